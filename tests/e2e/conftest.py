"""Small models with random weights, made here: nothing is downloaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvstore

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test that asks is a bug

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 256
#: Wide, so that logits are far apart: with the usual 0.02 they are all nearly equal.
INITIALIZER_RANGE = 0.2


def make_model(config: Any, seed: int = 0) -> Any:
    """A model of that config; never ends a text by itself, so that lengths are known."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    return model


def shape(**settings: Any) -> dict[str, Any]:
    """What most architectures call the same: four heads of 16, two with keys and values."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **settings,
    }


def config_of(name: str, **settings: Any) -> Any:
    """A config of that class; a skip where this version of transformers has none."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**settings)


def llama_config(kv_heads: int = 2, **settings: Any) -> Any:
    """Three layers, four heads of 16, `kv_heads` of them with keys and values of their own."""
    return transformers.LlamaConfig(**shape(num_key_value_heads=kv_heads, **settings))


def _gpt2() -> Any:
    return transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, initializer_range=0.2
    )


def _deepseek() -> Any:
    mixture = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    latents = {"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return transformers.DeepseekV3Config(
        **shape(moe_intermediate_size=32, num_key_value_heads=4, **mixture, **latents),
        q_lora_rank=None,
        first_k_dense_replace=1,
    )


def _gemma3() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(**shape(head_dim=16, layer_types=types), sliding_window=20)


def _gemma4() -> Any:
    """Heads of two sizes, and two layers that go by the keys and values of the two before."""
    return config_of(
        "Gemma4TextConfig",
        **shape(num_hidden_layers=4, head_dim=8, global_head_dim=16),
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=12,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    )


def _mimo() -> Any:
    """Values of half the keys' dim, and twice the heads where there is a window."""
    return config_of(
        "MiMoV2FlashConfig",
        **shape(head_dim=16, v_head_dim=8),
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense"] * 3,
        sliding_window=20,
    )


def _llama4() -> Any:
    """Three layers of four see the tokens of their own span of 24."""
    return transformers.Llama4TextConfig(
        **shape(num_hidden_layers=4, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
        attention_chunk_size=24,
        intermediate_size_mlp=64,
    )


def _two_shapes() -> Any:
    """A layer with as many KV heads as heads between two that share them."""
    model = make_model(llama_config())
    wide = make_model(llama_config(4), seed=1)
    model.model.layers[1].self_attn = wide.model.layers[1].self_attn
    return model


#: Kind of cache -> the model that has it.
KINDS: dict[str, Callable[[], Any]] = {
    "gqa": lambda: make_model(llama_config()),
    "mha": lambda: make_model(llama_config(4)),
    "mqa": lambda: make_model(llama_config(1)),
    "tied weights, learned positions": lambda: make_model(_gpt2()),
    "head dim of its own": lambda: make_model(transformers.Qwen3Config(**shape(head_dim=32))),
    "experts": lambda: make_model(
        transformers.MixtralConfig(**shape(num_local_experts=4, num_experts_per_tok=2))
    ),
    "mla": lambda: make_model(_deepseek()),
    "two shapes": _two_shapes,
    "values of another dim": lambda: make_model(_mimo()),
    "window": lambda: make_model(transformers.MistralConfig(**shape(sliding_window=20))),
    "window and full": lambda: make_model(_gemma3()),
    "window smaller than a block": lambda: make_model(
        transformers.Gemma2Config(**shape(head_dim=16, sliding_window=5))
    ),
    "shared layers": lambda: make_model(_gemma4()),
    "spans": lambda: make_model(_llama4()),
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """For models this small, threads take longer to wake up than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_of() -> Callable[[str], Any]:
    """The model of a kind; one for all tests, which must not change it."""
    return functools.cache(lambda kind: KINDS[kind]())


@pytest.fixture(scope="session")
def llama(model_of: Callable[[str], Any]) -> Any:
    """The model that most tests use: grouped-query attention."""
    return model_of("gqa")


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """`make_model`, for tests that need one of their own."""
    return make_model


@pytest.fixture(scope="session")
def llama_settings() -> Callable[..., Any]:
    """`llama_config`, likewise."""
    return llama_config


@pytest.fixture
def store() -> Iterator[kvstore._open.EmbeddedStore]:
    """An empty store; at the end it must add up, and nobody may hold anything."""
    with kvstore.open(dram_capacity_bytes="16MiB") as opened:
        yield opened
        audit = opened.check()
        assert (audit.leases, audit.reservations) == (0, 0)


@pytest.fixture
def prompt() -> Callable[..., Any]:
    """Random token ids of shape [1, tokens]; those of one seed are prefixes of each other."""

    def make(tokens: int, seed: int = 1) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, VOCABULARY, (1, 512), generator=generator)[:, :tokens]

    return make
