"""The vocabulary: values that every layer passes on and none changes.

Nothing here does I/O or imports another part of kvstore.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

DOMAIN_BYTES = 32
KEY_BYTES = 32
SLOT_ALIGNMENT_BYTES = 4096

#: The isolation domain of a store that serves a single tenant.
SINGLE_DOMAIN = bytes(DOMAIN_BYTES)


class Outcome(StrEnum):
    """What became of one block in a batch. A miss is a value, and says why."""

    OK = "ok"  # the bytes were moved, or the block was stored
    GRANTED = "granted"  # reserved for this writer to fill
    PRESENT = "present"  # already stored; the first commit of a key wins

    ABSENT = "absent"  # not held, and not in the bounded history
    EVICTED = "evicted"  # was held, and made room for another
    EXPIRED = "expired"  # its TTL passed, or it left, or its lease ended, while it was copied
    PENDING = "pending"  # another live writer is filling it
    CORRUPT = "corrupt"  # its checksum did not match; dropped
    TIMEOUT = "timeout"  # a tier did not answer within the deadline
    BUSY = "busy"  # a bound on work in flight was reached
    FULL = "full"  # no room, and nothing that may be evicted
    QUOTA = "quota"  # the tenant's share is used up
    UNAVAILABLE = "unavailable"  # the tier or the daemon is away
    INCOMPATIBLE = "incompatible"  # another wire or record version
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"  # loading it would not have paid

    @property
    def is_miss(self) -> bool:
        """True where the block was neither moved, nor granted, nor already there."""
        return self not in _SUCCESSES


_SUCCESSES = frozenset({Outcome.OK, Outcome.GRANTED, Outcome.PRESENT})


class BlockKey(NamedTuple):
    """The name of one block, without a part: made by `Namespace.keys`, opaque to its holder.

    `chain_hash` covers every token from the first one of the sequence to the last one of this
    block, so equal keys mean equal prefixes. The root's `parent_hash` is 32 zero bytes.
    """

    namespace_digest: bytes  # SHA-256 of the namespace's encoding
    source: bytes  # encoding of the hash's source: our chain, or an engine's algorithm and seed
    chain_hash: bytes  # 32 bytes with our chain; an engine's own length otherwise
    parent_hash: bytes
    token_count: int  # tokens in this block: block_tokens, fewer in a partial block
    is_partial: bool


class Found(NamedTuple):
    """Answer of a match: the longest prefix that is held right now, and why it ends there."""

    blocks: int
    tokens: int
    by_tier: dict[str, int]  # blocks of the prefix, by the fastest tier that holds them
    reason: Outcome | None  # why block `blocks` is missing; None where all keys were found


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where the bytes of one stored part lie in a tier."""

    key: bytes  # (domain, key): what a tier that stores records verifies
    offset_bytes: int  # a multiple of 4 KiB
    length_bytes: int  # of the payload, without padding
    generation: int  # of the slot when this place was handed out
