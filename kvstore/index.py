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
        "last_use",
        "leases",
        "length_bytes",
        "parent_key",
        "past_hits",
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
        # The policy's own: when it was last used (0: not yet), how often it was hit before it was
        # evicted the last time, and where it stands in the queue.
        self.stamp = 0.0
        self.last_use = 0.0
        self.past_hits = 0
        self.queued_rank: Rank | None = None

    @property
    def is_evictable(self) -> bool:
        """Ready, and nobody uses it."""
        return self.is_ready and not self.users

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

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables.values())

    def __iter__(self) -> Iterator[Entry]:
        for table in self._tables.values():
            yield from table.values()

    def find(self, domain: bytes, key: bytes) -> Entry | None:
        """The entry of a key, ready or being written."""
        table = self._tables.get(domain)
        return None if table is None else table.get(key)

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

    def remove(self, entry: Entry, reason: Outcome | None) -> None:
        """Hide a block at once. `reason` goes into the history; None leaves no trace there."""
        table = self._tables[entry.domain]
        self._count_child(entry, -1)
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
