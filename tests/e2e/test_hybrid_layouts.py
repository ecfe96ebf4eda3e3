"""Hybrid layouts proven on tensors: a model goes on from what the store kept, to the last bit.

The model computes token by token, so nothing depends on how many come at once. What a prefix does
not need is NaN when it goes on, and one NaN anywhere would spread to every output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidBuffer
from kvstore.keys import Namespace
from kvstore.layout import KVLayer, Layout, StateLayer
from kvstore.types import Outcome

torch = pytest.importorskip("torch")

HEADS, DIM, WINDOW_TOKENS, BLOCK_TOKENS = 2, 8, 10, 4
HIDDEN = HEADS * DIM
FULL = KVLayer(kv_heads=HEADS, head_dim=DIM, dtype="float32")
WINDOW = KVLayer(
    kv_heads=HEADS,
    head_dim=DIM,
    dtype="float32",
    attention="sliding",
    window_tokens=WINDOW_TOKENS,
)
STATE = StateLayer(state_bytes=4 * HEADS * DIM * DIM)

LAYOUTS = {
    "full and window": Layout.of([FULL, WINDOW, WINDOW, FULL]),
    "full and state": Layout.of([STATE, FULL, STATE]),
    "all three": Layout.of([WINDOW, STATE, FULL]),
    "window alone": Layout.of([WINDOW, WINDOW]),
}


class Model:
    """Layers of attention and of a recurrence, with caches that are indexed by token."""

    def __init__(self, layout: Layout, tokens_max: int) -> None:
        random = torch.Generator().manual_seed(1)
        self.layout = layout
        self.weights = [
            [torch.randn(HIDDEN, HIDDEN, generator=random) / HIDDEN**0.5 for _ in range(3)]
            for _ in layout.specs
        ]
        self.embedding = torch.randn(64, HIDDEN, generator=random)
        shape = (2, HEADS, tokens_max, DIM)
        self.caches = [
            torch.zeros(HEADS, DIM, DIM)
            if isinstance(spec, StateLayer)
            else torch.full(shape, torch.nan)
            for spec in layout.specs
        ]

    def step(self, token: int, position: int) -> Any:
        """Compute one token; its output."""
        x = self.embedding[token]
        for spec, weights, cache in zip(self.layout.specs, self.weights, self.caches, strict=True):
            normed = x / x.norm() * HIDDEN**0.5
            query, key, value = ((normed @ w).view(HEADS, DIM) for w in weights)
            if isinstance(spec, StateLayer):
                cache.mul_(0.9).add_(key[:, :, None] * value[:, None, :])
                x = x + torch.einsum("hd,hde->he", query, cache).reshape(-1)
                continue
            cache[0, :, position], cache[1, :, position] = key, value
            window = getattr(spec, "window_tokens", None)
            first = 0 if window is None else max(0, position - window + 1)
            keys, values = cache[:, :, first : position + 1]
            scores = torch.einsum("hd,htd->ht", query, keys) / DIM**0.5
            x = x + torch.einsum("ht,htd->hd", scores.softmax(-1), values).reshape(-1)
        return x

    def part(self, part: Any, block: int) -> Any:
        """The bytes of one part of a block; a state's as it is now."""
        memory = np.empty(self.layout.part_bytes(part, BLOCK_TOKENS), np.uint8)
        for spec, array, cached in self._tensors(part, memory, block):
            assert spec.dtype == "float32"
            array[...] = cached.numpy()
        return memory

    def load(self, part: Any, block: int, memory: Any) -> None:
        """Take one part of a block over."""
        for _, array, cached in self._tensors(part, memory, block):
            cached.copy_(torch.from_numpy(np.array(array)))

    def _tensors(self, part: Any, memory: Any, block: int) -> Any:
        """(spec, where it lies in the part, where in the cache) of each tensor of a part."""
        span = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        for spec in self.layout.tensors(part, BLOCK_TOKENS):
            at = spec.offset_bytes
            array = np.ndarray(spec.shape, spec.dtype, memory, at, spec.stride_bytes)
            cache = self.caches[spec.layer]
            if spec.name == "state":
                yield spec, array, cache.view(-1)
            else:
                yield spec, array, cache[("key", "value").index(spec.name), :, span]


def computed(layout: Layout, tokens: list[int]) -> tuple[Model, list[Any], list[list[Any]]]:
    """The model without a store: its outputs, and each block's parts when it was full."""
    model, outputs, blocks = Model(layout, len(tokens) + 8), [], []
    for position, token in enumerate(tokens):
        outputs.append(model.step(token, position))
        if (position + 1) % BLOCK_TOKENS == 0:
            block = position // BLOCK_TOKENS
            blocks.append([model.part(part, block) for part in layout.parts])
    return model, outputs, blocks


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request):
    return LAYOUTS[request.param]


@pytest.fixture
def session(layout):
    namespace = Namespace(model="m", fingerprint="f", layout=layout, block_tokens=BLOCK_TOKENS)
    with kvstore.open(dram_capacity_bytes="4MiB") as store, store.session(namespace) as session:
        yield session
        store.check()


def bare(layout: Layout, block: list[Any]) -> Any:
    return block[0] if len(layout.parts) == 1 else block


def resumed(session: Any, layout: Layout, tokens: list[int], loadable: int) -> tuple[int, Any]:
    """Go on from what is stored; how many blocks that was, and the outputs after them."""
    model = Model(layout, len(tokens) + 8)
    keys = session.namespace.keys(tokens)[:loadable]
    with session.lease(keys) as lease:
        for block, views in enumerate(lease.views):
            views = (views,) if len(layout.parts) == 1 else views
            for part, view in zip(layout.parts, views, strict=True):
                if view is not None:
                    model.load(part, block, view)
        assert lease.valid()
        blocks = lease.blocks
    start = blocks * BLOCK_TOKENS
    return blocks, [model.step(tokens[i], i) for i in range(start, len(tokens))]


TOKENS = [int(x) for x in np.random.default_rng(5).integers(0, 64, 41)]


@pytest.mark.parametrize("loadable", [1, 2, 3, 5, 10])
def test_it_goes_on_from_any_prefix_to_the_last_bit(session, layout, loadable):
    _, outputs, blocks = computed(layout, TOKENS)
    keys = session.namespace.keys(TOKENS)
    stored = session.put(keys, [bare(layout, block) for block in blocks])
    assert stored == [Outcome.OK] * len(keys)

    found, later = resumed(session, layout, TOKENS, loadable)

    assert found == loadable
    for expected, actual in zip(outputs[found * BLOCK_TOKENS :], later, strict=True):
        assert torch.equal(expected, actual)


def test_what_is_kept_of_a_prefix_is_what_it_needs(session, layout):
    """Only the last prefix can be gone on from: one block less lacks its window or its state."""
    _, outputs, blocks = computed(layout, TOKENS)
    keys = session.namespace.keys(TOKENS)
    ends = [(i + 1) * BLOCK_TOKENS for i in range(len(keys))]
    for part_number, part in enumerate(layout.parts):
        needed = layout.first_needed(part, ends, BLOCK_TOKENS)
        for block in range(needed[len(keys)] if needed else 0):
            blocks[block][part_number] = None
    if len(layout.parts) > 1:
        assert any(part is None for block in blocks for part in block)
        session.put(keys, blocks)
    else:
        session.put(keys, [bare(layout, block) for block in blocks])

    found, later = resumed(session, layout, TOKENS, len(keys))
    assert found == len(keys)
    assert torch.equal(outputs[-1], later[-1])
    assert session.match(keys[:-1]).blocks == 0


def test_each_part_is_really_used(session, layout):
    """Zeroes under the right key of any one part make another output."""
    _, outputs, blocks = computed(layout, TOKENS)
    keys = session.namespace.keys(TOKENS)
    for wrong in range(len(layout.parts)):
        changed = [list(block) for block in blocks]
        changed[-1][wrong] = np.zeros_like(blocks[-1][wrong])
        session.delete(keys)
        session.put(keys, [bare(layout, block) for block in changed])
        _, later = resumed(session, layout, TOKENS, len(keys))
        assert not torch.equal(outputs[-1], later[-1])


def test_two_ranks_store_what_one_scheduler_finds(session, layout):
    """Head groups written by two ranks make up the blocks; a state is everybody's."""
    split = layout.split(head_groups=2)
    ranks = [
        [part for part in split if part.head_groups == 1 or part.head_group == rank]
        for rank in range(2)
    ]
    _, _, blocks = computed(layout, TOKENS)
    keys = session.namespace.keys(TOKENS)
    with kvstore.open(dram_capacity_bytes="4MiB") as store:
        scheduler = store.session(session.namespace, part=split)
        for number, parts in enumerate(ranks):
            rank = store.session(session.namespace, part=parts)
            sizes = [layout.part_bytes(part, BLOCK_TOKENS) for part in parts]
            content = [[bytes([number]) * size for size in sizes] for _ in blocks]
            outcomes = rank.put(keys, [c[0] if len(parts) == 1 else c for c in content])
            assert set(outcomes) == {Outcome.OK}
            assert scheduler.match(keys).blocks == (len(keys) if number else 0)
        store.check()


def test_a_shorter_prefix_than_was_leased_is_not_copied(session, layout):
    """Its window is another one, which the lease may not hold."""
    _, _, blocks = computed(layout, TOKENS)
    keys = session.namespace.keys(TOKENS)
    session.put(keys, [bare(layout, block) for block in blocks])
    with session.lease(keys) as lease, pytest.raises(InvalidBuffer, match="lease its keys"):
        lease.copy_into([bare(layout, block) for block in blocks[:3]])
