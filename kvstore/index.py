"""The index: which block is where, and the longest prefix of a list of keys that is held.

Keys are opaque here. Two domains never see each other's entries, whatever keys they make up.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.types import Outcome, Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.messages import BlockSpec, PartLink
    from kvstore.slots import Slot


class Entry(msgspec.Struct, eq=False, gc=False):
    """One block that is stored, or is being written.

    Where a block has several parts, each of them is an entry, and `link` and `parts` join them.
    `users` counts what protects it from eviction: leases on it, a hard pin, and our own I/O on its
    slot. `children` counts resident entries whose parent it is. Deadlines are of the core's clock.

    The garbage collector does not know entries, of which there may be millions, nor anything that
    they refer to; a full collection would look at each of them. So what refers to an entry must not
    be referred to by it, save `parts`, which `Index` takes away in time.
    """

    domain: bytes
    key: bytes
    slot: Slot
    place: Place
    parent_key: bytes | None
    link: PartLink | None
    length_bytes: int
    size_bytes: int  # of the slot; here once more, since each object in between is a cache miss
    token_count: int
    is_partial: bool
    is_ready: bool = False
    #: Of its block, itself included; None: the block has this part only.
    parts: tuple[Entry, ...] | None = None
    children: int = 0
    users: int = 0
    leases: int = 0
    hits: int = 0
    entry_id: int = 0
    expires_at: float | None = None
    soft_pinned_until: float = 0.0
    is_soft_pinned: bool = False
    hard_pinned_until: float | None = None  # infinity: until it is unpinned
    checksum: int | None = None
    # The policy's own: when it was last used (0: not yet), how often it was hit before it was
    # evicted the last time, and where it stands in the queue.
    stamp: float = 0.0
    last_use: float = 0.0
    past_hits: int = 0
    queue_place: Any = None
    queued_stamp: float = 0.0

    @classmethod
    def of(cls, domain: bytes, spec: BlockSpec, slot: Slot) -> Entry:
        """An entry that is being written, in a slot that was just granted."""
        place = Place(domain + spec.key, slot.offset_bytes, spec.length_bytes, slot.generation)
        return cls(
            domain,
            spec.key,
            slot,
            place,
            spec.parent_key,
            spec.link,
            spec.length_bytes,
            slot.size_bytes,
            spec.token_count,
            spec.is_partial,
        )

    @property
    def is_evictable(self) -> bool:
        """Ready, and nobody uses it, nor any part that would leave with it."""
        if self.users or not self.is_ready:
            return False
        return self.parts is None or not any(part.users for part in self.leaving())

    def leaving(self) -> list[Entry]:
        """The ready parts of its block that leave when this one does, itself included.

        A block is worth nothing without a part that it always needs, so with that go all. A part
        that only some prefixes need (of a window, a state) goes with those of its own cache group.
        """
        if self.parts is None or self.link is None:
            return [self]
        all_leave, group = self.link.is_always_needed, self.link.group
        return [
            part
            for part in self.parts
            if part.is_ready and (all_leave or (part.link is not None and part.link.group == group))
        ]

    def __repr__(self) -> str:
        return f"Entry({self.key.hex()[:12]}, {self.slot!r}, users {self.users})"


class Index:
    """Entries by (domain, key), and a bounded history of why others are gone."""

    def __init__(self, history_entries: int) -> None:
        self._tables: dict[bytes, dict[bytes, Entry]] = {}
        # Domain and key are joined where a table is not of one domain: a tuple would be an object
        # more for the garbage collector to look at.
        # An OrderedDict, since a dict finds its first key slowly where many before it were deleted.
        self._history: OrderedDict[bytes, Outcome] = OrderedDict()
        self._history_entries = history_entries
        # How many resident blocks name a parent that is not resident, by that parent.
        self._orphans: dict[bytes, int] = {}
        # The parts of a block, by domain and link, where it has several.
        self._parts: dict[bytes, tuple[Entry, ...]] = {}

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables.values())

    def __iter__(self) -> Iterator[Entry]:
        for table in self._tables.values():
            yield from table.values()

    def in_order(self, domain: bytes, *, newest_first: bool) -> Iterator[Entry]:
        """The entries of a domain in the order in which they came, or in the reverse."""
        entries = self._tables.get(domain, {}).values()
        return reversed(entries) if newest_first else iter(entries)

    def find(self, domain: bytes, key: bytes) -> Entry | None:
        """The entry of a key, ready or being written."""
        table = self._tables.get(domain)
        return None if table is None else table.get(key)

    def find_ready(self, domain: bytes, key: bytes) -> Entry | None:
        """The entry of a key that readers may see."""
        entry = self.find(domain, key)
        return entry if entry is not None and entry.is_ready else None

    def prefix(self, domain: bytes, keys: Sequence[bytes]) -> list[Entry]:
        """The entries of the longest run of `keys`, from the first one on, that are ready."""
        table = self._tables.get(domain)
        entries: list[Entry] = []
        if table is None:
            return entries
        for key in keys:
            entry = table.get(key)
            if entry is None or not entry.is_ready:
                break
            entries.append(entry)
        return entries

    def why_missing(self, domain: bytes, key: bytes) -> Outcome:
        """The reason why `key` is not ready: `pending`, what the history says, or `absent`."""
        if self.find(domain, key) is not None:
            return Outcome.PENDING
        return self._history.get(domain + key, Outcome.ABSENT)

    def parent_of(self, entry: Entry) -> Entry | None:
        """The resident entry, if there is one, that `entry` follows."""
        if entry.parent_key is None:
            return None
        return self.find(entry.domain, entry.parent_key)

    def insert(self, entry: Entry) -> None:
        """Enter a block that is being written. No entry of its key may be resident."""
        table = self._tables.setdefault(entry.domain, {})
        table[entry.key] = entry
        entry.children = self._orphans.pop(entry.place.key, 0)
        self._count_child(entry, 1)
        if entry.link is not None:
            name = entry.domain + entry.link.block
            self._set_parts(name, (*self._parts.get(name, ()), entry))

    def remove(self, entry: Entry, reason: Outcome | None) -> None:
        """Hide a block at once. `reason` goes into the history; None leaves no trace there."""
        table = self._tables[entry.domain]
        self._count_child(entry, -1)
        if entry.parts is not None and entry.link is not None:
            others = tuple(part for part in entry.parts if part is not entry)
            self._set_parts(entry.domain + entry.link.block, others)
            entry.parts = None
        del table[entry.key]
        if not table:
            del self._tables[entry.domain]
        if entry.children:
            self._orphans[entry.place.key] = entry.children
        if reason is not None:
            self._remember(entry, reason)

    def _set_parts(self, name: bytes, parts: tuple[Entry, ...]) -> None:
        if parts:
            self._parts[name] = parts
        else:
            del self._parts[name]
        for part in parts:
            part.parts = parts

    def __del__(self) -> None:
        for parts in self._parts.values():
            for part in parts:
                part.parts = None  # a circle that no collector would find

    def forget_history(self, entry: Entry) -> None:
        """Drop the memory of an earlier loss: the block is back."""
        self._history.pop(entry.place.key, None)

    def _count_child(self, entry: Entry, change: int) -> None:
        if entry.parent_key is None:
            return
        parent = self.find(entry.domain, entry.parent_key)
        if parent is not None:
            parent.children += change
            return
        name = entry.domain + entry.parent_key
        children = self._orphans.get(name, 0) + change
        if children:
            self._orphans[name] = children
        else:
            del self._orphans[name]

    def _remember(self, entry: Entry, reason: Outcome) -> None:
        history = self._history
        history.pop(entry.place.key, None)
        history[entry.place.key] = reason
        if len(history) > self._history_entries:
            history.popitem(last=False)
