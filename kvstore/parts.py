"""The parts that a block is stored in, and what each of them needs of a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.encoding import checked_integer, checked_text, encode_fields, shown, u32
from kvstore.errors import InvalidLayout
from kvstore.layers import FULL, OPAQUE, SLIDING, KVLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.layers import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stored value of a block: layers [first_layer, end_layer) of the model, head group g of G.

    Of these layers it has those of one cache group, a set of layers that need the same of a prefix.
    Head group g of G holds the KV heads [g * kv_heads / G, (g + 1) * kv_heads / G). With a
    companion, a cache beside the model's own, all of this is said of the companion's layers. Raises
    InvalidLayout for values that no layout could have; `Layout.check_part` says whether one layout
    has it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that need the same of a prefix; `Layout.groups` has them.

    `attention` is that of its layers, "full", "sliding" or "chunked", with the last two's
    `window_tokens`; or "state" for recurrent layers, or "opaque". `layers` are indices.
    """

    index: int
    attention: str
    window_tokens: int | None
    layers: tuple[int, ...]

    @property
    def needs_all(self) -> bool:
        """True where every block of a prefix is needed."""
        return self.attention in (FULL, OPAQUE)

    def first_needed(self, block_ends: Sequence[int], block_tokens: int) -> list[int] | None:
        """For each prefix the first block that the group needs: see `Layout.first_needed`."""
        if self.needs_all:
            return None
        window = self.window_tokens
        if window is None:  # recurrent: the state at the end of the last block
            return [0, *range(len(block_ends))]
        if self.attention == SLIDING:
            # The next token, at position `end`, sees itself and window - 1 cached ones before it.
            before = window - 1
            return [0, *(max(end - before, 0) // block_tokens for end in block_ends)]
        # The next token sees its own span, which begins at a multiple of the window; where it is
        # the first of its span, it sees nothing that is cached.
        return [
            0,
            *(
                (end - end % window) // block_tokens if end % window else blocks
                for blocks, end in enumerate(block_ends, 1)
            ),
        ]


def cache_groups(specs: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """The layers by their rules, in order of the first layer that has each."""
    members: dict[tuple[str, int | None], list[int]] = {}
    for index, spec in enumerate(specs):
        members.setdefault(spec.rule, []).append(index)
    return tuple(
        CacheGroup(index=index, attention=attention, window_tokens=window, layers=tuple(layers))
        for index, ((attention, window), layers) in enumerate(members.items())
    )


def group_of(part: Part, groups: Sequence[CacheGroup]) -> CacheGroup:
    """The part's cache group. Raises InvalidLayout where there is none of that number."""
    if part.group >= len(groups):
        has = "only cache group 0" if len(groups) == 1 else f"cache groups 0 to {len(groups) - 1}"
        raise InvalidLayout(f"group={part.group}: the layout has {has}")
    return groups[part.group]


def layers_of(
    part: Part, groups: Sequence[CacheGroup], specs: Sequence[LayerSpec]
) -> list[tuple[int, LayerSpec]]:
    """Index and spec of each layer in a part. Raises InvalidLayout where layers cannot have it."""
    group = group_of(part, groups)
    if part.end_layer > len(specs):
        raise InvalidLayout(f"end_layer={part.end_layer}: the layout has {len(specs)} layers")
    layers = [
        (index, specs[index])
        for index in group.layers
        if part.first_layer <= index < part.end_layer
    ]
    if not layers:
        raise InvalidLayout(
            f"first_layer={part.first_layer}, end_layer={part.end_layer}: no layer of cache group "
            f"{part.group} is among them"
        )
    if part.head_groups != 1:
        for _, spec in layers:
            spec.check_head_groups(part.head_groups)
    return layers


def split_parts(
    specs: Sequence[LayerSpec],
    head_groups: int,
    layer_ranges: Sequence[tuple[int, int]] | None,
) -> list[Part]:
    """The parts of a model's own layers; `Layout.split` says which.

    Whether the heads of their layers split is not seen here.
    """
    checked_integer("head_groups", head_groups, InvalidLayout)
    ranges = [(0, len(specs))] if layer_ranges is None else list(layer_ranges)
    _check_layer_ranges(ranges, len(specs))
    groups = cache_groups(specs)
    found: list[Part] = []
    for first, end in ranges:
        for group in groups:
            held = [specs[index] for index in group.layers if first <= index < end]
            has_heads = any(isinstance(spec, KVLayer) for spec in held)
            count = head_groups if has_heads else 1
            found += (
                Part(
                    group=group.index,
                    first_layer=first,
                    end_layer=end,
                    head_group=head_group,
                    head_groups=count,
                )
                for head_group in range(count if held else 0)
            )
    return found


def _check_layer_ranges(ranges: Sequence[tuple[int, int]], layers: int) -> None:
    end_before = 0
    for position, given in enumerate(ranges):
        name = f"layer_ranges[{position}]"
        if not isinstance(given, tuple) or len(given) != 2:
            raise InvalidLayout(f"{name}={shown(given)}: expected (first layer, end layer)")
        first, end = given
        checked_integer(f"{name} first layer", first, InvalidLayout, at_least=0)
        checked_integer(f"{name} end layer", end, InvalidLayout, at_least=first + 1)
        if first != end_before:
            raise InvalidLayout(f"{name}={(first, end)}: expected it to begin at {end_before}")
        end_before = end
    if end_before != layers:
        raise InvalidLayout(f"layer_ranges end at {end_before}: the layout has {layers} layers")
