"""Storing while `generate` runs: each block as soon as it is full, none before the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from transformers.generation.streamers import BaseStreamer

from kvstore.connectors.transformers.faults import FAULTS, outcome_of
from kvstore.cuda import host_copy
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvstore.client.session import Session
    from kvstore.clock import Clock
    from kvstore.connectors.transformers.caches import FollowedCache
    from kvstore.connectors.transformers.geometry import PartForm
    from kvstore.connectors.transformers.report import Tally
    from kvstore.connectors.transformers.sequences import IsWanted, Sequences

RESERVATION_TTL_SECONDS = 30.0
#: One call may wait this long for room, once: after a refusal it stores no more.
RESERVE_WAIT_SECONDS = 0.1
#: Blocks of one reservation take at most this much, or are one block.
RESERVATION_BYTES = 16 << 20

#: After these the next block is worth a try: it is there, or its writer is another one.
_GOES_ON = frozenset({Outcome.GRANTED, Outcome.PRESENT, Outcome.PENDING})


class BlockWriter:
    """Stores the full blocks of all rows from their cache, those of each row first to last.

    The cache is behind the sequences, since the newest token's KV is not in it yet. One that is
    ahead holds something else than these tokens, and nothing more of it is stored.
    """

    def __init__(
        self,
        session: Session,
        sequences: Sequences,
        cache: FollowedCache,
        forms: Sequence[PartForm],
        tally: Tally,
        clock: Clock,
    ) -> None:
        self.sequences = sequences
        self._session = session
        self._cache = cache
        self._forms = forms
        self._tally = tally
        self._clock = clock
        self.is_stopped = False
        self._block_bytes = sum(form.form.block_bytes for form in forms)

    def store(self, known_columns: int, is_wanted: IsWanted | None = None) -> None:
        """Store what has become full since the last call and `is_wanted`, by default all.

        The rows of the sequences have the tokens of the first `known_columns`. A refusal or a fault
        ends it for good. Both are counted in the tally and never raised.
        """
        columns = self._cache.get_seq_length()
        gained = 0 if self.is_stopped else self.sequences.gained_blocks(columns)
        if gained == 0:
            return
        if columns > known_columns:
            self.stop(Outcome.INCOMPATIBLE, gained)
            return
        self.sequences.advance(columns)
        self.store_rest(is_wanted)

    def store_rest(self, is_wanted: IsWanted | None = None) -> None:
        """The same of what was full before."""
        started = self._clock.now()
        try:
            for index in range(len(self.sequences.rows)):
                for run in self.sequences.unstored(index, is_wanted):
                    self._store_run(index, run)
            self._cache.forget(self.sequences.first_needed_column())
        except FAULTS as fault:
            self.stop(outcome_of(fault))
        finally:
            self._tally.store_seconds += self._clock.now() - started

    def stop(self, outcome: Outcome, lost_blocks: int | None = None) -> None:
        """Store no more; by default all that is full and not stored is lost."""
        if self.is_stopped:
            return
        if lost_blocks is None:
            lost_blocks = self.sequences.count_unstored()
        self.is_stopped = True
        self._tally.put_outcomes[outcome] += lost_blocks
        self._cache.stop_recording()

    def _store_run(self, index: int, run: range) -> None:
        #   0 ....... run.start ....... end ........ run.stop ......
        #   └ stored ┘└ one reservation ┘└ the next one ┘└ stored, or not yet a block
        step = max(1, RESERVATION_BYTES // self._block_bytes)
        for start in range(run.start, run.stop, step):
            if self.is_stopped:
                return
            self._reserve_and_fill(index, range(start, min(run.stop, start + step)))

    def _reserve_and_fill(self, index: int, run: range) -> None:
        row, size = self.sequences.rows[index], self.sequences.block_tokens
        sources = [_Source(self._cache, form) for form in self._forms]
        while run and not any(source.has(row.padding + run.start * size) for source in sources):
            self.sequences.settle(index, run.start)  # all of it has left the windows unrecorded
            run = run[1:]
        columns = [row.padding + logical * size for logical in run]
        wanted = [[source.has(column) for source in sources] for column in columns]
        if not run:
            return
        with self._session.reserve(
            row.chain.keys[: run.stop],
            start=run.start,
            ttl_seconds=RESERVATION_TTL_SECONDS,
            wait_seconds=RESERVE_WAIT_SECONDS,
            wanted=wanted,
        ) as reservation:
            outcomes = list(reservation.outcomes)
            views = [v if isinstance(v, tuple) else (v,) for v in reservation.views]
            for source, of_part in zip(sources, zip(*views, strict=True), strict=True):
                source.store(index, columns, of_part)
            reservation.commit()
        stored_bytes = [sum(view.nbytes for view in block if view is not None) for block in views]
        for logical, outcome, size_bytes in zip(run, outcomes, stored_bytes, strict=True):
            if outcome not in _GOES_ON:
                self.stop(outcome)
                return
            stored = outcome is Outcome.GRANTED
            self._tally.put_outcomes[Outcome.OK if stored else outcome] += 1
            self._tally.stored_blocks += stored
            self._tally.stored_bytes += size_bytes
            self.sequences.settle(index, logical)


class _Source:
    """Where one part of the blocks comes from: the columns that its layers' caches have."""

    def __init__(self, cache: FollowedCache, form: PartForm) -> None:
        self._form = form.form
        found = [cache.columns_of(layer) for layer in form.layers]
        kept = [columns for columns in found if columns is not None]
        self._tensors = [tensor for _, pair in kept for tensor in pair]
        # Of a sliding window, the columns that are still there; it is the same for all layers.
        self._first = kept[0][0] if len(kept) == len(found) else None

    def has(self, column: int) -> bool:
        """True if a block that begins there can be had."""
        return self._first is not None and column >= self._first

    def store(self, row: int, columns: Sequence[int], views: Sequence[memoryview | None]) -> None:
        """Copy the blocks of a row to `views`, of which only what is at hand was asked for."""
        first = self._first or 0
        places = [(row, column - first) for column in columns]
        host_copy.store_blocks(self._form, self._tensors, places, views)


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

    def __init__(self, writer: BlockWriter, streamer: TokenStreamer | None) -> None:
        self._writer = writer
        self._sequences = writer.sequences
        self._streamer = streamer
        self._columns = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts, which come first, or the next token of each row."""
        if self._streamer is not None:
            self._streamer.put(value)
        if self._columns == 0:
            self._columns = value.shape[-1]  # the sequences have the prompts from the start
            return
        self._columns += 1
        rows, tokens = self._sequences.rows, value.reshape(-1).tolist()
        if len(tokens) != len(rows):
            self._writer.stop(Outcome.INCOMPATIBLE, 1)
            return
        for row, token in zip(rows, tokens, strict=True):
            row.extend([token], self._sequences.ends)
        self._writer.store(self._columns)

    def end(self) -> None:
        """Pass the end on."""
        if self._streamer is not None:
            self._streamer.end()
