"""Keys: what must agree to share a block, and what must never be mistaken for it."""

from __future__ import annotations

import dataclasses
import unicodedata
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.errors import InvalidKeys, InvalidLayout, InvalidNamespace
from kvstore.keys import (
    BLOCK_TOKENS_MAX,
    HASH_BYTES_MAX,
    OWN_CHAIN,
    ROOT_HASH,
    Media,
    Namespace,
    Source,
)
from kvstore.layout import Layout, Part
from kvstore.storage_keys import KeyMaker, storage_key
from kvstore.types import KEY_BYTES

GQA = Layout.gqa(layers=4, kv_heads=8, head_dim=64, dtype="bfloat16")
WHOLE = GQA.parts[0]
ENGINE = Source("vllm-sha256-cbor", b"0")
CAT, DOG = bytes([1]) * 32, bytes([2]) * 32


def a_namespace(**changed):
    fields: dict[str, Any] = {"model": "m", "fingerprint": "f", "layout": GQA, "block_tokens": 4}
    return Namespace(**(fields | changed))


def stored(namespace, block_keys, part=WHOLE):
    return KeyMaker(namespace, part).keys(block_keys, is_prefix=False)


def keys_of(namespace, token_ids, **options):
    return stored(namespace, namespace.keys(token_ids, **options))


# Namespaces.

VALUES = {
    "model": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
    "fingerprint": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
    "layout": st.builds(
        Layout.gqa,
        layers=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        head_dim=st.integers(1, 3),
        dtype=st.sampled_from(["float16", "bfloat16", "int8", "float8_e4m3fn"]),
        quantisation=st.none() | st.just("kv8"),
    ),
    "block_tokens": st.integers(1, 6),
    "adapter": st.none() | st.binary(min_size=32, max_size=32),
    "salt": st.none() | st.binary(max_size=4) | st.text(st.characters(codec="utf-8"), max_size=4),
    "epoch": st.none() | st.binary(min_size=16, max_size=16),
}
namespaces = st.builds(Namespace, **VALUES)
token_lists = st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=24)


@given(namespaces, token_lists, st.data())
def test_change_of_any_field_changes_every_key(namespace, token_ids, data):
    """ID02, ID04, ID06, ID08, ID10."""
    name = data.draw(st.sampled_from(list(VALUES)))
    other = dataclasses.replace(namespace, **{name: data.draw(VALUES[name])})
    ours = {storage_key(key, WHOLE) for key in namespace.keys(token_ids, partial=True)}
    others = {storage_key(key, WHOLE) for key in other.keys(token_ids, partial=True)}
    if namespace == other:
        assert ours == others
        assert namespace.digest == other.digest
    else:
        assert not ours & others


def test_adapters_and_their_absence_never_meet():
    """ID02: no salt or model equality bridges them."""
    found = [
        keys_of(a_namespace(adapter=adapter, salt=salt), range(8))
        for adapter in (None, CAT, DOG)
        for salt in (None, b"", CAT)
    ]
    assert all(not set(one) & set(other) for one, other in combinations(found, 2))


@pytest.mark.parametrize("adapter", ["my-lora", b"my-lora", "sha256:" + "0" * 63, "sha256:", 7, ""])
def test_adapter_by_name_is_refused_with_the_reason(adapter):
    """ID02: a name can be given to other weights."""
    with pytest.raises(InvalidNamespace, match=r"adapter=.*SHA-256 of its content.*other weights"):
        a_namespace(adapter=adapter)


def test_adapter_and_salt_are_the_same_identity_in_either_form():
    assert a_namespace(adapter=b"\xab" * 32) == a_namespace(adapter="sha256:" + "aB" * 32)
    assert a_namespace(salt="é").digest == a_namespace(salt="é".encode()).digest
    assert a_namespace(salt="").digest != a_namespace(salt=None).digest


def test_ranks_that_no_part_can_name_never_meet():
    """ID05: rank 0 of 2, 1 of 2, 0 of 4, and no rank at all."""
    ranks = [(0, 2), (1, 2), (0, 4), (0, 1), (None, None)]
    digests = {a_namespace(rank=rank, rank_count=count).digest for rank, count in ranks}
    assert len(digests) == len(ranks)


def test_shards_of_one_layout_never_meet_and_replicas_always_do():
    """ID05: other tensor-parallel rank, other rank count, other pipeline stage."""
    shards = [(0, 4, 0, 1), (0, 4, 0, 2), (0, 4, 1, 2), (0, 4, 0, 4), (0, 2, 0, 2), (2, 4, 0, 2)]
    parts = [
        Part(first_layer=first, end_layer=end, head_group=group, head_groups=groups)
        for first, end, group, groups in shards
    ]
    block_keys = a_namespace().keys(range(8))
    found = [set(stored(a_namespace(), block_keys, part)) for part in parts]
    assert all(not one & other for one, other in combinations(found, 2))
    again = Part(first_layer=0, end_layer=4, head_group=1, head_groups=2)
    assert set(stored(a_namespace(), block_keys, again)) == found[2]


def test_dtypes_of_one_size_never_meet():
    """ID04: bf16, fp16 and fp8, and one dtype under two quantisations."""
    layouts = [
        Layout.gqa(layers=4, kv_heads=8, head_dim=64, dtype=dtype, quantisation=quantisation)
        for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
        for quantisation in (None, "kv8")
    ]
    assert len({a_namespace(layout=layout).digest for layout in layouts}) == len(layouts)


def test_block_size_is_part_of_the_identity():
    """ID10: blocks of 16, 32 and 64 tokens over the same tokens."""
    found = [set(keys_of(a_namespace(block_tokens=size), range(128))) for size in (16, 32, 64)]
    assert [len(keys) for keys in found] == [8, 4, 2]
    assert len(set.union(*found)) == 14


def test_unicode_is_not_normalised():
    """ID08: NFC and NFD are two names; separators are text like any other."""
    names = [unicodedata.normalize(form, "modèle") for form in ("NFC", "NFD")]
    names += ["a|bc", "ab|c", "a@b", "a/b", "a\nb", "a\0b", "ab"]
    assert len({a_namespace(model=name).digest for name in names}) == len(names)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"fingerprint": ""}, "fingerprint='': expected a non-empty text"),
        ({"fingerprint": None}, "fingerprint=None"),
        ({"model": ""}, "model=''"),
        ({"model": "a\ud800"}, "model=.*character at 1 is a lone surrogate"),
        ({"model": "x" * 65_537}, "model of 65537 bytes.*65536"),
        ({"salt": "\udfff"}, "salt=.*lone surrogate"),
        ({"salt": b"x" * 65_537}, "salt=.*65536 bytes"),
        ({"salt": 7}, "salt=7"),
        ({"layout": "gqa"}, "layout='gqa': expected a Layout"),
        ({"block_tokens": 0}, "block_tokens=0"),
        ({"block_tokens": True}, "block_tokens=True"),
        ({"block_tokens": 16.0}, "block_tokens=16.0"),
        ({"block_tokens": BLOCK_TOKENS_MAX + 1}, "block_tokens=1048577"),
        ({"block_tokens": 10**6000}, "block_tokens=an integer of 19932 bits"),
        ({"rank": 0}, "expected both or neither"),
        ({"rank_count": 2}, "expected both or neither"),
        ({"rank": 2, "rank_count": 2}, "rank=2: expected an integer from 0 to 1"),
        ({"rank": -1, "rank_count": 2}, "rank=-1"),
        ({"rank": 0, "rank_count": 2**32}, "rank_count=4294967296"),
        ({"epoch": b"x" * 15}, "epoch=.*16 bytes"),
        ({"epoch": 0}, "epoch=0"),
    ],
)
def test_wrong_field_is_named_with_what_is_allowed(wrong, said):
    """ID06: above all the fingerprint, which has no default."""
    with pytest.raises(InvalidNamespace, match=said):
        a_namespace(**wrong)


def test_fingerprint_must_be_given():
    """ID06."""
    with pytest.raises(TypeError, match="fingerprint"):
        Namespace(model="m", layout=GQA, block_tokens=16)  # type: ignore[call-arg]


def test_key_length_does_not_depend_on_the_length_of_names():
    """ID13: the longest legal names, and the longest hash of an engine."""
    namespace = a_namespace(model="x" * 65_536, fingerprint="y" * 65_536, salt=b"z" * 65_536)
    block_keys = namespace.keys_of_hashes([b"h" * HASH_BYTES_MAX], ENGINE)
    assert [len(key) for key in stored(namespace, block_keys)] == [KEY_BYTES]


def test_salt_stays_out_of_logs():
    assert "secret" not in repr(a_namespace(salt="secret"))


# Chains.


@given(token_lists, token_lists)
def test_keys_are_equal_exactly_as_far_as_the_prefixes_are(one, other):
    other = one[: len(other)] + other[len(one) :] if len(other) % 2 else other
    namespace = a_namespace(block_tokens=3)
    pairs = zip(keys_of(namespace, one), keys_of(namespace, other), strict=False)
    for block, (key, other_key) in enumerate(pairs, 1):
        assert (key == other_key) == (one[: 3 * block] == other[: 3 * block])


@given(token_lists, st.data())
def test_permuted_tokens_have_other_keys(token_ids, data):
    """ID09: within a block and across blocks; the earlier blocks keep their keys."""
    i, j = sorted(data.draw(st.integers(0, len(token_ids) - 1)) for _ in range(2))
    assume(token_ids[i] != token_ids[j])
    swapped = list(token_ids)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    namespace = a_namespace(block_tokens=2)
    keys = keys_of(namespace, token_ids, partial=True)
    others = keys_of(namespace, swapped, partial=True)
    assert keys[: i // 2] == others[: i // 2]
    assert not set(keys[i // 2 :]) & set(others[i // 2 :])


@given(token_lists)
def test_each_block_knows_its_parent(token_ids):
    namespace = a_namespace()
    block_keys = namespace.keys(token_ids, partial=True)
    maker = KeyMaker(namespace, WHOLE)
    keys, parents = maker.keys(block_keys, is_prefix=True), maker.parents(block_keys)
    assert keys == [storage_key(key, WHOLE) for key in block_keys]
    assert parents == [None, *keys[:-1]]
    assert KeyMaker(namespace, WHOLE).parents(block_keys[1:]) == keys[:-1]
    assert [key.parent_hash for key in block_keys] == [
        ROOT_HASH,
        *(key.chain_hash for key in block_keys[:-1]),
    ]


def test_million_blocks_have_a_million_keys():
    """ID09."""
    token_ids = np.random.default_rng(1).integers(0, 8, 1_000_000, dtype=np.uint8)
    namespace = a_namespace(block_tokens=1)
    block_keys = namespace.keys(token_ids)
    assert len(set(stored(namespace, block_keys))) == len(block_keys) == 1_000_000


def test_partial_block_matches_only_at_its_length():
    namespace = a_namespace()
    found = [keys_of(namespace, range(n), partial=True) for n in range(1, 9)]
    assert [len(keys) for keys in found] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert len({keys[-1] for keys in found}) == 8
    assert [keys[0] for keys in found[3:]] == [found[3][0]] * 5
    last = namespace.keys(range(6), partial=True)[-1]
    assert (last.token_count, last.is_partial) == (2, True)
    assert namespace.keys(range(3)) == namespace.keys([], partial=True) == []


def test_partial_block_is_not_the_full_block_of_a_smaller_size():
    small, large = a_namespace(block_tokens=2), a_namespace(block_tokens=4)
    one, other = small.keys([1, 2])[0], large.keys([1, 2], partial=True)[0]
    assert one.chain_hash != other.chain_hash


# Media.


def test_media_part_blocks_from_the_first_that_they_touch():
    """ID03: equal placeholder tokens, other media, and text alone; the text before is shared."""
    namespace = a_namespace()
    items = [(), (Media(CAT, 5, 7),), (Media(DOG, 5, 7),), (Media(CAT, 5, 8),), (Media(CAT, 4, 7),)]
    found = [keys_of(namespace, [9] * 12, extra=extra) for extra in items]
    assert len({keys[0] for keys in found}) == 1
    assert len({keys[1] for keys in found}) == len({keys[2] for keys in found}) == len(items)


def test_media_are_a_set():
    namespace, items = a_namespace(), [Media(DOG, 1, 6), Media(CAT, 1, 6), Media(CAT, 2, 12)]
    keys = keys_of(namespace, range(12), extra=items)
    assert keys == keys_of(namespace, range(12), extra=iter([*reversed(items), items[0]]))
    assert keys != keys_of(namespace, range(12), extra=items[:2])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=4), st.integers(0, 20))
def test_prefix_has_the_keys_that_it_has_in_the_whole(ranges, cut):
    namespace = a_namespace()
    items = [Media(CAT, start, start + length) for start, length in ranges]
    keys = namespace.keys(range(20), extra=items)
    assert namespace.keys(range(cut), extra=items) == keys[: cut // 4]


# Hashes of an engine.


def test_hashes_of_an_engine_stand_for_ours():
    namespace = a_namespace()
    block_keys = namespace.keys_of_hashes([b"1" * 16, b"2" * 32, b"3" * HASH_BYTES_MAX], ENGINE)
    maker = KeyMaker(namespace, WHOLE)
    keys, parents = maker.keys(block_keys, is_prefix=True), maker.parents(block_keys)
    assert parents == [None, *keys[:-1]]
    assert {key.token_count for key in block_keys} == {4}
    tail = namespace.keys_of_hashes([b"2" * 32], ENGINE, parent_hash=b"1" * 16)
    assert tail == block_keys[1:2]


def test_sources_never_meet():
    """ID01: engines whose roots have other seeds, and our own chain."""
    namespace = a_namespace()
    own = namespace.keys(range(4))
    sources = [Source("a"), Source("a", b""), Source("a", b"1"), Source("b"), Source("kvstore")]
    found = [namespace.keys_of_hashes([own[0].chain_hash], source)[0] for source in sources]
    assert len(set(stored(namespace, own + found))) == len(sources) + 1


@pytest.mark.parametrize(
    ("hashes", "source", "said"),
    [
        ([b"h" * 16, b""], ENGINE, r"hashes\[1\]=b'': expected 16 to 128 bytes"),
        ([b"h" * 15], ENGINE, r"hashes\[0\]=.*16 to 128 bytes"),
        ([b"h" * 129], ENGINE, r"hashes\[0\]"),
        (["00"], ENGINE, r"hashes\[0\]='00'"),
        ([12345], ENGINE, r"hashes\[0\]=12345"),
        ([ROOT_HASH], ENGINE, r"hashes\[0\] is 32 zero bytes"),
        ([b"h" * 16], OWN_CHAIN, "source="),
        ([b"h" * 16], "vllm", "source='vllm'"),
    ],
)
def test_hashes_that_name_no_block_are_refused(hashes, source, said):
    with pytest.raises(InvalidKeys, match=said):
        a_namespace().keys_of_hashes(hashes, source)


def test_source_without_a_name_is_refused():
    with pytest.raises(InvalidKeys, match="algorithm=''"):
        Source("")
    with pytest.raises(InvalidKeys, match="seed='0'"):
        Source("a", "0")  # type: ignore[arg-type]


# One function makes the key.


@given(namespaces, token_lists)
def test_single_and_batch_make_the_same_key(namespace, token_ids):
    """ID07."""
    block_keys = namespace.keys(token_ids, partial=True)
    block_keys += namespace.keys_of_hashes([b"h" * 16, b"h" * 32], ENGINE)
    part = namespace.layout.parts[0]
    assert stored(namespace, block_keys, part) == [storage_key(key, part) for key in block_keys]


def test_key_of_another_namespace_is_refused_at_its_position():
    namespace, other = a_namespace(), a_namespace(salt="x")
    mixed = [*namespace.keys(range(8)), *other.keys(range(4))]
    with pytest.raises(InvalidKeys, match=r"keys\[2\] is of namespace"):
        stored(namespace, mixed)
    with pytest.raises(InvalidKeys, match=r"keys\[0\] = .*expected a BlockKey"):
        stored(namespace, [bytes(32)])


def test_part_that_the_layout_cannot_have_is_refused():
    with pytest.raises(InvalidLayout, match="head_groups"):
        KeyMaker(a_namespace(), Part(first_layer=0, end_layer=4, head_groups=3))
