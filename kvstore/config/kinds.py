"""The kinds of settings: what each accepts, how it says so, and how it shows a value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kvstore import paths, units
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SHOWN_CHARACTERS = 60
_COUNT_DIGITS = 18  # Python refuses to read numbers of thousands

#: In place of a value that the program finds.
AUTO = "auto"

T = TypeVar("T")


class MemoryShare(NamedTuple):
    """A fraction of the memory that this process may use."""

    fraction: float


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[T]):
    """One kind of setting.

    A field of a setting's table is of the type that `read` returns; `shown` and `literal` take it.
    """

    #: The unit of a bare number, or what the value is.
    unit: str
    #: The allowed values, for a table.
    range: str
    #: The allowed values, as they follow "give ".
    allowed: str
    #: From what a file, a variable or a program gives, or from its own result; else ConfigError.
    read: Callable[[object], T]
    #: A value for people.
    shown: Callable[[T], str] = str
    #: A value as it is written in the file.
    literal: Callable[[T], str] = str
    #: What a text that is not allowed may have meant.
    nearest: Callable[[str], list[str]] = lambda _: []
    #: What each of a few words means.
    meanings: Mapping[str, str] | None = None

    def parse(self, value: object) -> T:
        """The value. Raises ConfigError with what is allowed and nearest."""
        try:
            return self.read(value)
        except ConfigError as error:
            near = self.nearest(value) if isinstance(value, str) else []
            hint = f"; did you mean {' or '.join(map(quoted, near))}?" if near else ""
            raise ConfigError(f"give {self.allowed}{hint}") from error


def memory_size(least_bytes: int) -> Kind[int | MemoryShare]:
    """Bytes, or a share of the memory that this process may use."""

    def read(value: object) -> int | MemoryShare:
        if isinstance(value, str) and value.strip().endswith("%"):
            value = MemoryShare(units.parse_fraction(value))
        if isinstance(value, MemoryShare):
            _check(0.001 <= value.fraction <= 1.0)
            return value
        size = units.parse_bytes(_number(value, int))
        _check(size >= least_bytes)
        return size

    def shown(value: int | MemoryShare) -> str:
        if isinstance(value, MemoryShare):
            return units.shown_fraction(value.fraction)
        return units.shown_bytes(value)

    def literal(value: int | MemoryShare) -> str:
        return quoted(units.exact_bytes(value) if isinstance(value, int) else shown(value))

    least = units.exact_bytes(least_bytes)
    return Kind(
        unit="bytes",
        range=f"{least} or more, or 0.1% to 100% of memory",
        allowed=f'a size of {least} or more, as in "8GiB" or "1.5GB", or a share of the memory '
        'that this process may use, as in "10%"',
        read=read,
        shown=shown,
        literal=literal,
        nearest=units.nearest_sizes,
    )


def seconds(least: float, most: float) -> Kind[float]:
    """A duration."""

    def read(value: object) -> float:
        duration = units.parse_seconds(_number(value, int, float))
        _check(least <= duration <= most)
        return duration

    between = f"{units.shown_seconds(least)} to {units.shown_seconds(most)}"
    return Kind(
        unit="seconds",
        range=between,
        allowed=f'a duration from {between}, as in "90s", "5m" or "1h"',
        read=read,
        shown=units.shown_seconds,
        literal=lambda value: quoted(units.shown_seconds(value)),
    )


def fraction(least: float, most: float = 1.0) -> Kind[float]:
    """A part of a whole."""

    def read(value: object) -> float:
        part = units.parse_fraction(_number(value, int, float))
        _check(least <= part <= most)
        return part

    between = f"{units.shown_fraction(least)} to {units.shown_fraction(most)}"
    return Kind(
        unit="fraction",
        range=between,
        allowed=f'a fraction from {between}, as in 0.5 or "50%"',
        read=read,
        shown=units.shown_fraction,
        literal=lambda value: quoted(units.shown_fraction(value)),
    )


def count(least: int, most: int) -> Kind[int]:
    """A whole number."""

    def read(value: object) -> int:
        if isinstance(value, str):
            _check(re.fullmatch(rf"\s*[0-9]{{1,{_COUNT_DIGITS}}}\s*", value) is not None)
            value = int(value)
        number: int = _number(value, int)
        _check(least <= number <= most)
        return number

    between = f"{least} to {most}"
    return Kind(unit="count", range=between, allowed=f"a whole number from {between}", read=read)


def choice(meanings: Mapping[str, str]) -> Kind[str]:
    """One of a few words; `meanings` says what each does."""

    def read(value: object) -> str:
        _check(isinstance(value, str) and value in meanings)
        return str(value)

    words = ", ".join(map(quoted, meanings))
    return Kind(
        unit="word",
        range=words,
        allowed=f"one of {words}",
        read=read,
        literal=quoted,
        nearest=lambda text: get_close_matches(text.lower(), meanings, n=1),
        meanings=meanings,
    )


def socket_path() -> Kind[str]:
    """Where a Unix socket lies; `AUTO` leaves it to the program."""

    def read(value: object) -> str:
        text = str(_number(value))  # a text, and nothing else
        return text if text == AUTO else str(paths.parse_socket(text))

    most = f"an absolute path of at most {paths.SOCKET_PATH_BYTES_MAX} bytes"
    return Kind(
        unit="path",
        range=f'"{AUTO}", or {most}',
        allowed=f'"{AUTO}", or {most}, as in "{paths.SYSTEM_DIRECTORY / paths.SOCKET_NAME}"',
        read=read,
        shown=printable,
        literal=quoted,
    )


def shown_given(value: object) -> str:
    """A value that somebody gave, as TOML would have it, and not too long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and abs(value) >= 10**_SHOWN_CHARACTERS:
        return "a number of too many digits"
    text = quoted(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _number(value: object, *types: type) -> Any:  # noqa: ANN401
    """`value`, if it is a text or of one of these types; true and false are no numbers."""
    _check(isinstance(value, (str, *types)) and not isinstance(value, bool))
    return value


def _check(is_allowed: bool) -> None:
    if not is_allowed:
        raise ConfigError("not allowed")  # `Kind.parse` says what is


def quoted(text: str) -> str:
    """A text in quotes, with what no terminal should print written as escapes."""
    escaped = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def printable(text: str) -> str:
    """A name as it can be printed anywhere, on one line; in quotes where it has odd characters."""
    return text if text.isprintable() else quoted(text)
