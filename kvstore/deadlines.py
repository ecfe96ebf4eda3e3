"""The next of many deadlines."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadlines:
    """Deadlines that may move, of owners that may end before.

    A deadline that moves on costs nothing until its old time comes: `current` is then asked for
    the deadline as it is, None for an owner that has ended.
    """

    def __init__(self, current: Callable[[int], float | None]) -> None:
        self._current = current
        self._heap: list[tuple[float, int]] = []
        self._queued: dict[int, float] = {}  # which of an owner's tuples counts
        #: No deadline comes before this. For a look at every event, which a call would be dear for.
        self.earliest = math.inf

    def add(self, deadline: float, owner_id: int) -> None:
        """Watch an owner's deadline: a new one, or one that now comes earlier."""
        queued = self._queued.get(owner_id)
        if queued is None or deadline < queued:
            self._queued[owner_id] = deadline
            heappush(self._heap, (deadline, owner_id))
            self.earliest = min(self.earliest, deadline)

    def drop(self, owner_id: int) -> None:
        """An owner has ended before its deadline."""
        self._queued.pop(owner_id, None)
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [(deadline, owner) for owner, deadline in self._queued.items()]
            heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline, or a time before it; None without owners."""
        heap = self._heap
        while heap and self._queued.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> list[int]:
        """The owners whose deadline has come, earliest first. They are no longer watched."""
        due: list[int] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            queued, owner_id = heappop(heap)
            if self._queued.get(owner_id) != queued:
                continue
            del self._queued[owner_id]
            deadline = self._current(owner_id)
            if deadline is None:
                continue
            if deadline > now:
                self.add(deadline, owner_id)
            else:
                due.append(owner_id)
        self.earliest = heap[0][0] if heap else math.inf
        return due
