"""Sizes of the demo's model and texts, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.memory_limits import available_memory_bytes

PROMPT_TOKENS = 2_048
NEW_TOKENS = 16
LAYERS = 12
HIDDEN = 768

HEAD_DIM = 64
BLOCK_TOKENS = 16
VOCABULARY = 8_000
#: Tokens of the user's second question.
QUESTION_TOKENS = 128

_ELEMENT_BYTES = 4  # fp32
_CAPACITY_STEP_BYTES = 64 << 20
_GIB = 1 << 30
#: What torch and transformers take before there is any model.
_ENGINE_BYTES = 400 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Sizes of the model and of the texts."""

    layers: int = LAYERS
    hidden: int = HIDDEN
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS

    @classmethod
    def plan(cls, *, layers: int, hidden: int, prompt_tokens: int, new_tokens: int) -> Self:
        """Check what cannot be seen in one option.

        Raises InvalidRequest, or ConfigError where this machine is too small; both name the option.
        """
        if hidden % HEAD_DIM:
            raise InvalidRequest(f"--hidden is {hidden}: give a multiple of {HEAD_DIM}")
        planned = cls(
            layers=layers, hidden=hidden, prompt_tokens=prompt_tokens, new_tokens=new_tokens
        )
        available = available_memory_bytes()
        if planned.memory_bytes > available:
            raise ConfigError(
                f"{planned.costliest_option()}: the demo needs {_gib(planned.memory_bytes)} of "
                f"memory with it, and {_gib(available)} are available here: give less"
            )
        return planned

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // HEAD_DIM

    @property
    def kv_heads(self) -> int:
        """Heads that have keys and values: a third, where that is even, as 12 heads have 4."""
        return self.heads // 3 if self.heads % 3 == 0 else self.heads

    @property
    def intermediate(self) -> int:
        """Width of the MLP."""
        return self.hidden * 8 // 3

    @property
    def second_prompt_tokens(self) -> int:
        """First prompt, its answer and a further question."""
        return self.prompt_tokens + self.new_tokens + QUESTION_TOKENS

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.layers * 2 * self.kv_heads * HEAD_DIM * _ELEMENT_BYTES

    @property
    def capacity_bytes(self) -> int:
        """DRAM for all blocks four times over: at most half of a tier can be leased."""
        wanted = 4 * self._tokens * self.token_bytes
        return -(-wanted // _CAPACITY_STEP_BYTES) * _CAPACITY_STEP_BYTES

    @property
    def memory_bytes(self) -> int:
        """What the demo takes, near enough: engine, weights, cache, activations, store."""
        hidden, wide = self.hidden, self.intermediate
        kv_width = self.kv_heads * HEAD_DIM
        layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * wide
        weights = self.layers * layer + 2 * VOCABULARY * hidden
        activations = self._tokens * (8 * hidden + 3 * wide)  # of one layer at a time
        # A cache grows by concatenation, so that a layer is there twice; a prefix is loaded, too.
        cache = 2 * self._tokens * self.token_bytes
        return (
            (weights + activations) * _ELEMENT_BYTES + cache + self.capacity_bytes + _ENGINE_BYTES
        )

    def costliest_option(self) -> str:
        """`--option is N`: the one that would save the most memory if it were the default."""
        defaults = Parameters()
        by_option = {
            name: replace(self, **{name: min(getattr(self, name), getattr(defaults, name))})
            for name in ("prompt_tokens", "new_tokens", "layers", "hidden")
        }
        name = min(by_option, key=lambda option: by_option[option].memory_bytes)
        return f"--{name.replace('_', '-')} is {getattr(self, name)}"

    @property
    def _tokens(self) -> int:
        return self.second_prompt_tokens + self.new_tokens


def allocation_refused(parameters: Parameters) -> ConfigError:
    """The error where the engine could not get its memory in spite of the plan."""
    return ConfigError(
        f"{parameters.costliest_option()}: the engine was refused memory; the demo needs about "
        f"{_gib(parameters.memory_bytes)}, and {_gib(available_memory_bytes())} are available "
        "here: give less"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:,.1f} GiB"
