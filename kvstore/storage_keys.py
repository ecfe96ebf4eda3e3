"""From the names of blocks to the 32 bytes that index, files and pool go by: the one place.

The format is frozen with that of the names; docs/keys.md says it in words.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NoReturn

from kvstore.encoding import encode_fields, shown, u32
from kvstore.errors import InvalidKeys
from kvstore.keys import FORMAT_VERSION, OWN_CHAIN, ROOT_HASH
from kvstore.parts import Part
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.keys import Namespace

#: Storage keys that a `KeyMaker` remembers of each source: about 6 MiB.
MADE_KEYS_MAX = 32_768


def storage_key(block_key: BlockKey, part: Part) -> bytes:
    """The 32 bytes under which one part of a block is stored, in every tier.

    Whether the part fits the namespace's layout cannot be seen here: `KeyMaker` checks that.
    """
    return _SourceKeys(block_key.namespace_digest, block_key.source, part).make(
        block_key.chain_hash
    )


class KeyMaker:
    """Storage keys of one part of a namespace's blocks, in batches.

    Remembers the keys that it made last, since a prefix is looked up, read and extended with the
    same ones. Raises InvalidLayout where the namespace's layout cannot have that part.

    `anchor_head_groups` is for a part without heads of its own, beside others that are split: the
    number of head groups that those have. Left out, it is the part's own.
    """

    def __init__(
        self, namespace: Namespace, part: Part, *, anchor_head_groups: int | None = None
    ) -> None:
        """Check the part and encode it once for all keys."""
        layout = namespace.layout
        layout.check_part(part)
        self._namespace_digest = namespace.digest
        self._part = part
        # Only a name, so the layout need not have it: all its layers may be of other groups' kinds.
        self._anchor = Part(
            first_layer=0,
            end_layer=layout.layers,
            head_groups=part.head_groups if anchor_head_groups is None else anchor_head_groups,
        )
        self._is_whole_block = layout.parts == (part,)
        self._of_source: dict[bytes, _SourceKeys] = {}
        self._anchor_of_source = self._of_source if part == self._anchor else {}
        self._own = self._source_keys(OWN_CHAIN.encoding())

    def keys(self, block_keys: Sequence[BlockKey], *, is_prefix: bool) -> list[bytes]:
        """`storage_key` of each block, in order. With `is_prefix` each must follow the one before.

        Raises InvalidKeys, naming the position, for a key of another namespace or out of order.
        One loop, with nothing in it that could be spared: every lookup, read and write begins here.
        """
        digest = self._namespace_digest
        source: bytes | None = None
        maker = self._own
        previous: bytes | None = None
        is_ours = True
        keys: list[bytes] = []
        for block_key in block_keys:
            if type(block_key) is not BlockKey or block_key[0] != digest:
                self._refuse(block_keys)
            if block_key[1] is not source:
                source = block_key[1]
                maker = self._source_keys(source)
                is_ours = is_ours and maker is self._own
            if is_prefix and previous is not None and block_key[3] != previous:
                raise InvalidKeys(f"keys[{len(keys)}] does not follow keys[{len(keys) - 1}]")
            previous = block_key[2]
            keys.append(maker.made.get(previous) or maker.make(previous))
        # Hashes of our own chain cannot go round in a circle; an engine's may be anything.
        if is_prefix and not is_ours and len(set(keys)) < len(keys):
            raise InvalidKeys("a key occurs twice: every block of a sequence has another one")
        return keys

    def parents(self, block_keys: Sequence[BlockKey]) -> list[bytes | None]:
        """The storage key of each block's parent: None for the first block of a sequence."""
        parents: list[bytes | None] = []
        for block_key in block_keys:
            parent_hash = block_key.parent_hash
            if parent_hash == ROOT_HASH:
                parents.append(None)
                continue
            maker = self._source_keys(block_key.source)
            parents.append(maker.made.get(parent_hash) or maker.make(parent_hash))
        return parents

    def block_links(self, block_keys: Sequence[BlockKey]) -> list[bytes] | None:
        """What links the parts of each block: 32 bytes that all parts of one deployment share.

        The storage key of the block's anchor: cache group 0, all layers of the model, head group 0
        of as many as the deployment has. None where the maker's part is the whole block. The keys
        are not checked: `keys` has done that.
        """
        if self._is_whole_block:
            return None
        links: list[bytes] = []
        source: bytes | None = None
        maker = self._own
        for block_key in block_keys:
            if block_key[1] is not source:
                source = block_key[1]
                maker = self._source_keys(source, is_anchor=True)
            chain_hash = block_key[2]
            links.append(maker.made.get(chain_hash) or maker.make(chain_hash))
        return links

    def _source_keys(self, source: bytes, *, is_anchor: bool = False) -> _SourceKeys:
        of_source = self._anchor_of_source if is_anchor else self._of_source
        maker = of_source.get(source)
        if maker is None:
            part = self._anchor if is_anchor else self._part
            maker = of_source[source] = _SourceKeys(self._namespace_digest, source, part)
        return maker

    def _refuse(self, given: Sequence[object]) -> NoReturn:
        """Name the first key that is none of this namespace's."""
        for position, block_key in enumerate(given):
            if type(block_key) is not BlockKey:
                raise InvalidKeys(f"keys[{position}] = {shown(block_key)}: expected a BlockKey")
            if block_key.namespace_digest != self._namespace_digest:
                raise InvalidKeys(
                    f"keys[{position}] is of namespace {block_key.namespace_digest.hex()[:12]}…: "
                    f"expected keys of {self._namespace_digest.hex()[:12]}…"
                )
        raise InvalidKeys("the keys changed while they were read")


class _SourceKeys:
    """Storage keys of the hashes of one source: the only place where they are made.

    SHA-256 of the fields (format version, namespace digest, source, chain hash, part). All but the
    hash is the same for all keys, so its bytes are kept; a call of `encode_fields` for each key
    would take longer than hashing it.
    """

    def __init__(self, namespace_digest: bytes, source: bytes, part: Part) -> None:
        self.made: dict[bytes, bytes] = {}
        self._before = encode_fields(u32(FORMAT_VERSION), namespace_digest, source)
        self._after = encode_fields(part.encoding())

    def make(self, chain_hash: bytes) -> bytes:
        """The storage key of a hash, remembered in `made`."""
        message = self._before + u32(len(chain_hash)) + chain_hash + self._after
        key = hashlib.sha256(message).digest()
        if len(self.made) >= MADE_KEYS_MAX:
            self.made.clear()
        self.made[chain_hash] = key
        return key
