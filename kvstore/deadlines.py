"""The next of many deadlines."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadlines:
    """Deadlines that may move on, of owners that may end before.

    The heap's items may be out of date, so `current` is asked for an owner's deadline as it is
    now, None for one that has ended.
    """

    def __init__(self, current: Callable[[int], float | None]) -> None:
        self._current = current
        self._heap: list[tuple[float, int]] = []
        self._live = 0

    def add(self, deadline: float, owner_id: int) -> None:
        """Watch a new owner's deadline."""
        heappush(self._heap, (deadline, owner_id))
        self._live += 1

    def drop(self) -> None:
        """An owner has ended before its deadline; its item is forgotten when that is cheap."""
        self._live -= 1
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [item for item in self._heap if self._current(item[1]) is not None]
            heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline, or a time before it; None without owners."""
        while self._heap and self._current(self._heap[0][1]) is None:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[int]:
        """The owners whose deadline has come, earliest first. They are no longer watched."""
        due: list[int] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, owner_id = heappop(heap)
            deadline = self._current(owner_id)
            if deadline is None:
                continue
            if deadline > now:
                heappush(heap, (deadline, owner_id))
            else:
                due.append(owner_id)
                self._live -= 1
        return due
