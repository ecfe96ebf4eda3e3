"""Several answers to a prompt: `num_return_sequences`, and beam search with its forked beams."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache, GenerationConfig, LogitsProcessor  # noqa: E402

from kvstore.connectors.transformers import PrefixCache, prefix_cache  # noqa: E402
from kvstore.connectors.transformers.caches import CACHE_ARGUMENT, FollowedCache  # noqa: E402
from kvstore.types import Outcome  # noqa: E402
from tests.e2e.reference import (  # noqa: E402
    BLOCK,
    GREEDY,
    batch,
    check_blocks,
    check_cold_and_warm,
    check_same,
    stored_blocks,
    texts,
)

BEAMS = {"num_beams": 3, "max_new_tokens": 40}


@pytest.fixture
def cache(llama, store):
    return PrefixCache(llama, store)


def distinct_blocks(cache, rows):
    """How many blocks the rows have whose tokens all have KV: all but the last token of each."""
    return len({key for row in rows for key in cache.namespace.keys(row[:-1])})


class TestSeveralAnswers:
    def test_each_is_what_generate_draws(self, llama, store, cache, prompt):
        arguments = {"do_sample": True, "top_k": 20, "num_return_sequences": 3}
        sequences = check_cold_and_warm(llama, cache, prompt(40), loaded=32, **arguments)
        assert len({tuple(row) for row in sequences.tolist()}) == 3
        for row in sequences.tolist():
            assert check_blocks(llama, cache, store, row) == [3]

    def test_the_prompt_is_stored_once(self, llama, cache, prompt):
        arguments = {"do_sample": True, "num_return_sequences": 3}
        rows = check_same(llama, cache, prompt(40), **arguments).tolist()
        assert cache.last.put_outcomes == {Outcome.OK: distinct_blocks(cache, rows)}
        assert distinct_blocks(cache, rows) == 2 + 3

    def test_in_a_batch(self, llama, store, cache, prompt):
        arguments = batch(prompt(40), prompt(50, seed=2))
        sampling = {"do_sample": True, "num_return_sequences": 2}
        sequences = check_cold_and_warm(llama, cache, **arguments, **sampling, loaded=32 + 42)
        for row in texts(arguments, sequences):
            check_blocks(llama, cache, store, row)


class TestBeamSearch:
    @pytest.mark.parametrize("answers", [1, 3])
    @pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sampling"])
    def test_answers_are_those_of_generate(self, llama, cache, prompt, answers, do_sample):
        arguments = {**BEAMS, "do_sample": do_sample, "num_return_sequences": answers}
        check_cold_and_warm(llama, cache, prompt(40), loaded=32, **arguments)

    def test_a_padded_batch(self, llama, store, cache, prompt):
        arguments = batch(prompt(40), prompt(50, seed=2), prompt(3, seed=3))
        arguments |= {**BEAMS, "num_return_sequences": 2}
        # The row of three tokens has none to load, and a padding of 47.
        sequences = check_cold_and_warm(llama, cache, **arguments, loaded=32 + 42)
        for row in texts(arguments, sequences):
            assert check_blocks(llama, cache, store, row) == [(len(row) - 1) // BLOCK]

    def test_scores_are_those_of_generate(self, llama, cache, prompt):
        arguments = {
            **BEAMS,
            "return_dict_in_generate": True,
            "output_scores": True,
            "num_return_sequences": 3,
        }
        expected = llama.generate(prompt(40), **arguments)
        for _ in range(2):
            output = cache.generate(prompt(40), **arguments)
            torch.testing.assert_close(output.sequences_scores, expected.sequences_scores)
            assert torch.equal(output.beam_indices, expected.beam_indices)

    def test_only_blocks_of_answers_are_stored_and_each_once(self, llama, store, cache, prompt):
        sequences = check_same(llama, cache, prompt(40), **BEAMS, num_return_sequences=3)
        rows = sequences.tolist()
        assert cache.last.put_outcomes == {Outcome.OK: distinct_blocks(cache, rows)}
        assert store.check().ready_blocks == distinct_blocks(cache, rows)
        for row in rows:
            assert check_blocks(llama, cache, store, row) == [79 // BLOCK]

    def test_a_beam_that_loses_leaves_nothing(self, llama, store, cache, prompt):
        rows = check_same(llama, cache, prompt(40), **BEAMS).tolist()
        assert store.check().ready_blocks == distinct_blocks(cache, rows) == 79 // BLOCK

    def test_blocks_of_all_beams_are_stored_as_they_fill(self, llama, cache, prompt, store):
        seen: list[int] = []

        class Look(LogitsProcessor):
            def __call__(self, input_ids, scores):
                seen.append(store.check().ready_blocks)
                return scores

        cache.generate(prompt(40), **BEAMS, do_sample=False, logits_processor=[Look()])
        # The caller's processor comes first: the prompt's blocks are there from the second on.
        assert seen[:2] == [0, 2]
        assert 2 < seen[-1] <= 79 // BLOCK

    @pytest.mark.parametrize("early_stopping", [False, True])
    def test_answers_that_end_early(self, llama, store, cache, prompt, early_stopping):
        arguments = {
            **batch(prompt(40), prompt(50, seed=2)),
            **BEAMS,
            "eos_token_id": list(range(1, 30)),
            "num_return_sequences": 2,
            "early_stopping": early_stopping,
        }
        sequences = check_cold_and_warm(llama, cache, **arguments, loaded=32 + 42)
        assert (sequences[:, 50:-1] < 30).any()
        for row in texts(arguments, sequences):
            check_blocks(llama, cache, store, row)

    def test_the_next_turn_goes_on_from_the_answer(self, llama, cache, prompt):
        answer = cache.generate(prompt(40), **BEAMS, do_sample=False)
        question = torch.cat([answer, prompt(20, seed=2)], dim=1)
        check_same(llama, cache, question)
        assert cache.last.loaded_tokens == 79 // BLOCK * BLOCK

    def test_the_cache_that_is_returned_can_be_given_back(self, llama, cache, prompt):
        arguments = {**GREEDY, "return_dict_in_generate": True, "num_beams": 2}
        output = cache.generate(prompt(40), **arguments)
        own = output[CACHE_ARGUMENT]
        assert isinstance(own, FollowedCache)
        assert own.on_reorder is None
        assert own.get_seq_length() == 63
        single = cache.generate(prompt(40), **{**arguments, "num_beams": 1})
        longer = torch.cat([single.sequences, prompt(5, seed=2)], dim=1)
        again = cache.generate(longer, **{CACHE_ARGUMENT: single[CACHE_ARGUMENT]}, **GREEDY)
        assert torch.equal(again, llama.generate(longer, **GREEDY))
        assert cache.last.from_caller

    def test_the_models_own_settings_count(self, llama, store, prompt):
        model = copy.deepcopy(llama)
        model.generation_config.num_beams = 3
        model.generation_config.num_return_sequences = 2
        cache = PrefixCache(model, store)
        config = GenerationConfig(max_new_tokens=12)
        expected = model.generate(prompt(40), generation_config=config)
        for loaded in (0, 32):
            assert torch.equal(cache.generate(prompt(40), generation_config=config), expected)
            assert cache.last.loaded_tokens == loaded
        assert len(expected) == 2

    def test_a_last_step_that_is_not_the_last(self, llama, store, cache, prompt, monkeypatch):
        """The rows of the step before are no longer those of the cache: nothing more is stored."""
        monkeypatch.setattr(prefix_cache, "read_columns_max", lambda *_: 50)
        sequences = check_same(llama, cache, prompt(40), **BEAMS)
        assert cache.last.put_outcomes[Outcome.INCOMPATIBLE] == 1
        assert stored_blocks(cache, store, sequences[0].tolist()) in (2, 3)
        check_blocks(llama, cache, store, sequences[0].tolist())

    def test_rows_that_move_unseen_are_not_stored(self, llama, store, cache, prompt, monkeypatch):
        """Whatever a version of transformers may do: no wrong block is left behind."""
        monkeypatch.setattr(FollowedCache, "reorder_cache", DynamicCache.reorder_cache)
        sequences = check_same(llama, cache, prompt(40), **BEAMS)
        assert cache.last.put_outcomes[Outcome.INCOMPATIBLE] == 1
        assert stored_blocks(cache, store, sequences[0].tolist()) == 2
        check_blocks(llama, cache, store, sequences[0].tolist())
        assert store.check().ready_blocks == 2
