"""Frames between a client and the daemon of its node: how they begin, end, and what is packed.

    | length: u32 little-endian | body: a msgpack map of that many bytes |

docs/wire.md says each map. Unknown fields of a map are ignored, so that a newer minor version may
add some; a missing one has its default. Long lists of equal things are one binary each: keys lie
end to end, numbers are u64 little-endian. Golden frames in tests/unit/golden_frames.json pin it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated, Any, Required, TypedDict, cast

import msgspec

from kvstore.errors import WireError
from kvstore.types import KEY_BYTES, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: A daemon serves clients of the same major version, one minor version older or newer.
WIRE_VERSION = (1, 0)
#: Of a body. 65,536 blocks of eight parts fit; a longer one is an attack or a mistake.
BODY_BYTES_MAX = 64 << 20
#: Keys of one field, and parts of blocks of one reservation.
KEYS_MAX = 8 * 65_536
#: Of the body of a client that has not said hello.
HELLO_BYTES_MAX = 4_096

LENGTH = struct.Struct("<I")

#: One byte an outcome, for ever; new ones go to the end.
_OUTCOMES = (
    Outcome.OK,
    Outcome.GRANTED,
    Outcome.PRESENT,
    Outcome.ABSENT,
    Outcome.EVICTED,
    Outcome.EXPIRED,
    Outcome.PENDING,
    Outcome.CORRUPT,
    Outcome.TIMEOUT,
    Outcome.BUSY,
    Outcome.FULL,
    Outcome.QUOTA,
    Outcome.UNAVAILABLE,
    Outcome.INCOMPATIBLE,
    Outcome.SLOWER_THAN_RECOMPUTE,
)
_CODE_OF = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
#: Stands for None among numbers that cannot be this large.
NONE_U64 = (1 << 64) - 1

_FEW = msgspec.Meta(max_length=64)
_SOME = msgspec.Meta(max_length=4096)
_Columns = Annotated[list[Annotated[dict[str, bytes], _FEW]], _FEW]
_Groups = Annotated[list[Annotated[list[str | int | None], _FEW]], _SOME]


class _RequestFields(TypedDict, total=False):
    """Fields that a client may send, and of which type.

    A daemon makes no objects of anything else: some bytes of a frame could become a hundred times
    as many of them, since an empty map is one byte.
    """

    t: Required[str]
    i: int
    r: bytes
    v: Annotated[list[int], _FEW]
    name: Annotated[str, _SOME]
    session: int
    secret: bytes
    k: bytes
    n: bytes
    m: _Columns
    w: float
    tokens: int
    ttl: float | None
    id: int
    token: bytes
    width: int
    blocks: int
    o: int
    differing: int
    f: bytes
    p: bytes
    l: bytes  # noqa: E741
    c: bytes
    start: int
    x: float | None
    b: bytes
    g: bytes
    groups: _Groups
    kind: str
    what: Annotated[str, _SOME]
    limit: int
    prefix: bytes
    newest: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decode_request = msgspec.msgpack.Decoder(_RequestFields).decode


def frame(fields: dict[str, Any]) -> bytes:
    """A map as a frame."""
    body = _encode(fields)
    if len(body) > BODY_BYTES_MAX:
        raise WireError(f"a frame of {len(body)} bytes: {BODY_BYTES_MAX} are the most")
    return LENGTH.pack(len(body)) + body


def body_length(header: bytes | memoryview, *, bytes_max: int = BODY_BYTES_MAX) -> int:
    """The length of the body that follows these four bytes. Raises WireError beyond the maximum."""
    length: int = LENGTH.unpack(header)[0]
    if length > bytes_max:
        raise WireError(f"a frame of {length} bytes was announced: {bytes_max} are the most")
    return length


def fields_of(body: bytes | memoryview) -> dict[str, Any]:
    """The map of a body. Raises WireError for anything else."""
    return _decoded(_decode, body)


def request_fields_of(body: bytes | memoryview) -> dict[str, Any]:
    """The known fields of the map that a client sent. Raises WireError for anything else."""
    return _decoded(_decode_request, body)


def _decoded(
    decode: Callable[[bytes | memoryview], Any], body: bytes | memoryview
) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", decode(body))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"the body of a frame is no map of ours: {error}") from error


def version_of(fields: dict[str, Any]) -> tuple[int, int]:
    """The version that a hello names. Raises WireError where it names none."""
    match fields.get("v"):
        case [int() as major, int() as minor]:
            return major, minor
    raise WireError("a hello names its version")


def serves(own: tuple[int, int], other: tuple[int, int]) -> bool:
    """May these two versions talk to each other?"""
    return own[0] == other[0] and abs(own[1] - other[1]) <= 1


# -- lists as one binary ---------------------------------------------------------------------


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Keys end to end."""
    return b"".join(keys)


def unpack_keys(packed: object) -> list[bytes]:
    """Keys of 32 bytes each. Raises WireError for another length."""
    if not isinstance(packed, bytes) or len(packed) % KEY_BYTES:
        raise WireError("keys are a binary of n * 32 bytes")
    if len(packed) > KEYS_MAX * KEY_BYTES:
        raise WireError(f"{len(packed) // KEY_BYTES} keys: {KEYS_MAX} are the most")
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Numbers as u64, end to end."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(packed: object) -> tuple[int, ...]:
    """Numbers of 8 bytes each. Raises WireError for another length."""
    if not isinstance(packed, bytes) or len(packed) % 8:
        raise WireError("numbers are a binary of n * 8 bytes")
    if len(packed) > 8 * (KEYS_MAX + 1):
        raise WireError(f"{len(packed) // 8} numbers: {KEYS_MAX + 1} are the most")
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def pack_outcomes(outcomes: Iterable[Outcome]) -> bytes:
    """One byte each."""
    return bytes(_CODE_OF[outcome] for outcome in outcomes)


def unpack_outcomes(packed: object) -> list[Outcome]:
    """Outcomes of one byte each; one that is not known here is `incompatible`."""
    if not isinstance(packed, bytes):
        raise WireError("outcomes are a binary of one byte each")
    known = len(_OUTCOMES)
    return [_OUTCOMES[code] if code < known else Outcome.INCOMPATIBLE for code in packed]


def pack_outcome(outcome: Outcome | None) -> int | None:
    """The code of one outcome; None for None."""
    return None if outcome is None else _CODE_OF[outcome]


def unpack_outcome(code: object) -> Outcome | None:
    """The outcome of a code; None for None."""
    if code is None:
        return None
    if isinstance(code, bool) or not isinstance(code, int) or code < 0:
        raise WireError("an outcome is a number")
    return _OUTCOMES[code] if code < len(_OUTCOMES) else Outcome.INCOMPATIBLE
