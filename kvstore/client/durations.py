"""Durations that callers give, checked."""

from __future__ import annotations

import math

from kvstore.errors import InvalidRequest

WAIT_SECONDS_MAX = 3_600.0


def wait_seconds(value: float) -> float:
    """A time to wait, 0 included. Raises InvalidRequest."""
    if type(value) is float and 0.0 <= value <= WAIT_SECONDS_MAX:  # every read comes this way
        return value
    if not _is_number(value) or not 0 <= value <= WAIT_SECONDS_MAX:  # NaN is refused, too
        raise InvalidRequest(f"wait_seconds is {value!r}: allowed are 0 to {WAIT_SECONDS_MAX:.0f}")
    return float(value)


def lasting_seconds(name: str, value: float) -> float:
    """How long something lasts: more than 0, and finite. Raises InvalidRequest."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise InvalidRequest(f"{name} is {value!r}: it must be more than 0, and finite")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
