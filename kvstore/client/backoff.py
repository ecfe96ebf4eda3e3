"""When to try again what has failed: later each time."""

from __future__ import annotations

from kvstore.errors import DaemonUnavailable

#: How long after a failure the next attempt is made: it doubles from one to the other.
BACKOFF_SECONDS_MIN, BACKOFF_SECONDS_MAX = 0.1, 5.0


class Backoff:
    """The pause after failures."""

    def __init__(self) -> None:
        self._next_try_at = -1.0
        self._seconds = BACKOFF_SECONDS_MIN

    def check(self, now: float) -> None:
        """Raise DaemonUnavailable while it is too early to try again."""
        if now < self._next_try_at:
            raise DaemonUnavailable("no daemon answered a moment ago")

    def fail(self, now: float) -> None:
        """An attempt has failed."""
        self._next_try_at = now + self._seconds
        self._seconds = min(2 * self._seconds, BACKOFF_SECONDS_MAX)

    def succeed(self) -> None:
        """The next failure is the first again."""
        self._next_try_at = -1.0
        self._seconds = BACKOFF_SECONDS_MIN
