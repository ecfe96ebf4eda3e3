"""The contract of policies can fail: each fault is found by the test that looks for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.broken_policies import FAULTS, Plain

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/contract/broken_policies.py"
#: What a policy that is right but slow is excused from.
COSTS = "not does_not_look_at_all and not costs_the_same and not many and not does_not_grow"


def failures(*words: str) -> set[str]:
    """Test cases of which something failed, as Case::test."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return set(re.findall(r"^FAILED \S+::Test(\w+::\S+)", done.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def found():
    return failures(*(f"{FILE}::Test{fault.__name__}::{test}" for fault, test in FAULTS.items()))


@pytest.mark.parametrize(("fault", "test"), FAULTS.items(), ids=[f.__name__ for f in FAULTS])
def test_a_fault_is_found_where_it_is_looked_for(found, fault, test):
    assert f"{fault.__name__}::{test}" in found


def test_a_sound_policy_keeps_the_contract():
    assert failures(f"{FILE}::Test{Plain.__name__}", "-k", COSTS) == set()
