"""Workloads of our own: their structure, their shares, and that a seed decides everything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from random import Random

import pytest

from kvstore.replay.generate import ARRIVAL_GAPS, KINDS, Quantiles, generate
from kvstore.replay.workload import workload

REQUESTS = 3_000

#: Of the text that seed 1 makes with 50 requests. It changes only where the workloads change, and
#: then every published number of them does: say so in the changelog.
GOLDEN = {
    "chat": "9eb036fd6cc2c1ff63ea4f8c7a406af92c480e7317881e1136f0b10dd37a60c3",
    "agent": "7dd624d41416d08b45b559a952ff766279ed112a761e99b4ad86e96d80de0da5",
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def made():
    return {kind: list(generate(kind, 1, REQUESTS)) for kind in KINDS}


def uses(requests):
    """How often each block is named."""
    return Counter(block for request in requests for block in request.ids)


def never_reused(requests):
    counts = uses(requests)
    return sum(count == 1 for count in counts.values()) / len(counts)


def return_times(requests):
    """Seconds between one use of a block and the next, of all that are used again, sorted."""
    last: dict[int, int] = {}
    found = []
    for request in requests:
        for block in request.ids:
            if block in last:
                found.append((request.timestamp_ms - last[block]) / 1_000)
            last[block] = request.timestamp_ms
    return sorted(found)


def within(times, seconds):
    return sum(time <= seconds for time in times) / len(times)


class TestStructure:
    def test_every_block_has_one_parent(self, made, kind):
        """So the ids of a request extend those of the requests that it goes on from."""
        parents: dict[int, int | None] = {}
        for request in made[kind]:
            for parent, block in zip([None, *request.ids], request.ids, strict=False):
                assert parents.setdefault(block, parent) == parent

    def test_ids_fit_their_tokens(self, made, kind):
        assert workload(made[kind]).odd_requests == 0
        for request in made[kind]:
            assert len(set(request.ids)) == len(request.ids)
            assert request.input_tokens > 0
            assert request.output_tokens > 0

    def test_time_does_not_go_back(self, made, kind):
        times = [request.timestamp_ms for request in made[kind]]
        assert times == sorted(times)
        assert times[0] == 0
        assert 3_000_000 < times[-1] < 7_200_000

    def test_there_are_as_many_as_were_asked_for(self, kind):
        for count in (1, 2, 77):
            assert len(list(generate(kind, 3, count))) == count

    def test_other_blocks_than_512(self, kind):
        requests = list(generate(kind, 3, 50, block_tokens=16))
        assert workload(requests, block_tokens=16).odd_requests == 0

    def test_some_prefixes_are_shared_by_many(self, made, kind):
        common = [count for _, count in uses(made[kind]).most_common(1)]
        assert common[0] > REQUESTS / 2


class TestChat:
    def test_most_blocks_are_never_used_again(self, made):
        assert 0.73 < never_reused(made["chat"]) < 0.79

    @pytest.mark.parametrize(
        ("seconds", "share"), [(30, 0.16), (60, 0.28), (120, 0.52), (300, 0.79), (600, 0.94)]
    )
    def test_blocks_return_as_in_a_real_service(self, made, seconds, share):
        assert within(return_times(made["chat"]), seconds) == pytest.approx(share, abs=0.05)

    def test_a_store_that_never_forgets_has_some_two_fifths_of_the_tokens(self, made):
        prepared = workload(made["chat"])
        assert 0.34 < prepared.unlimited_hit_tokens / prepared.input_tokens < 0.46

    def test_some_ask_for_another_answer(self, made):
        prompts = Counter(tuple(request.ids) for request in made["chat"])
        assert 0 < sum(count - 1 for count in prompts.values()) < REQUESTS / 50


class TestAgent:
    def test_nearly_all_tokens_were_there_before(self, made):
        prepared = workload(made["agent"])
        assert 0.93 < prepared.unlimited_hit_tokens / prepared.input_tokens < 0.98

    def test_calls_follow_each_other_soon(self, made):
        times = return_times(made["agent"])
        assert within(times, 30) > 0.6
        assert within(times, 300) > 0.94

    def test_contexts_grow_and_start_again(self, made):
        lengths = sorted(request.input_tokens for request in made["agent"])
        assert lengths[0] > 11_000, "instructions and tools come first"
        assert lengths[len(lengths) // 2] > 40_000
        assert lengths[-1] <= 160_000


class TestDeterminism:
    def test_a_seed_decides_everything(self, kind):
        first, second, other = (list(generate(kind, seed, 40)) for seed in (7, 7, 8))
        assert first == second
        assert first != other

    def test_neither_process_nor_hash_seed_matters(self, kind):
        code = f"from kvstore.cli.main import main; main({WORDS!r}.split() + ['{kind}'])"
        texts = set()
        for hash_seed in ("0", "1", "random"):
            done = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                check=True,
            )
            texts.add(done.stdout)
        assert len(texts) == 1
        assert sha256(texts.pop()).hexdigest() == GOLDEN[kind]


WORDS = "replay --seed 1 --requests 50 --out - --generate"


class TestQuantiles:
    def test_a_draw_is_between_its_neighbours(self):
        table = Quantiles((0.0, 10), (0.5, 20), (1.0, 120))
        rng = Random(1)
        draws = sorted(table.draw(rng) for _ in range(4_000))
        assert draws[0] == 10
        assert draws[-1] in (118, 119)
        assert sum(draw < 20 for draw in draws) / 4_000 == pytest.approx(0.5, abs=0.03)
        assert sum(draws) / 4_000 == pytest.approx(table.mean, rel=0.05)
        assert table.mean == 42.5

    def test_arrivals_are_independent_of_each_other(self):
        """The standard deviation of such gaps is their mean."""
        rng = Random(2)
        gaps = [ARRIVAL_GAPS.draw(rng) for _ in range(20_000)]
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(1_000, rel=0.05)
        assert deviation == pytest.approx(mean, rel=0.06)
