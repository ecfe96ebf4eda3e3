"""Time, injected: the core never asks the operating system what time it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading


class Clock(Protocol):
    """A monotonic clock, and the only way to wait for it."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wait(self, condition: threading.Condition, timeout_seconds: float) -> None:
        """Wait on `condition`, which the caller holds, for at most `timeout_seconds`."""
        ...


class SystemClock:
    """The operating system's monotonic clock."""

    #: Seconds of CLOCK_MONOTONIC; not wrapped, since every request asks for it.
    now = staticmethod(time.monotonic)

    def wait(self, condition: threading.Condition, timeout_seconds: float) -> None:
        """Block this thread until notified or until the time is up."""
        condition.wait(timeout_seconds)


class FakeClock:
    """A clock that moves only when told to, or when somebody waits on it.

    Waiting moves the time on by the whole timeout and returns at once, so a single-threaded test
    sees each deadline pass without sleeping.
    """

    def __init__(self, start_seconds: float = 1_000.0) -> None:
        self._now = start_seconds

    def now(self) -> float:
        """The time that was last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time on by `seconds`, which may not be negative."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back: advance({seconds})")
        self._now += seconds

    def wait(self, condition: threading.Condition, timeout_seconds: float) -> None:
        """Let `timeout_seconds` pass."""
        self.advance(max(0.0, timeout_seconds))
