"""Layouts: exact sizes, one identity for one geometry, and refusals that say what is allowed."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidLayout
from kvstore.layout import (
    DTYPE_BYTES,
    KV_AXIS_ORDER,
    LAYERS_MAX,
    KVLayer,
    Layout,
)
from tests.drawn_layouts import dtypes, layouts

GQA: dict[str, Any] = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
MLA: dict[str, Any] = {"layers": 61, "latent_dim": 512, "rope_dim": 64, "dtype": "bfloat16"}
sizes = st.integers(1, 2**32 - 1)


@pytest.mark.parametrize(
    ("layout", "expected_bytes"),
    [
        pytest.param(Layout.gqa(**GQA), 131_072, id="Llama-3-8B"),
        pytest.param(Layout.gqa(**GQA | {"layers": 80}), 327_680, id="Llama-3-70B"),
        pytest.param(Layout.mla(**MLA), 70_272, id="DeepSeek-V3"),
        pytest.param(Layout.gqa(**GQA | {"dtype": "float8_e5m2"}), 65_536, id="fp8"),
        pytest.param(Layout.mha(layers=1, heads=3, head_dim=5, dtype="float32"), 120, id="odd"),
    ],
)
def test_bytes_per_token_are_exact(layout, expected_bytes):
    assert layout.bytes_per_token == expected_bytes
    assert layout.bytes_per_block(16) == 16 * expected_bytes


@given(st.integers(1, 8), sizes, sizes, dtypes)
def test_mha_and_mqa_are_gqa(layers, heads, head_dim, dtype):
    shape = {"layers": layers, "head_dim": head_dim, "dtype": dtype}
    gqa, one = (Layout.gqa(kv_heads=count, **shape) for count in (heads, 1))
    mha, mqa = Layout.mha(heads=heads, **shape), Layout.mqa(**shape)
    assert (mha, mha.encoding(), mha.digest) == (gqa, gqa.encoding(), gqa.digest)
    assert (mqa, mqa.encoding(), mqa.digest) == (one, one.encoding(), one.digest)


def test_latent_is_never_the_gqa_of_its_size():
    gqa = Layout.gqa(layers=2, kv_heads=2, head_dim=4, dtype="int8")
    mla = Layout.mla(layers=2, latent_dim=8, rope_dim=8, dtype="int8")
    assert gqa.bytes_per_token == mla.bytes_per_token
    assert gqa.digest != mla.digest


@given(layouts(), layouts())
def test_layouts_have_one_encoding_exactly_where_they_are_equal(one, other):
    """ID04: dtype, scales, quantisation and axis order are part of the identity."""
    assert (one.encoding() == other.encoding()) == (one == other)
    assert (one.digest == other.digest) == (one == other)
    assert one.digest == hashlib.sha256(one.encoding()).digest()


def test_layers_may_differ_in_shape_and_their_order_matters():
    layers = (
        KVLayer(kv_heads=8, head_dim=4, dtype="int8"),
        KVLayer(kv_heads=2, head_dim=4, dtype="float32"),
    )
    layout = Layout(specs=layers, axis_order=KV_AXIS_ORDER)
    assert layout.bytes_per_token == 64 + 64
    assert layout.digest != Layout(specs=layers[::-1], axis_order=KV_AXIS_ORDER).digest


def test_dtype_object_of_torch_is_its_name():
    torch = pytest.importorskip("torch")
    for name in DTYPE_BYTES:
        given_as_object = Layout.gqa(**GQA | {"dtype": getattr(torch, name)})
        assert given_as_object == Layout.gqa(**GQA | {"dtype": name})
        assert getattr(torch, name).itemsize == DTYPE_BYTES[name]
    with pytest.raises(InvalidLayout, match=r"dtype=torch\.float64: expected one of float32"):
        Layout.gqa(**GQA | {"dtype": torch.float64})


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8", None, 2**32])
@pytest.mark.parametrize(
    ("build", "field"),
    [
        *((Layout.gqa, field) for field in ("layers", "kv_heads", "head_dim")),
        *((Layout.mla, field) for field in ("layers", "latent_dim", "rope_dim")),
        *((Layout.mha, field) for field in ("layers", "heads", "head_dim")),
        *((Layout.mqa, field) for field in ("layers", "head_dim")),
    ],
)
def test_wrong_number_is_named_with_what_is_allowed(build, field, value):
    shape = {
        Layout.gqa: GQA,
        Layout.mla: MLA,
        Layout.mha: {"layers": 1, "heads": 1, "head_dim": 1, "dtype": "int8"},
        Layout.mqa: {"layers": 1, "head_dim": 1, "dtype": "int8"},
    }[build]
    with pytest.raises(InvalidLayout, match=f"^{field}={value!r}: expected an integer from 1 to "):
        build(**shape | {field: value})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtype": "bf16"}, "dtype='bf16': expected one of float32, float16, bfloat16, float8_e4m"),
        ({"dtype": None}, "dtype=None"),
        ({"dtype": "torch.torch.int8"}, "dtype='torch.torch.int8'"),
        ({"layers": LAYERS_MAX + 1}, "layers=4097: expected an integer from 1 to 4096"),
        ({"quantisation": ""}, "quantisation=''"),
        ({"quantisation": 8}, "quantisation=8"),
        ({"quantisation": "\ud800"}, "quantisation=.*lone surrogate"),
        ({"axis_order": "layer token dim"}, "axis_order='layer token dim': expected the axes of"),
        ({"axis_order": KV_AXIS_ORDER.replace(" ", "  ")}, "axis_order="),
        ({"axis_order": None}, "axis_order=None"),
    ],
)
def test_wrong_field_is_named_with_what_is_allowed(wrong, said):
    with pytest.raises(InvalidLayout, match=said):
        Layout.gqa(**GQA | wrong)


@pytest.mark.parametrize("specs", [(), [], None, ("layer",)])
def test_layers_must_be_given(specs):
    with pytest.raises(InvalidLayout, match="specs="):
        Layout(specs=specs, axis_order=KV_AXIS_ORDER)


def test_layout_and_part_are_values():
    layout = Layout.gqa(**GQA)
    values: list[tuple[Any, str]] = [(layout, "axis_order"), (layout.parts[0], "group")]
    for value, field in values:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, "layer")
    assert len({layout, Layout.gqa(**GQA)}) == 1


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_block_without_tokens_has_no_size(count):
    with pytest.raises(InvalidLayout, match="token_count="):
        Layout.gqa(**GQA).bytes_per_block(count)
