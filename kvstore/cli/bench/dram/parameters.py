"""What one run measures: sizes, counts, and the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.cli.bench import host
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.memory_limits import available_memory_bytes
from kvstore.types import SLOT_ALIGNMENT_BYTES

#: A working set of this many L3 caches finds next to nothing of itself there when it comes round.
COLD_FACTOR = 4
#: Fewer, and a batch would follow itself.
BATCHES_MIN = 2
ROUNDS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Sizes and counts of one run.

    The pool is two working sets: one that stays and is read, one that is replaced by each put.
    """

    block_bytes: int
    batch_blocks: int
    batches: int  # that each measurement moves in one round
    rounds: int
    is_aligned: bool
    is_interleaved: bool
    l3_bytes: int

    @property
    def batch_bytes(self) -> int:
        """Payload of one batch."""
        return self.batch_blocks * self.block_bytes

    @property
    def working_set_bytes(self) -> int:
        """Payload that one measurement moves in one round, every block once."""
        return self.batches * self.batch_bytes

    @property
    def pool_bytes(self) -> int:
        """The store's memory, all of it in use."""
        return 2 * self.working_set_bytes

    @property
    def is_cold(self) -> bool:
        """Is the working set so large that the caches do not matter?"""
        return self.working_set_bytes >= COLD_FACTOR * self.l3_bytes

    @property
    def memory_bytes(self) -> int:
        """What the run allocates: pool, targets, sources, and what the caches are filled with."""
        return self.pool_bytes + 2 * self.working_set_bytes + 2 * self.l3_bytes


def plan(
    *,
    block_bytes: int,
    batch_blocks: int,
    rounds: int,
    pool_bytes: int | None = None,
    is_aligned: bool = True,
    is_interleaved: bool = False,
) -> Parameters:
    """Check what was asked for, and choose the size of the pool if that was not.

    Raises ConfigError or InvalidRequest, which name the option.
    """
    if block_bytes < SLOT_ALIGNMENT_BYTES or block_bytes % SLOT_ALIGNMENT_BYTES:
        raise ConfigError(f"--block-size is {block_bytes} bytes: give a multiple of 4KiB")
    if batch_blocks < 1:
        raise InvalidRequest(f"--batch is {batch_blocks}: give 1 or more blocks")
    if rounds < ROUNDS_MIN:
        raise InvalidRequest(f"--rounds is {rounds}: give {ROUNDS_MIN} or more")
    l3_bytes = host.l3_bytes()
    batch_bytes = batch_blocks * block_bytes
    if pool_bytes is None:
        batches = max(BATCHES_MIN, -(-COLD_FACTOR * l3_bytes // batch_bytes))
    else:
        batches = pool_bytes // (2 * batch_bytes)
        if batches < BATCHES_MIN:
            smallest = 2 * BATCHES_MIN * batch_bytes
            raise ConfigError(
                f"--pool is {pool_bytes} bytes: batches of {batch_blocks} blocks need at least "
                f"{smallest}"
            )
    parameters = Parameters(
        block_bytes=block_bytes,
        batch_blocks=batch_blocks,
        batches=batches,
        rounds=rounds,
        is_aligned=is_aligned,
        is_interleaved=is_interleaved,
        l3_bytes=l3_bytes,
    )
    available = available_memory_bytes()
    if parameters.memory_bytes > available:
        raise ConfigError(
            f"this needs {parameters.memory_bytes} bytes of memory, and only {available} are "
            "available here: give a smaller --pool, --batch or --block-size"
        )
    return parameters
