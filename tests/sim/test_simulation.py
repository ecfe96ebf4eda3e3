"""The store under scripted clients and everything that the fault model allows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from kvstore.slots import Slots
from tests.sim.simulation import Result, simulate

ROOT = Path(__file__).resolve().parents[2]

#: What the default seeds must have met between them, or the simulation shows nothing about it.
TROUBLES = {
    "block granted beside parts that are there",
    "blocks of two ranks were loaded",
    "cancelled request",
    "copy that an eviction outran",
    "death",
    "dropped_blocks corrupt",
    "dropped_blocks deleted",
    "dropped_blocks evicted",
    "dropped_blocks expired",
    "ended_leases expired",
    "ended_leases released",
    "ended_reservations aborted",
    "ended_reservations expired",
    "hard pin ok",
    "hard pin quota",
    "left in mid-fill",
    "misses busy",
    "misses corrupt",
    "misses expired",
    "misses pending",
    "parts that left together, corrupt",
    "parts that left together, deleted",
    "parts that left together, evicted",
    "parts that left together, expired",
    "prefix that does not need all parts",
    "read that outlived its lease",
    "read that was absent",
    "read that was corrupt",
    "read that was timeout",
    "refused_blocks full",
    "refused_blocks pending",
    "waited, at the deadline",
    "waited, in time",
    "write after the deadline",
    "write that failed",
}


#: What is there only where the fault model strikes.
OF_FAULTS = {
    "death",
    "dropped_blocks corrupt",
    "left in mid-fill",
    "misses corrupt",
    "parts that left together, corrupt",
    "read that was absent",
    "read that was corrupt",
    "read that was timeout",
    "write that failed",
}


@lru_cache(maxsize=1_024)
def ran(seed: int) -> Result:
    return simulate(seed)


def test_no_fault_breaks_a_promise(seeds: range):
    """CO04, CO11, CO12, CO14, CA03, LI01, LI02."""
    for seed in seeds:
        ran(seed)


def test_default_seeds_meet_every_trouble(default_seeds: range):
    seen: Counter[str] = Counter()
    accepted_parts = 0
    for seed in default_seeds:
        result = ran(seed)
        seen.update(result.seen)
        accepted_parts += result.accepted_parts
    assert {name for name in TROUBLES if not seen[name]} == set()
    assert accepted_parts > 10 * len(default_seeds)


def test_without_faults_there_is_none_of_their_misses(default_seeds: range):
    calm = [result for seed in default_seeds if not (result := ran(seed)).has_faults]
    assert len(calm) > len(default_seeds) // 10
    assert not any(result.seen.keys() & OF_FAULTS for result in calm)


def test_a_seed_replays_exactly():
    for seed in range(5):
        assert simulate(seed) == simulate(seed)
    assert len({simulate(seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_replays_exactly_in_another_process(hash_seed: str):
    program = (
        "from tests.sim.simulation import simulate\n"
        "for seed in range(5): print(simulate(seed).digest)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.split() == [simulate(seed).digest for seed in range(5)]


def test_a_failing_seed_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Slots, "problems", lambda _: ["planted"])
    notes = []
    for _ in range(2):
        with pytest.raises(BaseException, match="planted") as failure:
            simulate(7)
        notes.append(failure.value.__notes__)
    assert notes[0] == notes[1]
    assert notes[0][0].startswith("seed 7, event ")
    assert "answer" in notes[0][1]
    assert notes[0][2] == "replay it: pytest tests/sim --sim-seed 7"
