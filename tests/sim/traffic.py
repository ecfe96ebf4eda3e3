"""What the clients of the simulation talk about: prompts that share beginnings, as in chats.

A prompt is a tuple of small numbers, one a block. Namespaces differ in the size of their blocks; a
domain is whose blocks they are, and two domains may well use the same keys.

    system prompt    turn 1     turn 2
    [0  1]           [17 3]     [4]          a conversation
    [0  1]           [17 3]     [9 9]        a fork of it
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from kvstore.messages import BlockSpec

if TYPE_CHECKING:
    from random import Random

DOMAINS = (bytes(32), b"\1" * 32)
#: Bytes of a full block by namespace: one unit to the byte, two that are padded.
NAMESPACE_BLOCK_BYTES = (4096, 3_001, 8_000)
BLOCKS_MAX = 8
_PARTIAL_BYTES = 700


class Prompt(NamedTuple):
    """The blocks of a sequence, the last one perhaps not full."""

    namespace: int
    tokens: tuple[int, ...]
    is_partial: bool


@lru_cache(maxsize=4_096)
def specs_of(prompt: Prompt) -> tuple[BlockSpec, ...]:
    """What the core must know of a prompt's blocks."""
    specs: list[BlockSpec] = []
    parent: bytes | None = None
    for position, token in enumerate(prompt.tokens):
        is_partial = prompt.is_partial and position == len(prompt.tokens) - 1
        text = f"{prompt.namespace} {parent!r} {token} {is_partial}"
        key = sha256(text.encode()).digest()
        length = _PARTIAL_BYTES if is_partial else NAMESPACE_BLOCK_BYTES[prompt.namespace]
        specs.append(BlockSpec(key, parent, length, 5 if is_partial else 16, is_partial))
        parent = key
    return tuple(specs)


class Conversations:
    """All prompts that were talked about so far; everybody goes on with anybody's."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._last_token = 100
        self._said: list[Prompt] = []

    def any(self) -> Prompt:
        """One that was said before, or a first one."""
        return self._rng.choice(self._said) if self._said else self.next_turn()

    def next_turn(self) -> Prompt:
        """A conversation goes on, forks, or begins."""
        rng = self._rng
        kind = rng.random()
        known = rng.choice(self._said) if self._said else None
        if known is None or kind < 0.25 or len(known.tokens) >= BLOCKS_MAX:
            namespace = rng.randrange(len(NAMESPACE_BLOCK_BYTES))
            tokens: tuple[int, ...] = (0, 1)[: rng.randint(1, 2)]  # the system prompt
        elif kind < 0.45:
            namespace, tokens = known.namespace, known.tokens[: rng.randint(1, len(known.tokens))]
        elif kind < 0.7:
            return known  # the same again
        else:
            namespace, tokens = known.namespace, known.tokens
        said = Prompt(namespace, tokens + self._turn(), rng.random() < 0.3)
        self._said.append(said)
        return said

    def _turn(self) -> tuple[int, ...]:
        blocks = self._rng.randint(1, 3)
        first = self._last_token + 1
        self._last_token += blocks
        return tuple(range(first, first + blocks))
