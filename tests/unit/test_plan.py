"""Which blocks leave so that a new one fits: runs of neighbours, as old as can be."""

from __future__ import annotations

import random

import pytest

from kvstore.residency import Residency
from kvstore.types import Outcome
from tests.core_driver import UNIT_BYTES, Driver, chain

GRANTED, FULL = Outcome.GRANTED, Outcome.FULL


def filled(units, names):
    """One block of one unit each, side by side in the order of their names."""
    driver = Driver(units)
    for name in names:
        driver.put(chain(name, 1))
    return driver


def held(driver, names):
    return "".join(name for name in names if driver.held(chain(name, 1)) == "1")


def test_blocks_of_one_size_leave_in_policy_order():
    driver = filled(4, "abcd")
    for name in "ca":
        driver.release(driver.lease(chain(name, 1)))
    for new, left in (("w", "acd"), ("x", "ac"), ("y", "a"), ("z", "")):
        driver.put(chain(new, 1))
        assert held(driver, "abcd") == left


def test_a_large_block_takes_neighbours_and_no_more_than_it_needs():
    driver = filled(8, "abcdefgh")
    driver.put(chain("big", 1, units=3))
    assert held(driver, "abcdefgh") == "defgh"


def test_the_run_grows_towards_the_older_neighbour():
    driver = filled(5, "abcde")
    for name in "bcda":  # the oldest is e, then b; of its neighbours, d is the only one
        driver.release(driver.lease(chain(name, 1)))
    driver.put(chain("big", 1, units=2))
    assert held(driver, "abcde") in ("abc", "de" + "abc"[1:], "ade")
    assert driver.held(chain("big", 1)) == "1"


def test_free_neighbours_are_part_of_the_run():
    driver = filled(6, "abcdef")
    driver.delete(chain("b", 1))
    driver.delete(chain("d", 1))
    driver.put(chain("big", 1, units=3))  # b, c, d: only c has to leave
    assert len(held(driver, "abcdef")) == 3


def test_of_several_runs_the_oldest_goes():
    driver = filled(6, "abcdef")
    for name in "abdecf":
        driver.release(driver.lease(chain(name, 1)))
    # From old to new: a b d e c f. The run a, b costs least.
    driver.put(chain("big", 1, units=2))
    assert held(driver, "abcdef") == "cdef"


def test_protected_blocks_are_no_part_of_a_run():
    driver = filled(6, "abcdef")
    leases = [driver.lease(chain(name, 1)) for name in "be"]
    assert driver.put(chain("big", 1, units=2)) == [GRANTED]
    assert held(driver, "abcdef") == "abef"
    for lease in leases:
        driver.release(lease)


def test_where_no_run_can_come_together_nothing_leaves():
    """CA09."""
    driver = filled(6, "abcdef")
    for name in "bdf":
        driver.lease(chain(name, 1))
    assert driver.reserve(chain("big", 1, units=2)).outcomes == [FULL]
    assert held(driver, "abcdef") == "abcdef"


@pytest.mark.parametrize("small_units", [1, 3, 16])
def test_no_size_is_starved_by_another(small_units):
    """CA06: full of small blocks, then full of large ones, and back."""
    units = 64 * 16
    driver = Driver(units)
    for i in range(units // small_units):
        driver.put(chain(f"small{i}-", 1, units=small_units))
    large = [chain(f"large{i}-", 1, units=64) for i in range(16)]
    for block in large:
        assert driver.put(block) == [GRANTED]
    assert "".join(driver.held(block) for block in large).count("1") >= 15
    for i in range(units // small_units):
        assert driver.put(chain(f"again{i}-", 1, units=small_units)) == [GRANTED]
    assert driver.usage("ready") >= 0.98 * units


def test_emptied_of_small_blocks_it_holds_large_ones_to_the_last_byte():
    """CA06."""
    driver = Driver(1024)
    small = [chain(f"s{i}-", 1, units=16) for i in range(64)]
    for block in small:
        driver.put(block)
    for block in small:
        driver.delete(block)
    assert driver.core.usage()["largest_free_bytes"] == 1024 * UNIT_BYTES
    assert driver.put(chain("large", 1, units=1024)) == [GRANTED]


def test_a_mix_of_sizes_evicts_about_what_it_needs():
    """CA06, CA09: everything asked for fits, and what is free is what a run was too long by."""
    rng = random.Random(3)
    driver = Driver(2048)
    free_units = []
    for i in range(1_000):
        units = rng.choice([1, 4, 16, 32, 64])
        assert driver.put(chain(f"b{i}-", 1, units=units)) == [GRANTED]
        free_units.append(driver.usage("free"))
    steady = free_units[300:]
    assert sum(steady) / len(steady) < 0.04 * 2048
    assert max(steady) < 0.12 * 2048


@pytest.mark.parametrize("units", [(5, 7), (16, 24), (96, 256)])
def test_a_tier_of_parts_of_odd_sizes_stays_full(units):
    """The parts of one block come in turns, and whatever leaves makes room for its like."""
    driver = Driver(2048)
    for i in range(600):
        size = units[i % len(units)]
        assert driver.put(chain(f"{i}-", 1, units=size)) == [Outcome.GRANTED]
    assert driver.usage("free") < 0.02 * 2048


def test_an_extent_that_is_fenced_in_is_looked_at_once(monkeypatch):
    """However many of its blocks are tried as the middle of a run."""
    driver = Driver(400)
    for i in range(400):
        driver.put(chain(f"{i}-", 1))
    fences = [chain(f"{i}-", 1)[0] for i in range(0, 400, 50)]
    for fence in fences:
        driver.lease([fence])
    looked = 0
    entry_at = Residency._entry_at

    def counted(self, slot):
        nonlocal looked
        looked += 1
        return entry_at(self, slot)

    monkeypatch.setattr(Residency, "_entry_at", counted)
    assert driver.put(chain("large", 1, units=60)) == [FULL]
    assert looked < 3 * 400
