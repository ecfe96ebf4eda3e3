"""Storing while `generate` runs: each block as soon as it is full, none before the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from transformers.generation.streamers import BaseStreamer

from kvstore.connectors.transformers import geometry
from kvstore.connectors.transformers.faults import FAULTS, outcome_of
from kvstore.cuda import host_copy
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import DynamicCache

    from kvstore.client.session import Session
    from kvstore.clock import Clock
    from kvstore.connectors.transformers.report import Tally
    from kvstore.keys import Namespace
    from kvstore.types import BlockKey

RESERVATION_TTL_SECONDS = 30.0
#: One call may wait this long for room, once: after a refusal it stores no more.
RESERVE_WAIT_SECONDS = 0.1
#: Blocks of one reservation take at most this much, or are one block.
RESERVATION_BYTES = 16 << 20

#: After these the next block is worth a try: it is there, or its writer is another one.
_GOES_ON = frozenset({Outcome.GRANTED, Outcome.PRESENT, Outcome.PENDING})


class BlockWriter:
    """Stores the full blocks of one sequence from its cache, first to last.

    The cache is behind the sequence, since the newest token's KV is not in it yet. One that is
    ahead holds something else than these tokens, and nothing more of it is stored.
    """

    def __init__(
        self,
        session: Session,
        namespace: Namespace,
        cache: DynamicCache,
        tally: Tally,
        clock: Clock,
    ) -> None:
        self._session = session
        self._namespace = namespace
        self._cache = cache
        self._tally = tally
        self._clock = clock
        self._done = tally.loaded_blocks
        self._stopped = False

    def store(self, tokens: Sequence[int]) -> None:
        """Store what has become full since the last call; `tokens` is the whole sequence so far.

        A refusal or a fault ends it for good. Both are counted in the tally and never raised.
        """
        size = self._namespace.block_tokens
        cached_tokens = self._cache.get_seq_length()
        full = cached_tokens // size
        if self._stopped or full <= self._done:
            return
        if cached_tokens > len(tokens):
            self._stop(Outcome.INCOMPATIBLE, full - self._done)
            return
        started = self._clock.now()
        try:
            self._store_until(tokens[: full * size], full)
        except FAULTS as fault:
            self._stop(outcome_of(fault), full - self._done)
        finally:
            self._tally.store_seconds += self._clock.now() - started

    def _store_until(self, tokens: Sequence[int], full: int) -> None:
        #   0 ....... self._done ........ end ........ full ...... tokens of the cache
        #   └ stored ┘└ one reservation ┘└ the next one ┘└ not yet a block ┘
        keys = self._namespace.keys(tokens)
        tensors = [tensor[0] for tensor in geometry.kv_tensors(self._cache)]
        block_bytes = self._namespace.layout.bytes_per_block(self._namespace.block_tokens)
        step = max(1, RESERVATION_BYTES // block_bytes)
        while self._done < full and not self._stopped:
            end = min(full, self._done + step)
            self._reserve_and_fill(keys[:end], tensors)

    def _reserve_and_fill(self, keys: Sequence[BlockKey], tensors: Sequence[torch.Tensor]) -> None:
        start = self._done
        with self._session.reserve(
            keys,
            start=start,
            ttl_seconds=RESERVATION_TTL_SECONDS,
            wait_seconds=RESERVE_WAIT_SECONDS,
        ) as reservation:
            outcomes = list(reservation.outcomes)
            first_token = start * self._namespace.block_tokens
            host_copy.store_blocks(tensors, first_token, reservation.views)
            reservation.commit()
        for position, outcome in enumerate(outcomes):
            if outcome not in _GOES_ON:
                self._stop(outcome, len(outcomes) - position)
                return
            stored = outcome is Outcome.GRANTED
            self._tally.put_outcomes[Outcome.OK if stored else outcome] += 1
            self._tally.stored_blocks += stored
            self._done += 1

    def _stop(self, outcome: Outcome, blocks: int) -> None:
        self._stopped = True
        self._tally.put_outcomes[outcome] += blocks


class TokenStreamer(Protocol):
    """What `generate` hands its tokens to: a `BaseStreamer`, or anything with its two methods."""

    def put(self, value: torch.Tensor) -> object:
        """Take the prompt, which comes first, or the next token."""

    def end(self) -> object:
        """Take notice that there are no more."""


class StoringStreamer(BaseStreamer):
    """Stands before the caller's streamer: each token goes on first, and is stored after that.

    A streamer, not a stopping criterion: those run before the token is handed out.
    """

    def __init__(
        self, writer: BlockWriter, tokens: list[int], streamer: TokenStreamer | None
    ) -> None:
        self._writer = writer
        self._tokens = tokens
        self._streamer = streamer
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, which comes first, or the next token."""
        if self._streamer is not None:
            self._streamer.put(value)
        if not self._prompt_seen:
            self._prompt_seen = True  # `tokens` has the prompt from the start
            return
        self._tokens.extend(value.reshape(-1).tolist())
        self._writer.store(self._tokens)

    def end(self) -> None:
        """Pass the end on."""
        if self._streamer is not None:
            self._streamer.end()
