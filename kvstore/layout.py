"""The geometry of a model's KV cache: how many bytes a token takes, and in which order they lie.

A layout is part of a block's identity: two engines whose layouts differ in anything, be it only
the dtype of one layer, never see each other's blocks. Its encoding is frozen by the golden vectors
in tests/unit/golden_keys.json, and docs/keys.md says it in words.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

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
    from collections.abc import Mapping

LAYERS_MAX = 4_096

#: Order of a stored part of attention keys and values: outermost axis first; contiguous.
KV_AXIS_ORDER = "layer kv head token dim"
#: Order of a stored part of latents, where `dim` is the latent followed by the rotary part.
LATENT_AXIS_ORDER = "layer token dim"

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
class KVLayer:
    """One attention layer: a key and a value of `head_dim` elements per token and KV head."""

    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        """Refuse what cannot be a layer."""
        checked_integer("kv_heads", self.kv_heads, InvalidLayout)
        checked_integer("head_dim", self.head_dim, InvalidLayout)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all heads: 2 * kv_heads * head_dim elements."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def encoding(self) -> bytes:
        """The layer's bytes in the layout's encoding."""
        return _encode_layer("kv", self.dtype, kv_heads=self.kv_heads, head_dim=self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """One layer of multi-head latent attention: a latent and a rotary key, shared by all heads."""

    latent_dim: int
    rope_dim: int
    dtype: str

    def __post_init__(self) -> None:
        """Refuse what cannot be a layer."""
        checked_integer("latent_dim", self.latent_dim, InvalidLayout)
        checked_integer("rope_dim", self.rope_dim, InvalidLayout)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def bytes_per_token(self) -> int:
        """One latent and one rotary key: latent_dim + rope_dim elements."""
        return (self.latent_dim + self.rope_dim) * DTYPE_BYTES[self.dtype]

    def encoding(self) -> bytes:
        """The layer's bytes in the layout's encoding."""
        return _encode_layer(
            "latent", self.dtype, latent_dim=self.latent_dim, rope_dim=self.rope_dim
        )


def _encode_layer(
    kind: str,
    dtype: str,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    latent_dim: int | None = None,
    rope_dim: int | None = None,
) -> bytes:
    """Encode one layer. What no layer can have yet is absent, so that its place is taken."""
    return encode_fields(
        kind.encode(),
        dtype.encode(),
        optional_u32(kv_heads),
        optional_u32(head_dim),
        None,  # value head dim, where it is not the key's
        optional_u32(latent_dim),
        optional_u32(rope_dim),
        None,  # attention rule, where a token does not see every earlier one
        None,  # window in tokens, with such a rule
        None,  # bytes of a recurrent state
        None,  # scales stored in the block: their dtype and granularity
        None,  # bytes of an opaque layer
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stored value of a block: layers [first_layer, end_layer) of the model, head group g of G.

    Head group g of G holds the KV heads [g * kv_heads / G, (g + 1) * kv_heads / G). A cache group
    is a set of layers that need the same of a prefix; a companion is a cache beside the model's
    own. Raises InvalidLayout for values that no layout could have; `Layout.check_part` says
    whether one layout has it.
    """

    group: int = 0
    companion: str | None = None
    first_layer: int
    end_layer: int
    head_group: int = 0
    head_groups: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be a part of any layout."""
        checked_integer("group", self.group, InvalidLayout, at_least=0)
        if self.companion is not None:
            checked_text("companion", self.companion, InvalidLayout)
        checked_integer("first_layer", self.first_layer, InvalidLayout, at_least=0)
        checked_integer("end_layer", self.end_layer, InvalidLayout, at_least=self.first_layer + 1)
        checked_integer("head_groups", self.head_groups, InvalidLayout)
        last_group = self.head_groups - 1
        checked_integer(
            "head_group", self.head_group, InvalidLayout, at_least=0, at_most=last_group
        )

    def encoding(self) -> bytes:
        """The part's bytes in a storage key."""
        return encode_fields(
            u32(self.group),
            None if self.companion is None else self.companion.encode("utf-8"),
            u32(self.first_layer),
            u32(self.end_layer),
            u32(self.head_group),
            u32(self.head_groups),
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The KV cache of a whole model: its layers, and the order in which a stored part has them.

    Build one with `mha`, `gqa`, `mqa` or `mla`; from single layers where they differ in shape.
    Layers are all of one kind. `quantisation` names a scheme whose scales are not stored in the
    block. `axis_order` is the order of a part's axes, outermost first, separated by one space: the
    default of the kind, or another order of the same axes.

    A layout describes the model, not one rank's shard of it: the shard is a `Part`.
    Raises InvalidLayout, naming the field, its value and what is allowed.
    """

    specs: tuple[KVLayer, ...] | tuple[LatentLayer, ...]
    axis_order: str
    quantisation: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be stored, or not told apart."""
        specs: object = self.specs
        kinds = {type(spec) for spec in specs} if isinstance(specs, tuple) else set()
        if kinds not in ({KVLayer}, {LatentLayer}):
            raise InvalidLayout(
                f"specs={shown(self.specs)}: expected a tuple of KVLayer or one of LatentLayer"
            )
        checked_integer("layers", len(self.specs), InvalidLayout, at_most=LAYERS_MAX)
        checked_text("axis_order", self.axis_order, InvalidLayout)
        default = KV_AXIS_ORDER if kinds == {KVLayer} else LATENT_AXIS_ORDER
        if sorted(self.axis_order.split(" ")) != sorted(default.split(" ")):
            raise InvalidLayout(
                f"axis_order={shown(self.axis_order)}: expected the axes of {default!r} in some "
                "order, separated by one space"
            )
        if self.quantisation is not None:
            checked_text("quantisation", self.quantisation, InvalidLayout)

    @classmethod
    def mha(
        cls,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: object,
        quantisation: str | None = None,
        axis_order: str = KV_AXIS_ORDER,
    ) -> Layout:
        """Multi-head attention: each head has its own keys and values. The same as GQA of them."""
        checked_integer("heads", heads, InvalidLayout)
        return cls.gqa(
            layers=layers,
            kv_heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            quantisation=quantisation,
            axis_order=axis_order,
        )

    @classmethod
    def gqa(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: object,
        quantisation: str | None = None,
        axis_order: str = KV_AXIS_ORDER,
    ) -> Layout:
        """Grouped-query attention: `kv_heads` of the whole model, not of one tensor-parallel rank.

        2 * layers * kv_heads * head_dim elements per token.
        """
        checked_integer("layers", layers, InvalidLayout, at_most=LAYERS_MAX)
        layer = KVLayer(kv_heads=kv_heads, head_dim=head_dim, dtype=dtype_name(dtype))
        return cls(specs=(layer,) * layers, axis_order=axis_order, quantisation=quantisation)

    @classmethod
    def mqa(
        cls,
        *,
        layers: int,
        head_dim: int,
        dtype: object,
        quantisation: str | None = None,
        axis_order: str = KV_AXIS_ORDER,
    ) -> Layout:
        """Multi-query attention: one KV head for all. The same as GQA of one."""
        return cls.gqa(
            layers=layers,
            kv_heads=1,
            head_dim=head_dim,
            dtype=dtype,
            quantisation=quantisation,
            axis_order=axis_order,
        )

    @classmethod
    def mla(
        cls,
        *,
        layers: int,
        latent_dim: int,
        rope_dim: int,
        dtype: object,
        quantisation: str | None = None,
        axis_order: str = LATENT_AXIS_ORDER,
    ) -> Layout:
        """Multi-head latent attention: layers * (latent_dim + rope_dim) elements per token.

        Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 (d_c and d_h^R there).
        """
        checked_integer("layers", layers, InvalidLayout, at_most=LAYERS_MAX)
        layer = LatentLayer(latent_dim=latent_dim, rope_dim=rope_dim, dtype=dtype_name(dtype))
        return cls(specs=(layer,) * layers, axis_order=axis_order, quantisation=quantisation)

    @property
    def layers(self) -> int:
        """Layers that have a cache."""
        return len(self.specs)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers; exact."""
        return sum(spec.bytes_per_token for spec in self.specs)

    def bytes_per_token_of(self, part: Part) -> int:
        """Bytes that one token takes up in one part. Raises InvalidLayout for a part it has not."""
        self.check_part(part)
        specs = self.specs[part.first_layer : part.end_layer]
        return sum(spec.bytes_per_token for spec in specs) // part.head_groups

    def bytes_per_block(self, token_count: int) -> int:
        """Bytes of all parts of a block of `token_count` tokens."""
        return self.bytes_per_token * checked_integer("token_count", token_count, InvalidLayout)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a block, in the order in which buffers and views come: today one of all."""
        return (Part(first_layer=0, end_layer=self.layers),)

    def check_part(self, part: Part) -> None:
        """Raise InvalidLayout where the layout cannot have this part.

        Heads are split evenly, so G divides the KV heads; a latent has no heads to split, and all
        ranks share its one head group.
        """
        if part.group != 0:
            raise InvalidLayout(f"group={part.group}: the layout has only cache group 0")
        if part.companion is not None:
            raise InvalidLayout(f"companion={shown(part.companion)}: the layout has no companion")
        if part.end_layer > self.layers:
            raise InvalidLayout(f"end_layer={part.end_layer}: the layout has {self.layers} layers")
        for spec in self.specs[part.first_layer : part.end_layer]:
            heads = spec.kv_heads if isinstance(spec, KVLayer) else 1
            if heads % part.head_groups:
                raise InvalidLayout(
                    f"head_groups={part.head_groups}: its {heads} heads do not split evenly"
                )

    def encoding(self) -> bytes:
        """The layout's bytes in a namespace's encoding; equal layouts have equal bytes."""
        return encode_fields(
            self.axis_order.encode("utf-8"),
            None if self.quantisation is None else self.quantisation.encode("utf-8"),
            None,  # backend of an opaque layout
            None,  # instruction set that an opaque layout depends on
            None,  # companions
            encode_fields(*(spec.encoding() for spec in self.specs)),
        )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the encoding, 32 bytes."""
        return hashlib.sha256(self.encoding()).digest()
