"""What a replay found, as one document for programs and as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import kvstore
from kvstore.cli import terminal

if TYPE_CHECKING:
    from kvstore.replay.counts import Outcome
    from kvstore.replay.workload import Workload

_ROW = "{:8}{:>7}{:>10}{:>9}{:>9}   {:>7}{:>8}{:>8}{:>10}"
_LEGEND = """\
tokens hit: of all input tokens, those that the store had; 2nd half: of the second half of the
requests, when the store was no longer empty. Why a block was missed, in % of all that were asked
for: new: no request had named it before; left: it was evicted, or there had been no room for it;
cut off: it is held, behind one that is not. written: blocks that were stored."""


class Capacity(NamedTuple):
    """A size of the store."""

    blocks: int
    fraction: float  # of the blocks that the trace names, as it was asked for


class Report:
    """Collects the outcomes of replays of one workload."""

    def __init__(self, source: str, workload: Workload) -> None:
        self._source = source
        self._workload = workload
        self._outcomes: list[tuple[Capacity, Outcome]] = []

    def add(self, capacity: Capacity, outcome: Outcome) -> None:
        """Take in one replay."""
        self._outcomes.append((capacity, outcome))

    def document(self) -> dict[str, Any]:
        """Everything. With one replay, its numbers stand at the top as well."""
        workload = self._workload
        results = [
            {"capacity_fraction": capacity.fraction, **outcome.document()}
            for capacity, outcome in self._outcomes
        ]
        return {
            "kvstore": kvstore.__version__,
            "trace": self._source,
            "mode": str(workload.mode),
            "block_tokens": workload.block_tokens,
            "requests": len(workload.prompts),
            "block_accesses": workload.block_accesses,
            "input_tokens": workload.input_tokens,
            "footprint_blocks": workload.footprint_blocks,
            "odd_requests": workload.odd_requests,
            "unlimited": {
                "hit_blocks": workload.unlimited_hit_blocks,
                "hit_tokens": workload.unlimited_hit_tokens,
                "hit_ratio": self._unlimited_hit_ratio(),
            },
            **(results[0] if len(results) == 1 else {}),
            "results": results,
        }

    def print_head(self) -> None:
        """What is replayed, and the titles of the columns."""
        workload = self._workload
        print(
            terminal.fill(
                f"{self._source}: {workload.input_tokens:,} tokens in "
                f"{len(workload.prompts):,} requests; {workload.block_accesses:,} blocks of "
                f"{workload.block_tokens} tokens, {workload.footprint_blocks:,} of them different. "
                f"A store that never forgets would have {100 * self._unlimited_hit_ratio():.2f} % "
                "of the tokens."
            )
        )
        if workload.odd_requests:
            print(
                terminal.fill(
                    f"Note: the number of ids does not fit that of tokens, with blocks of "
                    f"{workload.block_tokens} (--block-tokens): requests {workload.odd_requests:,}."
                )
            )
        print()
        print(_ROW.format("", "store", "", "tokens", "2nd", "", "missed", "", "blocks"))
        titles = ("policy", "size", "blocks", "hit", "half", "new", "left", "cut off", "written")
        print(_ROW.format(*titles), flush=True)

    def print_row(self, capacity: Capacity, outcome: Outcome) -> None:
        """One replay."""
        total = outcome.total
        row = _ROW.format(
            outcome.policy,
            f"{100 * capacity.fraction:.3g} %",
            f"{capacity.blocks:,}",
            f"{100 * total.hit_ratio:.2f} %",
            f"{100 * outcome.second_half.hit_ratio:.2f} %",
            *(
                f"{100 * missed / total.block_accesses:.1f} %"
                for missed in (
                    total.missed_new,
                    total.missed_evicted,
                    total.missed_out_of_reach,
                )
            ),
            f"{total.blocks_written:,}",
        )
        print(row, flush=True)

    def print_foot(self) -> None:
        """How to read it."""
        print()
        print(terminal.fill(_LEGEND))
        refused = max(outcome.total.refused_blocks for _, outcome in self._outcomes)
        if refused:
            print(
                terminal.fill(
                    f"Note: up to {refused:,} blocks found no room: some requests have more blocks "
                    "than the store."
                )
            )

    def _unlimited_hit_ratio(self) -> float:
        tokens = self._workload.input_tokens
        return self._workload.unlimited_hit_tokens / tokens if tokens else 0.0
