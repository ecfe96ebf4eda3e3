"""Small models with random weights, made here: nothing is downloaded."""

from __future__ import annotations

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


def llama_config(kv_heads: int = 2, **settings: Any) -> Any:
    """Three layers, four heads of 16, `kv_heads` of them with keys and values of their own."""
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """For models this small, threads take longer to wake up than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama() -> Any:
    """The model that most tests use: grouped-query attention."""
    return make_model(llama_config())


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
