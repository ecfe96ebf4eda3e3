"""What goes into a chain of hashes: token ids in whatever container, and the media they stand for.

The classic fault here is a silent wraparound, where -1 and 2**32 - 1 become one id: whatever is not
an integer from 0 to 2**32 - 1 is refused, with its position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from kvstore.encoding import (
    U32_MAX,
    checked_bytes,
    checked_integer,
    encode_fields,
    shown,
    u32,
)
from kvstore.errors import InvalidTokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np


class SupportsArray(Protocol):
    """Anything NumPy can look at: its own arrays, and torch tensors on the CPU."""

    def __array__(self) -> np.ndarray[Any, Any]:
        """The values as a NumPy array."""
        ...


#: One sequence of token ids, each from 0 to 2**32 - 1: a list, tuple, range, array.array or
#: memoryview, or a one-dimensional array or CPU tensor of any integer dtype. The container leaves
#: no trace in the keys.
TokenIds = Sequence[int] | SupportsArray


@dataclass(frozen=True, slots=True)
class Media:
    """An image, audio or other input whose placeholder tokens are [start, end) of the sequence.

    `digest` is 32 bytes that name the content as the model sees it, after preprocessing. The range
    counts from the sequence's first token and may end beyond the tokens at hand, so that a prefix
    has the keys that it has in the whole. Ranges may overlap: a video's sound lies inside it.
    Raises InvalidTokens.
    """

    digest: bytes
    start: int
    end: int

    def __post_init__(self) -> None:
        """Refuse what cannot be hashed, and the empty range, which no block would notice."""
        checked_bytes("media digest", self.digest, InvalidTokens, at_least=32, at_most=32)
        checked_integer("media start", self.start, InvalidTokens, at_least=0)
        checked_integer("media end", self.end, InvalidTokens, at_least=self.start + 1)

    def encoding(self) -> bytes:
        """The item's bytes in the extras of each block that it touches."""
        return encode_fields(u32(self.start), u32(self.end), self.digest)


def token_words(token_ids: object) -> np.ndarray[Any, Any]:
    """The ids as one row of u32 little-endian; InvalidTokens for anything that is not ids."""
    import numpy as np  # here, so that importing kvstore stays light

    if hasattr(token_ids, "__array__") or isinstance(token_ids, (array, memoryview)):
        values = _as_row(token_ids)
        if values.dtype.kind in "iu":
            # Before the cast, which would wrap -1 and 2**32 + 5 into legal ids.
            if values.size and (int(values.min()) < 0 or int(values.max()) > U32_MAX):
                _refuse_first(values.tolist())
            return values.astype("<u4")
        ids = values.tolist()  # integers in an object array pass below, all else is named there
    elif isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes, bytearray)):
        ids = token_ids if isinstance(token_ids, (list, tuple)) else list(token_ids)
    else:
        raise InvalidTokens(
            f"token_ids={shown(token_ids)} of type {type(token_ids).__name__}: expected a sequence "
            "or a one-dimensional array of integers"
        )
    kinds = set(map(type, ids))
    if bool in kinds or not all(issubclass(kind, Integral) for kind in kinds):
        _refuse_first(ids)
    try:
        words = array("I", ids)
    except OverflowError:
        _refuse_first(ids)
    return np.asarray(words).astype("<u4", copy=False)


def _as_row(token_ids: object) -> np.ndarray[Any, Any]:
    """The container's values as a one-dimensional array, of whatever dtype."""
    import numpy as np  # here, so that importing kvstore stays light

    try:
        values = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as cause:
        # A tensor in device memory, or of a dtype that NumPy lacks.
        raise InvalidTokens(
            f"token_ids of type {type(token_ids).__name__} cannot be read as an array in host "
            f"memory: {cause}"
        ) from cause
    if values.ndim != 1:
        raise InvalidTokens(
            f"token_ids of shape {values.shape}: expected one sequence, of shape (n,); of a batch "
            "give one row"
        )
    return values


def _refuse_first(ids: Sequence[object]) -> NoReturn:
    """Raise InvalidTokens for the first value that is no token id; there is one."""
    position = next(position for position, value in enumerate(ids) if not _is_token_id(value))
    raise InvalidTokens(
        f"token_ids[{position}] = {shown(ids[position])}: expected an integer from 0 to {U32_MAX}"
    )


def _is_token_id(value: object) -> bool:
    # bool is Integral, and True would be a legal id by accident; NumPy's bool is not Integral.
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return 0 <= int(value) <= U32_MAX


def extras_by_block(extra: Iterable[object], block_tokens: int, blocks: int) -> dict[int, bytes]:
    """The extras of each block below `blocks` that an item touches: items by start, end, digest."""
    items: set[Media] = set()
    for position, item in enumerate(extra):
        if not isinstance(item, Media):
            raise InvalidTokens(f"extra[{position}] = {shown(item)}: expected a Media item")
        items.add(item)
    touching: dict[int, list[bytes]] = {}
    for item in sorted(items, key=attrgetter("start", "end", "digest")):
        last = min((item.end - 1) // block_tokens, blocks - 1)
        for block in range(item.start // block_tokens, last + 1):
            touching.setdefault(block, []).append(item.encoding())
    return {block: encode_fields(*encoded) for block, encoded in touching.items()}
