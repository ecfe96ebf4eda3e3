"""Random rounds of kill, stop, wake and restart. `make test-crash` runs many more of them."""

from __future__ import annotations

import os

import pytest

from tests.daemon.crash_rounds import run_rounds


def test_twenty_rounds(directory):
    run_rounds(directory, seed=1, rounds=20)


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_many_rounds(directory):
    seed = int(os.environ.get("KVSTORE_CRASH_SEED", "2"))
    rounds = int(os.environ.get("KVSTORE_CRASH_ROUNDS", "500"))
    seconds = run_rounds(directory, seed, rounds)
    print(f"seed {seed}: {rounds} rounds in {seconds:.0f} s")
