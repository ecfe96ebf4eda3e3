"""The queue of those that may leave, put right as it is used.

To move a block in an ordered queue at each use would cost every read. So a use only changes the
block's stamp, and the queue finds out when the block's turn comes:

    leaves    one heap a rung, of (rank when queued, entry). A rank never sinks unnoticed, so what
              comes up first and still has that rank is the lowest of all.
    parents   one dict a rung, unordered: while a leaf can leave, no parent does, so nobody asks
              for their order. A parent whose last child left moves to the leaves at once.

Each block has one place here; what a heap holds besides are tuples of blocks that were removed or
moved, and it is made anew when they are more than half of it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.policy.base import Rung

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.index import Entry
    from kvstore.policy.base import Rank

#: Entries that one search for a victim looks at, at most, when it might take any of them: leaves
#: that were used since they were queued, and parents.
SEARCHED_MAX = 1_024
PARENTS_SEARCHED_MAX = 256

#: Tuples of no use that a heap may hold, besides as many again as it has of use.
_GONE_MAX = 64

_RUNGS = tuple(Rung)  # iterating over an enum is slow

_Leaf = tuple["Rank", int, "Entry"]


class Victims:
    """Entries by rank. `entry.queued_rank` is the rank under which it stands here; None: not."""

    def __init__(self, rank: Callable[[Entry], Rank]) -> None:
        self._rank = rank
        self._pushes = 0
        self._leaves: list[list[_Leaf]] = [[] for _ in _RUNGS]
        self._gone = [0 for _ in _RUNGS]  # tuples of no use, by rung
        self._parents: list[dict[Entry, None]] = [{} for _ in _RUNGS]

    def __len__(self) -> int:
        """How many places it keeps, tuples of no use included."""
        return sum(map(len, self._leaves)) + sum(map(len, self._parents))

    def add(self, entry: Entry) -> None:
        """Take an entry in, or move one whose rank has sunk."""
        rank, queued = self._rank(entry), entry.queued_rank
        if queued is not None:
            if rank >= queued:
                return
            self.remove(entry)
        self._put(entry, rank)

    def remove(self, entry: Entry) -> None:
        """Forget an entry, if it is here."""
        queued, entry.queued_rank = entry.queued_rank, None
        if queued is None:
            return
        rung, is_parent, _ = queued
        if is_parent:
            del self._parents[rung][entry]
            return
        self._gone[rung] += 1
        if self._gone[rung] > len(self._leaves[rung]) // 2 + _GONE_MAX:
            self._leaves[rung] = [item for item in self._leaves[rung] if _is_current(item)]
            heapify(self._leaves[rung])
            self._gone[rung] = 0

    def pop(self) -> Entry | None:
        """Take out the entry of the lowest rank that is evictable; None where there is none.

        Entries that are protected now are left out as they come up; whoever ends the protection
        adds them. Each of those, and each whose rung has risen or that got children, costs this
        once. Many that were only used since are not all put right at once: after `SEARCHED_MAX`
        the oldest of them will do. Of parents, which leave only where no leaf can, the oldest of
        `PARENTS_SEARCHED_MAX` will.
        """
        for rung in _RUNGS:
            victim = self._pop_leaf(rung) or self._pop_parent(rung)
            if victim is not None:
                return victim
        return None

    def _pop_leaf(self, rung: Rung) -> Entry | None:
        leaves = self._leaves[rung]
        searched = 0
        best: tuple[Rank, Entry] | None = None
        while leaves and searched < SEARCHED_MAX:
            item = heappop(leaves)
            queued, _, entry = item
            if not _is_current(item):
                self._gone[rung] -= 1
                continue
            entry.queued_rank = None
            if not entry.is_evictable:
                continue
            rank = self._rank(entry)
            if rank == queued:
                return entry
            self._put(entry, rank)
            if rank[:2] == queued[:2]:
                searched += 1
                if best is None or rank < best[0]:
                    best = rank, entry
        if best is None:
            return None
        self.remove(best[1])
        return best[1]

    def _pop_parent(self, rung: Rung) -> Entry | None:
        parents = self._parents[rung]
        best: tuple[Rank, Entry] | None = None
        while parents and best is None:
            for entry in list(islice(parents, PARENTS_SEARCHED_MAX)):
                rank = self._rank(entry)
                if not entry.is_evictable:
                    self.remove(entry)
                elif rank[:2] != (rung, True):
                    self.remove(entry)
                    self._put(entry, rank)
                elif best is None or rank < best[0]:
                    best = rank, entry
        if best is None:
            return None
        self.remove(best[1])
        return best[1]

    def _put(self, entry: Entry, rank: Rank) -> None:
        entry.queued_rank = rank
        rung, is_parent, _ = rank
        if is_parent:
            self._parents[rung][entry] = None
        else:
            # The count breaks ties, so that entries themselves are never compared.
            self._pushes += 1
            heappush(self._leaves[rung], (rank, self._pushes, entry))


def _is_current(item: _Leaf) -> bool:
    """Is this an entry's own place, and not one that it has left?"""
    return item[2].queued_rank is item[0]
