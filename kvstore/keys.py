"""From token ids to the names of blocks: the one place where keys are made.

A chain of hashes names the prefixes of a sequence, a namespace says what else must agree before two
blocks may be the same, and `storage_keys` joins both with a part into the 32 bytes that index,
files and pool go by. The format is frozen for ever by tests/unit/golden_keys.json; docs/keys.md
says it in words, for clients in other languages.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

from kvstore.encoding import (
    TEXT_BYTES_MAX,
    U32_MAX,
    checked_bytes,
    checked_integer,
    checked_text,
    encode_fields,
    optional_u32,
    shown,
    u32,
)
from kvstore.errors import InvalidKeys, InvalidNamespace
from kvstore.layout import Layout
from kvstore.tokens import Media, SupportsArray, TokenIds, extras_by_block, token_words
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

# Media and the token types are named here too: they belong to the call of Namespace.keys.
__all__ = [
    "BLOCK_TOKENS_MAX",
    "FORMAT_VERSION",
    "HASH_BYTES_MAX",
    "HASH_BYTES_MIN",
    "OWN_CHAIN",
    "ROOT_HASH",
    "Media",
    "Namespace",
    "Source",
    "SupportsArray",
    "TokenIds",
    "encode_fields",
]

#: Enters every namespace and every key: entries of another version are never found, only missed.
FORMAT_VERSION = 1

#: What the first block of every sequence follows. A constant: no process draws its own.
ROOT_HASH = bytes(32)

BLOCK_TOKENS_MAX = 1_048_576
HASH_BYTES_MAX = 128
#: Two prefixes with one hash would be one block: a hash cut down to an integer is not fit for that.
HASH_BYTES_MIN = 16

_ADAPTER = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Source:
    """Who made a chain hash: an algorithm and the seed of its root.

    Hashes of two sources never meet in one key. Name all that the algorithm depends on, such as
    "vllm-sha256-cbor", and give the seed's bytes where the engine has one. Raises InvalidKeys.
    """

    algorithm: str
    seed: bytes | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be told apart."""
        checked_text("algorithm", self.algorithm, InvalidKeys)
        if self.seed is not None:
            checked_bytes("seed", self.seed, InvalidKeys, at_least=0, at_most=TEXT_BYTES_MAX)

    def encoding(self) -> bytes:
        """The source's bytes in a key."""
        return encode_fields(self.algorithm.encode("utf-8"), self.seed)


#: The chain that `Namespace.keys` computes.
OWN_CHAIN = Source("kvstore-sha256")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything that must agree before two blocks may be the same. Its fields are the identity.

    - `model`: the model's name, any text.
    - `fingerprint`: of its weights: a hub revision, or a digest of the safetensors index and
      headers. There is no default: a served name alone says nothing about the weights behind it.
    - `layout`: the geometry of the cache. `block_tokens`: tokens of a full block.
    - `adapter`: SHA-256 of an adapter's content, as 32 bytes or "sha256:<64 hex digits>"; kept as
      bytes. Its name is refused, since a name can be given to other weights.
    - `salt`: text or bytes that separates those who must not share; kept as bytes, a text as its
      UTF-8. An empty salt is not an absent one.
    - `rank`, `rank_count`: only together. A shard by heads or by layers is a `Part` of the model's
      layout and needs no rank: give none, so that deployments of another size share the blocks. A
      shard that no part can express, such as a context-parallel slice, must say its rank, or two
      ranks would write different bytes under one key. For that they are accepted with any layout.
    - `epoch`: absent until an engine resets its cache, then 16 bytes.

    Text is not normalised. Raises InvalidNamespace, which names field, value and what is allowed.
    """

    model: str
    fingerprint: str
    layout: Layout
    block_tokens: int
    adapter: bytes | str | None = None
    salt: bytes | str | None = field(default=None, repr=False)  # often a secret of its tenant
    rank: int | None = None
    rank_count: int | None = None
    epoch: bytes | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be told apart, and bring adapter and salt into one form."""
        checked_text("model", self.model, InvalidNamespace)
        checked_text("fingerprint", self.fingerprint, InvalidNamespace)
        layout: object = self.layout
        if not isinstance(layout, Layout):
            raise InvalidNamespace(f"layout={shown(layout)}: expected a Layout")
        checked_integer(
            "block_tokens", self.block_tokens, InvalidNamespace, at_most=BLOCK_TOKENS_MAX
        )
        object.__setattr__(self, "adapter", _adapter_digest(self.adapter))
        object.__setattr__(self, "salt", _salt_bytes(self.salt))
        if (self.rank is None) != (self.rank_count is None):
            raise InvalidNamespace(
                f"rank={shown(self.rank)}, rank_count={shown(self.rank_count)}: expected both or "
                "neither"
            )
        if self.rank_count is not None:
            checked_integer("rank_count", self.rank_count, InvalidNamespace)
            last = self.rank_count - 1
            checked_integer("rank", self.rank, InvalidNamespace, at_least=0, at_most=last)
        if self.epoch is not None:
            checked_bytes("epoch", self.epoch, InvalidNamespace, at_least=16, at_most=16)

    def encoding(self) -> bytes:
        """The identity as bytes; equal namespaces, and only those, have equal encodings."""
        adapter, salt = _adapter_digest(self.adapter), _salt_bytes(self.salt)
        return encode_fields(
            u32(FORMAT_VERSION),
            self.model.encode("utf-8"),
            self.fingerprint.encode("utf-8"),
            self.layout.encoding(),
            u32(self.block_tokens),
            adapter,
            salt,
            optional_u32(self.rank),
            optional_u32(self.rank_count),
            self.epoch,
        )

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the encoding, 32 bytes."""
        return hashlib.sha256(self.encoding()).digest()

    def keys(
        self, token_ids: TokenIds, *, extra: Iterable[Media] = (), partial: bool = False
    ) -> list[BlockKey]:
        """One key per full block of the sequence, first to last; [] where there is none.

        `extra` are the media items of the sequence, a set: order and repetition do not matter. With
        `partial`, tokens left after the last full block get a key of their own, which names exactly
        these tokens at this length. Raises InvalidTokens, naming position and value.
        """
        words = token_words(token_ids)
        size = self.block_tokens
        blocks, rest = divmod(len(words), size)
        extras = extras_by_block(extra, size, blocks + 1)
        hashes = chain_hashes(words[: blocks * size], size, extras)
        keys = self._named(hashes, ROOT_HASH, OWN_CHAIN)
        if partial and rest:
            parent = hashes[-1] if hashes else ROOT_HASH
            tail = words[blocks * size :].tobytes()
            message = encode_fields(parent, tail, extras.get(blocks), u32(rest))
            chain_hash = hashlib.sha256(message).digest()
            source = OWN_CHAIN.encoding()
            keys.append(BlockKey(self.digest, source, chain_hash, parent, rest, True))
        return keys

    def keys_of_hashes(
        self, hashes: Iterable[bytes], source: Source, *, parent_hash: bytes = ROOT_HASH
    ) -> list[BlockKey]:
        """One key per block from an engine's own hashes of consecutive full blocks.

        Each hash must cover all tokens from the sequence's first one to its block's last, and
        whatever else the namespace does not say (media above all); blocks have `block_tokens`.
        `parent_hash` is the engine's hash of the block before the first, where there is one. Two
        prefixes with one hash are one block to the store, so a hash has at least 16 bytes. Raises
        InvalidKeys, naming the position.
        """
        given: object = source
        if not isinstance(given, Source) or given == OWN_CHAIN:
            raise InvalidKeys(f"source={shown(given)}: expected the Source of an engine's hashes")
        named = list(hashes)
        for position, value in enumerate(named):
            _check_engine_hash(f"hashes[{position}]", value)
        if parent_hash != ROOT_HASH:
            _check_engine_hash("parent_hash", parent_hash)
        return self._named(named, parent_hash, source)

    def _named(self, hashes: list[bytes], first_parent: bytes, source: Source) -> list[BlockKey]:
        """Keys of full blocks; made by tuple.__new__, which takes half of BlockKey's own time."""
        fields = zip(
            repeat(self.digest),
            repeat(source.encoding()),
            hashes,
            [first_parent, *hashes[:-1]],
            repeat(self.block_tokens),
            repeat(False),
            strict=False,
        )
        return list(map(functools.partial(tuple.__new__, BlockKey), fields))


def chain_hashes(
    words: np.ndarray[Any, Any],
    block_tokens: int,
    extras: dict[int, bytes],
    parent_hash: bytes = ROOT_HASH,
) -> list[bytes]:
    """SHA-256 of (parent's hash, token ids, extras) for each full block that follows a parent.

    `words` are u32 little-endian; `extras` are by block, counted from the first of `words`.

    One row of u32 per block holds what follows the parent's hash, so that a block costs one slice:

        length of the tokens' field | token ids | an absent field, where the block has no extras
    """
    import numpy as np  # here, so that importing kvstore stays light

    blocks = len(words) // block_tokens
    table = np.empty((blocks, block_tokens + 2), dtype="<u4")
    table[:, 0] = 4 * block_tokens
    table[:, 1:-1] = words.reshape(blocks, block_tokens)
    table[:, -1] = U32_MAX
    data, row_bytes = table.tobytes(), 4 * (block_tokens + 2)
    rows = [data[start : start + row_bytes] for start in range(0, len(data), row_bytes)]
    for block, encoded in extras.items():
        if block < blocks:
            rows[block] = rows[block][:-4] + encode_fields(encoded)
    sha256, length, chain_hash = hashlib.sha256, u32(len(ROOT_HASH)), parent_hash
    hashes: list[bytes] = []
    for row in rows:
        chain_hash = sha256(length + chain_hash + row).digest()
        hashes.append(chain_hash)
    return hashes


def _check_engine_hash(name: str, value: object) -> None:
    checked_bytes(name, value, InvalidKeys, at_least=HASH_BYTES_MIN, at_most=HASH_BYTES_MAX)
    if value == ROOT_HASH:
        raise InvalidKeys(f"{name} is 32 zero bytes, which stand for the start of a sequence")


def _adapter_digest(adapter: object) -> bytes | None:
    if adapter is None or (isinstance(adapter, bytes) and len(adapter) == 32):
        return adapter
    written = _ADAPTER.fullmatch(adapter) if isinstance(adapter, str) else None
    if written is None:
        raise InvalidNamespace(
            f"adapter={shown(adapter)}: expected the SHA-256 of its content, as 32 "
            'bytes or "sha256:<64 hex digits>"; a name can be given to other weights'
        )
    return bytes.fromhex(written[1])


def _salt_bytes(salt: object) -> bytes | None:
    if salt is None:
        return None
    if isinstance(salt, str):
        return checked_text("salt", salt, InvalidNamespace) if salt else b""
    return checked_bytes("salt", salt, InvalidNamespace, at_least=0, at_most=TEXT_BYTES_MAX)
