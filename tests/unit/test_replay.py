"""Replays: against known answers, against rules that are a few lines long, and what they count."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from kvstore.policy import POLICIES
from kvstore.replay.counts import Counts
from kvstore.replay.driver import replay
from kvstore.replay.generate import KINDS, generate
from kvstore.replay.trace import TraceRequest, read_trace
from kvstore.replay.workload import Mode, workload
from tests import cache_rules

DATA = Path(__file__).resolve().parents[1] / "data/mooncake"
TOY = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))["toy"]


def run(requests, policy, capacity_blocks, mode=Mode.ALL):
    return replay(workload(requests, mode), POLICIES[policy](), capacity_blocks)


def prompt(*ids, tokens=None):
    return TraceRequest(0, 512 * len(ids) if tokens is None else tokens, 0, list(ids))


@pytest.fixture(scope="module")
def made():
    """A workload of each kind."""
    return {kind: list(generate(kind, 5, 250)) for kind in KINDS}


class TestKnownAnswers:
    @pytest.mark.parametrize("policy", TOY["policies"])
    def test_the_toy_trace(self, policy):
        outcome = run(read_trace(str(DATA / "toy.jsonl")), policy, TOY["capacity_blocks"])
        expected = TOY["policies"][policy]
        assert {name: outcome.document()[name] for name in expected} == expected

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("policy", ["lru-n", "lru-r"])
    @pytest.mark.parametrize("mode", Mode)
    @pytest.mark.parametrize("part", [Fraction("0.1"), Fraction("0.35")])
    def test_a_rule_of_a_few_lines(self, made, kind, policy, mode, part):
        prepared = workload(made[kind], mode)
        prompts = [p.keys for p in prepared.prompts]
        capacity = max(prepared.capacity_blocks(part), max(map(len, prompts)))
        rule = {"lru-n": cache_rules.lru_n, "lru-r": cache_rules.lru_r}[policy]
        outcome = replay(prepared, POLICIES[policy](), capacity)
        assert outcome.hits == rule(prompts, capacity)
        assert 0 < outcome.total.hit_ratio < 1

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_store_that_is_large_enough_never_forgets(self, made, kind, policy):
        prepared = workload(made[kind])
        outcome = replay(prepared, POLICIES[policy](), prepared.footprint_blocks)
        total = outcome.total
        assert total.hit_blocks == prepared.unlimited_hit_blocks
        assert total.hit_tokens == prepared.unlimited_hit_tokens
        assert (total.evictions, total.missed_evicted, total.missed_out_of_reach) == (0, 0, 0)
        assert outcome.resident_blocks == total.blocks_written == prepared.footprint_blocks

    def test_full_mode_is_the_same_for_lru_and_lru_r(self, made):
        """Without partial blocks they are one rule."""
        outcomes = [run(made["chat"], policy, 300, Mode.FULL) for policy in ("lru", "lru-r")]
        assert outcomes[0].hits == outcomes[1].hits

    def test_partial_blocks_first_is_worth_something(self, made):
        """Where prompts end in one and go on; the real trace says how much."""
        for blocks in (200, 600, 1_500):
            lru, lru_r = (run(made["chat"], policy, blocks).total for policy in ("lru", "lru-r"))
            assert lru.hit_tokens > lru_r.hit_tokens


class TestCounts:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_they_add_up(self, made, kind, policy):
        prepared = workload(made[kind])
        capacity = prepared.footprint_blocks // 5
        outcome = replay(prepared, POLICIES[policy](), capacity)
        total = outcome.total
        assert total.requests == len(prepared.prompts) == len(outcome.hits)
        assert total.block_accesses == prepared.block_accesses
        assert total.input_tokens == prepared.input_tokens
        assert total.hit_blocks == sum(outcome.hits)
        missed = total.missed_new + total.missed_evicted + total.missed_out_of_reach
        assert total.hit_blocks + missed == total.block_accesses
        assert sum(outcome.misses.values()) == missed
        assert total.missed_new == prepared.footprint_blocks
        assert total.blocks_written - total.evictions == outcome.resident_blocks <= capacity

    def test_halves_are_halves(self, made):
        outcome = run(made["chat"], "lru", 400)
        second = outcome.second_half
        middle = len(outcome.hits) // 2
        assert second.requests == len(outcome.hits) - middle
        assert second.hit_blocks == sum(outcome.hits[middle:])
        # The store is as the first half left it.
        alone = run(made["chat"][middle:], "lru", 400)
        assert second.hit_tokens > alone.total.hit_tokens

    def test_counts_of_stretches_add(self):
        first, second = Counts(requests=1, hit_tokens=5), Counts(requests=2, input_tokens=10)
        total = first + second
        assert (total.requests, total.hit_tokens, total.input_tokens) == (3, 5, 10)
        assert total.hit_ratio == 0.5
        assert Counts().hit_ratio == 0.0

    def test_what_is_missed_and_why(self):
        requests = [prompt(1, 2, 3), prompt(4), prompt(1, 2, 3)]
        total = run(requests, "lru-n", 3).total  # 4 evicts 1, and cuts off 2 and 3
        assert (total.missed_new, total.missed_evicted, total.missed_out_of_reach) == (4, 1, 2)
        total = run(requests, "lru-r", 3).total  # 4 evicts 3
        assert (total.missed_new, total.missed_evicted, total.missed_out_of_reach) == (4, 1, 0)

    def test_a_hit_of_a_partial_block_counts_its_tokens(self):
        requests = [prompt(1, 2, tokens=700), prompt(1, 2, tokens=700)]
        outcome = run(requests, "lru", 2)
        assert (outcome.total.hit_blocks, outcome.total.hit_tokens) == (2, 700)
        assert outcome.total.full_hits == 1
        outcome = run(requests, "lru", 2, Mode.FULL)
        assert (outcome.total.hit_blocks, outcome.total.hit_tokens) == (1, 512)

    def test_a_request_larger_than_the_store_is_stored_as_far_as_it_goes(self):
        outcome = run([prompt(1, 2, 3, 4), prompt(1, 2, 3, 4)], "lru", 2)
        assert outcome.hits == [0, 2]
        assert outcome.total.refused_blocks == 4
        assert outcome.total.blocks_written == 2


class TestWorkload:
    def test_a_capacity_is_rounded_down_exactly(self):
        prepared = workload([prompt(*range(100))])
        assert prepared.capacity_blocks(Fraction("0.29")) == 29, "0.29 * 100 is less in floats"

    @pytest.mark.parametrize("mode", Mode)
    def test_a_prompt_without_blocks_is_a_request(self, mode):
        prepared = workload([prompt(tokens=0), prompt(7, tokens=100)], mode)
        assert [len(p.keys) for p in prepared.prompts] == [0, int(mode is Mode.ALL)]
        assert prepared.input_tokens == 100

    def test_ids_that_do_not_fit_the_tokens_are_counted_and_replayed(self):
        requests = [prompt(1, 2, 3, tokens=600), prompt(1, 2, 3, tokens=600), prompt(5)]
        prepared = workload(requests)
        assert prepared.odd_requests == 2
        outcome = replay(prepared, POLICIES["lru"](), 4)
        assert outcome.total.hit_tokens == 600, "no more than there were"

    def test_ids_that_name_no_prefix_are_replayed(self):
        """One behind another, in another order, twice: no trace of prefixes, and no harm."""
        requests = [prompt(1, 2, 3), prompt(3, 2, 1, 3), prompt(9, 1, 9), prompt(2, 2)]
        for policy in POLICIES:
            total = run(requests, policy, 2).total
            missed = total.missed_new + total.missed_evicted + total.missed_out_of_reach
            assert total.hit_blocks + missed == total.block_accesses == 12

    def test_other_blocks_than_512(self):
        requests = [TraceRequest(0, 40, 0, [1, 2, 3]), TraceRequest(0, 48, 0, [1, 2, 4])]
        prepared = workload(requests, Mode.FULL, 16)
        assert [len(p.keys) for p in prepared.prompts] == [2, 3]
        assert replay(prepared, POLICIES["lru"](), 3).total.hit_tokens == 32
        assert prepared.odd_requests == 0
