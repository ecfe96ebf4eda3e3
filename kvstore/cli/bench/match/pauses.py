"""How long the garbage collector stops the process, in CPU time."""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_REPETITIONS = 3
_GENERATIONS = 3


class Collections:
    """The collections of each generation while this context is open: how many, and the longest."""

    def __init__(self) -> None:
        self.longest_ms = [0.0] * _GENERATIONS
        self.counts = [0] * _GENERATIONS
        self._started = 0.0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.thread_time()
            return
        spent_ms = 1e3 * (time.thread_time() - self._started)
        generation = info["generation"]
        self.longest_ms[generation] = max(self.longest_ms[generation], spent_ms)
        self.counts[generation] += 1


@contextmanager
def without_what_was_before() -> Iterator[None]:
    """Collections inside do not look at what the process has had before: that is not the store."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def full_collection_ms() -> float:
    """What a collection of everything takes now; the median of a few."""
    spent = []
    for _ in range(_REPETITIONS):
        started = time.thread_time()
        gc.collect()
        spent.append(1e3 * (time.thread_time() - started))
    return median(spent)
