"""What a replay asks of the core: every request of it is made here, and nowhere else."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from kvstore.messages import BlockSpec, CommitRequest, MatchRequest, ReadRequest, ReserveRequest
from kvstore.types import KEY_BYTES, SINGLE_DOMAIN, SLOT_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Every block counts the same, so the smallest slot will do. No byte of it is ever touched.
BLOCK_BYTES = SLOT_ALIGNMENT_BYTES
_TTL_SECONDS = 30.0  # no time passes in a replay


def key_of(block_id: int) -> bytes:
    """The storage key of a trace's id."""
    return blake2b(str(block_id).encode(), digest_size=KEY_BYTES).digest()


def block(key: bytes, parent_key: bytes | None, tokens: int, *, is_partial: bool) -> BlockSpec:
    """What is to be stored of one block."""
    return BlockSpec(key, parent_key, BLOCK_BYTES, tokens, is_partial)


def read(keys: Sequence[bytes], tokens: int) -> ReadRequest:
    """Where is the longest prefix of these, which have so many tokens?"""
    return ReadRequest(SINGLE_DOMAIN, keys, tokens, 0.0)


def is_held(key: bytes) -> MatchRequest:
    """Is this one block held, whatever is before it?"""
    return MatchRequest(SINGLE_DOMAIN, [key], 0.0)


def reserve(blocks: Sequence[BlockSpec], start: int) -> ReserveRequest:
    """Make room for the blocks from `start` on; those before are held and stay."""
    return ReserveRequest(SINGLE_DOMAIN, blocks, start, _TTL_SECONDS, 0.0, None)


def commit(reservation_id: int, blocks: int) -> CommitRequest:
    """The first `blocks` of a reservation were computed."""
    return CommitRequest(reservation_id, blocks, 0)
