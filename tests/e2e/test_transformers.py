"""One sequence: what is loaded, what is stored and when, over a real store and a real small model.

Every comparison is with `model.generate` without the store, greedy, and first shows that rounding
decided none of its tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import WatermarkingConfig  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from kvstore.connectors.transformers import PrefixCache  # noqa: E402
from kvstore.connectors.transformers.caches import CACHE_ARGUMENT  # noqa: E402
from kvstore.types import BlockKey, Outcome  # noqa: E402
from tests.e2e.reference import BLOCK, GREEDY, check_cold_and_warm, plain  # noqa: E402

NEW_TOKENS = 24


def counts(report):
    return report.prompt_tokens, report.loaded_tokens, report.computed_tokens, report.stored_blocks


class TestReuse:
    @pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17, 47, 48, 49])
    def test_full_prompt_hit_leaves_a_token_to_compute(self, llama, store, prompt, prompt_tokens):
        input_ids = prompt(prompt_tokens)
        cache = PrefixCache(llama, store)
        expected = plain(llama, input_ids)
        assert torch.equal(cache.generate(input_ids, **GREEDY), expected)
        # KV of all tokens but the last one generated.
        full_blocks = (prompt_tokens + NEW_TOKENS - 1) // BLOCK
        assert counts(cache.last) == (prompt_tokens, 0, prompt_tokens, full_blocks)

        assert torch.equal(cache.generate(input_ids, **GREEDY), expected)
        loaded = (prompt_tokens - 1) // BLOCK * BLOCK
        assert counts(cache.last) == (prompt_tokens, loaded, prompt_tokens - loaded, 0)
        assert cache.last.reason is None
        assert cache.last.hits_by_tier == ({"dram": loaded // BLOCK} if loaded else {})
        # Only what was computed is offered again, and the first contents of a block stay.
        offered = full_blocks - loaded // BLOCK
        assert cache.last.put_outcomes == ({Outcome.PRESENT: offered} if offered else {})

    @pytest.mark.parametrize(("shared", "loaded"), [(8, 0), (24, 16), (32, 32), (40, 32)])
    def test_hit_that_ends_inside_a_block_is_cut_to_whole_blocks(
        self, llama, store, prompt, shared, loaded
    ):
        cache = PrefixCache(llama, store)
        cache.generate(prompt(64), **GREEDY)
        other = prompt(64).clone()
        other[:, shared:] = 256 - other[:, shared:]
        assert torch.equal(cache.generate(other, **GREEDY), plain(llama, other))
        assert cache.last.loaded_tokens == loaded
        assert cache.last.reason is Outcome.ABSENT

    def test_second_turn_hits_the_blocks_of_the_first_answer(self, llama, store, prompt):
        cache = PrefixCache(llama, store)
        first = cache.generate(prompt(40), **GREEDY)
        assert first.shape == (1, 64)
        # Tokens 0..62 have KV: two blocks of the prompt, and one of its end and the answer.
        assert cache.last.stored_blocks == 3

        second = torch.cat([first, prompt(20, seed=2)], dim=1)
        assert torch.equal(cache.generate(second, **GREEDY), plain(llama, second))
        assert counts(cache.last) == (84, 48, 36, 3)
        assert cache.last.loaded_bytes == 48 * cache.namespace.layout.bytes_per_token

    def test_sampling_with_a_seed_draws_the_same_tokens(self, llama, store, prompt):
        arguments = {"do_sample": True, "top_k": 20, "max_new_tokens": NEW_TOKENS}
        cache = PrefixCache(llama, store)
        answers = []
        for generate in (llama.generate, cache.generate, cache.generate):
            torch.manual_seed(7)
            answers.append(generate(prompt(40), **arguments))
        assert torch.equal(answers[0], answers[1])
        assert torch.equal(answers[0], answers[2])
        assert cache.last.loaded_tokens == 32

    def test_scores_and_config_objects_pass_through(self, llama, store, prompt):
        cache = PrefixCache(llama, store)
        cache.generate(prompt(40), **GREEDY)
        config = transformers.GenerationConfig(
            **GREEDY, return_dict_in_generate=True, output_logits=True
        )
        mask = torch.ones_like(prompt(40))
        arguments = {"generation_config": config, "attention_mask": mask}
        expected = llama.generate(prompt(40), **arguments)
        output = cache.generate(prompt(40), **arguments)
        assert torch.equal(output.sequences, expected.sequences)
        torch.testing.assert_close(torch.cat(output.logits), torch.cat(expected.logits))
        assert cache.last.loaded_tokens == 32

    @pytest.mark.parametrize(
        "arguments",
        [
            {"guidance_scale": 1.7},
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            {"min_new_tokens": 12, "eos_token_id": 3, "suppress_tokens": [5, 6]},
            {"prefix_allowed_tokens_fn": lambda *_: list(range(40, 90))},
            {"do_sample": True, "typical_p": 0.7, "watermarking_config": WatermarkingConfig()},
            {"max_length": 60, "max_new_tokens": None},
        ],
        ids=lambda arguments: next(iter(arguments)),
    )
    def test_other_settings_of_generate(self, llama, store, prompt, arguments):
        cache = PrefixCache(llama, store)
        check_cold_and_warm(llama, cache, prompt(40), loaded=32, **arguments)

    @pytest.mark.parametrize("block_tokens", [1, 5, 64])
    def test_any_block_size(self, llama, store, prompt, block_tokens):
        cache = PrefixCache(llama, store, block_tokens=block_tokens)
        expected = plain(llama, prompt(70))
        for loaded in (0, 69 // block_tokens * block_tokens):
            assert torch.equal(cache.generate(prompt(70), **GREEDY), expected)
            assert cache.last.loaded_tokens == loaded

    def test_bytes_under_a_key_are_what_the_model_reads(self, llama, store, prompt):
        """Loading is real: wrong bytes, put under the right keys, change the answer."""
        cache = PrefixCache(llama, store)
        keys = cache.namespace.keys(prompt(32)[0])
        block_bytes = cache.namespace.layout.bytes_per_block(BLOCK)
        with store.session(cache.namespace) as session:
            assert session.put(keys, [bytes(block_bytes)] * 2) == [Outcome.OK] * 2
        output = cache.generate(prompt(40), **GREEDY)
        assert cache.last.loaded_tokens == 32
        assert not torch.equal(output, plain(llama, prompt(40)))

    def test_a_block_has_the_declared_order(self, llama, store, prompt):
        """layer, key or value, head, token, dim: read with the model's own cache beside it."""
        cache = PrefixCache(llama, store)
        cache.generate(prompt(40), **GREEDY)
        with torch.no_grad():
            own = llama(prompt(40), use_cache=True)[CACHE_ARGUMENT]
        keys = cache.namespace.keys(prompt(32)[0])
        block = torch.empty(3, 2, 2, BLOCK, 16)
        with store.session(cache.namespace) as session, session.lease(keys) as lease:
            assert lease.blocks == 2
            assert lease.copy_into([torch.empty_like(block), block]) == [Outcome.OK] * 2
        for layer, (key, value) in zip(own.layers, block, strict=True):
            torch.testing.assert_close(key, layer.keys[0, :, BLOCK : 2 * BLOCK])
            torch.testing.assert_close(value, layer.values[0, :, BLOCK : 2 * BLOCK])


class TestCallersCache:
    def own_cache(self, model, input_ids):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids, **{CACHE_ARGUMENT: cache})
        return cache

    def test_it_is_used_and_neither_grown_nor_stored(self, llama, store, prompt):
        own = self.own_cache(llama, prompt(20))
        before = [(layer.keys.clone(), layer.values.clone()) for layer in own.layers]
        cache = PrefixCache(llama, store)
        output = cache.generate(prompt(40), cache=own, **GREEDY)
        assert torch.equal(output, plain(llama, prompt(40)))
        assert own.get_seq_length() == 20
        for layer, (keys, values) in zip(own.layers, before, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
        assert cache.last.from_caller
        assert (cache.last.loaded_tokens, cache.last.stored_blocks) == (0, 0)
        assert store.check().ready_blocks == 0

    def test_what_it_holds_decides_the_answer(self, llama, store, prompt):
        """Proof that the copy is what generate reads: KV of another prompt gives other tokens."""
        own = self.own_cache(llama, prompt(20, seed=3))
        output = PrefixCache(llama, store).generate(prompt(40), cache=own, **GREEDY)
        assert not torch.equal(output, plain(llama, prompt(40)))

    def test_an_empty_one_is_no_obstacle(self, llama, store, prompt):
        cache = PrefixCache(llama, store)
        for loaded in (0, 32):
            own = transformers.DynamicCache()
            output = cache.generate(prompt(40), past_key_values=own, **GREEDY)
            assert torch.equal(output, plain(llama, prompt(40)))
            assert own.get_seq_length() == 0
            assert cache.last.loaded_tokens == loaded


class TestStreaming:
    def test_nothing_is_stored_before_the_first_token_and_blocks_as_they_fill(
        self, llama, store, prompt
    ):
        cache = PrefixCache(llama, store)
        keys: list[BlockKey] = []
        seen: list[Any] = []

        class Watch(BaseStreamer):
            def put(self, value):
                tokens = value.reshape(-1).tolist()
                with store.session(cache.namespace) as session:
                    blocks = session.match(keys).blocks if keys else 0
                seen.append((tokens, blocks))

            def end(self):
                seen.append("end")

        expected = plain(llama, prompt(40))
        keys += cache.namespace.keys(expected[0])
        cache.generate(prompt(40), streamer=Watch(), **GREEDY)
        assert seen[0] == (prompt(40)[0].tolist(), 0)
        assert [tokens for tokens, _ in seen[1:-1]] == [[t] for t in expected[0, 40:].tolist()]
        # With token n of the answer in hand, the cache has 40 + n - 1 tokens, and what is full is
        # stored after this look: two blocks with the first token, the third with the ninth.
        assert [blocks for _, blocks in seen[1:-1]] == [0] + [2] * 8 + [3] * 15
        assert seen[-1] == "end"

    def test_an_exception_keeps_what_was_stored_and_holds_nothing(self, llama, store, prompt):
        class Cancelled(Exception):
            pass

        class Cancel(BaseStreamer):
            def __init__(self, after):
                self.left = after

            def put(self, value):
                if self.left == 0:
                    raise Cancelled
                self.left -= 1

            def end(self):
                pass

        cache = PrefixCache(llama, store)
        with pytest.raises(Cancelled):
            cache.generate(prompt(40), streamer=Cancel(1), **GREEDY)  # in the first token's hands
        assert counts(cache.last) == (40, 0, 40, 0)
        with pytest.raises(Cancelled):
            cache.generate(prompt(40), streamer=Cancel(5), **GREEDY)
        assert counts(cache.last) == (40, 0, 40, 2)
        audit = store.check()
        assert (audit.leases, audit.reservations, audit.ready_blocks) == (0, 0, 2)
        assert torch.equal(cache.generate(prompt(40), **GREEDY), plain(llama, prompt(40)))
        assert cache.last.loaded_tokens == 32
