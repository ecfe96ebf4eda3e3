"""Parts: a block is stored in them, each byte once, and each says what it needs of a prefix."""

from __future__ import annotations

from math import gcd
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidLayout
from kvstore.layout import (
    CacheGroup,
    KVLayer,
    LatentLayer,
    Layout,
    OpaqueLayer,
    Part,
    Scales,
    StateLayer,
)
from tests.drawn_layouts import kv_layers, latent_layers, layouts, state_layers

GQA: dict[str, Any] = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
MLA: dict[str, Any] = {"layers": 61, "latent_dim": 512, "rope_dim": 64, "dtype": "bfloat16"}
FULL = KVLayer(kv_heads=4, head_dim=8, dtype="bfloat16")
SLIDING = KVLayer(kv_heads=8, head_dim=8, dtype="bfloat16", attention="sliding", window_tokens=1024)
CHUNKED = KVLayer(kv_heads=2, head_dim=8, dtype="int8", attention="chunked", window_tokens=8192)
LATENT = LatentLayer(latent_dim=8, rope_dim=4, dtype="bfloat16")
STATE = StateLayer(state_bytes=4096)
OPAQUE = OpaqueLayer(bytes_per_token=12, bytes_per_block=5)
PER_TOKEN = Scales(dtype="float32", granularity="token")
DRAFT = Layout.gqa(layers=2, kv_heads=2, head_dim=4, dtype="int8")


def a_part(**changed):
    return Part(**{"first_layer": 0, "end_layer": 4} | changed)


def test_block_has_one_part_of_all_layers_and_heads():
    layout = Layout.gqa(**GQA)
    (part,) = layout.parts
    assert part == Part(
        group=0, companion=None, first_layer=0, end_layer=32, head_group=0, head_groups=1
    )
    layout.check_part(part)


parts = st.builds(
    Part,
    group=st.integers(0, 2),
    companion=st.none() | st.sampled_from(["a", "b"]),
    first_layer=st.integers(0, 2),
    end_layer=st.integers(3, 5),
    head_group=st.integers(0, 1),
    head_groups=st.integers(2, 4),
)


@given(parts, parts)
def test_parts_have_one_encoding_exactly_where_they_are_equal(one, other):
    """ID05."""
    assert (one.encoding() == other.encoding()) == (one == other)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"first_layer": -1}, "first_layer=-1"),
        ({"first_layer": 4}, "end_layer=4: expected an integer from 5"),
        ({"end_layer": 2**32}, "end_layer=4294967296"),
        ({"head_groups": 0}, "head_groups=0"),
        ({"head_group": 1}, "head_group=1: expected an integer from 0 to 0"),
        ({"group": True}, "group=True"),
        ({"companion": ""}, "companion=''"),
    ],
)
def test_part_of_no_layout_is_refused(wrong, said):
    with pytest.raises(InvalidLayout, match=said):
        a_part(**wrong)


@pytest.mark.parametrize(
    ("layout", "wrong", "said"),
    [
        (Layout.gqa(**GQA), {"end_layer": 33}, "end_layer=33: .*32 layers"),
        (Layout.gqa(**GQA), {"group": 1}, "group=1: .*only cache group 0"),
        (Layout.gqa(**GQA), {"companion": "draft"}, "companion='draft': .*no companion"),
        (Layout.of([FULL] * 4, companions={"a": DRAFT}), {"companion": "b"}, "companions 'a'$"),
        (Layout.of([FULL] * 4, companions={"a": DRAFT}), {"companion": "a"}, "end_layer=4: .*2 l"),
        (Layout.of([STATE, FULL] * 2), {"group": 2}, "group=2: .*cache groups 0 to 1"),
        (Layout.of([FULL] * 4 + [STATE]), {"group": 1}, "first_layer=0, end_layer=4: no layer of"),
        (Layout.gqa(**GQA), {"head_groups": 3}, "head_groups=3: .*8 heads do not split"),
        (Layout.gqa(**GQA), {"head_groups": 16}, "head_groups=16"),
        (Layout.mla(**MLA), {"head_groups": 2}, "head_groups=2: .*latent has no heads"),
        (Layout.of([STATE] * 4), {"head_groups": 2}, "head_groups=2: .*recurrent has no heads"),
        (Layout.of([OPAQUE] * 4, backend="b"), {"head_groups": 2}, "head_groups=2: .*opaque has"),
        (
            Layout.gqa(
                **GQA | {"dtype": "int8"}, scales=Scales(dtype="float32", granularity="token")
            ),
            {"head_groups": 2},
            "head_groups=2: its scales are per token, over all heads",
        ),
    ],
)
def test_part_that_the_layout_cannot_have_is_refused(layout, wrong, said):
    with pytest.raises(InvalidLayout, match=said):
        layout.check_part(a_part(**wrong))


# Cache groups.


def test_layers_that_need_the_same_are_a_group_in_order_of_their_first():
    other = KVLayer(kv_heads=1, head_dim=2, dtype="int8", attention="sliding", window_tokens=1024)
    layout = Layout.of([SLIDING, STATE, FULL, other, CHUNKED, LATENT, StateLayer(state_bytes=8)])
    found = [(g.index, g.attention, g.window_tokens, g.layers) for g in layout.groups]
    assert found == [
        (0, "sliding", 1024, (0, 3)),
        (1, "state", None, (1, 6)),
        (2, "full", None, (2, 5)),
        (3, "chunked", 8192, (4,)),
    ]
    assert layout.parts == tuple(Part(group=g, first_layer=0, end_layer=7) for g in range(4))


def test_other_windows_are_other_groups():
    specs = [
        KVLayer(kv_heads=1, head_dim=1, dtype="int8", attention=attention, window_tokens=window)
        for attention, window in [("sliding", 8), ("sliding", 16), ("chunked", 8)]
    ]
    assert len(Layout.of(specs).groups) == 3


def test_companions_come_last_in_order_of_name():
    hybrid = Layout.of([STATE, FULL])
    layout = Layout.of([FULL, SLIDING], companions={"eagle": hybrid, "draft": DRAFT})
    assert layout.companions == (("draft", DRAFT), ("eagle", hybrid))
    assert layout.parts == (
        Part(group=0, first_layer=0, end_layer=2),
        Part(group=1, first_layer=0, end_layer=2),
        Part(group=0, companion="draft", first_layer=0, end_layer=2),
        Part(group=0, companion="eagle", first_layer=0, end_layer=2),
        Part(group=1, companion="eagle", first_layer=0, end_layer=2),
    )
    assert [layout.part_bytes(part, 3) for part in layout.parts] == [
        2 * 4 * 8 * 2 * 3,
        2 * 8 * 8 * 2 * 3,
        2 * 2 * 2 * 4 * 3,
        4096,
        2 * 4 * 8 * 2 * 3,
    ]
    assert layout.bytes_per_block(3) == sum(layout.part_bytes(part, 3) for part in layout.parts)
    assert layout.bytes_per_token == 128 + 256 + 32 + 128


# Parts of a deployment.


def test_split_names_stages_then_groups_then_heads():
    layout = Layout.of([FULL, STATE, SLIDING, FULL], companions={"draft": DRAFT})
    found = layout.split(head_groups=2, layer_ranges=[(0, 2), (2, 4)])
    assert [
        (p.first_layer, p.end_layer, p.group, p.head_group, p.head_groups, p.companion)
        for p in found
    ] == [
        (0, 2, 0, 0, 2, None),
        (0, 2, 0, 1, 2, None),
        (0, 2, 1, 0, 1, None),
        (2, 4, 0, 0, 2, None),
        (2, 4, 0, 1, 2, None),
        (2, 4, 2, 0, 2, None),
        (2, 4, 2, 1, 2, None),
        (0, 2, 0, 0, 1, "draft"),
    ]
    assert layout.split() == layout.parts


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"head_groups": 0}, "head_groups=0"),
        ({"head_groups": 3}, "head_groups=3: its 4 heads do not split evenly"),
        ({"layer_ranges": [3]}, r"layer_ranges\[0\]=3: expected \(first layer, end layer\)"),
        ({"layer_ranges": []}, "layer_ranges end at 0: the layout has 3 layers"),
        ({"layer_ranges": [(0, 2)]}, "layer_ranges end at 2"),
        ({"layer_ranges": [(0, 4)]}, "layer_ranges end at 4"),
        ({"layer_ranges": [(1, 3)]}, r"layer_ranges\[0\]=\(1, 3\): expected it to begin at 0"),
        ({"layer_ranges": [(0, 2), (1, 3)]}, r"layer_ranges\[1\]=\(1, 3\): .* begin at 2"),
        ({"layer_ranges": [(0, 1), (2, 3)]}, r"layer_ranges\[1\]=\(2, 3\): .* begin at 1"),
        ({"layer_ranges": [(0, 3), (3, 3)]}, r"layer_ranges\[1\] end layer=3"),
        ({"layer_ranges": [(0, 1.5), (1.5, 3)]}, r"layer_ranges\[0\] end layer=1.5"),
    ],
)
def test_deployment_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(InvalidLayout, match=said):
        Layout.of([FULL] * 3).split(**wrong)


def test_latent_beside_heads_in_one_group_does_not_split():
    with pytest.raises(InvalidLayout, match=r"head_groups=2: .*latent has no heads"):
        Layout.of([FULL, LATENT]).split(head_groups=2)


@st.composite
def splits(draw, layout):
    """The parts of some deployment of a layout."""
    cuts = draw(st.sets(st.integers(1, layout.layers - 1))) if layout.layers > 1 else set()
    ends = [*sorted(cuts), layout.layers]
    ranges = list(zip([0, *ends], ends, strict=False))
    heads = [spec.kv_heads for spec in layout.specs if isinstance(spec, KVLayer)]
    groups = draw(st.sampled_from([n for n in range(1, 7) if gcd(*heads) % n == 0] or [2]))
    try:
        return layout.split(head_groups=groups, layer_ranges=ranges)
    except InvalidLayout:  # scales over all heads, or a latent in a group with heads
        return layout.split(layer_ranges=ranges)


@given(st.data())
def test_parts_of_a_split_have_each_layer_and_head_exactly_once(data):
    layout = data.draw(layouts())
    found: list[tuple[str | None, int, int]] = []
    for part in data.draw(splits(layout)):
        layout.check_part(part)
        home = dict(layout.companions)[part.companion] if part.companion else layout
        for index in home.groups[part.group].layers:
            if part.first_layer <= index < part.end_layer:
                spec = home.specs[index]
                heads = spec.kv_heads if isinstance(spec, KVLayer) else 1
                first, rest = divmod(part.head_group * heads, part.head_groups)
                count, unsplit = divmod(heads, part.head_groups)
                assert (rest, unsplit) == (0, 0)
                found += ((part.companion, index, first + head) for head in range(count))
    homes = [(None, layout), *layout.companions]
    assert sorted(found, key=repr) == sorted(
        (
            (name, index, head)
            for name, home in homes
            for index, spec in enumerate(home.specs)
            for head in range(spec.kv_heads if isinstance(spec, KVLayer) else 1)
        ),
        key=repr,
    )


@given(st.data(), st.integers(1, 40))
def test_parts_of_a_split_are_as_large_as_the_block(data, token_count):
    layout = data.draw(layouts())
    sizes = [layout.part_bytes(part, token_count) for part in data.draw(splits(layout))]
    assert min(sizes) > 0
    assert sum(sizes) == layout.bytes_per_block(token_count)
    further = layout.bytes_per_block(token_count + 1) - layout.bytes_per_block(token_count)
    assert further == layout.bytes_per_token


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_part_of_a_block_without_tokens_has_no_size(count):
    layout = Layout.gqa(**GQA)
    with pytest.raises(InvalidLayout, match="token_count="):
        layout.part_bytes(layout.parts[0], count)


# What a prefix needs.


def first_needed_by_definition(group: CacheGroup, end: int, block_tokens: int) -> int:
    """Token by token: which cached ones the token at position `end` sees, of positions below it."""
    if group.attention == "state":
        cached = [end - 1] if end else []
    else:
        window = group.window_tokens
        assert window
        visible = {
            "sliding": lambda token: end - token < window,
            "chunked": lambda token: token // window == end // window,
        }[group.attention]
        cached = [token for token in range(end) if visible(token)]
    blocks = -(-end // block_tokens)
    return min((token // block_tokens for token in cached), default=blocks)


@given(st.data(), st.integers(1, 7), st.integers(0, 40))
def test_first_needed_is_that_of_its_definition(data, block_tokens, tokens):
    layout = data.draw(layouts(kinds=kv_layers() | latent_layers() | state_layers))
    ends = [min(start + block_tokens, tokens) for start in range(0, tokens, block_tokens)]
    for part in layout.parts:
        home = dict(layout.companions)[part.companion] if part.companion else layout
        group = home.groups[part.group]
        found = layout.first_needed(part, ends, block_tokens)
        assert layout.needs_all(part) == (found is None) == (group.attention in ("full", "opaque"))
        if found is not None:
            assert found == [
                first_needed_by_definition(group, end, block_tokens) for end in [0, *ends]
            ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FULL, None),
        (STATE, [0, 0, 1, 2]),
        # Blocks of 4; the prefixes have 0, 4, 8 and 10 tokens.
        ("sliding", [0, 0, 1, 1]),
        ("chunked", [0, 0, 2, 2]),
    ],
)
def test_first_needed_of_each_rule(spec, expected):
    if isinstance(spec, str):
        window = 5 if spec == "sliding" else 8
        spec = KVLayer(kv_heads=1, head_dim=1, dtype="int8", attention=spec, window_tokens=window)
    layout = Layout.of([spec], companions={"draft": Layout.of([spec])})
    for part in layout.parts:
        assert layout.first_needed(part, [4, 8, 10], 4) == expected


def test_opaque_layers_need_all():
    layout = Layout.of([OPAQUE], backend="b")
    assert layout.needs_all(layout.parts[0])
    assert layout.first_needed(layout.parts[0], [4], 4) is None


def test_need_of_a_part_that_the_layout_has_not_is_refused():
    layout = Layout.gqa(**GQA)
    for ask in (layout.needs_all, lambda part: layout.first_needed(part, [4], 4)):
        with pytest.raises(InvalidLayout, match="group=1"):
            ask(a_part(group=1))
