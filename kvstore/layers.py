"""What one layer of a model caches: its shape, its dtype, and how much of a prefix it sees.

Each kind of layer says how many bytes a token adds to a block, how many a block has beside its
tokens, and which rule it goes by: layers of one rule are one cache group. docs/keys.md says in
words what `encoding` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.dtypes import DTYPE_BYTES, Scales, check_choice, dtype_name
from kvstore.encoding import (
    checked_integer,
    checked_text,
    encode_fields,
    optional_u32,
    shown,
    u32,
)
from kvstore.errors import InvalidLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

FULL = "full"
SLIDING = "sliding"
CHUNKED = "chunked"
STATE = "state"
OPAQUE = "opaque"
ATTENTIONS = (FULL, SLIDING, CHUNKED)
#: A window of one token would leave a layer nothing to read from its cache.
WINDOW_TOKENS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayer:
    """One attention layer: a key of `head_dim` elements per token and KV head, and a value.

    A value has `value_head_dim` elements, as many as the key where that is None (or given equal).
    `attention` says which tokens one sees: "full" all earlier ones; "sliding" itself and the
    `window_tokens` - 1 before it; "chunked" those of its own span, where the sequence is cut into
    spans of `window_tokens` from its first token on. `scales` are stored in the part.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    value_head_dim: int | None = None
    attention: str = FULL
    window_tokens: int | None = None
    scales: Scales | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a layer, and bring a value's dim into one form."""
        checked_integer("kv_heads", self.kv_heads, InvalidLayout)
        checked_integer("head_dim", self.head_dim, InvalidLayout)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.value_head_dim is not None:
            checked_integer("value_head_dim", self.value_head_dim, InvalidLayout)
            if self.value_head_dim == self.head_dim:
                object.__setattr__(self, "value_head_dim", None)
        _check_attention(self.attention, self.window_tokens)
        _check_scales(self.scales, self.dtype)

    @property
    def value_dim(self) -> int:
        """Elements of one value."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all heads, kv_heads * (key + value) elements, and a token's scales."""
        elements = self.kv_heads * (self.head_dim + self.value_dim)
        return elements * DTYPE_BYTES[self.dtype] + self._scale_bytes(is_per_token=True)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that a block has beside those of its tokens: its scales, where they are its own."""
        return self._scale_bytes(is_per_token=False)

    @property
    def rule(self) -> tuple[str, int | None]:
        """What the layer needs of a prefix; layers of one rule are one cache group."""
        return self.attention, self.window_tokens

    def check_head_groups(self, head_groups: int) -> None:
        """Raise InvalidLayout where its heads cannot be split into that many equal groups."""
        if self.kv_heads % head_groups:
            raise InvalidLayout(
                f"head_groups={head_groups}: its {self.kv_heads} heads do not split evenly"
            )
        if head_groups > 1 and self.scales is not None and not self.scales.is_per_head:
            raise InvalidLayout(
                f"head_groups={head_groups}: its scales are per {self.scales.granularity}, over "
                "all heads; expected 1, or a scale per head"
            )

    def encoding(self) -> bytes:
        """The layer's bytes in the layout's encoding."""
        return _encode_layer(
            "kv",
            self.dtype,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            rule=self.rule,
            scales=self.scales,
        )

    def _scale_bytes(self, *, is_per_token: bool) -> int:
        if self.scales is None or self.scales.is_per_token != is_per_token:
            return 0
        return self.scales.bytes_of(2 * (self.kv_heads if self.scales.is_per_head else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """One layer of multi-head latent attention: a latent and a rotary key, shared by all heads.

    `attention`, `window_tokens` and `scales` are as for a `KVLayer`; there are no heads to have
    scales of their own.
    """

    latent_dim: int
    rope_dim: int
    dtype: str
    attention: str = FULL
    window_tokens: int | None = None
    scales: Scales | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a layer."""
        checked_integer("latent_dim", self.latent_dim, InvalidLayout)
        checked_integer("rope_dim", self.rope_dim, InvalidLayout)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        _check_attention(self.attention, self.window_tokens)
        _check_scales(self.scales, self.dtype)
        if self.scales is not None and self.scales.is_per_head:
            raise InvalidLayout(
                f"granularity={self.scales.granularity!r}: a latent has no heads; expected one of "
                "token, block"
            )

    @property
    def bytes_per_token(self) -> int:
        """One latent and one rotary key, latent_dim + rope_dim elements, and a token's scale."""
        elements = self.latent_dim + self.rope_dim
        return elements * DTYPE_BYTES[self.dtype] + self._scale_bytes(is_per_token=True)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that a block has beside those of its tokens: its scale, where it has one."""
        return self._scale_bytes(is_per_token=False)

    @property
    def rule(self) -> tuple[str, int | None]:
        """What the layer needs of a prefix; layers of one rule are one cache group."""
        return self.attention, self.window_tokens

    def check_head_groups(self, head_groups: int) -> None:
        """Raise InvalidLayout for more than one: a latent has no heads to split."""
        _check_one_head_group("latent", head_groups)

    def encoding(self) -> bytes:
        """The layer's bytes in the layout's encoding."""
        return _encode_layer(
            "latent",
            self.dtype,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            rule=self.rule,
            scales=self.scales,
        )

    def _scale_bytes(self, *, is_per_token: bool) -> int:
        if self.scales is None or self.scales.is_per_token != is_per_token:
            return 0
        return self.scales.bytes_of(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """One recurrent layer: its state after the block's last token, `state_bytes`; none per token.

    Where a state is made of tensors of different dtypes, `dtype` is one that divides them all.
    """

    state_bytes: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse what cannot be a layer."""
        checked_integer("state_bytes", self.state_bytes, InvalidLayout)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.state_bytes % DTYPE_BYTES[self.dtype]:
            raise InvalidLayout(
                f"state_bytes={self.state_bytes}: expected a multiple of the "
                f"{DTYPE_BYTES[self.dtype]} bytes of {self.dtype}"
            )

    @property
    def bytes_per_token(self) -> int:
        """None: the state is as large after one token as after a thousand."""
        return 0

    @property
    def bytes_per_block(self) -> int:
        """The one state."""
        return self.state_bytes

    @property
    def rule(self) -> tuple[str, int | None]:
        """What the layer needs of a prefix: the state at its end."""
        return STATE, None

    def check_head_groups(self, head_groups: int) -> None:
        """Raise InvalidLayout for more than one: a state is one piece."""
        _check_one_head_group("recurrent", head_groups)

    def encoding(self) -> bytes:
        """The layer's bytes in the layout's encoding."""
        return _encode_layer("state", self.dtype, state_bytes=self.state_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueLayer:
    """One layer whose bytes only its engine can read: so many per token, so many per block.

    What they depend on beside the layer is the layout's `backend` and `isa`.
    """

    bytes_per_token: int
    bytes_per_block: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be a layer."""
        checked_integer("bytes_per_block", self.bytes_per_block, InvalidLayout, at_least=0)
        at_least = 0 if self.bytes_per_block else 1
        checked_integer("bytes_per_token", self.bytes_per_token, InvalidLayout, at_least=at_least)

    @property
    def rule(self) -> tuple[str, int | None]:
        """What the layer needs of a prefix: all of it, since nobody else can say less."""
        return OPAQUE, None

    def check_head_groups(self, head_groups: int) -> None:
        """Raise InvalidLayout for more than one: nobody else knows where the heads lie."""
        _check_one_head_group("opaque", head_groups)

    def encoding(self) -> bytes:
        """The layer's bytes in the layout's encoding."""
        opaque = encode_fields(u32(self.bytes_per_token), u32(self.bytes_per_block))
        return _encode_layer("opaque", None, opaque=opaque)


LayerSpec = KVLayer | LatentLayer | StateLayer | OpaqueLayer


def _encode_layer(
    kind: str,
    dtype: str | None,
    *,
    rule: tuple[str, int | None] = (FULL, None),
    scales: Scales | None = None,
    opaque: bytes | None = None,
    **numbers: int | None,
) -> bytes:
    """Encode one layer. What its kind has not is absent, and so is the rule "full"."""
    attention, window_tokens = rule
    return encode_fields(
        kind.encode(),
        None if dtype is None else dtype.encode(),
        optional_u32(numbers.get("kv_heads")),
        optional_u32(numbers.get("head_dim")),
        optional_u32(numbers.get("value_head_dim")),
        optional_u32(numbers.get("latent_dim")),
        optional_u32(numbers.get("rope_dim")),
        None if attention == FULL else attention.encode(),
        optional_u32(window_tokens),
        optional_u32(numbers.get("state_bytes")),
        None if scales is None else scales.encoding(),
        opaque,
    )


def _check_attention(attention: object, window_tokens: object) -> None:
    check_choice("attention", attention, ATTENTIONS)
    if attention != FULL:
        at_least = WINDOW_TOKENS_MIN
        checked_integer("window_tokens", window_tokens, InvalidLayout, at_least=at_least)
    elif window_tokens is not None:
        raise InvalidLayout(
            f"window_tokens={shown(window_tokens)}: full attention has no window; expected None"
        )


def _check_scales(scales: object, dtype: str) -> None:
    if scales is None:
        return
    if not isinstance(scales, Scales):
        raise InvalidLayout(f"scales={shown(scales)}: expected a Scales")
    if DTYPE_BYTES[dtype] != 1:
        one_byte = ", ".join(name for name, size in DTYPE_BYTES.items() if size == 1)
        raise InvalidLayout(f"scales of dtype={dtype!r}: expected one of {one_byte}")


def _check_one_head_group(kind: str, head_groups: int) -> None:
    if head_groups != 1:
        raise InvalidLayout(
            f"head_groups={head_groups}: a layer that is {kind} has no heads to split; expected 1"
        )


def check_backend(specs: Sequence[LayerSpec], backend: object, isa: object) -> None:
    """Opaque layers need a backend and may have an instruction set, and no others have either."""
    opaque = sum(isinstance(spec, OpaqueLayer) for spec in specs)
    if opaque not in (0, len(specs)):
        raise InvalidLayout(
            f"specs: {opaque} of {len(specs)} layers are opaque; expected all or none"
        )
    if opaque:
        checked_text("backend", backend, InvalidLayout)
        if isa is not None:
            checked_text("isa", isa, InvalidLayout)
        return
    for field, value in (("backend", backend), ("isa", isa)):
        if value is not None:
            raise InvalidLayout(
                f"{field}={shown(value)}: the layout has no opaque layer; expected None"
            )
