"""Every kind of cache that is supported: the same tokens, the right bytes, and really loaded."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.connectors.transformers import PrefixCache, caches  # noqa: E402
from kvstore.connectors.transformers.caches import CACHE_ARGUMENT, cached_layers  # noqa: E402
from kvstore.layout import KVLayer, LatentLayer  # noqa: E402
from kvstore.types import Outcome  # noqa: E402
from tests.e2e.conftest import KINDS  # noqa: E402
from tests.e2e.reference import (  # noqa: E402
    BLOCK,
    GREEDY,
    LOGITS,
    batch,
    check_blocks,
    check_cold_and_warm,
    check_same,
    texts,
)

#: Kinds whose layers do not all need the whole prefix, with their windows.
WINDOWS = {
    "window": 20,
    "window and full": 20,
    "window smaller than a block": 5,
    "values of another dim": 20,
    "shared layers": 12,
    "spans": 24,
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def model(kind, model_of):
    return model_of(kind)


class TestEveryKind:
    def test_alone(self, model, store, prompt):
        cache = PrefixCache(model, store)
        sequences = check_cold_and_warm(model, cache, prompt(50), loaded=48)
        counts = check_blocks(model, cache, store, sequences[0].tolist())
        assert max(counts) == 73 // BLOCK
        check_same(model, cache, sequences)  # the next turn
        assert cache.last.loaded_tokens == 64

    def test_padded_batch(self, model, store, prompt):
        """The rows end at columns 56, 48 and 51, so two of them are cut within a block."""
        cache = PrefixCache(model, store)
        arguments = batch(prompt(40), prompt(64, seed=2), prompt(45, seed=3))
        sequences = check_cold_and_warm(model, cache, **arguments, loaded=24 + 48 + 29)
        for row in texts(arguments, sequences):
            check_blocks(model, cache, store, row)

    def test_beams(self, model, store, prompt):
        cache = PrefixCache(model, store, block_tokens=8)
        sequences = check_cold_and_warm(model, cache, prompt(50), loaded=48, num_beams=3)
        counts = check_blocks(model, cache, store, sequences[0].tolist())
        assert max(counts) == 73 // 8

    def test_bytes_under_a_key_are_what_the_model_reads(self, model, store, prompt):
        """Each part by itself: wrong bytes, put under the right keys, change the logits."""
        cache = PrefixCache(model, store)
        right = model.generate(prompt(66), **GREEDY, **LOGITS).logits[0]
        cache.generate(prompt(66), **GREEDY)
        keys = cache.namespace.keys(prompt(66)[0])
        layout = cache.namespace.layout
        for part in range(len(layout.parts)):
            with store.session(cache.namespace) as session:
                with session.lease(keys) as lease:
                    view = lease.views[3]
                    views = view if isinstance(view, tuple) else (view,)
                    block = [np.array(each) for each in views]
                block[part] = torch.rand(len(block[part]) // 4).numpy()
                session.delete(keys[3:])
                assert session.put(keys, [block if len(block) > 1 else block[0]], start=3) == [
                    Outcome.OK
                ]
            wrong = cache.generate(prompt(66), **GREEDY, **LOGITS).logits[0]
            assert cache.last.loaded_tokens == 64
            assert (wrong - right).abs().max() > 0.01 * right.abs().max()
            with store.session(cache.namespace) as session:
                session.delete(keys[3:])
            check_same(model, cache, prompt(66))  # puts it right for the next part


class TestHalfPrecision:
    @pytest.mark.parametrize("kind", ["gqa", "mla", "window and full"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_bytes_are_kept_and_tokens_too_where_they_are_clear(
        self, model_of, store, prompt, kind, dtype
    ):
        model = copy.deepcopy(model_of(kind)).to(dtype)
        cache = PrefixCache(model, store)
        input_ids = prompt(49, seed=3)
        alone = model.generate(input_ids, **GREEDY, **LOGITS)
        cold = cache.generate(input_ids, **GREEDY, **LOGITS)
        warm = cache.generate(input_ids, **GREEDY, **LOGITS)
        assert cache.last.loaded_tokens == 48
        best, second = torch.cat(alone.logits).topk(2).values.unbind(1)
        # A prefill of one token rounds otherwise than one of 49: by 1 eps of the largest, here.
        noise = 2 * torch.finfo(dtype).eps * float(torch.cat(alone.logits).abs().max())
        clear = int(((best - second) > noise).cumprod(0).sum())
        assert clear >= 3
        for output in (cold, warm):
            end = 49 + clear
            assert torch.equal(output.sequences[:, :end], alone.sequences[:, :end])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_keys_and_values_come_back_bit_for_bit(self, llama, store, prompt, dtype):
        model = copy.deepcopy(llama).to(dtype)
        cache = PrefixCache(model, store)
        arguments = {**GREEDY, "max_new_tokens": 1, "return_dict_in_generate": True}
        rows = batch(prompt(49), prompt(57, seed=2))
        cold = cache.generate(**rows, **arguments)[CACHE_ARGUMENT]
        warm = cache.generate(**rows, **arguments)[CACHE_ARGUMENT]
        assert cache.last.loaded_tokens == 40 + 48
        for before, after in zip(cold.layers, warm.layers, strict=True):
            for name in ("keys", "values"):
                one, other = getattr(before, name), getattr(after, name)
                assert other.dtype is dtype
                assert torch.equal(one[0, :, 8:48], other[0, :, 8:48])
                assert torch.equal(one[1, :, :48], other[1, :, :48])


class TestLayouts:
    def test_latents_are_latents(self, model_of, store):
        """What transformers calls keys and values of an MLA cache: latents and rotary keys."""
        layout = PrefixCache(model_of("mla"), store).namespace.layout
        latent = LatentLayer(latent_dim=12, rope_dim=8, dtype="float32")
        # In earlier versions the cache had what the latents are expanded to.
        expanded = KVLayer(kv_heads=4, head_dim=16, value_head_dim=8, dtype="float32")
        assert layout.specs in ((latent,) * 3, (expanded,) * 3)

    def test_layers_may_differ(self, model_of, store):
        layout = PrefixCache(model_of("two shapes"), store).namespace.layout
        assert [spec.kv_heads for spec in layout.specs if isinstance(spec, KVLayer)] == [2, 4, 2]
        assert len(layout.parts) == 1

    def test_values_may_have_a_dim_of_their_own(self, model_of, store):
        layout = PrefixCache(model_of("values of another dim"), store).namespace.layout
        shapes = [
            (s.kv_heads, s.head_dim, s.value_dim) for s in layout.specs if isinstance(s, KVLayer)
        ]
        assert shapes == [(2, 16, 8), (4, 16, 8), (2, 16, 8)]

    @pytest.mark.parametrize("kind", WINDOWS)
    def test_a_window_is_a_part_of_its_own(self, model_of, store, kind):
        layout = PrefixCache(model_of(kind), store).namespace.layout
        groups = {group.attention: group.window_tokens for group in layout.groups}
        full = {} if kind == "window" else {"full": None}
        assert groups == {"chunked" if kind == "spans" else "sliding": WINDOWS[kind], **full}

    def test_layers_that_share_have_no_keys_of_their_own(self, model_of, store):
        layout = PrefixCache(model_of("shared layers"), store).namespace.layout
        assert [spec.head_dim for spec in layout.specs if isinstance(spec, KVLayer)] == [8, 16]


class TestWindows:
    @pytest.fixture(params=sorted(WINDOWS))
    def kind(self, request):
        return request.param

    def test_a_long_answer_leaves_its_windows_behind(self, model, store, prompt):
        """Every block of the answer is stored before its tokens leave the window."""
        cache = PrefixCache(model, store, block_tokens=4)
        sequences = check_same(model, cache, prompt(10), max_new_tokens=80)
        tokens = sequences[0].tolist()
        counts = check_blocks(model, cache, store, tokens)
        assert max(counts) == 89 // 4
        # Prefixes of any length can go on.
        for length in (13, 30, 61, 88):
            check_same(model, cache, sequences[:, :length], max_new_tokens=8)
            assert cache.last.loaded_tokens == (length - 1) // 4 * 4

    def test_a_prefix_loads_no_more_of_a_window_than_it_needs(self, kind, model, store, prompt):
        cache = PrefixCache(model, store, block_tokens=4)
        cache.generate(prompt(97), **GREEDY)
        cache.generate(prompt(97), **GREEDY)
        assert cache.last.loaded_tokens == 96
        layout = cache.namespace.layout
        expected = 0
        for part, group in zip(layout.parts, layout.groups, strict=True):
            needed = 96 if group.window_tokens is None else group.window_tokens - 1
            if kind == "spans" and group.window_tokens:
                needed = 96 % 24
            expected += -(-needed // 4) * layout.part_bytes(part, 4)
        assert cache.last.loaded_bytes == expected

    def test_the_cache_that_is_returned_holds_no_more_than_any(self, model, store, prompt):
        cache = PrefixCache(model, store)
        arguments = {**GREEDY, "return_dict_in_generate": True}
        own = cache.generate(prompt(50), **arguments)[CACHE_ARGUMENT]
        expected = model.generate(prompt(50), **arguments)[CACHE_ARGUMENT]
        for index in cached_layers(expected):
            one, other = own.layers[index], expected.layers[index]
            assert one.keys.shape == other.keys.shape
            assert one.get_seq_length() == other.get_seq_length() == 73
            assert getattr(one, "recorded", lambda: None)() is None

    def test_a_callers_cache_is_used_and_not_grown(self, model, store, prompt):
        arguments = {**GREEDY, "return_dict_in_generate": True}
        first = model.generate(prompt(50), **arguments)
        longer = torch.cat([first.sequences, prompt(5, seed=2)], dim=1)
        own = first[CACHE_ARGUMENT]
        cache = PrefixCache(model, store)
        output = cache.generate(longer, **{CACHE_ARGUMENT: own}, **GREEDY)
        assert torch.equal(output, model.generate(longer, **GREEDY))
        assert own.get_seq_length() == 73

    def test_of_a_prompt_that_is_too_long_the_end_is_stored(
        self, kind, model, store, prompt, monkeypatch
    ):
        """What leaves a window is kept until it is stored, but not without a limit."""
        cache = PrefixCache(model, store, block_tokens=4)
        layout = cache.namespace.layout
        column_bytes = sum(
            layout.bytes_per_token_of(part)
            for part, group in zip(layout.parts, layout.groups, strict=True)
            if group.window_tokens is not None
        )
        monkeypatch.setattr(caches, "RECORD_BYTES", 30 * column_bytes)
        sequences = check_same(model, cache, prompt(97))
        counts = check_blocks(model, cache, store, sequences[0].tolist())
        assert min(counts) < 120 // 4 == (120 // 4 if kind == "window" else max(counts))
        assert not {*cache.last.put_outcomes} - {Outcome.OK}
        check_same(model, cache, sequences)
        assert cache.last.loaded_tokens == 120
        check_same(model, cache, prompt(41))  # within the prompt: no window there
        if kind != "spans":
            assert cache.last.loaded_tokens == 0
