"""Sizes, durations and fractions with their units, as people write them and as they are shown."""

from __future__ import annotations

import re
from decimal import Decimal

from kvstore.errors import ConfigError

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000 ** (n + 1) for n, prefix in enumerate("kmgt")},
    **{f"{prefix}ib": 1024 ** (n + 1) for n, prefix in enumerate("kmgt")},
}
_BINARY_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
#: Milliseconds, because they are whole numbers.
_TIME_UNITS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}

# No more digits than any of them can need: Python refuses to read numbers of thousands.
_NUMBER = r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*"
_SIZE = re.compile(_NUMBER + r"([a-zA-Z]*)\s*")
_SHORT_SIZE = re.compile(_NUMBER + r"([kmgt])(i?)\s*", re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"(d|h|m|s|ms|)\s*")
_FRACTION = re.compile(_NUMBER + r"(%?)\s*")


def parse_bytes(text: str | int) -> int:
    """The number of bytes in "512MiB", "1.5 GB" or 4096. Raises ConfigError for anything else."""
    match = None if isinstance(text, bool) else _SIZE.fullmatch(str(text))
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f'{text!r} is no size: write a number of bytes, or one with a unit, as in "512MiB" or '
            '"1.5GB"'
        )
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def is_size(text: str) -> bool:
    """Could this be meant as a size?"""
    match = _SIZE.fullmatch(text)
    return match is not None and match[2].lower() in _SIZE_UNITS


def nearest_sizes(text: str) -> list[str]:
    """What a size whose unit lacks its "B" may mean: "8G" is either of two, "8Gi" is one."""
    match = _SHORT_SIZE.fullmatch(text)
    if match is None:
        return []
    number, prefix, binary = match[1], match[2].upper(), match[3]
    return [f"{number}{prefix}iB"] + ([] if binary else [f"{number}{prefix}B"])


def shown_bytes(count: int) -> str:
    """A size for people, rounded: "23.4 GiB"."""
    for unit, factor in _BINARY_UNITS:
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} bytes"


def exact_bytes(count: int) -> str:
    """The same size in the largest unit that loses nothing: "8GiB", "1500000"."""
    for unit, factor in _BINARY_UNITS:
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def parse_seconds(text: str | float) -> float:
    """The seconds in "250ms", "1.5h" or 30. Raises ConfigError for anything else."""
    match = None if isinstance(text, bool) else _TIME.fullmatch(str(text))
    if match is None:
        raise ConfigError(
            f'{text!r} is no duration: write a number of seconds, or one with a unit, as in "30s" '
            "(there are ms, s, m, h and d)"
        )
    number, milliseconds = float(match[1]), _TIME_UNITS[match[2] or "s"]
    # Seconds stay what they are, to the last bit.
    return number / 1_000 if milliseconds == 1 else number * (milliseconds // 1_000)


def shown_seconds(seconds: float) -> str:
    """A duration in the largest unit that has no fraction: "30d", "90m", "250ms"."""
    milliseconds = seconds * 1_000
    for unit, factor in _TIME_UNITS.items():
        if milliseconds and milliseconds % factor == 0:
            return f"{milliseconds // factor:.0f}{unit}"
    return f"{Decimal(repr(seconds)).normalize():f}s"


def parse_fraction(text: str | float) -> float:
    """The fraction in "50%", "0.5" or 0.5. Raises ConfigError for anything else, also above 1."""
    match = None if isinstance(text, bool) else _FRACTION.fullmatch(str(text))
    fraction = None if match is None else float(match[1]) / (100 if match[2] else 1)
    if fraction is None or fraction > 1:
        raise ConfigError(
            f'{text!r} is no fraction: write a number from 0 to 1, or a percentage, as in "50%"'
        )
    return fraction


def shown_fraction(fraction: float) -> str:
    """A fraction as a percentage: "12.5%"."""
    return f"{fraction * 100:.10g}%"
