"""Models and calls that the transformers connector refuses, and how it says so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import UnsupportedCache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.connectors.transformers import PrefixCache, refusals  # noqa: E402
from tests.e2e.conftest import config_of  # noqa: E402
from tests.e2e.reference import GREEDY  # noqa: E402


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

    def test_state_space(self, build):
        config = transformers.MambaConfig(
            hidden_size=32, state_size=4, num_hidden_layers=1, vocab_size=64
        )
        refused(build(config), "0: LinearAttentionLayer|keeps a state")

    def test_hybrid_of_attention_and_state(self, build):
        config = transformers.Qwen3NextConfig(
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            vocab_size=64,
        )
        refused(build(config), "0: LinearAttentionLayer.*1 in all|keeps a state")

    def test_an_index_beside_the_keys(self, build):
        config = config_of(
            "GlmMoeDsaConfig",
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_routed_experts=2,
            num_experts_per_tok=1,
            q_lora_rank=16,
            kv_lora_rank=12,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            index_head_dim=16,
            index_n_heads=1,
            vocab_size=64,
        )
        refused(build(config), "0: DynamicIndexedLayer")

    def test_a_window_of_one_token(self, build, llama_settings):
        config = llama_settings()
        mistral = transformers.MistralConfig(**{**config.to_diff_dict(), "sliding_window": 1})
        refused(build(mistral), "layer 0: a window of 1 tokens; supported: 2 or more")

    def test_attention_to_what_follows(self, build):
        config = transformers.Gemma3TextConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=64,
            use_bidirectional_attention=True,
        )
        refused(build(config), "use_bidirectional_attention: the keys of a prefix change")

    def test_attention_to_what_follows_that_no_config_tells_of(self, llama):
        """A model is asked, too: the keys of a token must not change with the one after it."""
        model = copy.deepcopy(llama)
        attention = model.model.layers[0].self_attn

        def both_ways(*arguments, attention_mask=None, **settings):
            return type(attention).forward(attention, *arguments, attention_mask=None, **settings)

        attention.forward = both_ways
        attention.is_causal = False
        refused(model, "layer 1: the keys or values of a token change with the token after it")

    def test_a_dtype_that_no_layout_has(self, llama):
        refused(copy.deepcopy(llama).double(), "LlamaForCausalLM: dtype='torch.float64': expected")

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
        model.peft_config = {"one": object(), "two": object()}
        refused(model, r"a PEFT adapter is loaded \(one, two\): merge it, or pass adapter=")
        PrefixCache(model, store, adapter=bytes(32))

    def test_an_adapter_before_the_prompt(self, llama):
        class Prompt:
            is_prompt_learning = True

        model = copy.deepcopy(llama)
        model.peft_config = {"one": Prompt()}
        refused(model, "adapter 'one' puts keys and values of its own", adapter=bytes(32))

    def test_quantised_weights_without_a_fingerprint(self, llama, store):
        model = copy.deepcopy(llama)
        model.config.quantization_config = {"quant_method": "other"}
        refused(model, "pass fingerprint=")
        PrefixCache(model, store, fingerprint="revision 1")


def foreign_cache():
    return transformers.StaticCache(config=transformers.LlamaConfig(), max_cache_len=8)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "beam groups": ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups=2|'num_beam_groups'"),
    "constraints": ({"num_beams": 2, "force_words_ids": [[1]]}, "force_words_ids"),
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
        config = transformers.GenerationConfig(use_cache=False, max_new_tokens=4)
        with pytest.raises(UnsupportedCache, match="use_cache=False"):
            PrefixCache(llama, store).generate(prompt(20), generation_config=config)
        model = copy.deepcopy(llama)
        model.generation_config.cache_implementation = "static"
        with pytest.raises(UnsupportedCache, match="cache_implementation='static'"):
            PrefixCache(model, store).generate(prompt(20), **GREEDY)

    def test_every_refused_setting_is_documented(self):
        path = Path(__file__).resolve().parents[2] / "docs/transformers.md"
        document = path.read_text("utf-8")
        names = [*refusals._PLAIN_SETTINGS, *refusals._PLAIN_ARGUMENTS]
        assert [name for name in names if f"`{name}" not in document] == []
        assert [kind for kind in refusals.UNSTABLE_ROPE_TYPES if f"`{kind}`" not in document] == []

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
