"""Which block leaves first.

A policy orders; it never decides whether a block may leave. The core hands it the blocks that
nothing protects, takes victims from it, and tells it about each use.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index import Entry

#: Stamps below 0 are those of final partial blocks that were never hit: they leave first.
_UNHIT_PARTIAL = -(2**62)


class Policy(Protocol):
    """The order in which unprotected blocks are evicted."""

    name: str

    def touch(self, entries: Sequence[Entry]) -> None:
        """`entries`, a run of one prefix in prefix order, were committed or used just now."""
        ...

    def add(self, entry: Entry) -> None:
        """Nothing protects `entry` any more. The caller may add again what was added before."""
        ...

    def remove(self, entry: Entry) -> None:
        """`entry` is protected from now on, or gone."""
        ...

    def pop_victim(self) -> Entry | None:
        """The block that should leave first, and after it the next; None where nothing may.

        It is still evictable: the caller removes it, or adds it again to keep it.
        """
        ...


class LruPolicy:
    """Least recently used first, and of one prefix the tail first.

    A prefix is worth nothing without its beginning, so its blocks are stamped from last to first,
    and a block with resident children waits until they are gone; only when nothing else is left
    (its children are leased) does it go before them. A final partial block leaves first of all
    until somebody has hit it: nothing but the very same prompt ever will.

    The queue is a heap of (stamp when queued, entry), put right when popped: using a block costs
    one store, and each use at most one more push.
    """

    name = "lru"

    def __init__(self) -> None:
        self._clock = 0
        self._pushes = 0
        self._queue: list[tuple[int, int, Entry]] = []  # one tuple an entry at the most
        self._evictable = 0
        self._parents: dict[Entry, None] = {}

    def touch(self, entries: Sequence[Entry]) -> None:
        """Stamp from last to first, so that the root is the most recent."""
        clock = self._clock
        for entry in reversed(entries):
            clock += 1
            unhit_partial = entry.is_partial and not entry.hits
            entry.stamp = clock + _UNHIT_PARTIAL if unhit_partial else clock
        self._clock = clock

    def add(self, entry: Entry) -> None:
        """Queue a leaf, or set a parent aside until its children are gone."""
        if not entry.is_evictable:
            entry.is_evictable = True
            self._evictable += 1
        if entry.children:
            self._parents[entry] = None
            return
        self._parents.pop(entry, None)
        if not entry.is_queued:
            self._push(entry)

    def remove(self, entry: Entry) -> None:
        """Forget an entry; its tuple in the queue is passed over when it comes up."""
        if entry.is_evictable:
            entry.is_evictable = False
            self._evictable -= 1
            self._parents.pop(entry, None)
            if len(self._queue) > 2 * self._evictable + 1024:
                self._compact()

    def pop_victim(self) -> Entry | None:
        """The leaf that was used longest ago; failing that, the parent set aside first."""
        while self._queue:
            stamp, _, entry = heappop(self._queue)
            entry.is_queued = False
            if not entry.is_evictable:
                continue
            if entry.children:
                self._parents[entry] = None
            elif entry.stamp != stamp:
                self._push(entry)
            else:
                return entry
        for entry in self._parents:
            del self._parents[entry]
            return entry
        return None

    def _push(self, entry: Entry) -> None:
        # The count breaks ties, so that entries themselves are never compared.
        self._pushes += 1
        entry.is_queued = True
        heappush(self._queue, (entry.stamp, self._pushes, entry))

    def _compact(self) -> None:
        for _, _, entry in self._queue:
            entry.is_queued = entry.is_evictable
        self._queue = [item for item in self._queue if item[2].is_evictable]
        heapify(self._queue)
