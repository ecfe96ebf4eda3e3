"""Batches: rows of different lengths, padded on the left, each matched, loaded and stored alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import StoppingCriteria  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from kvstore.connectors.transformers import PrefixCache  # noqa: E402
from kvstore.cuda import host_copy  # noqa: E402
from kvstore.errors import UnsupportedCache  # noqa: E402
from kvstore.types import Outcome  # noqa: E402
from tests.e2e.reference import (  # noqa: E402
    BLOCK,
    GREEDY,
    batch,
    check_blocks,
    check_cold_and_warm,
    check_same,
    plain,
    stored_blocks,
    texts,
)


@pytest.fixture
def rows(prompt):
    """Rows of other beginnings and lengths, of which 16 is one block and 17 leaves one to load."""
    return [prompt(tokens, seed=tokens) for tokens in (40, 17, 64, 1, 16)]


@pytest.fixture
def cache(llama, store):
    return PrefixCache(llama, store)


class TestReuse:
    def test_cold_and_warm_say_what_generate_says(self, llama, store, cache, rows):
        arguments = batch(*rows)
        # The row of 16 tokens has none to load, and ends at its padding of 48.
        loaded = (48 - 24) + (48 - 47) + 48
        sequences = check_cold_and_warm(llama, cache, **arguments, loaded=loaded)
        for text in texts(arguments, sequences):
            # All tokens but the last one have KV.
            assert check_blocks(llama, cache, store, text) == [(len(text) - 1) // BLOCK]

    @pytest.mark.parametrize(
        ("lengths", "stored", "columns"),
        [
            ((40, 40), (32, 32), 32),
            ((40, 64), (32, 48), 48),  # row 0 ends at column 24 + 32, row 1 at 48
            ((40, 64), (16, 48), 40),  # row 0 ends at 24 + 16: row 1 uses half a block
            ((40, 64), (32, 16), 16),  # nothing of row 0, whose padding is 24
            ((64, 40), (48, 0), 24),  # nothing of row 1, so its padding is all
            ((64, 64), (48, 0), 0),
            ((16, 64), (16, 48), 48),  # never the last token: row 0 has 15 tokens to load
            ((33, 50, 64), (32, 48, 16), 16),
            ((33, 50, 64), (16, 32, 48), 46),
        ],
    )
    def test_loads_up_to_the_column_where_the_first_row_ends(
        self, llama, cache, prompt, lengths, stored, columns
    ):
        rows = [prompt(length, seed) for seed, length in enumerate(lengths)]
        for row, tokens in zip(rows, stored, strict=True):
            if tokens:
                cache.generate(row[:, :tokens], max_new_tokens=1, do_sample=False)
        check_same(llama, cache, **batch(*rows))
        loaded = [max(0, columns - max(lengths) + length) for length in lengths]
        assert cache.last.loaded_tokens == sum(loaded)
        assert cache.last.prompt_tokens == sum(lengths)
        blocks = sum(-(-tokens // BLOCK) for tokens in loaded)
        assert cache.last.loaded_bytes == blocks * cache.namespace.layout.bytes_per_block(BLOCK)

    def test_a_row_has_the_same_blocks_alone(self, llama, cache, rows):
        arguments = batch(*rows)
        sequences = cache.generate(**arguments, **GREEDY)
        for text in texts(arguments, sequences):
            alone = torch.tensor([text])
            check_same(llama, cache, alone)
            assert cache.last.loaded_tokens == (len(text) - 1) // BLOCK * BLOCK
            assert cache.last.reason is None

    def test_rows_alone_serve_a_batch(self, llama, cache, rows):
        for row in rows:
            cache.generate(row, **GREEDY)
        check_same(llama, cache, **batch(*rows))
        # The row of 16 tokens has none to load, and a padding of 48.
        assert cache.last.loaded_tokens == (48 - 24) + (48 - 47) + 48
        check_same(llama, cache, **batch(rows[0], rows[2]))
        assert cache.last.loaded_tokens == 24 + 48

    @pytest.mark.parametrize("block_tokens", [1, 7])
    def test_any_block_size(self, llama, store, rows, block_tokens):
        cache = PrefixCache(llama, store, block_tokens=block_tokens)
        for _ in range(2):
            check_same(llama, cache, **batch(*rows))
        assert cache.last.loaded_tokens > 0

    def test_sampling_draws_the_same_tokens(self, llama, cache, rows):
        for _ in range(2):
            check_same(llama, cache, **batch(*rows[:3]), do_sample=True, top_k=20)
        assert cache.last.loaded_tokens > 0

    def test_wrong_bytes_of_one_row_change_that_row(self, llama, store, cache, prompt):
        """Loading is real, and each row reads its own blocks."""
        rows = [prompt(40), prompt(50, seed=2)]
        keys = cache.namespace.keys(rows[1][0])
        with store.session(cache.namespace) as session:
            size = cache.namespace.layout.bytes_per_block(BLOCK)
            assert session.put(keys[:2], [bytes(size)] * 2) == [Outcome.OK] * 2
        cache.generate(rows[0], **GREEDY)
        arguments = batch(*rows)
        expected = plain(llama, **arguments)
        output = cache.generate(**arguments, **GREEDY)
        assert cache.last.loaded_tokens == (32 - 10) + 32
        assert torch.equal(output[0], expected[0])
        assert not torch.equal(output[1], expected[1])


class TestSharing:
    @pytest.fixture
    def views_read(self, monkeypatch):
        """How many blocks were read from the store, in all calls."""
        seen: list[memoryview] = []
        load_blocks = host_copy.load_blocks

        def load(views, spots, prefix):
            seen.extend(views)
            load_blocks(views, spots, prefix)

        monkeypatch.setattr(host_copy, "load_blocks", load)
        return seen

    def test_rows_of_one_prefix_load_and_store_it_once(self, llama, cache, prompt, views_read):
        system = prompt(48)
        rows = [torch.cat([system, prompt(12, seed)], dim=1) for seed in (2, 3, 4)]
        sequences = check_same(llama, cache, **batch(*rows))
        own = (60 + 24 - 1) // BLOCK - 3
        assert cache.last.put_outcomes == {Outcome.OK: 3 + 3 * own}
        assert cache.last.stored_bytes == sum(cache.last.put_outcomes.values()) * (
            cache.namespace.layout.bytes_per_block(BLOCK)
        )
        assert len(sequences) == 3

        check_same(llama, cache, **batch(*rows))
        assert cache.last.loaded_tokens == 3 * 48
        assert len(views_read) == 3
        assert cache.last.loaded_bytes == 3 * cache.namespace.layout.bytes_per_block(BLOCK)

    def test_equal_rows_are_one_sequence(self, llama, cache, prompt, views_read):
        rows = [prompt(40)] * 3
        check_same(llama, cache, **batch(*rows))
        assert cache.last.put_outcomes == {Outcome.OK: 3}
        check_same(llama, cache, **batch(*rows))
        assert (cache.last.loaded_tokens, len(views_read)) == (3 * 32, 2)
        assert cache.last.put_outcomes == {Outcome.PRESENT: 1}  # of the answer, offered once

    def test_a_prefix_at_another_padding_is_the_same(self, llama, cache, prompt, views_read):
        check_same(llama, cache, **batch(prompt(40), prompt(64)))
        # 63 and 87 tokens with KV: three blocks and five, of which the first two are equal.
        assert cache.last.put_outcomes == {Outcome.OK: 6}
        check_same(llama, cache, **batch(prompt(40), prompt(64)))
        assert cache.last.loaded_tokens == (48 - 24) + 48
        assert len(views_read) == 3


class TestFinishedRows:
    def test_nothing_after_the_end_is_stored(self, llama, store, cache, prompt):
        arguments = {**batch(prompt(40), prompt(50, seed=2)), "max_new_tokens": 60}
        never = plain(llama, **arguments)
        end = int(never[0, 55])  # somewhere in the answer of row 0
        sequences = check_same(llama, cache, **arguments, eos_token_id=end)
        first, second = texts(arguments, sequences)
        length = first.index(end, 40) + 1
        assert first[length:] == [0] * (len(first) - length) != []
        assert end not in second[50:]
        # The end itself is text: the next turn's prompt has it.
        assert stored_blocks(cache, store, first) == length // BLOCK
        assert check_blocks(llama, cache, store, second) == [(len(second) - 1) // BLOCK]
        assert store.check().ready_blocks == length // BLOCK + (len(second) - 1) // BLOCK

    def test_a_row_that_a_criterion_of_the_callers_ended(self, llama, store, cache, prompt):
        class Length(StoppingCriteria):
            """Ends row 0 after some tokens, without an end token."""

            def __call__(self, input_ids, scores, **_):
                return torch.tensor([input_ids.shape[1] >= 70, False])

        arguments = {
            **batch(prompt(40), prompt(50, seed=2)),
            "max_new_tokens": 60,
            "eos_token_id": 255,
            "stopping_criteria": [Length()],
        }
        sequences = check_same(llama, cache, **arguments)
        first, _ = texts(arguments, sequences)
        assert first[60:] == [0] * len(first[60:]) != []
        assert stored_blocks(cache, store, first) == 60 // BLOCK


class TestStreaming:
    def test_a_streamer_is_handed_what_generate_hands_it(self, llama, cache, prompt):
        class Collect(BaseStreamer):
            def __init__(self):
                self.seen = []

            def put(self, value):
                self.seen.append(value.clone())

            def end(self):
                self.seen.append("end")

        arguments = batch(prompt(40), prompt(50, seed=2))
        alone, through = Collect(), Collect()
        llama.generate(**arguments, **GREEDY, streamer=alone)
        cache.generate(**arguments, **GREEDY, streamer=through)
        assert len(alone.seen) == len(through.seen) == 26
        for one, other in zip(alone.seen[:-1], through.seen[:-1], strict=True):
            assert torch.equal(one, other)


class TestMasks:
    def test_without_a_mask_the_pad_token_says_it(self, llama, cache, prompt):
        arguments = batch(prompt(40), prompt(50, seed=2))
        del arguments["attention_mask"]
        for _ in range(2):
            check_same(llama, cache, **arguments)
        assert cache.last.loaded_tokens == 32 + 42

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
    def test_a_mask_of_any_dtype(self, llama, cache, prompt, dtype):
        arguments = batch(prompt(40), prompt(50, seed=2))
        arguments["attention_mask"] = arguments["attention_mask"].to(dtype)
        for _ in range(2):
            cache.generate(**arguments, **GREEDY)
        assert cache.last.loaded_tokens > 0

    @pytest.mark.parametrize(
        ("mask", "match"),
        [
            ([[1, 1, 1, 0], [1, 1, 1, 1]], "hides column 3 of row 0 after tokens that are seen"),
            ([[1, 1, 1, 1], [0, 1, 0, 1]], "hides column 2 of row 1 .* padding on the left"),
            ([[0, 0, 0, 0], [1, 1, 1, 1]], "row 0 has no token"),
            ([[1, 1, 1, 1]], r"attention_mask of shape \[1, 4\]; supported: .* \[2, 4\]"),
            ([[0, 1, 1, 2], [1, 1, 1, 1]], "other values than 0 and 1"),
        ],
    )
    def test_what_is_no_left_padding_is_refused(self, cache, mask, match):
        input_ids = torch.ones(2, 4, dtype=torch.long)
        with pytest.raises(UnsupportedCache, match=match):
            cache.generate(input_ids, attention_mask=torch.tensor(mask), **GREEDY)

    def test_a_mask_that_is_no_tensor(self, cache):
        with pytest.raises(TypeError, match="attention_mask: expected a tensor, got list"):
            cache.generate(torch.ones(1, 4, dtype=torch.long), attention_mask=[[1] * 4], **GREEDY)

    def test_a_pad_token_within_a_row_is_refused_without_a_mask(self, cache):
        input_ids = torch.tensor([[5, 0, 7, 8]])
        with pytest.raises(UnsupportedCache, match="the pad token hides column 1 of row 0"):
            cache.generate(input_ids, pad_token_id=0, **GREEDY)

    def test_a_pad_token_is_a_token_where_a_mask_says_so(self, llama, cache):
        input_ids = torch.ones(1, 20, dtype=torch.long)
        mask = torch.ones_like(input_ids)
        check_same(llama, cache, input_ids, pad_token_id=1, attention_mask=mask)
