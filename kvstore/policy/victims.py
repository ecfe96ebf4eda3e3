"""The queue of those that may leave, put right as it is used.

To move a block in an ordered queue at each use would cost every read. So a use only changes the
block's stamp, and the queue finds out when the block's turn comes:

    leaves    one queue a rung, of (stamp when queued, place). A stamp never sinks unnoticed, so
              what comes up first and still has that stamp is the lowest of all.
    parents   one dict a rung, unordered: while a leaf can leave, no parent does, so nobody asks
              for their order. A parent whose last child left moves to the leaves at once.

A place is a number that is given once: `count * 8 + rung * 2 + is parent`. Each block has one here;
what a queue holds besides are places that were given up, and it is swept when they are more than
half of it. There is nothing in it that the garbage collector would look at, one by one.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvstore.policy.base import Rung
from kvstore.stamp_queue import StampQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.index import Entry
    from kvstore.policy.base import Rank

#: Entries that one search for a victim looks at, at most, when it might take any of them: leaves
#: that were used since they were queued, and parents.
SEARCHED_MAX = 1_024
PARENTS_SEARCHED_MAX = 256

#: Places given up that a queue may hold, besides as many again as it has of use.
_GONE_MAX = 64

_RUNGS = tuple(Rung)  # iterating over an enum is slow


class Victims:
    """Entries by rank. `entry.queue_place` is the place under which it stands here; None: not."""

    def __init__(self, rank: Callable[[Entry], Rank]) -> None:
        self._rank = rank
        self._places = 0
        self._leaves: list[dict[int, Entry]] = [{} for _ in _RUNGS]
        self._queues = [StampQueue() for _ in _RUNGS]
        self._parents: list[dict[int, Entry]] = [{} for _ in _RUNGS]

    def __len__(self) -> int:
        """How many places it keeps, those of no use included."""
        return sum(map(len, self._queues)) + sum(map(len, self._parents))

    def add(self, entry: Entry) -> None:
        """Take an entry in, or move one whose rank has sunk."""
        rank, place = self._rank(entry), entry.queue_place
        if place is not None:
            kind = rank[0] * 2 + rank[1]
            if (kind, rank[2]) >= (place & 7, entry.queued_stamp):
                return
            self.remove(entry)
        self._put(entry, rank)

    def remove(self, entry: Entry) -> None:
        """Forget an entry, if it is here."""
        place, entry.queue_place = entry.queue_place, None
        if place is None:
            return
        rung = (place & 7) >> 1
        if place & 1:
            del self._parents[rung][place]
            return
        leaves = self._leaves[rung]
        del leaves[place]
        if len(self._queues[rung]) > 2 * len(leaves) + _GONE_MAX:
            self._queues[rung].sweep(lambda _, number: number in leaves)

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
        leaves, queue = self._leaves[rung], self._queues[rung]
        searched = 0
        best: tuple[Rank, Entry] | None = None
        while searched < SEARCHED_MAX and (item := queue.pop()) is not None:
            stamp, place = item
            entry = leaves.pop(place, None)
            if entry is None:
                continue  # a place that was given up
            entry.queue_place = None
            if not entry.is_evictable:
                continue
            rank = self._rank(entry)
            if rank == (rung, False, stamp):
                return entry
            self._put(entry, rank)
            if rank[0] == rung and not rank[1]:
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
            for entry in list(islice(parents.values(), PARENTS_SEARCHED_MAX)):
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
        rung, is_parent, stamp = rank
        self._places += 1
        place = self._places * 8 + rung * 2 + is_parent
        entry.queue_place, entry.queued_stamp = place, stamp
        if is_parent:
            self._parents[rung][place] = entry
        else:
            self._leaves[rung][place] = entry
            self._queues[rung].push(stamp, place)
