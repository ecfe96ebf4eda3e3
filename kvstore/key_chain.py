"""The keys of a sequence that grows: each block is hashed once, when it becomes full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.keys import OWN_CHAIN, ROOT_HASH, chain_hashes
from kvstore.tokens import token_words
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.keys import Namespace
    from kvstore.tokens import TokenIds


class KeyChain:
    """`namespace.keys(tokens)` for all tokens appended so far, without hashing one of them twice.

    Token ids alone: a sequence with media items needs `Namespace.keys`.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._source = OWN_CHAIN.encoding()
        self._keys: list[BlockKey] = []
        self._tail = token_words([])  # tokens after the last full block

    @property
    def keys(self) -> Sequence[BlockKey]:
        """One key per full block, first to last. The chain's own list, not a copy: it grows."""
        return self._keys

    @property
    def token_count(self) -> int:
        """Tokens appended so far."""
        return len(self._keys) * self._namespace.block_tokens + len(self._tail)

    def append(self, token_ids: TokenIds) -> None:
        """Add the next tokens. Raises InvalidTokens, and then nothing was added."""
        import numpy as np  # here, so that importing kvstore stays light

        words = np.concatenate([self._tail, token_words(token_ids)])
        size = self._namespace.block_tokens
        full = len(words) // size * size
        parent = self._keys[-1].chain_hash if self._keys else ROOT_HASH
        for chain_hash in chain_hashes(words[:full], size, {}, parent):
            key = BlockKey(self._namespace.digest, self._source, chain_hash, parent, size, False)
            self._keys.append(key)
            parent = chain_hash
        # A copy, or the tail would keep all of `words` alive.
        self._tail = words[full:].copy()

    def fork(self) -> KeyChain:
        """Another chain of the same tokens, which goes its own way from here."""
        other = KeyChain(self._namespace)
        other._keys = list(self._keys)
        other._tail = self._tail
        return other
