"""A hundred thousand operations on blocks of five sizes: every promise is kept, no size starves."""

from __future__ import annotations

import pytest

from tests.model.five_sizes import MIB, SIZES, FiveSizes

OPERATIONS = 100_000
RECOUNT_EVERY = 1_000
LONG_SEEDS = range(1, 6)

LARGEST = max(SIZES)


def run(seed: int, capacity_bytes: int, operations: int) -> FiveSizes:
    """Random operations, each one seen to be answered right."""
    traffic = FiveSizes(seed, capacity_bytes)
    try:
        traffic.run(operations, RECOUNT_EVERY)
    except BaseException as error:
        error.add_note(
            "replay it: python -c 'from tests.model.test_five_sizes import run; "
            f"run({seed}, {capacity_bytes}, {operations})'"
        )
        raise
    return traffic


def check_that_no_size_starves(traffic: FiveSizes, refused_max: float) -> None:
    for size in SIZES:
        asked = traffic.granted[size] + traffic.refused[size]
        assert traffic.refused[size] <= refused_max * asked, f"blocks of {size} are refused"
        assert traffic.hits[size] > 0, f"blocks of {size} are never there when they are wanted"
    assert traffic.most_in_a_row <= 5


def check_that_it_can_be_filled(traffic: FiveSizes, deleted_size: int) -> None:
    """CA06: memory that was cut up into blocks of all sizes holds large ones all the same."""
    traffic.end_all_holders()
    traffic.recount()
    traffic.delete_all(deleted_size)
    traffic.recount()
    assert traffic.fill_with(LARGEST) >= 0.98
    traffic.recount()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_operations_of_five_sizes():
    traffic = run(0, 256 * MIB, OPERATIONS)
    check_that_no_size_starves(traffic, refused_max=0.001)
    check_that_it_can_be_filled(traffic, min(SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("deleted_size", SIZES)
def test_it_can_be_filled_whatever_was_deleted(deleted_size: int):
    check_that_it_can_be_filled(run(deleted_size, 64 * MIB, 2_000), deleted_size)


@pytest.mark.slow
def test_where_room_is_tight_no_size_starves():
    """Eight of the largest blocks fill the tier, and leases and pins lie among them."""
    check_that_no_size_starves(run(0, 32 * MIB, 5_000), refused_max=0.05)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_many_hundred_thousand_operations(seed: int):
    traffic = run(seed, 256 * MIB, OPERATIONS)
    check_that_no_size_starves(traffic, refused_max=0.001)
    check_that_it_can_be_filled(traffic, list(SIZES)[seed % len(SIZES)])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_many_operations_where_room_is_tight(seed: int):
    traffic = run(seed, 32 * MIB, OPERATIONS)
    check_that_no_size_starves(traffic, refused_max=0.05)
    check_that_it_can_be_filled(traffic, list(SIZES)[seed % len(SIZES)])
