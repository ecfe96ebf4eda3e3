"""Which blocks leave so that a new one fits.

Blocks differ in size and a slot is one run of bytes, so the oldest blocks alone may free many bytes
and no room: sixteen holes of 64 KiB do not hold 1 MiB. What leaves is therefore a *run* of
neighbours, around a block whose turn it is. If that block and what is free beside it are room
enough, it leaves alone. Else it is its *window*, of those that divide the tier into pieces as long
as the new block:

      |          window          |          window          |          window          |
      | hot | warm | free | OLD  | free | cold | hot | hot         | hot | free |  cold  |
                                 |<-- the run of OLD -->|

Whatever was there before, a tier that is filled with blocks of one size ends up as a row of its
windows, with nothing lost between them; runs that begin anywhere would leave gaps for good. Where a
window is fenced in by what is protected, the run begins anywhere; and so it does for sizes that
have no windows (`Slots.has_windows`).

Runs evict hardly more bytes than were asked for, of any size, and neighbours are mostly of one age,
having been written together. Where all blocks have one size a run is one block: plain policy order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.index import Entry
    from kvstore.policy import Policy
    from kvstore.slots import Slot, Slots

#: How many blocks whose turn it is are tried as the middle of a run, if one does not make room.
SEEDS = 8
#: And how many if none of them can grow to a run: then there is no room, for now. A bound on the
#: time that one block may take; what is protected is seldom spread so evenly.
SEEDS_MAX = 256


_Age = tuple[int, float]


class _Run(NamedTuple):
    entries: list[Entry]
    cost: tuple[_Age, int]  # of its youngest block, then the bytes that leave


def choose_victims(
    slots: Slots, policy: Policy, size_bytes: int, entry_at: Callable[[Slot], Entry | None]
) -> list[Entry]:
    """The blocks to evict so that `size_bytes` fit in one piece; [] where nothing helps.

    `entry_at` says which block lies in a slot.

    Of several runs, the one whose youngest block is the oldest, and of those the smallest. No block
    leaves while one on a lower rung of the ladder could make the room. The caller drops what is
    returned.
    """
    best: _Run | None = None
    tried: list[Entry] = []
    fences: list[tuple[int, int, int]] = []  # what a rung cannot grow out of: start, end, rung
    while len(tried) < (SEEDS_MAX if best is None else SEEDS):
        seed = policy.pop_victim()
        if seed is None:
            break
        tried.append(seed)
        offset, rung = seed.slot.offset_bytes, policy.rank(seed)[0]
        if any(start <= offset < end and rung == fenced for start, end, fenced in fences):
            continue
        extent = _Extent(slots, policy, seed, entry_at)
        run = extent.run(size_bytes)
        if run is None:
            fences.append((*extent.bounds, rung))
        if run is not None and (best is None or run.cost < best.cost):
            best = run
        if run is not None and len(run.entries) == 1:
            break  # no later seed is older
    victims = [] if best is None else best.entries
    for entry in tried:
        if entry not in victims:
            policy.add(entry)
    return victims


class _Extent:
    """Bytes that are free once some neighbours have left, `seed` among them.

    Nothing joins them that is protected, or on a higher rung than the seed.
    """

    def __init__(
        self,
        slots: Slots,
        policy: Policy,
        seed: Entry,
        entry_at: Callable[[Slot], Entry | None],
    ) -> None:
        self._entry_at = entry_at
        self._slots = slots
        self._policy = policy
        self._seed = seed
        self._rung = policy.rank(seed)[0]
        self._begin()

    @property
    def bounds(self) -> tuple[int, int]:
        """Where it begins and ends."""
        return self._start, self._end

    def run(self, size_bytes: int) -> _Run | None:
        """Who leaves for `size_bytes` around the seed; None if it is fenced in."""
        is_enough = self._end - self._start >= size_bytes
        if not self._slots.has_windows(size_bytes):
            return self._run() if is_enough or self._grow(size_bytes) else None
        if is_enough and (self._seed.size_bytes < size_bytes or self._has_window(size_bytes)):
            return self._run()
        run = self._run() if self._fill_window(size_bytes) else None
        # A block as large as the new one that lies across two windows would hand its place on for
        # ever; so what is older in its window leaves with it.
        if run is not None and (not is_enough or run.cost[0] == _age(self._policy, self._seed)):
            return run
        self._begin()
        return self._run() if self._grow(size_bytes) else None

    def _has_window(self, size_bytes: int) -> bool:
        return -(-self._start // size_bytes) * size_bytes + size_bytes <= self._end

    def _begin(self) -> None:
        self._entries: list[Entry] = []
        self._start = self._seed.slot.offset_bytes
        self._end = self._start
        self._take(self._seed)

    def _take(self, entry: Entry) -> None:
        """Let a neighbour leave, too; what is free behind it joins."""
        self._entries.append(entry)
        slot = entry.slot
        if slot.offset_bytes < self._start:
            self._start = slot.offset_bytes
        else:
            self._end = slot.end_bytes
        self._start -= self._slots.free_before(self._start)
        self._end += self._slots.free_after(self._end)

    def _fill_window(self, size_bytes: int) -> bool:
        """Grow over the seed's window, of those that divide the tier; False where that cannot be.

        The seed may reach beyond it: its window is the one in which it begins.
        """
        first = self._seed.slot.offset_bytes // size_bytes * size_bytes
        end = first + size_bytes
        if end > self._slots.capacity_bytes:
            return False
        while self._start > first or self._end < end:
            is_before = self._start > first
            slots, start = self._slots, self._start
            entry = self._may_leave(
                slots.slot_before(start) if is_before else slots.slot_after(self._end)
            )
            if entry is None:
                return False
            self._take(entry)
        return True

    def _grow(self, size_bytes: int) -> bool:
        """Grow towards the older neighbour until there is room; False where that cannot be."""
        slots, policy = self._slots, self._policy
        while self._end - self._start < size_bytes:
            sides = (slots.slot_before(self._start), slots.slot_after(self._end))
            neighbours = [entry for slot in sides if (entry := self._may_leave(slot)) is not None]
            if not neighbours:
                return False
            self._take(min(neighbours, key=lambda entry: _age(policy, entry)))
        return True

    def _may_leave(self, slot: Slot | None) -> Entry | None:
        """The block in a slot, if it may leave for the sake of the seed's room."""
        entry = None if slot is None else self._entry_at(slot)
        if entry is None or not entry.is_evictable or self._policy.rank(entry)[0] > self._rung:
            return None
        return entry

    def _run(self) -> _Run:
        youngest = max(_age(self._policy, entry) for entry in self._entries)
        return _Run(self._entries, (youngest, sum(entry.size_bytes for entry in self._entries)))


def _age(policy: Policy, entry: Entry) -> _Age:
    """Rung and last use. Whether it is a parent does not count here.

    What follows a block was last used no later than the block itself, so it is next to leave
    anyway. If parents counted, windows that hold each other's children would outlast everything.
    """
    rung, _, stamp = policy.rank(entry)
    return rung, stamp
