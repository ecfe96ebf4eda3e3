"""What the clients of the simulation talk about: prompts that share beginnings, as in chats.

A prompt is a tuple of small numbers, one a block. A domain is whose blocks they are, and two
domains may well use the same keys.

    system prompt    turn 1     turn 2
    [0  1]           [17 3]     [4]          a conversation
    [0  1]           [17 3]     [9 9]        a fork of it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.sim.models import MODELS, Model, block_keys

if TYPE_CHECKING:
    from random import Random

    from kvstore.types import BlockKey

DOMAINS = (bytes(32), b"\1" * 32)
BLOCKS_MAX = 8
#: Models that one run is about: so few that its clients meet on the same blocks.
MODELS_MAX = 3
#: How many of the last prompts an operator has heard of.
RECENT = 8


class Prompt(NamedTuple):
    """The blocks of a sequence, the last one perhaps not full."""

    model_index: int
    tokens: tuple[int, ...]
    is_partial: bool

    @property
    def model(self) -> Model:
        """Whose prompt it is."""
        return MODELS[self.model_index]

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """The names of its blocks."""
        return block_keys(self.model_index, self.tokens, is_partial=self.is_partial)


class Conversations:
    """All prompts that were talked about so far; everybody goes on with anybody's."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._models = rng.sample(range(len(MODELS)), rng.randint(1, MODELS_MAX))
        self._last_token = 100
        self._said: list[Prompt] = []

    def recent(self) -> Prompt:
        """One of the last that were said, or a first one."""
        return self._rng.choice(self._said[-RECENT:]) if self._said else self.next_turn()

    def next_turn(self) -> Prompt:
        """A conversation goes on, forks, or begins."""
        rng = self._rng
        kind = rng.random()
        known = rng.choice(self._said) if self._said else None
        if known is None or kind < 0.25 or len(known.tokens) >= BLOCKS_MAX:
            model = rng.choice(self._models)
            tokens: tuple[int, ...] = (0, 1)[: rng.randint(1, 2)]  # the system prompt
        elif kind < 0.45:
            model, tokens = known.model_index, known.tokens[: rng.randint(1, len(known.tokens))]
        elif kind < 0.7:
            return known  # the same again
        else:
            model, tokens = known.model_index, known.tokens
        said = Prompt(model, tokens + self._turn(), rng.random() < 0.3)
        self._said.append(said)
        return said

    def _turn(self) -> tuple[int, ...]:
        blocks = self._rng.randint(1, 3)
        first = self._last_token + 1
        self._last_token += blocks
        return tuple(range(first, first + blocks))
