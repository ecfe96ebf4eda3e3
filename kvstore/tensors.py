"""Where the tensors of a part lie among its bytes. docs/keys.md says it in words."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from kvstore.axes import own_axes
from kvstore.dtypes import DTYPE_BYTES
from kvstore.layers import KVLayer, LatentLayer, StateLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.layers import LayerSpec, OpaqueLayer


class TensorSpec(NamedTuple):
    """One tensor inside a part: `numpy.ndarray(shape, dtype, part, offset_bytes, stride_bytes)`.

    `layer` is the index in the model, or in the companion. By `name` the axes of `shape` are

        key, value                (heads, tokens, dim)
        latent                    (tokens, dim), dim: the latent, then the rotary key
        state, opaque             (elements,)
        key_scale, value_scale    (tokens,), (heads, tokens), () or (heads,), by the granularity:
                                  token, token_head, block, block_head
        latent_scale              (tokens,) or ()

    whatever the axis order; the order is what `stride_bytes`, one for each axis, come from. Heads
    are those of the part's head group. `dtype` is torch's name, and "uint8" for opaque bytes.
    """

    layer: int
    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    dtype: str


def place_tensors(
    layers: Sequence[tuple[int, LayerSpec]], axis_order: str, head_groups: int, token_count: int
) -> list[TensorSpec]:
    """The tensors of a part that has these layers, (index, spec): data first, then scales.

    There is no padding. Where `layer` is the outermost axis, each layer is an array of its own, one
    after the other; otherwise all layers, which are alike then, are one array.
    """
    specs = [spec for _, spec in layers]
    axes = own_axes(specs, axis_order)
    runs = [[layer] for layer in layers] if axes[0] == "layer" else [list(layers)]
    found: list[TensorSpec] = []
    offset_bytes = 0
    for run in runs:
        spec = run[0][1]
        if isinstance(spec, KVLayer | LatentLayer):
            array = _Array(spec, axes, len(run), head_groups, token_count)
            for position, (index, _) in enumerate(run):
                found += array.tensors(index, position, offset_bytes)
            offset_bytes += array.size_bytes
        else:
            tensor = _flat(run[0][0], spec, token_count, offset_bytes)
            found.append(tensor)
            offset_bytes += tensor.shape[0] * tensor.stride_bytes[0]
    for index, spec in layers:
        for name, shape, dtype in _scale_shapes(spec, head_groups, token_count):
            size = DTYPE_BYTES[dtype]
            strides = tuple(size * prod(shape[axis + 1 :]) for axis in range(len(shape)))
            found.append(TensorSpec(index, name, offset_bytes, shape, strides, dtype))
            offset_bytes += size * prod(shape)
    return found


class _Array:
    """The keys and values, or the latents, of layers that are alike, as one array.

    Its axes are walked from the innermost outwards, for each side (key and value) with a step of
    its own, since their dims may differ. At the axis `kv` the value begins where the key ends, and
    from there on one step spans both.
    """

    def __init__(
        self,
        spec: KVLayer | LatentLayer,
        axes: tuple[str, ...],
        layers: int,
        head_groups: int,
        tokens: int,
    ) -> None:
        self._dtype = spec.dtype
        self._names: tuple[str, ...] = ("latent",)
        dims: tuple[int, ...]
        counts = {"layer": layers, "token": tokens}
        if isinstance(spec, KVLayer):
            self._names = ("key", "value")
            dims = (spec.head_dim, spec.value_dim)
            counts["head"] = spec.kv_heads // head_groups
        else:
            dims = (spec.latent_dim + spec.rope_dim,)
            axes = tuple(axis for axis in axes if axis not in ("kv", "head"))
        self._counts = [counts | {"dim": dim} for dim in dims]
        self._strides: list[dict[str, int]] = [{} for _ in dims]
        self._value_offset_bytes = 0
        steps = [DTYPE_BYTES[spec.dtype]] * len(dims)
        for axis in reversed(axes):
            if axis == "kv":
                self._value_offset_bytes = steps[0]
                steps = [sum(steps)] * len(steps)
                continue
            for side, step in enumerate(steps):
                self._strides[side][axis] = step
                steps[side] = step * self._counts[side][axis]
        self.size_bytes = steps[0]

    def tensors(self, layer: int, position: int, offset_bytes: int) -> Iterator[TensorSpec]:
        """Those of one layer: its index, its position in the array, and where the array begins."""
        axes = ("token", "dim") if len(self._names) == 1 else ("head", "token", "dim")
        for side, name in enumerate(self._names):
            strides, counts = self._strides[side], self._counts[side]
            yield TensorSpec(
                layer,
                name,
                offset_bytes + position * strides["layer"] + side * self._value_offset_bytes,
                tuple(counts[axis] for axis in axes),
                tuple(strides[axis] for axis in axes),
                self._dtype,
            )


def _flat(
    layer: int, spec: StateLayer | OpaqueLayer, token_count: int, offset_bytes: int
) -> TensorSpec:
    """A layer that has no axes of its own."""
    name, dtype, size = "opaque", "uint8", 1
    if isinstance(spec, StateLayer):
        name, dtype, size = "state", spec.dtype, DTYPE_BYTES[spec.dtype]
    elements = (spec.bytes_per_token * token_count + spec.bytes_per_block) // size
    return TensorSpec(layer, name, offset_bytes, (elements,), (size,), dtype)


def _scale_shapes(
    spec: LayerSpec, head_groups: int, token_count: int
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each tensor of scales that a layer has."""
    if not isinstance(spec, KVLayer | LatentLayer) or spec.scales is None:
        return
    shape: tuple[int, ...] = (token_count,) if spec.scales.is_per_token else ()
    if isinstance(spec, LatentLayer):
        yield "latent_scale", shape, spec.scales.dtype
        return
    if spec.scales.is_per_head:
        shape = (spec.kv_heads // head_groups, *shape)
    yield "key_scale", shape, spec.scales.dtype
    yield "value_scale", shape, spec.scales.dtype
