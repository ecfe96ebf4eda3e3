"""How many seeds the simulation runs, or which one."""

from __future__ import annotations

import pytest

SEEDS = 200
#: One test runs so many: few enough for its time limit, enough not to flood the report.
BATCH_SEEDS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--sim-seeds", type=int, help=f"run seeds 0 to N - 1 (default {SEEDS})")
    group.addoption("--sim-seed", type=int, help="run one seed only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    # Where this file is found only after the command line was read, nobody gave its options.
    config = metafunc.config
    one = config.getoption("sim_seed", None)
    count = config.getoption("sim_seeds", None)
    if one is not None:
        batches = [range(one, one + 1)]
    else:
        count = SEEDS if count is None else count
        batches = [
            range(first, min(first + BATCH_SEEDS, count)) for first in range(0, count, BATCH_SEEDS)
        ]
    metafunc.parametrize("seeds", batches, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")


@pytest.fixture
def default_seeds(request: pytest.FixtureRequest) -> range:
    """Those of a run without options."""
    if request.config.getoption("sim_seed", None) is not None:
        pytest.skip("one seed is replayed")
    return range(SEEDS)
