"""Tensors of a part: written through what `tensors` says, read by the order of the axes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidLayout
from kvstore.layout import (
    DTYPE_BYTES,
    KVLayer,
    LatentLayer,
    LayerSpec,
    Layout,
    OpaqueLayer,
    Part,
    Scales,
    StateLayer,
    TensorSpec,
)
from tests.drawn_layouts import layouts

#: Layer, name of the tensor, position in its shape; and the bytes of that element.
Element = tuple[int, str, tuple[int, ...], int]


def view_of(part: bytearray, tensor: TensorSpec) -> np.ndarray:
    """The tensor inside the part, its elements as unsigned integers of their size."""
    size = DTYPE_BYTES.get(tensor.dtype, 1)
    return np.ndarray(tensor.shape, f"<u{size}", part, tensor.offset_bytes, tensor.stride_bytes)


# The second way: from the sentences of docs/keys.md, one element after the other.


def elements(
    layers: Sequence[tuple[int, LayerSpec]], order: str, head_groups: int, tokens: int
) -> Iterator[Element]:
    """The elements of a part in the order in which they are stored."""
    axes = [
        axis
        for axis in order.split(" ")
        if axis == "layer"
        or any(isinstance(spec, KVLayer) for _, spec in layers)
        or (axis in ("token", "dim") and any(isinstance(s, LatentLayer) for _, s in layers))
    ]
    yield from walk(list(layers), axes, {}, head_groups, tokens)
    for index, spec in layers:
        scales = getattr(spec, "scales", None)
        if scales is None:
            continue
        token_range = [(t,) for t in range(tokens)] if "token" in scales.granularity else [()]
        size = 2 if scales.dtype != "float32" else 4
        if isinstance(spec, LatentLayer):
            yield from ((index, "latent_scale", at, size) for at in token_range)
            continue
        assert isinstance(spec, KVLayer)
        heads = range(spec.kv_heads // head_groups)
        head_range = [(h,) for h in heads] if scales.granularity.endswith("_head") else [()]
        for name in ("key_scale", "value_scale"):
            yield from ((index, name, (*h, *t), size) for h in head_range for t in token_range)


def walk(
    layers: list[tuple[int, LayerSpec]],
    axes: list[str],
    at: dict[str, int],
    head_groups: int,
    tokens: int,
) -> Iterator[Element]:
    """Nested loops over the axes, outermost first."""
    index, spec = layers[at.get("layer", 0)]
    if isinstance(spec, StateLayer | OpaqueLayer) and "layer" in at:
        size = DTYPE_BYTES[spec.dtype] if isinstance(spec, StateLayer) else 1
        count = (spec.bytes_per_token * tokens + spec.bytes_per_block) // size
        name = "state" if isinstance(spec, StateLayer) else "opaque"
        yield from ((index, name, (n,), size) for n in range(count))
        return
    if not axes:
        assert isinstance(spec, KVLayer | LatentLayer)
        name = ("key", "value")[at["kv"]] if isinstance(spec, KVLayer) else "latent"
        inner = ("head", "token", "dim") if isinstance(spec, KVLayer) else ("token", "dim")
        yield index, name, tuple(at[axis] for axis in inner), DTYPE_BYTES[spec.dtype]
        return
    axis, rest = axes[0], axes[1:]
    if axis == "layer":
        count = len(layers)
    elif axis == "token":
        count = tokens
    elif isinstance(spec, KVLayer):
        value_dim = spec.value_head_dim or spec.head_dim
        dim = value_dim if at.get("kv") == 1 else spec.head_dim
        count = {"kv": 2, "head": spec.kv_heads // head_groups, "dim": dim}[axis]
    else:
        assert isinstance(spec, LatentLayer)
        if axis != "dim":  # it has no such axis
            yield from walk(layers, rest, at, head_groups, tokens)
            return
        count = spec.latent_dim + spec.rope_dim
    for n in range(count):
        yield from walk(layers, rest, at | {axis: n}, head_groups, tokens)


def layers_in(layout: Layout, part: Part) -> tuple[list[tuple[int, LayerSpec]], str]:
    """Index and spec of the part's layers, and the order of its axes."""
    home = dict(layout.companions)[part.companion] if part.companion else layout
    inside = range(part.first_layer, part.end_layer)
    indices = [n for n in home.groups[part.group].layers if n in inside]
    return [(n, home.specs[n]) for n in indices], home.axis_order


@st.composite
def layouts_and_parts(draw):
    """A layout, and any part that it can have."""
    layout = draw(layouts())
    part = draw(st.sampled_from(layout.parts))
    home = dict(layout.companions)[part.companion] if part.companion else layout
    layers = home.groups[part.group].layers
    first, last = sorted((draw(st.sampled_from(layers)), draw(st.sampled_from(layers))))
    groups = draw(st.sampled_from([1, 2, 3]))
    smaller = Part(
        group=part.group,
        companion=part.companion,
        first_layer=first,
        end_layer=last + 1,
        head_group=draw(st.integers(0, groups - 1)),
        head_groups=groups,
    )
    try:
        layout.check_part(smaller)
    except InvalidLayout:  # its heads do not split
        return layout, part
    return layout, smaller


@given(layouts_and_parts(), st.integers(1, 3))
def test_every_element_lies_where_the_order_of_axes_says(drawn, tokens):
    layout, part = drawn
    tensors = {(tensor.layer, tensor.name): tensor for tensor in layout.tensors(part, tokens)}
    number: dict[tuple[int, str, tuple[int, ...]], tuple[int, int]] = {}
    memory = [bytearray(layout.part_bytes(part, tokens)) for _ in range(2)]
    for key, tensor in tensors.items():
        views = [view_of(digits, tensor) for digits in memory]
        for at in np.ndindex(tensor.shape):
            # Two digits of one byte, since that is all that some elements hold.
            digits = divmod(len(number), 256)
            number[*key, at] = digits
            for view, digit in zip(views, digits, strict=True):
                view[at] = digit
    offset = 0
    layers, order = layers_in(layout, part)
    for layer, name, at, size in elements(layers, order, part.head_groups, tokens):
        stored = [int.from_bytes(m[offset : offset + size], "little") for m in memory]
        assert tuple(stored) == number.pop((layer, name, at))
        offset += size
    assert not number
    assert offset == layout.part_bytes(part, tokens)


@given(layouts_and_parts(), st.integers(1, 3))
def test_tensors_cover_each_byte_of_a_part_once(drawn, tokens):
    layout, part = drawn
    tensors = layout.tensors(part, tokens)
    assert len({(tensor.layer, tensor.name) for tensor in tensors}) == len(tensors)
    covered = np.zeros(layout.part_bytes(part, tokens), np.uint8)
    for tensor in tensors:
        size = DTYPE_BYTES.get(tensor.dtype, 1)
        assert len(tensor.shape) == len(tensor.stride_bytes)
        as_bytes = np.ndarray(
            (*tensor.shape, size),
            np.uint8,
            covered,
            tensor.offset_bytes,
            (*tensor.stride_bytes, 1),
        )
        as_bytes += 1
    assert (covered == 1).all()
    sizes = [prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 1) for tensor in tensors]
    assert sum(sizes) == len(covered)


@given(st.data(), st.integers(1, 3))
def test_data_comes_first_then_scales_in_order_of_layers(data, tokens):
    layout, part = data.draw(layouts_and_parts())
    tensors = layout.tensors(part, tokens)
    is_scale = [tensor.name.endswith("_scale") for tensor in tensors]
    assert is_scale == sorted(is_scale)
    for wanted in (False, True):
        rest = [t for t, found in zip(tensors, is_scale, strict=True) if found is wanted]
        assert [t.layer for t in rest] == sorted(t.layer for t in rest)
    scales = [t for t in tensors if t.name.endswith("_scale")]
    data_end = layout.part_bytes(part, tokens) - sum(
        prod(t.shape) * DTYPE_BYTES[t.dtype] for t in scales
    )
    assert all(t.offset_bytes >= data_end for t in scales)


# By hand.


def test_gqa_is_the_plain_array_of_its_axes():
    layout = Layout.gqa(layers=3, kv_heads=4, head_dim=5, dtype="float16")
    whole = np.arange(3 * 2 * 4 * 6 * 5, dtype="<u2").reshape(3, 2, 4, 6, 5)
    part = bytearray(whole.tobytes())
    for tensor in layout.tensors(layout.parts[0], 6):
        side = ("key", "value").index(tensor.name)
        np.testing.assert_array_equal(view_of(part, tensor), whole[tensor.layer, side])


@pytest.mark.parametrize(
    ("spec", "order", "expected"),
    [
        (
            KVLayer(kv_heads=2, head_dim=3, value_head_dim=5, dtype="bfloat16"),
            "layer token head kv dim",
            [
                TensorSpec(1, "key", 0, (1, 4, 3), (16, 16, 2), "bfloat16"),
                TensorSpec(1, "value", 6, (1, 4, 5), (16, 16, 2), "bfloat16"),
                TensorSpec(2, "key", 64, (1, 4, 3), (16, 16, 2), "bfloat16"),
                TensorSpec(2, "value", 70, (1, 4, 5), (16, 16, 2), "bfloat16"),
            ],
        ),
        (
            KVLayer(
                kv_heads=2,
                head_dim=3,
                dtype="int8",
                scales=Scales(dtype="float32", granularity="token_head"),
            ),
            "kv token layer head dim",
            [
                TensorSpec(1, "key", 0, (1, 4, 3), (3, 6, 1), "int8"),
                TensorSpec(1, "value", 24, (1, 4, 3), (3, 6, 1), "int8"),
                TensorSpec(2, "key", 3, (1, 4, 3), (3, 6, 1), "int8"),
                TensorSpec(2, "value", 27, (1, 4, 3), (3, 6, 1), "int8"),
                TensorSpec(1, "key_scale", 48, (1, 4), (16, 4), "float32"),
                TensorSpec(1, "value_scale", 64, (1, 4), (16, 4), "float32"),
                TensorSpec(2, "key_scale", 80, (1, 4), (16, 4), "float32"),
                TensorSpec(2, "value_scale", 96, (1, 4), (16, 4), "float32"),
            ],
        ),
    ],
)
def test_second_head_group_of_the_second_stage(spec, order, expected):
    layout = Layout.of([spec] * 3, axis_order=order)
    part = Part(first_layer=1, end_layer=3, head_group=1, head_groups=2)
    assert layout.tensors(part, 4) == expected


def test_states_opaque_layers_and_latents():
    latent = LatentLayer(
        latent_dim=3,
        rope_dim=2,
        dtype="float8_e5m2",
        scales=Scales(dtype="float16", granularity="block"),
    )
    layout = Layout.of(
        [StateLayer(state_bytes=6, dtype="float16"), latent, StateLayer(state_bytes=8)],
        companions={
            "ours": Layout.of([OpaqueLayer(bytes_per_token=3, bytes_per_block=1)] * 2, backend="b")
        },
    )
    assert [layout.tensors(part, 2) for part in layout.parts] == [
        [
            TensorSpec(0, "state", 0, (3,), (2,), "float16"),
            TensorSpec(2, "state", 6, (2,), (4,), "float32"),
        ],
        [
            TensorSpec(1, "latent", 0, (2, 5), (5, 1), "float8_e5m2"),
            TensorSpec(1, "latent_scale", 10, (), (), "float16"),
        ],
        [
            TensorSpec(0, "opaque", 0, (7,), (1,), "uint8"),
            TensorSpec(1, "opaque", 7, (7,), (1,), "uint8"),
        ],
    ]


def test_tensors_of_no_part_and_of_no_tokens_are_refused():
    layout = Layout.gqa(layers=2, kv_heads=1, head_dim=1, dtype="int8")
    with pytest.raises(InvalidLayout, match="end_layer=3"):
        layout.tensors(Part(first_layer=0, end_layer=3), 1)
    with pytest.raises(InvalidLayout, match="token_count=0"):
        layout.tensors(layout.parts[0], 0)
