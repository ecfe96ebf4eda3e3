"""A core full of blocks, filled through requests as sessions make them, without any payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from kvstore.clock import SystemClock
from kvstore.messages import BlockSpec, CommitRequest, ReserveRequest
from kvstore.policy import POLICIES
from kvstore.settings import CoreSettings
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import KEY_BYTES, SINGLE_DOMAIN, SLOT_ALIGNMENT_BYTES, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.messages import Answer, Request, ReserveAnswer, Step

BLOCK_BYTES = SLOT_ALIGNMENT_BYTES
BLOCK_TOKENS = 16
#: Blocks that are never in the store have keys of another seed.
SEED, OTHER_SEED = 20_261_130, 20_261_131
_RESERVATION_SECONDS = 30.0


class Sequences:
    """Keys of `entries` blocks, in sequences of `sequence_blocks`; the last one may be shorter.

    They look random, as hashes do. Each call makes objects of its own, as a session does: whoever
    looks for a key shall not find it by its identity, nor its hash computed before.

    Their turns to be stored come prompt by prompt or, interleaved, block by block from all
    sequences in random order.
    """

    def __init__(
        self,
        entries: int,
        sequence_blocks: int,
        *,
        is_interleaved: bool = False,
        seed: int = SEED,
    ) -> None:
        self._is_interleaved = is_interleaved
        self._bytes = np.random.default_rng(seed).bytes(KEY_BYTES * entries)
        self.starts = range(0, entries, sequence_blocks)
        self.lengths = [min(sequence_blocks, entries - start) for start in self.starts]

    def __len__(self) -> int:
        return len(self.starts)

    def turns(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, first block, end) of each batch that is stored, every time the same."""
        if not self._is_interleaved:
            for sequence, length in enumerate(self.lengths):
                yield sequence, 0, length
            return
        order = np.repeat(np.arange(len(self), dtype=np.int32), self.lengths)
        np.random.default_rng(SEED).shuffle(order)
        ends = [0] * len(self)
        for sequence in order.tolist():
            first = ends[sequence]
            ends[sequence] = first + 1
            yield sequence, first, first + 1

    def keys(self, sequence: int, first: int, end: int) -> list[bytes]:
        """The keys of blocks first..end of a sequence."""
        start = self.starts[sequence]
        joined, ends = self._bytes, range(start + first + 1, start + end + 1)
        return [joined[KEY_BYTES * (n - 1) : KEY_BYTES * n] for n in ends]


class Residents:
    """A core whose tier has exactly the room for `entries` blocks of 4 KiB.

    All of them may be leased, and the index does not count: it is the work that is to be measured.
    """

    def __init__(self, entries: int) -> None:
        self.core = Core(
            SystemClock(),
            Slots(entries * BLOCK_BYTES),
            POLICIES["lru"](),
            settings=CoreSettings(leased_fraction=1.0),
        )
        self._checksums = np.random.default_rng(SEED)
        self._last_request_id = 0

    def ask(self, request: Request) -> Answer:
        """The answer of a request that does not wait."""
        return self._begin(request).answers[0][1]

    def put(self, specs: list[BlockSpec], start: int = 0) -> None:
        """Reserve and commit the blocks from `start` on, and report their checksums."""
        request = ReserveRequest(SINGLE_DOMAIN, specs, start, _RESERVATION_SECONDS, 0.0, None)
        answer = cast("ReserveAnswer", self.ask(request))
        step = self._begin(CommitRequest(answer.reservation_id, len(answer.outcomes), 0))
        checksums = self._checksums.integers(1 << 64, size=len(step.transfers), dtype=np.uint64)
        for transfer, checksum in zip(step.transfers, checksums.tolist(), strict=True):
            self.core.complete(transfer, Outcome.OK, checksum)

    def fill(self, sequences: Sequences) -> None:
        """Put all blocks, in the order of their turns."""
        for sequence, first, end in sequences.turns():
            if first:  # the block before comes along, so that it is not evicted for these
                self.put(specs_of(sequences.keys(sequence, first - 1, end)), start=1)
            else:
                self.put(specs_of(sequences.keys(sequence, first, end)))

    def _begin(self, request: Request) -> Step:
        self._last_request_id += 1
        return self.core.begin(self._last_request_id, request)


def specs_of(keys: Iterable[bytes]) -> list[BlockSpec]:
    """Consecutive blocks, each the parent of the next."""
    specs, parent = [], None
    for key in keys:
        specs.append(BlockSpec(key, parent, BLOCK_BYTES, BLOCK_TOKENS, False))
        parent = key
    return specs
