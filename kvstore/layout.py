"""The geometry of a model's KV cache: how many bytes a token takes, and in which order they lie.

A layout is part of a block's identity: two engines whose layouts differ in anything, be it only
the dtype of one layer, never see each other's blocks. Its encoding is frozen by the golden vectors
in tests/unit/golden_keys.json, and docs/keys.md says it in words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict, Unpack

from kvstore.axes import (
    KV_AXIS_ORDER,
    LATENT_AXIS_ORDER,
    LAYER_AXIS_ORDER,
    check_axis_order,
    default_axis_order,
)
from kvstore.dtypes import DTYPE_BYTES, Scales, dtype_name
from kvstore.encoding import checked_integer, checked_text, encode_fields, shown
from kvstore.errors import InvalidLayout
from kvstore.layers import (
    KVLayer,
    LatentLayer,
    LayerSpec,
    OpaqueLayer,
    StateLayer,
    check_backend,
)
from kvstore.parts import (
    CacheGroup,
    Part,
    cache_groups,
    group_of,
    layers_of,
    split_parts,
)
from kvstore.tensors import TensorSpec, place_tensors

# What a layout is made of, and what it gives, is imported from here.
__all__ = [
    "DTYPE_BYTES",
    "KV_AXIS_ORDER",
    "LATENT_AXIS_ORDER",
    "LAYERS_MAX",
    "LAYER_AXIS_ORDER",
    "CacheGroup",
    "KVLayer",
    "LatentLayer",
    "LayerSpec",
    "Layout",
    "LayoutOptions",
    "OpaqueLayer",
    "Part",
    "Scales",
    "StateLayer",
    "TensorSpec",
    "dtype_name",
]

LAYERS_MAX = 4_096

_KINDS = (KVLayer, LatentLayer, StateLayer, OpaqueLayer)


class LayoutOptions(TypedDict, total=False):
    """What every way to build a layout takes beside its layers; `Layout` says what they mean."""

    axis_order: str
    quantisation: str | None
    companions: Mapping[str, Layout] | tuple[tuple[str, Layout], ...]
    backend: str | None
    isa: str | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The KV cache of a whole model: its layers, and the order in which a stored part has them.

    Build one with `mha`, `gqa`, `mqa` or `mla`, or from single layers with `of`. They may differ in
    kind, shape and dtype; but all are opaque, or none is.

    - `axis_order`: the axes of a part, outermost first, separated by one space: those of
      `KV_AXIS_ORDER`, if any layer has keys and values; else of `LATENT_AXIS_ORDER`, if any has a
      latent; else `LAYER_AXIS_ORDER`. A layer has those of the axes that its kind has: a latent has
      no kv and head, a state or an opaque layer only its place among the layers. Where `layer` is
      not the outermost of a part's axes, all layers of the part must be alike; where `dim` is
      outside `kv`, a key and a value must be of one dim.
    - `quantisation`: names a scheme whose scales are not stored in the block.
    - `companions`: name -> layout of a cache beside the model's own, such as a draft model's; its
      blocks are of the same tokens. Kept as pairs in order of name. Has no companions itself.
    - `backend`: who can read the bytes of opaque layers, with whatever they depend on; `isa` the
      instruction set, where their packing depends on it. Only and always with opaque layers.

    A layout describes the model, not one rank's shard of it: the shard is a `Part`.
    Raises InvalidLayout, naming the field, its value and what is allowed.
    """

    specs: tuple[LayerSpec, ...]
    axis_order: str
    quantisation: str | None = None
    companions: Mapping[str, Layout] | tuple[tuple[str, Layout], ...] = ()
    backend: str | None = None
    isa: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be stored, or not told apart."""
        specs: object = self.specs
        if not isinstance(specs, tuple) or not specs or not all(type(s) in _KINDS for s in specs):
            expected = ", ".join(kind.__name__ for kind in _KINDS)
            raise InvalidLayout(f"specs={shown(specs)}: expected a tuple of {expected}")
        checked_integer("layers", len(self.specs), InvalidLayout, at_most=LAYERS_MAX)
        if self.quantisation is not None:
            checked_text("quantisation", self.quantisation, InvalidLayout)
        check_backend(self.specs, self.backend, self.isa)
        check_axis_order(self.axis_order, self.specs)
        object.__setattr__(self, "companions", _sorted_companions(self.companions))

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], **options: Unpack[LayoutOptions]) -> Layout:
        """From single layers in the model's order, such as `[*[sliding] * 5, full] * 8`.

        `axis_order` is the default of their kinds.
        """
        given: object = layers
        if not isinstance(given, Sequence):
            raise InvalidLayout(f"layers={shown(given)}: expected a sequence of layers")
        specs = tuple(layers)
        options.setdefault("axis_order", default_axis_order(specs))
        return cls(specs=specs, **options)

    @classmethod
    def mha(
        cls,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: object,
        scales: Scales | None = None,
        **options: Unpack[LayoutOptions],
    ) -> Layout:
        """Multi-head attention: each head has its own keys and values. The same as GQA of them."""
        checked_integer("heads", heads, InvalidLayout)
        return cls.gqa(
            layers=layers,
            kv_heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            scales=scales,
            **options,
        )

    @classmethod
    def gqa(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: object,
        scales: Scales | None = None,
        **options: Unpack[LayoutOptions],
    ) -> Layout:
        """Grouped-query attention: `kv_heads` of the whole model, not of one tensor-parallel rank.

        2 * layers * kv_heads * head_dim elements per token.
        """
        checked_integer("layers", layers, InvalidLayout, at_most=LAYERS_MAX)
        layer = KVLayer(
            kv_heads=kv_heads, head_dim=head_dim, dtype=dtype_name(dtype), scales=scales
        )
        return cls.of((layer,) * layers, **options)

    @classmethod
    def mqa(
        cls,
        *,
        layers: int,
        head_dim: int,
        dtype: object,
        scales: Scales | None = None,
        **options: Unpack[LayoutOptions],
    ) -> Layout:
        """Multi-query attention: one KV head for all. The same as GQA of one."""
        return cls.gqa(
            layers=layers, kv_heads=1, head_dim=head_dim, dtype=dtype, scales=scales, **options
        )

    @classmethod
    def mla(
        cls,
        *,
        layers: int,
        latent_dim: int,
        rope_dim: int,
        dtype: object,
        scales: Scales | None = None,
        **options: Unpack[LayoutOptions],
    ) -> Layout:
        """Multi-head latent attention: layers * (latent_dim + rope_dim) elements per token.

        Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 (d_c and d_h^R there).
        """
        checked_integer("layers", layers, InvalidLayout, at_most=LAYERS_MAX)
        layer = LatentLayer(
            latent_dim=latent_dim, rope_dim=rope_dim, dtype=dtype_name(dtype), scales=scales
        )
        return cls.of((layer,) * layers, **options)

    @property
    def layers(self) -> int:
        """Layers that have a cache."""
        return len(self.specs)

    @cached_property
    def bytes_per_token(self) -> int:
        """What each further token adds to a block, over all layers and companions; exact."""
        own = sum(spec.bytes_per_token for spec in self.specs)
        return own + sum(layout.bytes_per_token for layout in self._companion.values())

    def bytes_per_token_of(self, part: Part) -> int:
        """What each further token adds to one part. Raises InvalidLayout for a part it has not."""
        layers = self._layers_of(part)
        return sum(spec.bytes_per_token for _, spec in layers) // part.head_groups

    def bytes_per_block(self, token_count: int) -> int:
        """Bytes of all `parts` of a block of `token_count` tokens."""
        checked_integer("token_count", token_count, InvalidLayout)
        return self.bytes_per_token * token_count + self._bytes_beside_tokens

    def part_bytes(self, part: Part, token_count: int) -> int:
        """Bytes of one part of a block of `token_count` tokens.

        Raises InvalidLayout for a part that the layout has not.
        """
        checked_integer("token_count", token_count, InvalidLayout)
        layers = self._layers_of(part)
        per_token = sum(spec.bytes_per_token for _, spec in layers)
        per_block = sum(spec.bytes_per_block for _, spec in layers)
        return (per_token * token_count + per_block) // part.head_groups

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The model's layers by what they need of a prefix, in order of their first layers.

        Layers of one attention and window are a group, and so are all recurrent layers. Those of a
        companion are not among them: `layout.companions` has its layout.
        """
        return cache_groups(self.specs)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a block, in the order in which buffers and views come.

        One for each cache group of the model, then one for each of each companion's, in order of
        the companions' names.
        """
        return self.split()

    def split(
        self, *, head_groups: int = 1, layer_ranges: Sequence[tuple[int, int]] | None = None
    ) -> tuple[Part, ...]:
        """The parts of a block that a tensor- and pipeline-parallel deployment stores.

        `layer_ranges` are its pipeline stages, (first layer, end layer), which cover all layers in
        order; `head_groups` its shards of the KV heads. In order: for each stage, for each cache
        group that has layers in it, for each head group. Layers without heads of their own
        (latents, states, opaque ones) are one part that all ranks share; so is each cache group of
        a companion. Raises InvalidLayout where the stages leave a gap or overlap, or heads do not
        split evenly.
        """
        found = split_parts(self.specs, head_groups, layer_ranges)
        for part in found:
            self.check_part(part)
        for name, layout in self._companion.items():
            found += (
                Part(group=group.index, companion=name, first_layer=0, end_layer=layout.layers)
                for group in layout.groups
            )
        return tuple(found)

    def check_part(self, part: Part) -> None:
        """Raise InvalidLayout where the layout cannot have this part.

        Heads are split evenly, so G divides the KV heads of all its layers; a latent, a state and
        an opaque layer have no heads to split, and all ranks share its one head group.
        """
        self._layers_of(part)

    def needs_all(self, part: Part) -> bool:
        """True where every block of a prefix is needed of this part."""
        return self._group_of(part).needs_all

    def first_needed(
        self, part: Part, block_ends: Sequence[int], block_tokens: int
    ) -> list[int] | None:
        """For each prefix of n blocks, n from 0 on, the first block that it needs of this part.

        `block_ends[i]` is the number of tokens in blocks 0 to i: all blocks have `block_tokens`,
        but for the last one, which may have fewer. The list has one element more than that;
        element n is n where such a prefix needs nothing, and from that block on all up to block
        n - 1 are needed. What counts is what the token after the prefix sees, since those after it
        see no more of the past. None where every block is needed (full attention, opaque layers).
        Raises InvalidLayout for a part that the layout has not.
        """
        return self._group_of(part).first_needed(block_ends, block_tokens)

    def tensors(self, part: Part, token_count: int) -> list[TensorSpec]:
        """What lies where in a part of a block of `token_count` tokens, without gap or overlap.

        The data of all its layers, and after that their scales. There is no padding, so a tensor
        may lie unaligned behind one of smaller elements. Raises InvalidLayout for a part that the
        layout has not.
        """
        checked_integer("token_count", token_count, InvalidLayout)
        order = self._home_of(part).axis_order
        return place_tensors(self._layers_of(part), order, part.head_groups, token_count)

    def encoding(self) -> bytes:
        """The layout's bytes in a namespace's encoding; equal layouts have equal bytes."""
        companions = [
            encode_fields(name.encode("utf-8"), layout.encoding())
            for name, layout in self._companion.items()
        ]
        return encode_fields(
            self.axis_order.encode("utf-8"),
            *(
                None if text is None else text.encode("utf-8")
                for text in (self.quantisation, self.backend, self.isa)
            ),
            encode_fields(*companions) if companions else None,
            encode_fields(*(spec.encoding() for spec in self.specs)),
        )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the encoding, 32 bytes."""
        return hashlib.sha256(self.encoding()).digest()

    @cached_property
    def _companion(self) -> dict[str, Layout]:
        """Layouts of the companions by name, in order of name."""
        return dict(self.companions)

    @cached_property
    def _bytes_beside_tokens(self) -> int:
        own = sum(spec.bytes_per_block for spec in self.specs)
        return own + sum(layout._bytes_beside_tokens for layout in self._companion.values())

    def _home_of(self, part: Part) -> Layout:
        """The layout whose layers the part counts: this one, or that of a companion."""
        if part.companion is None:
            return self
        layout = self._companion.get(part.companion)
        if layout is None:
            names = ", ".join(map(shown, self._companion))
            raise InvalidLayout(
                f"companion={shown(part.companion)}: the layout has "
                + (f"the companions {names}" if names else "no companion")
            )
        return layout

    def _group_of(self, part: Part) -> CacheGroup:
        return group_of(part, self._home_of(part).groups)

    def _layers_of(self, part: Part) -> list[tuple[int, LayerSpec]]:
        """Index and spec of each layer in a part. Raises InvalidLayout as `check_part` does."""
        home = self._home_of(part)
        return layers_of(part, home.groups, home.specs)


def _sorted_companions(companions: object) -> tuple[tuple[str, Layout], ...]:
    """The companions as pairs in order of name; for UTF-8 that is the order of the bytes too."""
    pairs = tuple(companions.items()) if isinstance(companions, Mapping) else companions
    if not isinstance(pairs, tuple) or not all(_is_pair(pair) for pair in pairs):
        raise InvalidLayout(f"companions={shown(pairs)}: expected a mapping from name to Layout")
    found: dict[str, Layout] = {}
    for name, layout in pairs:
        checked_text("name of a companion", name, InvalidLayout)
        if not isinstance(layout, Layout) or layout.companions:
            raise InvalidLayout(
                f"companions[{shown(name)}]={shown(layout)}: expected a Layout without companions"
            )
        if name in found:
            raise InvalidLayout(f"companions: {shown(name)} occurs twice")
        found[name] = layout
    return tuple(sorted(found.items()))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2
