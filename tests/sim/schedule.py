"""Events in the order of their time, and what was seen of them."""

from __future__ import annotations

from collections import Counter, deque
from hashlib import sha256
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from kvstore.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

#: A run that takes more than this does not end by itself.
EVENTS_MAX = 20_000
_LINES_KEPT = 40


class Schedule:
    """A clock, the events to come, and a trace of those that were.

    Of events that are due at one time, any may come first: the seed decides.
    """

    def __init__(self, rng: Random) -> None:
        self.clock = FakeClock()
        self.events = 0
        self.seen: Counter[str] = Counter()  # troubles that came up
        self.last_lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._rng = rng
        self._queue: list[tuple[float, float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._digest = sha256()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen that many seconds from now."""
        self.at(self.clock.now() + seconds, event)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen then, or now if that is past."""
        self._pushed += 1
        time = max(time, self.clock.now())
        heappush(self._queue, (time, self._rng.random(), self._pushed, event))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._queue:
            time, _, _, event = heappop(self._queue)
            self.clock.advance(max(0.0, time - self.clock.now()))
            self.events += 1
            assert self.events < EVENTS_MAX, "the run does not end"
            event()

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        line = f"{self.clock.now():.6f} {who} {what}"
        self.last_lines.append(line)
        self._digest.update(line.encode() + b"\n")

    def digest(self) -> str:
        """Of the whole trace."""
        return self._digest.hexdigest()
