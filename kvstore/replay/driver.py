"""Sends a workload through a core: the real index, slots and policy, with no tier below them.

One request after the other, each of them: read the longest prefix that is held, reserve the rest,
commit it. Nothing else happens meanwhile and no time passes, so every number is exact and the same
on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvstore.clock import FakeClock
from kvstore.policy import LruNPolicy
from kvstore.replay import requests as ask
from kvstore.replay.counts import Counts, Outcome
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import Outcome as BlockOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.messages import Answer, BlockSpec, MatchAnswer, ReadAnswer, Request, ReserveAnswer
    from kvstore.policy import Policy
    from kvstore.replay.workload import Prompt, Workload


def replay(workload: Workload, policy: Policy, capacity_blocks: int) -> Outcome:
    """Run a workload through an empty store of that many blocks with that policy, a new one.

    With `lru-n` every block is reserved and committed by itself, from first to last, as a cache
    does that knows of no prefixes. Raises InvariantViolated if the core does not add up at the end.
    """
    run = _Run(workload, policy, capacity_blocks)
    middle = len(workload.prompts) // 2
    first_half = run.play(workload.prompts[:middle])
    second_half = run.play(workload.prompts[middle:])
    audit = run.core.check()
    return Outcome(
        policy.name,
        capacity_blocks,
        first_half + second_half,
        second_half,
        audit.ready_blocks,
        {str(reason): count for reason, count in run.core.counters.by_label("misses").items()},
        run.hits,
    )


class _Run:
    """One replay under way."""

    def __init__(self, workload: Workload, policy: Policy, capacity_blocks: int) -> None:
        self.core = Core(FakeClock(), Slots(capacity_blocks * ask.BLOCK_BYTES), policy)
        self.hits: list[int] = []
        self._block_tokens = workload.block_tokens
        self._is_block_by_block = policy.name == LruNPolicy.name
        self._last_request_id = 0

    def play(self, prompts: Sequence[Prompt]) -> Counts:
        """Some requests, one after the other."""
        counts = Counts()
        evictions = self._evictions()
        for prompt in prompts:
            self._one(prompt, counts)
        counts.evictions = self._evictions() - evictions
        return counts

    def _one(self, prompt: Prompt, counts: Counts) -> None:
        tokens, blocks = prompt.input_tokens, prompt.blocks
        hits = 0
        if blocks:
            answer = cast("ReadAnswer", self._ask(ask.read(prompt.keys, tokens)))
            hits = len(answer.places)
        self.hits.append(hits)
        counts.requests += 1
        counts.block_accesses += len(blocks)
        counts.input_tokens += tokens
        counts.hit_blocks += hits
        counts.hit_tokens += min(self._block_tokens * hits, tokens)
        counts.requests_with_hit += hits > 0
        missed = len(blocks) - hits
        if not missed:
            counts.full_hits += 1
            return
        # What is there is counted before anything makes room for what is not.
        beyond = prompt.keys[hits + 1 : prompt.named_blocks]
        held = sum(cast("MatchAnswer", self._ask(ask.is_held(key))).blocks for key in beyond)
        outcomes: list[BlockOutcome] = []
        if self._is_block_by_block:
            for block in blocks[hits:]:
                outcomes += self._store([block], 0)
        else:
            outcomes = self._store(blocks, hits)
        counts.blocks_written += outcomes.count(BlockOutcome.GRANTED)
        counts.refused_blocks += outcomes.count(BlockOutcome.FULL)
        counts.missed_new += prompt.new_blocks
        counts.missed_out_of_reach += held
        counts.missed_evicted += missed - prompt.new_blocks - held

    def _store(self, blocks: Sequence[BlockSpec], start: int) -> list[BlockOutcome]:
        answer = cast("ReserveAnswer", self._ask(ask.reserve(blocks, start)))
        self._ask(ask.commit(answer.reservation_id, len(answer.outcomes)))
        return answer.outcomes

    def _ask(self, request: Request) -> Answer:
        """The answer of a request; the checksums that a commit asks for are made up at once."""
        self._last_request_id += 1
        step = self.core.begin(self._last_request_id, request)
        for transfer in step.transfers:
            self.core.complete(transfer, BlockOutcome.OK, 0)
        ((_, answer),) = step.answers
        return answer

    def _evictions(self) -> int:
        return self.core.counters["dropped_blocks", BlockOutcome.EVICTED]
