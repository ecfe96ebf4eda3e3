"""Slots: which bytes of a tier are free, and who owns the rest.

A tier is one run of bytes, handed out in multiples of 4 KiB. Neighbouring free extents are merged
at once, so a tier that was emptied can be filled with blocks of any other size.

    offset 0                                                     capacity
    | slot A (ready) | free | slot B (reserved) | slot C (held) | free |
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from enum import StrEnum

import msgspec

from kvstore.errors import InvariantViolated
from kvstore.types import SLOT_ALIGNMENT_BYTES


class SlotState(StrEnum):
    """Who may touch a slot's bytes. Free extents are not slots."""

    RESERVED = "reserved"  # a writer fills it; nobody reads it
    READY = "ready"  # committed; its bytes do not change any more
    CONDEMNED = "condemned"  # hidden by a delete, still read under a lease or by our own I/O
    HELD = "held"  # its writer's time is up, but that writer may still touch it


class Slot(msgspec.Struct, eq=False, gc=False):
    """A granted extent: `size_bytes` from `offset_bytes`, both multiples of 4 KiB."""

    offset_bytes: int
    size_bytes: int
    generation: int
    state: SlotState = SlotState.RESERVED
    key: bytes = b""  # (domain, key) of the block that lies here

    @property
    def end_bytes(self) -> int:
        """The first offset behind the slot."""
        return self.offset_bytes + self.size_bytes

    def __repr__(self) -> str:
        return (
            f"Slot({self.offset_bytes}+{self.size_bytes}, {self.state}, "
            f"generation {self.generation})"
        )


#: Slots of other sizes than powers of two may take this part of a tier before windows end.
_ODD_SHARE = 16


def slot_size_bytes(length_bytes: int) -> int:
    """Bytes that a payload of `length_bytes` takes up: rounded up to 4 KiB, never 0."""
    return max(1, -(-length_bytes // SLOT_ALIGNMENT_BYTES)) * SLOT_ALIGNMENT_BYTES


def _odd_bytes_of(size_bytes: int) -> int:
    return size_bytes if size_bytes & (size_bytes - 1) else 0


class Slots:
    """The slots of one tier of `capacity_bytes`, rounded down to 4 KiB.

    `words` are u64 that readers in other processes may see: `moves`, then the generations.
    `generations[offset // 4096]` changes whenever a slot that starts there is granted or taken
    back, so whoever remembers a generation can tell that its bytes may have become another's.
    """

    def __init__(self, capacity_bytes: int, words: memoryview[int] | None = None) -> None:
        units = capacity_bytes // SLOT_ALIGNMENT_BYTES
        if units < 1:
            raise ValueError(f"capacity_bytes is {capacity_bytes}, less than one slot of 4096")
        self.capacity_bytes = units * SLOT_ALIGNMENT_BYTES
        words = memoryview(array("Q", bytes(8 * (1 + units)))) if words is None else words
        self.generations, self._moves_word = words[1 : 1 + units], words[:1]
        #: How often slots changed hands. While it stays, no generation has changed.
        self.moves = 0
        #: The first bytes of the tier, of which slots are granted; see `extend`.
        self.usable_bytes = self.capacity_bytes
        self._granted: dict[int, Slot] = {}  # by offset
        self._granted_by_end: dict[int, Slot] = {}
        self.free_bytes = self.capacity_bytes
        self._bytes = dict.fromkeys(SlotState, 0)
        self._odd_bytes = 0  # of slots whose size is no power of two
        # Free extents, three views of one set: where each starts, where each ends, and by size.
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        # Ordered by when they became free, in an OrderedDict: a dict finds its first key slowly
        # where many before it were deleted.
        self._starts_of_size: dict[int, OrderedDict[int, None]] = {}
        self._sizes: list[int] = []  # sorted keys of _starts_of_size
        self._add_extent(0, self.capacity_bytes)

    def restrict(self, usable_bytes: int) -> None:
        """Grant slots of the first bytes only, of a tier of which nothing was granted yet."""
        self._remove_extent(0, self.usable_bytes)
        self.usable_bytes = self.free_bytes = usable_bytes
        if usable_bytes:
            self._add_extent(0, usable_bytes)

    def extend(self, usable_bytes: int) -> None:
        """Grant slots of more of the tier: memory that has been had meanwhile."""
        added = usable_bytes - self.usable_bytes
        if added > 0:
            self.usable_bytes = usable_bytes
            self.free_bytes += added
            self._merge_extent(usable_bytes - added, added)

    @property
    def granted_slots(self) -> int:
        """How many slots there are, in whatever state."""
        return len(self._granted)

    @property
    def largest_free_bytes(self) -> int:
        """The largest payload that could be granted right now."""
        return self._sizes[-1] if self._sizes else 0

    def bytes_in(self, state: SlotState) -> int:
        """Bytes of all slots in `state`."""
        return self._bytes[state]

    def has_windows(self, size_bytes: int) -> bool:
        """Do slots of this size begin at multiples of it?

        Powers of two do: their windows nest, so smaller ones lie within what a larger one can
        replace as a whole. Where other sizes take much of the tier, such as those of the parts of
        one block, windows would leave gaps between them that nothing fits into.
        """
        is_power = size_bytes & (size_bytes - 1) == 0
        return is_power and self._odd_bytes * _ODD_SHARE <= self.capacity_bytes

    def grant(self, length_bytes: int) -> Slot | None:
        """Make a slot in state `reserved` for `length_bytes`; None where no extent is that large.

        Takes the smallest extent that fits, and of those the one that has been free for longest.
        In it the slot begins at a multiple of its size, if it `has_windows` and there is room.
        """
        size = slot_size_bytes(length_bytes)
        position = bisect_left(self._sizes, size)
        if position == len(self._sizes):
            return None
        extent_size = self._sizes[position]
        start = next(iter(self._starts_of_size[extent_size]))
        self._remove_extent(start, extent_size)
        end = start + extent_size
        aligned = -(-start // size) * size if self.has_windows(size) else start
        if start < aligned <= end - size:
            self._add_extent(start, aligned - start)
            start = aligned
        if start + size < end:
            self._add_extent(start + size, end - start - size)
        slot = Slot(start, size, self._next_generation(start))
        self._granted[start] = slot
        self._granted_by_end[start + size] = slot
        self._bytes[SlotState.RESERVED] += size
        self.free_bytes -= size
        self._odd_bytes += _odd_bytes_of(size)
        return slot

    def move(self, slot: Slot, state: SlotState) -> None:
        """Put a granted slot into another state."""
        self._bytes[slot.state] -= slot.size_bytes
        self._bytes[state] += slot.size_bytes
        slot.state = state

    def free(self, slot: Slot) -> None:
        """Take a slot back and merge it with its free neighbours.

        Its generation changes before anybody can be granted these bytes again, also where a
        later slot covers them without starting at the same offset.
        """
        start, size = slot.offset_bytes, slot.size_bytes
        if self._granted.get(start) is not slot:
            raise InvariantViolated(f"freed twice: {slot!r}")
        del self._granted[start]
        self._bytes[slot.state] -= size
        self.free_bytes += size
        self._odd_bytes -= _odd_bytes_of(size)
        self._next_generation(start)
        end = start + size
        del self._granted_by_end[end]
        self._merge_extent(start, size)

    def _merge_extent(self, start: int, size: int) -> None:
        """Add a free extent, as one with its free neighbours."""
        end = start + size
        size_after = self._size_at.get(end)
        if size_after is not None:
            self._remove_extent(end, size_after)
            size += size_after
        start_before = self._start_of_end.get(start)
        if start_before is not None:
            self._remove_extent(start_before, start - start_before)
            size += start - start_before
            start = start_before
        self._add_extent(start, size)

    def free_before(self, offset_bytes: int) -> int:
        """Bytes of the free extent that ends at `offset_bytes`; 0 where there is none."""
        return offset_bytes - self._start_of_end.get(offset_bytes, offset_bytes)

    def free_after(self, offset_bytes: int) -> int:
        """Bytes of the free extent that starts at `offset_bytes`; 0 where there is none."""
        return self._size_at.get(offset_bytes, 0)

    def slot_before(self, offset_bytes: int) -> Slot | None:
        """The slot that ends at `offset_bytes`."""
        return self._granted_by_end.get(offset_bytes)

    def slot_after(self, offset_bytes: int) -> Slot | None:
        """The slot that starts at `offset_bytes`."""
        return self._granted.get(offset_bytes)

    def granted(self) -> list[Slot]:
        """All slots, by offset."""
        return [self._granted[offset] for offset in sorted(self._granted)]

    def close(self) -> None:
        """Let go of the words. The slots are of no use afterwards."""
        self.generations.release()
        self._moves_word.release()

    def problems(self) -> list[str]:
        """What does not add up: slots and extents must tile the tier, the sums must agree."""
        found = []
        pieces = sorted(
            [(slot.offset_bytes, slot.size_bytes) for slot in self._granted.values()]
            + list(self._size_at.items())
        )
        expected_start = 0
        for start, size in pieces:
            if start != expected_start:
                found.append(f"bytes {expected_start}..{start} are in no slot, or in two")
            expected_start = start + size
        if expected_start != self.usable_bytes:
            found.append(f"slots end at {expected_start}, not at {self.usable_bytes}")
        for state in SlotState:
            counted = sum(s.size_bytes for s in self._granted.values() if s.state is state)
            if counted != self._bytes[state]:
                found.append(f"{state}: {counted} bytes in slots, {self._bytes[state]} booked")
        for slot in self._granted.values():
            if self.generations[slot.offset_bytes // SLOT_ALIGNMENT_BYTES] != slot.generation:
                found.append(f"generation table disagrees with {slot!r}")
        return found

    def _next_generation(self, offset_bytes: int) -> int:
        # One store of eight bytes each: a reader in another process never sees half of one.
        self.moves += 1
        self.generations[offset_bytes // SLOT_ALIGNMENT_BYTES] = self.moves
        self._moves_word[0] = self.moves
        return self.moves

    def _add_extent(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_of_end[start + size] = start
        starts = self._starts_of_size.get(size)
        if starts is None:
            self._starts_of_size[size] = starts = OrderedDict()
            insort(self._sizes, size)
        starts[start] = None

    def _remove_extent(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_of_end[start + size]
        starts = self._starts_of_size[size]
        del starts[start]
        if not starts:
            del self._starts_of_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
