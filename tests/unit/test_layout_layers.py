"""Single layers: what each kind takes, what is refused, and that equal ones are one identity."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import InvalidLayout
from kvstore.layout import (
    KVLayer,
    LatentLayer,
    Layout,
    OpaqueLayer,
    Scales,
    StateLayer,
)

KV: dict[str, Any] = {"kv_heads": 4, "head_dim": 8, "dtype": "int8"}
LATENT: dict[str, Any] = {"latent_dim": 8, "rope_dim": 4, "dtype": "int8"}
FULL, STATE, OPAQUE = KVLayer(**KV), StateLayer(state_bytes=8), OpaqueLayer(bytes_per_token=4)


def scales(granularity, dtype="float16"):
    return Scales(dtype=dtype, granularity=granularity)


@pytest.mark.parametrize(
    ("spec", "per_token", "per_block"),
    [
        (KVLayer(**KV), 4 * (8 + 8), 0),
        (KVLayer(**KV, value_head_dim=3), 4 * (8 + 3), 0),
        (KVLayer(**KV | {"dtype": "float32"}, attention="sliding", window_tokens=2), 256, 0),
        (KVLayer(**KV, scales=scales("token")), 64 + 2 * 2, 0),
        (KVLayer(**KV, scales=scales("token_head")), 64 + 2 * 4 * 2, 0),
        (KVLayer(**KV, scales=scales("block")), 64, 2 * 2),
        (KVLayer(**KV, scales=scales("block_head", "float32")), 64, 2 * 4 * 4),
        (LatentLayer(**LATENT), 12, 0),
        (LatentLayer(**LATENT, scales=scales("token")), 12 + 2, 0),
        (LatentLayer(**LATENT, scales=scales("block", "bfloat16")), 12, 2),
        (StateLayer(state_bytes=8), 0, 8),
        (OpaqueLayer(bytes_per_token=7), 7, 0),
        (OpaqueLayer(bytes_per_token=0, bytes_per_block=5), 0, 5),
    ],
)
def test_bytes_of_a_layer_are_exact(spec, per_token, per_block):
    assert (spec.bytes_per_token, spec.bytes_per_block) == (per_token, per_block)
    layout = Layout.of([spec] * 3, backend="b" if isinstance(spec, OpaqueLayer) else None)
    assert layout.bytes_per_block(16) == 3 * (16 * per_token + per_block)
    assert layout.bytes_per_token_of(layout.parts[0]) == layout.bytes_per_token == 3 * per_token


def test_value_of_the_keys_dim_is_the_layer_without_it():
    same = KVLayer(**KV, value_head_dim=8)
    assert same == KVLayer(**KV)
    assert same.encoding() == KVLayer(**KV).encoding() != KVLayer(**KV, value_head_dim=4).encoding()


def test_dtype_objects_of_torch_are_their_names():
    torch = pytest.importorskip("torch")
    assert KVLayer(**KV | {"dtype": torch.int8}) == KVLayer(**KV)
    assert StateLayer(state_bytes=8, dtype=torch.float32) == STATE
    assert scales("token", torch.float16) == scales("token")


@pytest.mark.parametrize("kind", [KVLayer, LatentLayer])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"attention": "local"}, "attention='local': expected one of full, sliding, chunked"),
        ({"attention": None}, "attention=None"),
        ({"attention": "sliding"}, "window_tokens=None: expected an integer from 2 to 4294967295"),
        ({"attention": "chunked", "window_tokens": 1}, "window_tokens=1: expected .* from 2"),
        ({"attention": "sliding", "window_tokens": True}, "window_tokens=True"),
        ({"window_tokens": 8}, "window_tokens=8: full attention has no window; expected None"),
        ({"scales": "float32"}, "scales='float32': expected a Scales"),
        (
            {"dtype": "float16", "scales": scales("token")},
            "scales of dtype='float16': expected one of float8_e4m3fn, float8_e5m2, int8",
        ),
    ],
)
def test_wrong_field_of_an_attention_layer_is_named(kind, wrong, said):
    with pytest.raises(InvalidLayout, match=said):
        kind(**(KV if kind is KVLayer else LATENT) | wrong)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: KVLayer(**KV, value_head_dim=0), "value_head_dim=0: expected an integer from 1"),
        (lambda: Scales(dtype="int8", granularity="token"), "dtype='int8' of scales: expected one"),
        (lambda: Scales(dtype="float64", granularity="token"), "dtype='float64': expected one of"),
        (lambda: scales("head"), "granularity='head': expected one of token, token_head, block, "),
        (lambda: scales(None), "granularity=None"),
        (lambda: LatentLayer(**LATENT, scales=scales("token_head")), "'token_head': a latent has"),
        (lambda: LatentLayer(**LATENT, scales=scales("block_head")), "'block_head': a latent has"),
        (lambda: StateLayer(state_bytes=0), "state_bytes=0"),
        (lambda: StateLayer(state_bytes=6), "state_bytes=6: .*multiple of the 4 bytes of float32"),
        (lambda: StateLayer(state_bytes=8, dtype="f32"), "dtype='f32'"),
        (lambda: OpaqueLayer(bytes_per_token=0), "bytes_per_token=0: expected an integer from 1"),
        (
            lambda: OpaqueLayer(bytes_per_token=-1, bytes_per_block=1),
            "bytes_per_token=-1",
        ),
        (lambda: OpaqueLayer(bytes_per_token=1, bytes_per_block=2**32), "bytes_per_block=42949672"),
    ],
)
def test_wrong_field_of_a_layer_is_named(build, said):
    with pytest.raises(InvalidLayout, match=said):
        build()


# Layers together.


@pytest.mark.parametrize(
    ("layers", "options", "said"),
    [
        (None, {}, "layers=None: expected a sequence of layers"),
        ([FULL, OPAQUE], {"backend": "b"}, "specs: 1 of 2 layers are opaque; expected all or none"),
        ([OPAQUE], {}, "backend=None: expected a non-empty text"),
        ([OPAQUE], {"backend": ""}, "backend=''"),
        ([OPAQUE], {"backend": "b", "isa": ""}, "isa=''"),
        ([FULL], {"backend": "b"}, "backend='b': the layout has no opaque layer; expected None"),
        ([FULL], {"isa": "avx512"}, "isa='avx512': the layout has no opaque layer"),
        ([FULL], {"companions": 7}, "companions=7: expected a mapping from name to Layout"),
        ([FULL], {"companions": ("ab",)}, "companions=.*'ab'.*expected a mapping"),
        ([FULL], {"companions": {"": Layout.of([FULL])}}, "name of a companion=''"),
        ([FULL], {"companions": {"a": FULL}}, r"companions\['a'\]=KVLayer.*expected a Layout"),
        (
            [FULL],
            {"companions": {"a": Layout.of([FULL], companions={"b": Layout.of([FULL])})}},
            r"companions\['a'\]=.*expected a Layout without companions",
        ),
        (
            [FULL],
            {"companions": (("a", Layout.of([FULL])), ("a", Layout.of([STATE])))},
            "companions: 'a' occurs twice",
        ),
    ],
)
def test_layers_that_make_no_layout_are_refused(layers, options, said):
    with pytest.raises(InvalidLayout, match=said):
        Layout.of(layers, **options)


def test_order_of_companions_does_not_matter():
    one, other = Layout.of([FULL]), Layout.of([STATE])
    layouts = [
        Layout.of([FULL], companions={"a": one, "b": other}),
        Layout.of([FULL], companions={"b": other, "a": one}),
        Layout.of([FULL], companions=(("b", other), ("a", one))),
    ]
    assert len(set(layouts)) == len({layout.encoding() for layout in layouts}) == 1
    assert Layout.of([FULL], companions={}) == Layout.of([FULL])


# Axis orders.


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        ([FULL, STATE], {}, "layer kv head token dim"),
        ([STATE, LatentLayer(**LATENT), FULL], {}, "layer kv head token dim"),
        ([STATE, LatentLayer(**LATENT)], {}, "layer token dim"),
        ([STATE], {}, "layer"),
        ([OPAQUE], {"backend": "b"}, "layer"),
    ],
)
def test_axis_order_has_the_axes_of_the_richest_kind(layers, options, expected):
    layout = Layout.of(layers, **options)
    assert layout.axis_order == expected
    with pytest.raises(InvalidLayout, match=f"expected the axes of '{expected}' in some order"):
        Layout.of(layers, axis_order="layer kv", **options)


SMALL = KVLayer(**KV | {"kv_heads": 2})
WINDOW = KVLayer(**KV | {"head_dim": 2}, attention="sliding", window_tokens=4)


@pytest.mark.parametrize("order", ["kv layer head token dim", "token dim head kv layer"])
def test_layers_within_an_array_must_be_alike(order):
    Layout.of([FULL, FULL], axis_order=order)
    # Layers of other groups are other parts, and a state has only its place among the layers.
    Layout.of([FULL, WINDOW, FULL, STATE, StateLayer(state_bytes=12)], axis_order=order)
    with pytest.raises(InvalidLayout, match=f"'{order}': the layers of cache group 1 .*not alike"):
        Layout.of([WINDOW, FULL, SMALL], axis_order=order)
    Layout.of([WINDOW, FULL, SMALL], axis_order="layer dim token head kv")


def test_latents_of_two_sizes_are_alike_where_layer_is_their_outermost_axis():
    latents = [LatentLayer(**LATENT, attention="sliding", window_tokens=4)]
    latents += [LatentLayer(**LATENT | {"rope_dim": 1}, attention="sliding", window_tokens=4)]
    Layout.of([FULL, *latents], axis_order="kv head layer token dim")
    with pytest.raises(InvalidLayout, match="cache group 1 are not alike"):
        Layout.of([FULL, *latents], axis_order="token layer kv head dim")


def test_values_of_another_dim_lie_behind_their_keys():
    layers = [FULL, KVLayer(**KV, value_head_dim=3)]
    Layout.of(layers, axis_order="layer token head kv dim")
    with pytest.raises(InvalidLayout, match="the values of layer 1 have another dim"):
        Layout.of(layers, axis_order="layer token dim kv head")
