"""A queue by stamp for millions of numbers, in flat memory.

A heap of tuples holds a million objects that the garbage collector looks at, all in one go. Here
they are numbers in arrays: runs in ascending order, of which a small heap holds the first ones.

    runs     | 3  5  9 |    | 4  4  8 |    | 6 |         push(7): behind the largest end up to 7,
    firsts     3              4              6           which is 6; pop(): 3, then 4, 4, 5 ...

What is pushed in about ascending order, as uses are, makes few runs; at random it takes some
2 * sqrt(n) of them. A push or pop then costs two searches in a list of that length. Source of the
idea: patience sorting (Mallows, 1963).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from heapq import heapify, heappop, heappush, nsmallest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Items of a run, at most: a bound on the work that is done in one go.
RUN_ITEMS_MAX = 4_096
#: Runs that still grow, at most; beyond it the shortest are merged.
RUNS_MAX = 2_048
_MERGED_RUNS = 32


class _Run:
    """Stamps in ascending order with their numbers; those before `first` were taken."""

    __slots__ = ("first", "numbers", "stamps")

    def __init__(self) -> None:
        self.stamps = array("d")
        self.numbers = array("Q")
        self.first = 0

    def __len__(self) -> int:
        return len(self.stamps) - self.first

    def append(self, stamp: float, number: int) -> None:
        self.stamps.append(stamp)
        self.numbers.append(number)


class StampQueue:
    """Numbers from 0 to 2^64 - 1, each with a stamp. Equal stamps come in any order."""

    def __init__(self) -> None:
        self._size = 0
        self._pushes = 0
        # Runs that grow, by their last stamp, which stands beside them.
        self._growing: list[_Run] = []
        self._ends: list[float] = []
        # Every run that is not empty, once: (its first stamp, a number that breaks ties, the run).
        self._firsts: list[tuple[float, int, _Run]] = []
        self._unswept: list[_Run] = []  # whose turn in this round of sweeps is still to come

    def __len__(self) -> int:
        """How many numbers are queued."""
        return self._size

    def push(self, stamp: float, number: int) -> None:
        """Queue a number. A number may be queued several times."""
        self._size += 1
        position = bisect_right(self._ends, stamp) - 1
        if position < 0:
            self._start(stamp, number)
            return
        run = self._growing[position]
        run.append(stamp, number)
        if len(run.stamps) < RUN_ITEMS_MAX:
            self._ends[position] = stamp
        else:
            del self._growing[position], self._ends[position]

    def pop(self) -> tuple[float, int] | None:
        """Take out the number with the lowest stamp; None where the queue is empty."""
        if not self._firsts:
            return None
        self._size -= 1
        stamp, _, run = heappop(self._firsts)
        number = run.numbers[run.first]
        run.first += 1
        if run:
            self._watch(run)
        elif len(run.stamps) < RUN_ITEMS_MAX:
            self._stop_growing(run)
        return stamp, number

    def sweep(self, is_wanted: Callable[[float, int], bool]) -> None:
        """Take out what is not wanted, of one run: of each in turn.

        A bounded piece of work. Call it again and again while there is much of no use.
        """
        if not self._unswept:
            self._unswept = [run for _, _, run in self._firsts]
        if not self._unswept:
            return
        run = self._unswept.pop()
        if not run:
            return  # all of it was taken meanwhile, or went into another one
        self._firsts = [item for item in self._firsts if item[2] is not run]
        heapify(self._firsts)
        if len(run.stamps) < RUN_ITEMS_MAX:
            self._stop_growing(run)
        kept = [
            (stamp, number)
            for stamp, number in zip(run.stamps[run.first :], run.numbers[run.first :], strict=True)
            if is_wanted(stamp, number)
        ]
        self._size -= len(run)
        for stamp, number in kept:
            self.push(stamp, number)

    def _start(self, stamp: float, number: int) -> None:
        """A run of its own, for a stamp that is below the end of every other one."""
        run = _Run()
        run.append(stamp, number)
        self._growing.insert(0, run)
        self._ends.insert(0, stamp)
        self._watch(run)
        if len(self._growing) > RUNS_MAX:
            self._merge()

    def _watch(self, run: _Run) -> None:
        self._pushes += 1
        heappush(self._firsts, (run.stamps[run.first], self._pushes, run))

    def _stop_growing(self, run: _Run) -> None:
        position = bisect_right(self._ends, run.stamps[-1]) - 1
        while self._growing[position] is not run:
            position -= 1
        del self._growing[position], self._ends[position]

    def _merge(self) -> None:
        """Make one run of the shortest ones, which descending stamps have left."""
        shortest = nsmallest(_MERGED_RUNS, self._growing, key=len)
        gone = set(map(id, shortest))
        items = sorted(
            item
            for run in shortest
            for item in zip(run.stamps[run.first :], run.numbers[run.first :], strict=True)
        )
        for run in shortest:
            run.first = len(run.stamps)
        pairs = [
            (run, end)
            for run, end in zip(self._growing, self._ends, strict=True)
            if id(run) not in gone
        ]
        self._growing = [run for run, _ in pairs]
        self._ends = [end for _, end in pairs]
        self._firsts = [item for item in self._firsts if id(item[2]) not in gone]
        self._firsts.sort()  # a sorted list is a heap
        merged = _Run()
        for stamp, number in items:
            merged.append(stamp, number)
        self._watch(merged)
        if len(items) < RUN_ITEMS_MAX:
            position = bisect_right(self._ends, items[-1][0])
            self._growing.insert(position, merged)
            self._ends.insert(position, items[-1][0])
