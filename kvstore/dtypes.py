"""What a cache's elements are: their dtypes, and the scales of those that have one byte."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvstore.encoding import encode_fields, shown
from kvstore.errors import InvalidLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes of one element, by torch's full name of its dtype. A name outside this table is refused.
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
    }
)
SCALE_DTYPES = ("float32", "float16", "bfloat16")
SCALE_GRANULARITIES = ("token", "token_head", "block", "block_head")


def dtype_name(dtype: object) -> str:
    """The full name of a dtype, given as that name or as a torch dtype object.

    Raises InvalidLayout for a name outside `DTYPE_BYTES`. torch is not imported: its dtypes print
    as "torch.<name>".
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise InvalidLayout(f"dtype={shown(dtype)}: expected one of {', '.join(DTYPE_BYTES)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales stored in a part beside elements of one byte: one for the keys and one for the values.

    `granularity` says what shares one: the elements of a "token", of a token and head
    ("token_head"), of the whole "block", or of a head in it ("block_head"). A latent has one scale,
    per token or per block. Those over all heads belong to all heads together, so a part of some
    heads cannot have them.
    """

    dtype: str
    granularity: str

    def __post_init__(self) -> None:
        """Refuse what no scale can be."""
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.dtype not in SCALE_DTYPES:
            expected = ", ".join(SCALE_DTYPES)
            raise InvalidLayout(f"dtype={self.dtype!r} of scales: expected one of {expected}")
        check_choice("granularity", self.granularity, SCALE_GRANULARITIES)

    @property
    def is_per_token(self) -> bool:
        """True where each token adds scales, False where a block has the same number of them."""
        return self.granularity in ("token", "token_head")

    @property
    def is_per_head(self) -> bool:
        """True where each head has a scale of its own."""
        return self.granularity in ("token_head", "block_head")

    def bytes_of(self, scales: int) -> int:
        """Bytes of that many scales."""
        return scales * DTYPE_BYTES[self.dtype]

    def encoding(self) -> bytes:
        """The scales' bytes in a layer's encoding."""
        return encode_fields(self.dtype.encode(), self.granularity.encode())


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidLayout for a value that is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidLayout(f"{field}={shown(value)}: expected one of {', '.join(choices)}")
