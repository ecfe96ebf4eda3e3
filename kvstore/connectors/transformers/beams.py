"""Storing while beam search runs.

Beam search hands out nothing before its end, and moves its beams about meanwhile: row i of the next
step goes on from any row of this one, so tables are forked with the beams. What all beams of a
prompt have in common is stored as it fills, since any answer will have it, and at the end what is
left of the answers: no block of a beam that lost is ever stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import LogitsProcessor

from kvstore.key_chain import KeyChain
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvstore.connectors.transformers.caches import FollowedCache
    from kvstore.connectors.transformers.writer import BlockWriter


class StoringProcessor(LogitsProcessor):
    """Stores from within beam search; the `beams` of a prompt are neighbouring rows.

    generate calls it after each forward pass with the tokens of all rows, when the cache has KV of
    every one of them, and asks its cache to reorder the rows after that. Answers have `columns_max`
    columns at most.
    """

    def __init__(
        self, writer: BlockWriter, cache: FollowedCache, beams: int, columns_max: int | None
    ) -> None:
        self._writer = writer
        self._cache = cache
        self._columns_max = columns_max
        self._sequences = writer.sequences
        self._beams = beams
        rows = self._sequences.rows
        self._prompts = [(row.padding, len(row.tokens)) for row in rows[::beams]]
        self._order: torch.Tensor | None = None  # of the rows since the sequences were last told

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores as they are."""
        columns = input_ids.shape[1]
        if self._cache.keeps_rows:
            self._writer.stop(Outcome.INCOMPATIBLE, 1)  # the last step was not the last
        is_due = not self._writer.is_stopped and self._sequences.gained_blocks(columns)
        if is_due and self._follow(input_ids.tolist()):
            self._writer.store(columns, self._is_common)
        self._cache.keeps_rows = columns + 1 == self._columns_max
        return scores

    def reorder(self, beam_idx: torch.Tensor) -> None:
        """Take notice that row i of the cache is now what row `beam_idx[i]` was."""
        order = self._order
        self._order = beam_idx if order is None else order[beam_idx.to(order.device)]

    def finish(self, answers: Sequence[Sequence[int]]) -> None:
        """Store what the last beams have of the answers, which come with their prompts' padding."""
        self._apply_order()
        wanted: set[bytes] = set()
        for index, answer in enumerate(answers):
            padding, tokens = self._prompts[index * len(self._prompts) // len(answers)]
            text, _ = self._sequences.ends.text(answer[padding + tokens :])
            chain = KeyChain(self._sequences.namespace)
            chain.append([*answer[padding : padding + tokens], *text])
            wanted |= {key.chain_hash for key in chain.keys}
        rows = self._sequences.rows
        self._writer.store_rest(
            lambda index, logical: rows[index].chain.keys[logical].chain_hash in wanted
        )

    def _follow(self, tokens: Sequence[Sequence[int]]) -> bool:
        """Bring the sequences up to date; False where these are other rows than those followed."""
        self._apply_order()
        rows = self._sequences.rows
        texts = [given[row.padding :] for row, given in zip(rows, tokens, strict=False)]
        known = [text[: len(row.tokens)] for row, text in zip(rows, texts, strict=False)]
        if len(tokens) != len(rows) or known != [row.tokens for row in rows]:
            self._writer.stop(Outcome.INCOMPATIBLE, 1)
            return False
        for row, text in zip(rows, texts, strict=True):
            row.extend(text[len(row.tokens) :], self._sequences.ends)
        return True

    def _apply_order(self) -> None:
        if self._order is not None:
            self._sequences.reorder(self._order.tolist())
            self._order = None

    def _is_common(self, index: int, logical: int) -> bool:
        """True for a block of all beams of its prompt: whichever of them wins, it has the block."""
        first = index // self._beams * self._beams
        beams = self._sequences.rows[first : first + self._beams]
        return len({self._sequences.block_of(row, logical) for row in beams}) == 1
