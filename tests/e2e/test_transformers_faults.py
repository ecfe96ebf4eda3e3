"""The transformers connector where the store fails, and where a call or a model is refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

import kvstore
from kvstore.client.session import Session
from kvstore.clock import FakeClock
from kvstore.errors import InvalidNamespace, InvalidTokens, TierError, UnsupportedCache
from kvstore.types import Outcome

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.generation.streamers import BaseStreamer  # noqa: E402

from kvstore.connectors.transformers import PrefixCache, geometry  # noqa: E402
from kvstore.cuda import host_copy  # noqa: E402

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture
def expected(llama, prompt):
    return llama.generate(prompt(40), **GREEDY)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "kvstore")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture(scope="module")
def wide(build, llama_settings):
    """12 KiB of KV per token."""
    return build(llama_settings(4, head_dim=128))


@pytest.fixture
def five_blocks():
    """The smallest store there is, with room for five blocks of `wide`."""
    with kvstore.open(dram_capacity_bytes="1MiB") as store:
        yield store


class TestFaults:
    def test_a_deleted_prefix_is_computed_again(self, llama, store, prompt, expected, warnings):
        cache = PrefixCache(llama, store)
        cache.generate(prompt(40), **GREEDY)
        with store.session(cache.namespace) as session:
            session.delete(cache.namespace.keys(prompt(40)[0]))
        assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
        assert cache.last.loaded_tokens == 0
        assert cache.last.reason is Outcome.ABSENT  # deleted, not evicted
        assert cache.last.stored_blocks == 2  # the third, of the answer, was not deleted
        assert warnings() == []

    def test_an_evicted_prefix_is_computed_again(self, wide, five_blocks, prompt, warnings):
        cache = PrefixCache(wide, five_blocks)
        cache.generate(prompt(40), **GREEDY)
        cache.generate(prompt(60, seed=2), **GREEDY)  # five blocks
        output = cache.generate(prompt(40), **GREEDY)
        assert torch.equal(output, wide.generate(prompt(40), **GREEDY))
        assert cache.last.loaded_tokens == 0
        assert cache.last.reason is Outcome.EVICTED
        assert cache.misses[Outcome.EVICTED] > 0
        five_blocks.check()
        assert warnings() == []

    def test_a_store_that_is_too_small_keeps_what_fits(self, wide, five_blocks, prompt, warnings):
        cache = PrefixCache(wide, five_blocks)
        expected = wide.generate(prompt(100), **GREEDY)
        for loaded, reason in ((0, Outcome.ABSENT), (32, Outcome.BUSY), (32, Outcome.BUSY)):
            assert torch.equal(cache.generate(prompt(100), **GREEDY), expected)
            # Five blocks are stored, but at most half of a tier is leased at a time.
            assert (cache.last.loaded_tokens, cache.last.reason) == (loaded, reason)
            assert cache.last.put_outcomes[Outcome.FULL] > 0
        five_blocks.check()
        assert [message.split(".")[0] for message in warnings()] == [
            "Blocks not stored: full",
            "Prefix not loaded: busy",
        ]

    def test_a_closed_store_costs_hits_and_one_warning(
        self, llama, store, prompt, expected, warnings
    ):
        with kvstore.open(dram_capacity_bytes="1MiB") as closed:
            cache = PrefixCache(llama, closed)
            cache.generate(prompt(40), **GREEDY)
        for _ in range(3):
            assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
            assert (cache.last.loaded_tokens, cache.last.reason) == (0, Outcome.UNAVAILABLE)
        assert (
            cache.misses[Outcome.UNAVAILABLE] == 3 * 2
        )  # to load; a closed store is offered nothing
        assert ["unavailable" in message for message in warnings()] == [True]

    def test_a_store_that_closes_in_the_middle(self, llama, prompt, expected, warnings):
        store = kvstore.open(dram_capacity_bytes="1MiB")
        cache = PrefixCache(llama, store)

        class Close(BaseStreamer):
            left = 5  # the prompt, then tokens: two blocks are stored, the third is not

            def put(self, value):
                self.left -= 1
                if self.left == 0:
                    store.close()

            def end(self):
                pass

        assert torch.equal(cache.generate(prompt(40), streamer=Close(), **GREEDY), expected)
        assert cache.last.put_outcomes == {Outcome.OK: 2, Outcome.UNAVAILABLE: 1}
        assert len(warnings()) == 1

    @pytest.mark.parametrize("work", ["lease", "reserve"])
    def test_a_broken_tier_is_a_miss(
        self, llama, store, prompt, expected, warnings, monkeypatch, work
    ):
        cache = PrefixCache(llama, store)

        def broken(*_, **__):
            raise TierError("gone")

        monkeypatch.setattr(Session, work, broken)
        assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
        assert cache.last.loaded_tokens == 0
        assert len(warnings()) == 1

    def test_bytes_read_under_an_expired_lease_are_discarded(
        self, llama, prompt, expected, warnings, monkeypatch
    ):
        clock = FakeClock()
        with kvstore.open(dram_capacity_bytes="1MiB", clock=clock) as store:
            cache = PrefixCache(llama, store)
            cache.generate(prompt(40), **GREEDY)

            def slow(views, prefix):
                host_copy_load_blocks(views, prefix)
                prefix.zero_()  # what another writer might have left there
                clock.advance(3_600)

            host_copy_load_blocks = host_copy.load_blocks
            monkeypatch.setattr(host_copy, "load_blocks", slow)
            assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
            assert (cache.last.loaded_tokens, cache.last.reason) == (0, Outcome.EXPIRED)
            audit = store.check()
            assert (audit.leases, audit.reservations) == (0, 0)
        assert ["expired" in message for message in warnings()] == [True]

    def test_a_late_commit_stores_nothing(self, llama, prompt, expected, warnings, monkeypatch):
        clock = FakeClock()
        with kvstore.open(dram_capacity_bytes="1MiB", clock=clock) as store:
            cache = PrefixCache(llama, store)

            def slow(*_):
                clock.advance(3_600)

            monkeypatch.setattr(host_copy, "store_blocks", slow)
            assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
            assert cache.last.put_outcomes == {Outcome.EXPIRED: 2}
            audit = store.check()
            assert audit.free_bytes == audit.capacity_bytes  # nothing is held for a late writer
        assert len(warnings()) == 1

    def test_a_cache_that_is_not_of_these_tokens_is_not_stored(
        self, llama, store, prompt, warnings, monkeypatch
    ):
        """Whatever a version of transformers may do to the cache: no wrong block is left behind."""
        cache = PrefixCache(llama, store)
        made: Any = geometry.empty_cache(llama)
        monkeypatch.setattr(geometry, "empty_cache", lambda _: made)

        class Disturb(BaseStreamer):
            def put(self, value):
                for layer in made.layers if value.numel() == 1 else []:
                    layer.update(layer.keys[:, :, :2], layer.values[:, :, :2])

            def end(self):
                pass

        cache.generate(prompt(40), streamer=Disturb(), **GREEDY)
        assert cache.last.put_outcomes == {Outcome.INCOMPATIBLE: 2}
        assert store.check().ready_blocks == 0
        assert len(warnings()) == 1

    def test_programming_errors_are_raised(self, llama, store, prompt, monkeypatch):
        with pytest.raises(InvalidNamespace):
            PrefixCache(llama, store, block_tokens=0)
        with pytest.raises(TypeError, match=r"expected a tensor of shape \[1, tokens\]"):
            PrefixCache(llama, store).generate([[1, 2]])  # type: ignore[arg-type]
        for swapped in ((store, llama), (type(llama), store), (None, store)):
            with pytest.raises(TypeError, match=r"^model is .*: expected a transformers model"):
                PrefixCache(*swapped)
        for wrong in (3, None, type(store), "8GiB"):
            with pytest.raises(TypeError, match=r"^store is .*: expected an open store"):
                PrefixCache(llama, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"got \[3\]"):
            PrefixCache(llama, store).generate(torch.tensor([1, 2, 3]))
        with pytest.raises(InvalidTokens):
            PrefixCache(llama, store).generate(prompt(40) - 300)


def refused(model, match, **arguments):
    with (
        kvstore.open(dram_capacity_bytes="1MiB") as store,
        pytest.raises(UnsupportedCache, match=match),
    ):
        PrefixCache(model, store, **arguments)


class TestRefusedModels:
    def test_encoder_decoder(self, llama):
        config = transformers.T5Config(
            d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2, vocab_size=64
        )
        model = transformers.T5ForConditionalGeneration(config).eval()
        refused(model, "T5ForConditionalGeneration is an encoder-decoder model")

    def test_sliding_window(self, build):
        config = transformers.MistralConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            sliding_window=8,
        )
        refused(build(config), "0: DynamicSlidingWindowLayer, 1: DynamicSlidingWindowLayer.*2 in")

    def test_state_space(self, build):
        config = transformers.MambaConfig(
            hidden_size=32, state_size=4, num_hidden_layers=1, vocab_size=64
        )
        refused(build(config), "0: LinearAttentionLayer|keeps a state")

    def test_latents_and_other_keys_and_values_of_different_dims(self, build):
        config = transformers.DeepseekV3Config(
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            first_k_dense_replace=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=None,
            kv_lora_rank=12,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            vocab_size=64,
        )
        refused(build(config), r"layer 0: keys \[1, \d, 1, \d+\], values \[1, \d, 1, 8\]; supp")

    @pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
    def test_rope_that_depends_on_the_length(self, build, llama_settings, rope_type):
        rope = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 2.0}
        if rope_type == "longrope":
            rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
            rope |= {"original_max_position_embeddings": 64}
        refused(build(llama_settings(rope_parameters=rope)), f"RoPE of type '{rope_type}'")

    def test_several_devices(self, llama):
        model = copy.deepcopy(llama)
        model.lm_head.to("meta")
        refused(model, "the model lies on cpu, meta; supported: one device")

    def test_an_adapter_that_nobody_named(self, llama, store):
        model = copy.deepcopy(llama)
        model.peft_config = {"default": object()}
        refused(model, "a PEFT adapter is loaded")
        PrefixCache(model, store, adapter=bytes(32))

    def test_quantised_weights_without_a_fingerprint(self, llama, store):
        model = copy.deepcopy(llama)
        model.config.quantization_config = {"quant_method": "other"}
        refused(model, "pass fingerprint=")
        PrefixCache(model, store, fingerprint="revision 1")


def foreign_cache():
    return transformers.StaticCache(config=transformers.LlamaConfig(), max_cache_len=8)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"input_ids": torch.ones(2, 8, dtype=torch.long)}, "a batch of 2 sequences"),
    "padding": ({"attention_mask": torch.tensor([[0] + [1] * 7])}, "attention_mask hides tokens"),
    "pad token": ({"pad_token_id": 1}, "the prompt has the pad token 1 and no attention_mask"),
    "beams": ({"num_beams": 2}, "num_beams=2; supported: 1"),
    "answers": ({"num_return_sequences": 2}, "num_return_sequences=2; supported: 1"),
    "no cache": ({"use_cache": False}, "use_cache=False; supported: True"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3; supported: not set"),
    "assistant": ({"assistant_model": object()}, "assistant_model is given"),
    "own loop": ({"custom_generate": print}, "custom_generate is given"),
    "healing": ({"token_healing": True}, "token_healing=True"),
    "prefill in pieces": ({"prefill_chunk_size": 4}, "prefill_chunk_size=4; supported: not set"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states=True"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 8, 64)}, "model input 'inputs_embeds'"),
    "positions": ({"position_ids": torch.arange(8)[None]}, "model input 'position_ids'"),
    "image": ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "model input 'pixel_values'"),
    "other cache": ({"past_key_values": foreign_cache()}, "is a StaticCache; supported: a plain"),
    "offloading": (
        {"cache": transformers.DynamicCache(offloading=True)},
        "is a DynamicCache that offloads",
    ),
    "two caches": (
        {"cache": transformers.DynamicCache(), "past_key_values": transformers.DynamicCache()},
        "both cache and past_key_values",
    ),
}


class TestRefusedCalls:
    @pytest.mark.parametrize("name", CALLS)
    def test_reason_names_what_was_found(self, llama, store, name):
        arguments, match = CALLS[name]
        arguments = {"input_ids": torch.ones(1, 8, dtype=torch.long), **arguments}
        cache = PrefixCache(llama, store)
        with pytest.raises(UnsupportedCache, match=match):
            cache.generate(arguments.pop("input_ids"), **arguments, **GREEDY)
        assert cache.last.prompt_tokens == 0

    def test_settings_of_the_config_and_of_the_model_count(self, llama, store, prompt):
        config = transformers.GenerationConfig(num_beams=3, max_new_tokens=4)
        with pytest.raises(UnsupportedCache, match="num_beams=3"):
            PrefixCache(llama, store).generate(prompt(20), generation_config=config)
        model = copy.deepcopy(llama)
        model.generation_config.cache_implementation = "static"
        with pytest.raises(UnsupportedCache, match="cache_implementation='static'"):
            PrefixCache(model, store).generate(prompt(20), **GREEDY)

    def test_training_mode(self, llama, store, prompt):
        model = copy.deepcopy(llama)
        cache = PrefixCache(model, store)
        model.train()
        with pytest.raises(UnsupportedCache, match="training mode"):
            cache.generate(prompt(20), **GREEDY)

    def test_a_model_that_was_converted_since(self, llama, store, prompt):
        model = copy.deepcopy(llama)
        cache = PrefixCache(model, store)
        model.to(torch.bfloat16)
        with pytest.raises(UnsupportedCache, match=r"was torch.float32 on cpu and is now torch.bf"):
            cache.generate(prompt(20), **GREEDY)

    def test_autocast(self, llama, store, prompt):
        cache = PrefixCache(llama, store)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(UnsupportedCache, match="autocast is on"),
        ):
            cache.generate(prompt(20), **GREEDY)

    def test_a_pad_token_is_a_token_where_a_mask_says_so(self, llama, store):
        input_ids = torch.ones(1, 20, dtype=torch.long)
        arguments = {**GREEDY, "pad_token_id": 1, "attention_mask": torch.ones_like(input_ids)}
        output = PrefixCache(llama, store).generate(input_ids, **arguments)
        assert torch.equal(output, llama.generate(input_ids, **arguments))
