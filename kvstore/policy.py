"""Which block leaves first.

A policy orders; it never decides whether a block may leave. The core hands it the blocks that
nothing protects, takes victims from it, and tells it about each use.

The order has three parts, compared from left to right:

    rung       what protection a block has left (`Rung`): the core's ladder, the same for all
    is parent  whether blocks that follow it are resident: they are worth nothing without it
    stamp      when it was used, in the policy's own reckoning
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index import Entry

Rank = tuple[int, bool, float]

#: Entries that one search for a victim puts right in the queue, at most.
REQUEUED_MAX = 1_024


class Rung(IntEnum):
    """The protection ladder, as far as eviction goes: leased and hard-pinned blocks are above."""

    UNHIT_PARTIAL = 0  # a final partial block that nobody has hit: only the same prompt ever will
    PLAIN = 1
    SOFT_PIN = 2


class Policy(Protocol):
    """The order in which unprotected blocks are evicted."""

    name: str

    def rank(self, entry: Entry) -> Rank:
        """Where `entry` stands: the lowest rank leaves first."""
        ...

    def touch(self, entries: Sequence[Entry]) -> None:
        """`entries`, a run of one prefix in prefix order, were committed or used just now."""
        ...

    def add(self, entry: Entry) -> None:
        """Nothing protects `entry` any more, or its rank has sunk. Adding again does no harm."""
        ...

    def remove(self, entry: Entry) -> None:
        """`entry` is gone. What is merely protected need not be removed."""
        ...

    def pop_victim(self) -> Entry | None:
        """The evictable block that should leave first, and after it the next; None: there is none.

        The caller drops it, or adds it again to keep it.
        """
        ...


class LruPolicy:
    """Least recently used first, and of one prefix the tail first.

    A prefix is worth nothing without its beginning, so its blocks are stamped from last to first,
    and a block with resident children waits until they are gone; only when nothing else is left
    (all children are protected) does one go before them, and then again the last one first.

    The queue is a heap of (rank when queued, entry), put right when popped: using a block costs
    one store, and each use at most one more push.
    """

    name = "lru"

    #: Whether final partial blocks that were never hit leave before all others.
    partial_first = True
    #: Whether blocks with resident children wait.
    children_first = True

    def __init__(self) -> None:
        self._clock = 0.0
        self._pushes = 0
        self._queue: list[tuple[Rank, int, Entry]] = []
        self._gone = 0  # tuples of entries that were removed

    def rank(self, entry: Entry) -> Rank:
        """The rung, parents behind leaves, then the last use."""
        rung = Rung.PLAIN
        if entry.is_soft_pinned:
            rung = Rung.SOFT_PIN
        elif self.partial_first and entry.is_partial and not entry.hits:
            rung = Rung.UNHIT_PARTIAL
        return rung, self.children_first and entry.children > 0, entry.stamp

    def touch(self, entries: Sequence[Entry]) -> None:
        """Stamp from last to first, so that the root is the most recent."""
        clock = self._clock
        for entry in reversed(entries):
            clock += 1.0
            entry.stamp = clock
        self._clock = clock

    def add(self, entry: Entry) -> None:
        """Queue an entry, unless it is queued and its rank has not sunk."""
        rank = self.rank(entry)
        if entry.queued_rank is None or rank < entry.queued_rank:
            self._push(entry, rank)

    def remove(self, entry: Entry) -> None:
        """Forget an entry; its tuple in the queue is passed over when it comes up."""
        if entry.queued_rank is not None:
            entry.queued_rank = None
            self._gone += 1
            if self._gone > len(self._queue) // 2 + 1024:
                self._compact()

    def pop_victim(self) -> Entry | None:
        """The entry of the lowest rank. What is protected now is queued again when it is added.

        After a long time with uses and without evictions, the queue is out of date; to put all of
        it right at once would take long, so the best of `REQUEUED_MAX` will do.
        """
        requeued = 0
        best: Entry | None = None
        while self._queue and requeued < REQUEUED_MAX:
            queued_rank, _, entry = heappop(self._queue)
            if queued_rank != entry.queued_rank:
                continue  # gone, or queued again since with a lower rank
            entry.queued_rank = None
            if not entry.is_evictable:
                continue
            rank = self.rank(entry)
            if rank == queued_rank:
                return entry
            self._push(entry, rank)
            requeued += 1
            if best is None or rank < self.rank(best):
                best = entry
        if best is not None:
            best.queued_rank = None  # its tuple no longer counts
        return best

    def _push(self, entry: Entry, rank: Rank) -> None:
        # The count breaks ties, so that entries themselves are never compared.
        self._pushes += 1
        entry.queued_rank = rank
        heappush(self._queue, (rank, self._pushes, entry))

    def _compact(self) -> None:
        self._queue = [item for item in self._queue if item[0] == item[2].queued_rank]
        heapify(self._queue)
        self._gone = 0


class LruRPolicy(LruPolicy):
    """`lru` without a rule for partial blocks: the reference that traces are measured with."""

    name = "lru-r"
    partial_first = False


class LruNPolicy(LruPolicy):
    """One list of blocks, each touched on its own from first to last: what a plain LRU does.

    It evicts the beginning of a prefix before its tail, which strands the tail. For comparison.
    """

    name = "lru-n"
    partial_first = False
    children_first = False

    def touch(self, entries: Sequence[Entry]) -> None:
        """Stamp from first to last."""
        for entry in entries:
            self._clock += 1.0
            entry.stamp = self._clock


#: Every policy by its name: what `store.policy` may be.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (LruPolicy, LruRPolicy, LruNPolicy)
}
