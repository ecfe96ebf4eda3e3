"""Contents of blocks, each made from its key alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvstore.buffers import Bytes
    from kvstore.types import BlockKey

_WORD_BYTES = 8


class Payload:
    """Bytes that no other key and no other position in the block has.

    Word i of a block is a + i * b (mod 2**64), with a and an odd b from the key's hash.
    """

    def __init__(self, block_bytes: int) -> None:
        self._positions = np.arange(block_bytes // _WORD_BYTES, dtype=np.uint64)
        self._expected = np.empty_like(self._positions)

    def write(self, key: BlockKey, buffer: Bytes) -> None:
        """Fill `buffer` with the contents of `key`."""
        words = buffer.view(np.uint64)
        seed = key.chain_hash
        step = np.uint64(int.from_bytes(seed[:_WORD_BYTES], "little") | 1)
        start = np.uint64(int.from_bytes(seed[_WORD_BYTES : 2 * _WORD_BYTES], "little"))
        np.multiply(self._positions, step, out=words)
        np.add(words, start, out=words)

    def is_in(self, key: BlockKey, buffer: Bytes) -> bool:
        """Does `buffer` have exactly these contents?"""
        self.write(key, self._expected.view(np.uint8))
        return bool(np.array_equal(self._expected, buffer.view(np.uint64)))
