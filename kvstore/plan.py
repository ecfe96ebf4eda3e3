"""Which blocks leave so that a new one fits.

Blocks differ in size and a slot is one run of bytes, so the oldest blocks alone may free many bytes
and no room: sixteen holes of 64 KiB do not hold 1 MiB. What leaves is therefore a *run* of
neighbours, grown around a block whose turn it is:

      | hot | warm | free | OLD | free | cold | hot |
                   |<------- run of OLD -->|             as long as the new block, or a bit longer

It evicts hardly more bytes than were asked for, of any size, and neighbours are mostly of one age,
having been written together. Where all blocks have one size a run is one block: plain policy order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.index import Entry
    from kvstore.policy import Policy, Rank
    from kvstore.slots import Slot, Slots

#: How many blocks whose turn it is are tried as the middle of a run, if one does not make room.
SEEDS = 8
#: And how many if none of them can grow to a run: then there is no room, for now. A bound on the
#: time that one block may take; what is protected is seldom spread so evenly.
SEEDS_MAX = 256


class _Run(NamedTuple):
    entries: list[Entry]
    cost: tuple[Rank, int]  # the rank of its most valuable block, then the bytes that leave


def choose_victims(
    slots: Slots, policy: Policy, size_bytes: int, entry_at: Callable[[Slot], Entry | None]
) -> list[Entry]:
    """The blocks to evict so that `size_bytes` fit in one piece; [] where nothing helps.

    `entry_at` says which block lies in a slot.

    Of several runs, the one whose highest rank is the lowest, and of those the smallest. No block
    leaves while one on a lower rung of the ladder could make the room. The caller drops what is
    returned.
    """
    best: _Run | None = None
    tried: list[Entry] = []
    while len(tried) < (SEEDS_MAX if best is None else SEEDS):
        seed = policy.pop_victim()
        if seed is None:
            break
        tried.append(seed)
        run = _grow(slots, policy, seed, size_bytes, entry_at)
        if run is not None and (best is None or run.cost < best.cost):
            best = run
        if run is not None and len(run.entries) == 1:
            break  # no later seed has a lower rank
    victims = [] if best is None else best.entries
    for entry in tried:
        if entry not in victims:
            policy.add(entry)
    return victims


def _grow(
    slots: Slots,
    policy: Policy,
    seed: Entry,
    size_bytes: int,
    entry_at: Callable[[Slot], Entry | None],
) -> _Run | None:
    """The run around `seed`, extended towards the older neighbour; None if it is fenced in."""
    entries = [seed]
    highest = policy.rank(seed)
    rung = highest[0]
    start = seed.slot.offset_bytes
    end = seed.slot.end_bytes
    start -= slots.free_before(start)
    end += slots.free_after(end)
    while end - start < size_bytes:
        sides = [
            (policy.rank(entry), entry)
            for slot in (slots.slot_before(start), slots.slot_after(end))
            if slot is not None and (entry := entry_at(slot)) is not None and entry.is_evictable
        ]
        rank, older = min(sides, key=lambda side: side[0], default=(highest, None))
        if older is None or rank[0] > rung:
            return None
        entries.append(older)
        highest = max(highest, rank)
        if older.slot.offset_bytes < start:
            start = older.slot.offset_bytes
            start -= slots.free_before(start)
        else:
            end = older.slot.end_bytes
            end += slots.free_after(end)
    return _Run(entries, (highest, sum(entry.size_bytes for entry in entries)))
