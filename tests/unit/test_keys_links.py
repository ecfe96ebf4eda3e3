"""Links: the parts of one block know each other by one name, and no others have it."""

from __future__ import annotations

from itertools import combinations

from kvstore.keys import Namespace, Source
from kvstore.layout import KVLayer, LatentLayer, Layout, Part, StateLayer
from kvstore.storage_keys import KeyMaker, storage_key

FULL = KVLayer(kv_heads=4, head_dim=8, dtype="bfloat16")
DRAFT = Layout.gqa(layers=2, kv_heads=2, head_dim=4, dtype="int8")
#: Its cache group 0 has neither heads nor all layers.
HYBRID = Layout.of([StateLayer(state_bytes=64), FULL, FULL], companions={"draft": DRAFT})


def a_namespace(layout):
    return Namespace(model="m", fingerprint="f", layout=layout, block_tokens=4)


def keys_and_links(namespace, parts, head_groups=None):
    block_keys = namespace.keys(range(10), partial=True)
    block_keys += namespace.keys_of_hashes([b"h" * 16], Source("engine"))
    makers = [KeyMaker(namespace, part, anchor_head_groups=head_groups) for part in parts]
    keys = [maker.keys(block_keys, is_prefix=False) for maker in makers]
    return block_keys, keys, [maker.block_links(block_keys) for maker in makers]


def test_block_of_one_part_needs_no_link():
    gqa = Layout.gqa(layers=2, kv_heads=2, head_dim=4, dtype="int8")
    mla = Layout.mla(layers=2, latent_dim=4, rope_dim=4, dtype="int8")
    for layout in (gqa, mla):
        maker = KeyMaker(a_namespace(layout), layout.parts[0], anchor_head_groups=2)
        assert maker.block_links(a_namespace(layout).keys(range(8))) is None


def test_all_parts_of_a_deployment_have_one_link_to_a_block():
    namespace = a_namespace(HYBRID)
    parts = HYBRID.split(head_groups=2, layer_ranges=[(0, 2), (2, 3)])
    block_keys, keys, links = keys_and_links(namespace, parts, head_groups=2)
    anchor = Part(first_layer=0, end_layer=3, head_groups=2)
    expected = [storage_key(key, anchor) for key in block_keys]
    assert links == [expected] * len(parts)
    assert len(set(expected)) == len(block_keys) == 4
    assert all(not set(one) & set(other) for one, other in combinations(keys, 2))


def test_link_of_the_anchor_itself_is_its_key():
    namespace = a_namespace(HYBRID)
    _, keys, links = keys_and_links(namespace, HYBRID.parts)
    assert links == [keys[0]] * len(HYBRID.parts)
    heads = Layout.of([FULL] * 2).split(head_groups=2)
    _, keys, links = keys_and_links(a_namespace(Layout.of([FULL] * 2)), heads)
    assert links == [keys[0], keys[0]]


def test_links_of_other_deployments_namespaces_and_blocks_never_meet():
    namespaces = [a_namespace(HYBRID), a_namespace(Layout.of(HYBRID.specs))]
    found = [
        set(keys_and_links(namespace, [part], head_groups)[2][0] or ())
        for namespace in namespaces
        for part, head_groups in [(Part(first_layer=0, end_layer=3), n) for n in (None, 2, 4)]
    ]
    assert [len(links) for links in found] == [4] * 6
    assert all(not one & other for one, other in combinations(found, 2))


def test_latent_beside_split_heads_has_their_link():
    latent = LatentLayer(
        latent_dim=4, rope_dim=4, dtype="int8", attention="sliding", window_tokens=8
    )
    layout = Layout.of([FULL, latent])
    parts = layout.split(head_groups=4)
    assert [part.head_groups for part in parts] == [4] * 4 + [1]
    _, _, links = keys_and_links(a_namespace(layout), parts, head_groups=4)
    assert links == [links[0]] * 5
    # Left out, the number is the part's own, which is that of another deployment.
    _, _, others = keys_and_links(a_namespace(layout), parts)
    assert others[:4] == links[:4]
    assert others[4] != links[4]
