"""The index: which block is where, and the longest prefix of a list of keys that is held.

Keys are opaque here. Two domains never see each other's entries, whatever keys they make up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.types import Outcome, Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.messages import BlockSpec
    from kvstore.policy import Rank
    from kvstore.slots import Slot

#: How many keys that were dropped are remembered, with the reason.
HISTORY_ENTRIES = 65_536


class Entry:
    """One block that is stored, or is being written.

    Where a block has several parts, each of them is an entry, and `link` and `parts` join them.
    `users` counts what protects it from eviction: leases on it, a hard pin, and our own I/O on its
    slot. `children` counts resident entries whose parent it is. Deadlines are of the core's clock.
    """

    __slots__ = (
        "checksum",
        "children",
        "domain",
        "entry_id",
        "expires_at",
        "hard_pinned_until",
        "hits",
        "is_partial",
        "is_ready",
        "is_soft_pinned",
        "key",
        "leases",
        "length_bytes",
        "link",
        "parent_key",
        "parts",
        "place",
        "queued_rank",
        "size_bytes",
        "slot",
        "soft_pinned_until",
        "stamp",
        "token_count",
        "users",
    )

    def __init__(self, domain: bytes, spec: BlockSpec, slot: Slot) -> None:
        self.domain = domain
        self.key = spec.key
        self.token_count = spec.token_count
        self.is_partial = spec.is_partial
        self.length_bytes = spec.length_bytes
        self.slot = slot
        # What every read needs stands here once more: an entry is one cache miss, each object that
        # it refers to another one.
        self.is_ready = False
        self.size_bytes = slot.size_bytes
        self.place = Place(domain + spec.key, slot.offset_bytes, spec.length_bytes, slot.generation)
        self.parent_key = spec.parent_key
        self.link = spec.link
        self.parts: list[Entry] | None = None  # of its block, itself included; None: the only one
        self.children = 0
        self.users = 0
        self.leases = 0
        self.hits = 0
        self.entry_id = 0
        self.expires_at: float | None = None
        self.soft_pinned_until = 0.0
        self.is_soft_pinned = False
        self.hard_pinned_until: float | None = None  # infinity: until it is unpinned
        self.checksum: int | None = None
        # The policy's own: when it was last used, and where it stands in the queue.
        self.stamp = 0.0
        self.queued_rank: Rank | None = None

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

    def __init__(self, history_entries: int = HISTORY_ENTRIES) -> None:
        self._tables: dict[bytes, dict[bytes, Entry]] = {}
        self._history: dict[tuple[bytes, bytes], Outcome] = {}
        self._history_entries = history_entries
        # How many resident blocks name a parent that is not resident, by that parent.
        self._orphans: dict[tuple[bytes, bytes], int] = {}
        # The parts of a block, by domain and link, where it has several.
        self._parts: dict[tuple[bytes, bytes], list[Entry]] = {}

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables.values())

    def __iter__(self) -> Iterator[Entry]:
        for table in self._tables.values():
            yield from table.values()

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
        return self._history.get((domain, key), Outcome.ABSENT)

    def parent_of(self, entry: Entry) -> Entry | None:
        """The resident entry, if there is one, that `entry` follows."""
        if entry.parent_key is None:
            return None
        return self.find(entry.domain, entry.parent_key)

    def insert(self, entry: Entry) -> None:
        """Enter a block that is being written. No entry of its key may be resident."""
        table = self._tables.setdefault(entry.domain, {})
        table[entry.key] = entry
        entry.children = self._orphans.pop((entry.domain, entry.key), 0)
        self._count_child(entry, 1)
        if entry.link is not None:
            entry.parts = self._parts.setdefault((entry.domain, entry.link.block), [])
            entry.parts.append(entry)

    def remove(self, entry: Entry, reason: Outcome | None) -> None:
        """Hide a block at once. `reason` goes into the history; None leaves no trace there."""
        table = self._tables[entry.domain]
        self._count_child(entry, -1)
        if entry.parts is not None and entry.link is not None:
            entry.parts.remove(entry)
            if not entry.parts:
                del self._parts[entry.domain, entry.link.block]
            entry.parts = None
        del table[entry.key]
        if not table:
            del self._tables[entry.domain]
        if entry.children:
            self._orphans[entry.domain, entry.key] = entry.children
        if reason is not None:
            self._remember(entry, reason)

    def forget_history(self, entry: Entry) -> None:
        """Drop the memory of an earlier loss: the block is back."""
        self._history.pop((entry.domain, entry.key), None)

    def _count_child(self, entry: Entry, change: int) -> None:
        if entry.parent_key is None:
            return
        parent = self.find(entry.domain, entry.parent_key)
        if parent is not None:
            parent.children += change
            return
        name = (entry.domain, entry.parent_key)
        children = self._orphans.get(name, 0) + change
        if children:
            self._orphans[name] = children
        else:
            del self._orphans[name]

    def _remember(self, entry: Entry, reason: Outcome) -> None:
        history = self._history
        history.pop((entry.domain, entry.key), None)
        history[entry.domain, entry.key] = reason
        if len(history) > self._history_entries:
            del history[next(iter(history))]
