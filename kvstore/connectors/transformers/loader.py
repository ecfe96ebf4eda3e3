"""Loading: the longest stored prefix of every row, as the first columns of the batch's cache.

    c = 6         0  1  2  3  4  5 | 6  7  8  9
    row 0         a  b  c  d  e  f | g  h  i  j     has 8 tokens stored: 6 are of use
    row 1         .  .  .  k  l  m | n  o  p  q     has 3 tokens stored: they end at column 6
                 └───── loaded ────┘└─ computed ┘

generate computes the same columns of every row, those from the cache's length c on. So c is the
least of padding + stored tokens over all rows, and never the last column, whose logits are needed.
A row uses its stored blocks up to c, the last one perhaps in part; columns of padding stay zero and
are hidden by the mask.

A sliding window needs the end of the prefix alone, which is another end in each row. A lease on n
blocks has what a prefix of n blocks needs of a window, so a row that is cut short leases again.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from kvstore.connectors.transformers.faults import FAULTS, outcome_of
from kvstore.cuda import host_copy
from kvstore.cuda.host_copy import Spot
from kvstore.errors import LeaseExpired

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvstore.client.lease import Lease
    from kvstore.client.session import Session
    from kvstore.connectors.transformers.geometry import PartForm
    from kvstore.connectors.transformers.report import Tally
    from kvstore.connectors.transformers.sequences import Sequences
    from kvstore.cuda.block_form import Prefix
    from kvstore.types import BlockKey

#: Loading is a copy out of host memory: milliseconds. Only a stopped process keeps a lease so long.
LEASE_TTL_SECONDS = 30.0


class Loaded(NamedTuple):
    """The first `columns` of the batch, or what a sliding window keeps of them, for each part."""

    columns: int
    prefixes: list[Prefix]


def loadable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Whole blocks of a prompt, without its last token, whose logits must be computed.

    prompt of n * block_tokens - 1 or n * block_tokens: n - 1 blocks; of one more: n blocks.
    """
    return max(0, prompt_tokens - 1) // block_tokens


def load(
    session: Session,
    sequences: Sequences,
    forms: Sequence[PartForm],
    device: torch.device,
    tally: Tally,
) -> Loaded | None:
    """The first columns of the batch, or None where there is nothing to load, or that failed.

    `sequences` adopts the blocks that were loaded.
    """
    try:
        with ExitStack() as stack:
            loader = _Loader(session, sequences, forms, stack)
            counts = loader.lease()
            loaded = loader.copy(counts, device) if any(counts) else None
    except FAULTS as fault:
        sequences.drop_adopted()
        tally.lose_load(outcome_of(fault))
        return None
    loader.count(tally)
    tally.loaded_tokens = sum(counts)
    return loaded


class _Leases:
    """The leases of one sequence: the first on all that is stored of it, more on shorter parts."""

    def __init__(self, session: Session, keys: Sequence[BlockKey], stack: ExitStack) -> None:
        self._session = session
        self._stack = stack
        self.keys = keys
        self.leases: dict[int, Lease] = {}  # by how many blocks were asked for
        self._views: list[list[tuple[memoryview | None, ...]]] = []
        if keys:
            self.lease(len(keys))

    @property
    def first(self) -> Lease | None:
        return self.leases.get(len(self.keys))

    @property
    def blocks(self) -> int:
        return self.first.blocks if self.first else 0

    def lease(self, blocks: int) -> None:
        """Lease what a prefix of so many blocks needs, where that is stored."""
        if blocks == 0 or blocks in self.leases:
            return
        keys = self.keys[:blocks]
        lease = self._session.lease(keys, ttl_seconds=LEASE_TTL_SECONDS, wait_seconds=0)
        self.leases[blocks] = self._stack.enter_context(lease)
        if lease.blocks:
            views = lease.views
            self._views.append([v if isinstance(v, tuple) else (v,) for v in views])

    def view(self, part: int, logical: int) -> memoryview | None:
        """One part of a block, if any of the leases has it."""
        for views in self._views:
            if logical < len(views) and (view := views[logical][part]) is not None:
                return view
        return None


class _Loader:
    """What one call has leased, row by row, and how much of it is of use."""

    def __init__(
        self, session: Session, sequences: Sequences, forms: Sequence[PartForm], stack: ExitStack
    ) -> None:
        self._session = session
        self._sequences = sequences
        self._rows = sequences.rows
        self._size = sequences.block_tokens
        self._forms = forms
        self._stack = stack
        self._held: list[_Leases] = []  # by row
        self._limits: list[int] = []  # blocks of each row that can be used
        self._loaded_bytes = 0

    def lease(self) -> list[int]:
        """Lease what is stored of all rows; how many tokens of each can be loaded."""
        self._lease_longest()
        while True:
            columns = min(map(self._end, range(len(self._rows))))
            counts = [max(0, columns - row.padding) for row in self._rows]
            missing = [index for index, count in enumerate(counts) if not self._has(index, count)]
            if not missing:
                return counts
            for index in missing:
                # The next shorter prefix; what it needs is seen when its turn comes.
                self._limits[index] = -(-counts[index] // self._size) - 1

    def copy(self, counts: Sequence[int], device: torch.device) -> Loaded:
        """Copy each block that is of use to all rows that have it."""
        columns = max(row.padding + n for row, n in zip(self._rows, counts, strict=True) if n)
        places = self._sequences.adopt(counts)
        prefixes = []
        for part, form in enumerate(self._forms):
            first_column = form.first_kept(columns)
            views: list[memoryview] = []
            spots: list[list[Spot]] = []
            for at in places.values():
                found = [
                    self._spot(form, index, logical, counts[index], first_column)
                    for index, logical in at
                ]
                if any(found):
                    views.append(self._view(part, at, found))
                    spots.append([spot for spot in found if spot])
            prefix = form.form.allocate(len(self._rows), columns - first_column, device)
            host_copy.load_blocks(views, spots, prefix)
            self._loaded_bytes += sum(view.nbytes for view in views)
            prefixes.append(prefix)
        # The memory may have been another block's while it was read.
        leases = [lease for held in set(self._held) for lease in held.leases.values()]
        if not all(lease.valid() for lease in leases):
            raise LeaseExpired("a lease ended while its blocks were copied")
        return Loaded(columns, prefixes)

    def count(self, tally: Tally) -> None:
        """Say what was found, and what the row that the cache ends with has missed."""
        last = min(range(len(self._rows)), key=self._end)
        first = self._held[last].first
        tally.reason = first.reason if first else None
        tally.loaded_bytes = self._loaded_bytes
        for held in dict.fromkeys(self._held):
            if held.first:
                tally.hits_by_tier.update(held.first.by_tier)
                if held.first.reason:
                    tally.misses[held.first.reason] += len(held.keys) - held.blocks

    def _lease_longest(self) -> None:
        """Lease for each row what can be of use, given what the rows before it have."""
        columns = self._rows[0].padding + len(self._rows[0].tokens) - 1
        leased: dict[BlockKey | None, _Leases] = {}
        for row in self._rows:
            keys = row.chain.keys[: loadable_blocks(len(row.tokens), self._size)]
            keys = keys[: max(0, -(-(columns - row.padding) // self._size))]
            last = keys[-1] if keys else None
            if last not in leased:  # equal rows, and rows of one prefix, share a lease
                leased[last] = _Leases(self._session, keys, self._stack)
            self._held.append(leased[last])
            self._limits.append(leased[last].blocks)
            columns = min(columns, self._end(len(self._held) - 1))

    def _end(self, index: int) -> int:
        """The column where what can be used of a row ends."""
        return self._rows[index].padding + self._limits[index] * self._size

    def _has(self, index: int, count: int) -> bool:
        """True if all parts of a row's first `count` tokens that are needed are leased."""
        held, (full, rest) = self._held[index], divmod(count, self._size)
        if self._is_leased(held, count):
            return True
        # Of the block that the prefix ends in, and of the blocks before it.
        for blocks in (full + (rest > 0), full):
            held.lease(blocks)
        return self._is_leased(held, count)

    def _is_leased(self, held: _Leases, count: int) -> bool:
        """True if a view of every part of the first `count` tokens that is needed is at hand."""
        end = -(-count // self._size)
        return all(
            held.view(part, logical) is not None
            for part, form in enumerate(self._forms)
            for logical in range(form.first_needed(count) // self._size, end)
        )

    def _view(
        self, part: int, at: Sequence[tuple[int, int]], found: Sequence[Spot | None]
    ) -> memoryview:
        """The memory of the block that all of `at` are, from a row that needs the part."""
        views = (
            self._held[index].view(part, logical)
            for (index, logical), spot in zip(at, found, strict=True)
            if spot
        )
        return next(view for view in views if view is not None)

    def _spot(
        self, form: PartForm, index: int, logical: int, count: int, first_column: int
    ) -> Spot | None:
        """Where a logical block of a row goes: what is needed of its part, if anything is."""
        block = logical * self._size
        first = max(block, form.first_needed(count))
        end = min(block + self._size, count)
        if first >= end:
            return None
        column = self._rows[index].padding + first - first_column
        return Spot(index, column, first - block, end - first)
