"""The simulation finds mistakes: each one that is planted, and by what it does to clients.

The core's own recount is left out here, which would find most of them one step earlier.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.sim.planted_bugs import PLANTED
from tests.sim.planted_bugs_of_parts import PLANTED_IN_PARTS
from tests.sim.simulation import simulate

if TYPE_CHECKING:
    from tests.sim.planted_bugs import Plant


ALL = PLANTED + PLANTED_IN_PARTS


@pytest.mark.parametrize(("plant", "finding"), ALL, ids=[plant.__name__ for plant, _ in ALL])
def test_a_planted_bug_is_found(
    plant: Plant, finding: str, default_seeds: range, monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    other: dict[str, int] = {}
    for seed in default_seeds:
        try:
            simulate(seed, recounts=False)
        except (AssertionError, LookupError) as error:
            if re.search(finding, str(error)):
                return
            other[str(error)] = seed
    pytest.fail(f"not found; found instead: {other}")
