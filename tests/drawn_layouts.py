"""Layouts of every kind for property tests, small enough that equal ones are drawn often."""

from __future__ import annotations

from hypothesis import strategies as st

from kvstore.dtypes import SCALE_DTYPES, SCALE_GRANULARITIES
from kvstore.errors import InvalidLayout
from kvstore.layers import ATTENTIONS, FULL
from kvstore.layout import (
    DTYPE_BYTES,
    KVLayer,
    LatentLayer,
    Layout,
    OpaqueLayer,
    Scales,
    StateLayer,
)

dtypes = st.sampled_from(list(DTYPE_BYTES))


@st.composite
def _attention_fields(draw, granularities):
    dtype, attention = draw(dtypes), draw(st.sampled_from(ATTENTIONS))
    scales = st.builds(
        Scales, dtype=st.sampled_from(SCALE_DTYPES), granularity=st.sampled_from(granularities)
    )
    return {
        "dtype": dtype,
        "attention": attention,
        "window_tokens": None if attention == FULL else draw(st.integers(2, 5)),
        "scales": draw(st.none() | scales) if DTYPE_BYTES[dtype] == 1 else None,
    }


@st.composite
def kv_layers(draw):
    return KVLayer(
        kv_heads=draw(st.sampled_from([1, 2, 4, 6])),
        head_dim=draw(st.integers(1, 3)),
        value_head_dim=draw(st.none() | st.integers(1, 3)),
        **draw(_attention_fields(SCALE_GRANULARITIES)),
    )


@st.composite
def latent_layers(draw):
    return LatentLayer(
        latent_dim=draw(st.integers(1, 3)),
        rope_dim=draw(st.integers(1, 3)),
        **draw(_attention_fields(["token", "block"])),
    )


state_layers = st.builds(
    StateLayer,
    state_bytes=st.sampled_from([4, 8, 12]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
)
opaque_layers = st.builds(
    OpaqueLayer, bytes_per_token=st.integers(1, 3), bytes_per_block=st.integers(0, 2)
)


@st.composite
def layouts(draw, *, kinds=None, have_companions=True):
    """A layout of one to six layers; with `kinds`, a strategy for one layer, all of those."""
    is_opaque = kinds is None and draw(st.integers(0, 9)) == 9
    if kinds is None:
        kinds = opaque_layers if is_opaque else kv_layers() | latent_layers() | state_layers
    # From few layers, so that some are alike.
    different = draw(st.lists(kinds, min_size=1, max_size=3))
    specs = draw(st.lists(st.sampled_from(different), min_size=1, max_size=6))
    options = {"quantisation": draw(st.none() | st.sampled_from(["a", "b"]))}
    if is_opaque:
        options |= {
            "backend": draw(st.sampled_from(["a", "b"])),
            "isa": draw(st.none() | st.sampled_from(["a", "b"])),
        }
    if have_companions and draw(st.integers(0, 3)) == 3:
        options["companions"] = draw(
            st.dictionaries(
                st.sampled_from(["a", "b", "é"]), layouts(have_companions=False), max_size=2
            )
        )
    layout = Layout.of(specs, **options)
    order = " ".join(draw(st.permutations(layout.axis_order.split(" "))))
    try:
        return Layout.of(specs, axis_order=order, **options)
    except InvalidLayout:  # not every order suits layers that differ
        return layout
