"""Blocks that say whose they are, so that a wrong byte names its culprit.

    word 0               word i
    tag | writer   XOR   i * an odd constant      (little-endian u64; the tag is of the key)

Any eight bytes at any place follow from key and writer, so a block that is torn, shifted, padded or
another's differs; and its first word tells which key and which writer it came from.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from kvstore.keys import Namespace
from kvstore.layout import Layout

HEADER_BYTES = 8
#: Of a block in most tests.
BLOCK_BYTES = 64 * 1024
_STEP = np.uint64(0x9E3779B97F4A7C15)


def a_namespace(block_bytes: int, *, block_tokens: int = 1, model: str = "m") -> Namespace:
    """A namespace whose full blocks have `block_bytes`, a multiple of `block_tokens`."""
    dims, rest = divmod(block_bytes, block_tokens)
    assert not rest
    assert dims >= 2
    layout = Layout.mla(layers=1, latent_dim=dims - 1, rope_dim=1, dtype="int8")
    return Namespace(model=model, fingerprint="f", layout=layout, block_tokens=block_tokens)


def tag_of(key: Any) -> int:
    """Four bytes that stand for a key: a BlockKey with its namespace, or plain bytes."""
    parts = (key,) if isinstance(key, bytes) else (key.namespace_digest, key.chain_hash)
    return zlib.crc32(b"".join(parts))


def payload(key: Any, writer: int, length_bytes: int) -> np.ndarray[Any, Any]:
    """What `writer` stores under `key`."""
    words = -(-length_bytes // 8)
    header = np.uint64(tag_of(key) | writer << 32)
    body = header ^ (np.arange(words, dtype=np.uint64) * _STEP)
    return body.astype("<u8").view(np.uint8)[:length_bytes]


def writer_of(memory: Any, key: Any) -> int:
    """Who wrote these bytes under `key`. Fails for bytes that nobody wrote there."""
    found = np.frombuffer(memory, np.uint8)
    header = int.from_bytes(found[:HEADER_BYTES].tobytes(), "little")
    tag, writer = header & 0xFFFFFFFF, header >> 32
    assert tag == tag_of(key), f"under key {tag_of(key):08x} lie bytes of {tag:08x}, {writer=}"
    expected = payload(key, writer, len(found))
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), f"{len(wrong)} wrong bytes of writer {writer}, the first at {wrong[0]}"
    return writer


def payloads(keys: Any, writer: int = 1, length_bytes: int = BLOCK_BYTES) -> list[Any]:
    """The blocks of `keys` as `writer` has them."""
    return [payload(key, writer, length_bytes) for key in keys]


def empty_buffers(count: int, length_bytes: int = BLOCK_BYTES) -> list[Any]:
    """Memory to read blocks into."""
    return [np.zeros(length_bytes, np.uint8) for _ in range(count)]


def writers(memories: Any, keys: Any) -> list[int]:
    """Who wrote each of the blocks that are in `memories`; there may be more keys."""
    return [writer_of(memory, key) for memory, key in zip(memories, keys, strict=False)]


def filled(session: Any, name: int, blocks: int, writer: int = 1) -> list[Any]:
    """Store a sequence of its own; its keys."""
    keys: list[Any] = session.namespace.keys([name] * blocks)
    outcomes = session.put(keys, payloads(keys, writer))
    assert all(not outcome.is_miss for outcome in outcomes), outcomes
    return keys
