"""The order of a part's axes: which there are, and which orders leave every part an array."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.encoding import checked_text, shown
from kvstore.errors import InvalidLayout
from kvstore.layers import KVLayer, LatentLayer
from kvstore.parts import cache_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.layers import LayerSpec

#: Order of a stored part of attention keys and values: outermost axis first; contiguous.
KV_AXIS_ORDER = "layer kv head token dim"
#: Order of a stored part of latents, where `dim` is the latent followed by the rotary part.
LATENT_AXIS_ORDER = "layer token dim"
#: Order of a stored part of layers that have no axes of their own: states, opaque ones.
LAYER_AXIS_ORDER = "layer"


def default_axis_order(specs: Sequence[LayerSpec]) -> str:
    """The order of the kind with the most axes among these layers."""
    kinds = {type(spec) for spec in specs}
    if KVLayer in kinds:
        return KV_AXIS_ORDER
    return LATENT_AXIS_ORDER if LatentLayer in kinds else LAYER_AXIS_ORDER


def own_axes(specs: Sequence[LayerSpec], axis_order: str) -> tuple[str, ...]:
    """The axes of an order that these layers have: a latent has neither kv nor head."""
    own = set(default_axis_order(specs).split(" "))
    return tuple(axis for axis in axis_order.split(" ") if axis in own)


def check_axis_order(axis_order: str, specs: Sequence[LayerSpec]) -> None:
    """Refuse an order of other axes than the layers', and one in which a part would be no array.

    Where `layer` is not outermost, the layers of a cache group are one array, so they must be
    alike. Where `dim` is outside `kv`, so are key and value, and then their dims must agree.
    """
    checked_text("axis_order", axis_order, InvalidLayout)
    default = default_axis_order(specs)
    axes = axis_order.split(" ")
    if sorted(axes) != sorted(default.split(" ")):
        raise InvalidLayout(
            f"axis_order={shown(axis_order)}: expected the axes of {default!r} in some order, "
            "separated by one space"
        )
    for group in cache_groups(specs):
        grouped = [specs[index] for index in group.layers]
        if len(set(grouped)) > 1 and own_axes(grouped, axis_order)[0] != "layer":
            raise InvalidLayout(
                f"axis_order={shown(axis_order)}: the layers of cache group {group.index} are not "
                "alike; expected an order that begins with layer"
            )
    for index, spec in enumerate(specs):
        if not isinstance(spec, KVLayer) or spec.value_head_dim is None:
            continue
        if axes.index("dim") < axes.index("kv"):
            raise InvalidLayout(
                f"axis_order={shown(axis_order)}: the values of layer {index} have another dim "
                "than its keys; expected an order in which dim comes after kv"
            )
