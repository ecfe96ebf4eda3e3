"""The encoding that every identity is made of, and the checks of what goes into it.

Frozen together with the keys: tests/unit/golden_keys.json pins it, docs/keys.md says it in words.
"""

from __future__ import annotations

import reprlib

from kvstore.errors import InvalidRequest

U32_MAX = 0xFFFF_FFFF
TEXT_BYTES_MAX = 65_536


def encode_fields(*fields: bytes | None) -> bytes:
    """Concatenate the fields so that no two different sequences of them give the same bytes.

    Each field is its length as u32 little-endian and its bytes; None, an absent field, is the
    length 0xFFFFFFFF alone, so absent and empty differ. A field of 4 GiB - 1 byte or more raises
    InvalidRequest.
    """
    pieces: list[bytes] = []
    for field in fields:
        if field is None:
            pieces.append(b"\xff\xff\xff\xff")
            continue
        if len(field) >= U32_MAX:
            raise InvalidRequest(f"a field of {len(field)} bytes: at most {U32_MAX - 1} fit")
        pieces += (u32(len(field)), field)
    return b"".join(pieces)


def u32(value: int) -> bytes:
    """The integer as 4 bytes, little-endian; its range has been checked before."""
    return value.to_bytes(4, "little")


def optional_u32(value: int | None) -> bytes | None:
    """`u32`, or an absent field."""
    return None if value is None else u32(value)


def shown(value: object) -> str:
    """The value for an error message, bounded: a caller's megabyte does not enter a log line."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def checked_integer(
    field: str,
    value: object,
    error: type[InvalidRequest],
    *,
    at_least: int = 1,
    at_most: int = U32_MAX,
) -> int:
    """The value, where it is an int of that range; otherwise `error`. A bool is not an int here."""
    if isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most:
        return value
    raise error(f"{field}={shown(value)}: expected an integer from {at_least} to {at_most}")


def checked_text(field: str, value: object, error: type[InvalidRequest]) -> bytes:
    """UTF-8 of a non-empty text, not normalised; otherwise `error`, also for lone surrogates."""
    if not isinstance(value, str) or not value:
        raise error(f"{field}={shown(value)}: expected a non-empty text")
    try:
        encoded = value.encode("utf-8")
    except UnicodeEncodeError as cause:
        raise error(
            f"{field}={shown(value)}: the character at {cause.start} is a lone surrogate, which "
            "UTF-8 cannot express; expected a text of Unicode characters"
        ) from cause
    if len(encoded) > TEXT_BYTES_MAX:
        raise error(f"{field} of {len(encoded)} bytes in UTF-8: expected at most {TEXT_BYTES_MAX}")
    return encoded


def checked_bytes(
    field: str,
    value: object,
    error: type[InvalidRequest],
    *,
    at_least: int,
    at_most: int,
) -> bytes:
    """The value, where it is bytes of such a length; otherwise `error`."""
    if isinstance(value, bytes) and at_least <= len(value) <= at_most:
        return value
    allowed = f"{at_most}" if at_least == at_most else f"{at_least} to {at_most}"
    raise error(f"{field}={shown(value)}: expected {allowed} bytes")
