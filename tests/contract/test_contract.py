"""The contract can fail: each tier with a fault breaks it, and a sound one does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.contract.broken_tiers import FAULTS, Sound

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def failures():
    """Names of the contract's tests that failed, by the tier that was run."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/contract/broken_tiers.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = defaultdict(set)
    for tier, test in re.findall(r"^FAILED \S+::Test(\w+)::(\w+)", done.stdout, re.MULTILINE):
        found[tier].add(test)
    return found


def test_a_sound_tier_keeps_the_contract(failures):
    assert failures[Sound.__name__] == set()


@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
def test_a_fault_breaks_the_contract(failures, fault):
    assert failures[fault], f"{fault} was not noticed"


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("PadsReads", "test_every_length_comes_back_exactly"),
        ("PadsWrites", "test_a_write_leaves_its_neighbours_alone"),
        ("SwapsTwoPieces", "test_a_changed_byte_is_a_miss_and_spoils_no_other_piece"),
        ("IgnoresTheLastPiece", "test_a_batch_may_name_places_in_any_order"),
        ("SaysOkToDamage", "test_a_changed_byte_is_a_miss_and_spoils_no_other_piece"),
        ("CachesWrites", "test_the_medium_holds_what_was_written"),
        ("LosesTheLastSlot", "test_the_first_and_the_last_place_are_usable"),
        ("SharesABuffer", "test_threads_may_use_different_places_at_the_same_time"),
    ],
)
def test_a_fault_is_found_where_it_is_looked_for(failures, fault, test):
    assert test in failures[fault]
