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
    from kvstore.index import Entry
    from kvstore.policy import Policy
    from kvstore.slots import Slot, Slots

#: How many blocks whose turn it is are tried as the middle of a run, if one does not make room.
SEEDS = 8


class _Run(NamedTuple):
    entries: list[Entry]
    newest_stamp: int  # of its most recently used block: what evicting it costs


def choose_victims(slots: Slots, policy: Policy, size_bytes: int) -> list[Entry]:
    """The blocks to evict so that `size_bytes` fit in one piece; [] where nothing helps.

    Of several runs, the one whose most recent block was used longest ago. The caller drops them.
    """
    best: _Run | None = None
    tried: list[Entry] = []
    while best is None or len(tried) < SEEDS:
        seed = policy.pop_victim()
        if seed is None:
            break
        tried.append(seed)
        run = _grow(slots, seed, size_bytes)
        if run is not None and (best is None or run.newest_stamp < best.newest_stamp):
            best = run
        if run is not None and len(run.entries) == 1:
            break  # no later seed is older than this one
    victims = [] if best is None else best.entries
    for entry in tried:
        if entry not in victims:
            policy.add(entry)
    return victims


def _grow(slots: Slots, seed: Entry, size_bytes: int) -> _Run | None:
    """The run around `seed`, extended towards the older neighbour; None if it is fenced in."""
    entries = [seed]
    newest_stamp = seed.stamp
    start = seed.slot.offset_bytes
    end = seed.slot.end_bytes
    start -= slots.free_before(start)
    end += slots.free_after(end)
    while end - start < size_bytes:
        before = _evictable(slots.slot_before(start))
        after = _evictable(slots.slot_after(end))
        if before is None and after is None:
            return None
        if after is None or (before is not None and before.stamp <= after.stamp):
            assert before is not None
            chosen = before
            start = before.slot.offset_bytes
            start -= slots.free_before(start)
        else:
            chosen = after
            end = after.slot.end_bytes
            end += slots.free_after(end)
        entries.append(chosen)
        newest_stamp = max(newest_stamp, chosen.stamp)
    return _Run(entries, newest_stamp)


def _evictable(slot: Slot | None) -> Entry | None:
    if slot is None or slot.entry is None or not slot.entry.is_evictable:
        return None
    return slot.entry
