"""A trace as blocks: what is the same for every policy and every capacity is done here, once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kvstore.replay import requests as ask

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from kvstore.messages import BlockSpec
    from kvstore.replay.trace import TraceRequest

#: Tokens of one block in the traces that Mooncake published.
BLOCK_TOKENS = 512


class Mode(StrEnum):
    """Which blocks of a request the store is asked for and keeps."""

    ALL = "all"  # every one
    FULL = "full"  # not the final partial one


class Prompt(NamedTuple):
    """One request of a workload."""

    input_tokens: int
    keys: list[bytes]
    blocks: list[BlockSpec]
    new_blocks: int  # that no request before it names
    named_blocks: int  # the run of blocks up to the last one that was named before


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace in one mode."""

    prompts: list[Prompt]
    mode: Mode
    block_tokens: int
    footprint_blocks: int  # distinct ids
    block_accesses: int
    input_tokens: int
    unlimited_hit_blocks: int  # with a store that never forgets
    unlimited_hit_tokens: int
    odd_requests: int  # whose number of ids does not fit their tokens

    def capacity_blocks(self, fraction: Fraction) -> int:
        """So much of the footprint, in whole blocks, rounded down."""
        return int(fraction * self.footprint_blocks)


def workload(
    requests: Sequence[TraceRequest], mode: Mode = Mode.ALL, block_tokens: int = BLOCK_TOKENS
) -> Workload:
    """Prepare a trace for any number of replays."""
    blocks: dict[int, BlockSpec] = {}
    prompts = []
    accesses = hit_blocks = hit_tokens = odd = 0
    for request in requests:
        tokens = request.input_tokens
        odd += len(request.ids) != -(-tokens // block_tokens)
        ids = request.ids[: tokens // block_tokens] if mode is Mode.FULL else request.ids
        hits = _known_prefix(ids, blocks)
        known_before = len(blocks)
        named = hits
        for position in range(hits, len(ids)):
            if ids[position] in blocks:  # behind a new one: in no trace of ids that name prefixes
                named = position + 1
                continue
            parent = blocks[ids[position - 1]].key if position else None
            blocks[ids[position]] = _block(ids[position], parent, tokens, position, block_tokens)
        specs = [blocks[block_id] for block_id in ids]
        keys = [spec.key for spec in specs]
        prompts.append(Prompt(tokens, keys, specs, len(blocks) - known_before, named))
        accesses += len(ids)
        hit_blocks += hits
        hit_tokens += min(block_tokens * hits, tokens)
    return Workload(
        prompts,
        mode,
        block_tokens,
        len(blocks),
        accesses,
        sum(prompt.input_tokens for prompt in prompts),
        hit_blocks,
        hit_tokens,
        odd,
    )


def _known_prefix(ids: Sequence[int], known: dict[int, BlockSpec]) -> int:
    """How many leading ids were named before."""
    for position, block_id in enumerate(ids):
        if block_id not in known:
            return position
    return len(ids)


def _block(
    block_id: int, parent: bytes | None, tokens: int, position: int, block_tokens: int
) -> BlockSpec:
    left = max(0, min(block_tokens, tokens - block_tokens * position))
    return ask.block(ask.key_of(block_id), parent, left, is_partial=left < block_tokens)
