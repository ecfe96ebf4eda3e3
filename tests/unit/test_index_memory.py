"""What the store knows of its blocks counts against the capacity (CA14).

Most tests say that an entry takes 1024 bytes, in a tier of 64 units of 4 KiB. A sixteenth of that
is four units, so the index of 16 blocks is free, and 54 blocks of one unit fit with theirs: their
54 units and the 9.5 units that 38 entries take.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.clock import FakeClock
from kvstore.errors import InvariantViolated
from kvstore.residency import ENTRY_BYTES, Residency, capacity_for
from kvstore.settings import CoreSettings
from kvstore.types import Outcome
from tests.core_driver import UNIT_BYTES, Driver, chain
from tests.payload import a_namespace

KIB = 1024
UNITS, ENTRY, FIT = 64, 1024, 54
#: Units of a block of 64 KiB, from which on nothing shall be noticed.
LARGE = 16

GRANTED, FULL = Outcome.GRANTED, Outcome.FULL


@pytest.fixture
def driver() -> Driver:
    """Its core recounts slots, index and entries after every event."""
    return Driver(UNITS, entry_bytes=ENTRY)


class TestSmallBlocks:
    def test_they_and_their_index_stay_under_the_capacity(self, driver):
        for i in range(5 * UNITS):
            driver.put(chain(f"{i}-", 1))
            assert driver.core.usage()["index_bytes"] == min(i + 1, FIT) * ENTRY
        assert driver.usage("ready") == FIT
        assert driver.usage("free") == UNITS - FIT
        last = [chain(f"{i}-", 1)[0] for i in range(5 * UNITS)]
        assert driver.held(last) == "0" * (5 * UNITS - FIT) + "1" * FIT

    def test_the_index_of_a_sixteenth_is_free(self):
        """Half as large an entry, of 256 bytes: a sixteenth of a unit."""
        driver = Driver(UNITS, entry_bytes=UNIT_BYTES // 16)
        assert driver.put(chain("a", UNITS)) == [GRANTED] * UNITS
        assert driver.usage("free") == 0

    def test_the_rest_is_refused_where_nothing_may_leave(self, driver):
        outcomes = driver.put(chain("a", UNITS))
        assert outcomes == [GRANTED] * FIT + [FULL] * (UNITS - FIT)
        lease = driver.lease(chain("a", FIT))
        assert driver.put(chain("b", 1)) == [FULL]
        driver.release(lease)
        assert driver.put(chain("b", 1)) == [GRANTED]
        assert driver.held(chain("a", FIT)) == "1" * (FIT - 1) + "0"

    def test_a_writer_waits_for_the_index_as_for_bytes_and_takes_nothing_in_vain(self, driver):
        driver.put(chain("a", 30))
        driver.put(chain("b", 24))
        lease = driver.lease(chain("a", 30))
        waiting = driver.begin_reserve(chain("c", 30), wait_seconds=10)
        assert waiting not in driver.answers
        assert driver.held(chain("b", 24)) == "1" * 24  # though its units would have been enough
        driver.release(lease)
        assert driver.answers.pop(waiting).outcomes == [GRANTED] * 30

    def test_nobody_waits_for_what_can_never_fit(self, driver):
        request = driver.begin_reserve(chain("a", FIT + 1), wait_seconds=10)
        assert driver.answers.pop(request).outcomes == [GRANTED] * FIT + [FULL]

    def test_what_its_writer_may_still_touch_has_an_entry(self, driver):
        reservation = driver.reserve(chain("a", FIT), ttl_seconds=1)
        driver.tick(1)
        assert driver.usage("held") == FIT
        assert driver.core.usage()["index_bytes"] == FIT * ENTRY
        assert driver.put(chain("b", 1)) == [FULL]
        driver.abort(reservation)
        assert driver.core.usage()["index_bytes"] == 0
        assert driver.put(chain("b", 1)) == [GRANTED]

    def test_a_deleted_block_that_is_read_has_an_entry(self, driver):
        driver.put(chain("a", FIT))
        lease = driver.lease(chain("a", FIT))
        driver.delete(chain("a", FIT))
        assert driver.put(chain("b", 1)) == [FULL]
        driver.release(lease)
        assert driver.put(chain("b", 1)) == [GRANTED]
        assert driver.core.usage()["index_bytes"] == ENTRY

    def test_a_large_block_drives_out_about_as_much_as_it_takes(self, driver):
        driver.put(chain("a", FIT))
        assert driver.put(chain("b", 1, units=LARGE)) == [GRANTED]
        gone = driver.held(chain("a", FIT)).count("0")
        # With each unit goes an entry, so fewer units than its own would do; but in one piece.
        assert 13 <= gone <= LARGE

    def test_watermarks_see_the_index(self):
        settings = CoreSettings(watermark_high=0.75, watermark_low=0.5)
        driver = Driver(UNITS, entry_bytes=ENTRY, settings=settings)
        for i in range(41):
            driver.put(chain(f"{i}-", 1))
        assert driver.usage("ready") == 41  # and six units and a quarter of index: 47.25
        driver.put(chain("b", 1))  # 48.5, over 48; now down to 32
        assert driver.usage("ready") == 28


class TestLargeBlocks:
    def drivers(self) -> list[Driver]:
        return [Driver(20 * LARGE, entry_bytes=entry_bytes) for entry_bytes in (0, ENTRY_BYTES)]

    @given(seed=st.integers(0, 1 << 32))
    def test_nothing_changes_for_blocks_of_64_kib_and_more(self, seed: int):
        free, counted = self.drivers()
        rng = random.Random(seed)
        leases: list[tuple[object, object]] = []
        for _ in range(60):
            name, blocks = rng.choice("abcdefgh"), rng.randint(1, 6)
            specs = chain(name, blocks, units=LARGE + "abcdefgh".index(name))
            action = rng.choice(["put", "put", "lease", "release", "delete", "reserve"])
            if action == "lease":
                leases.append((free.lease(specs), counted.lease(specs)))
            elif action == "release" and leases:
                mine, other = leases.pop(rng.randrange(len(leases)))
                assert free.release(mine) == counted.release(other)
            elif action == "delete":
                assert free.delete(specs) == counted.delete(specs)
            elif action == "reserve":
                wait, ttl = rng.choice([0.0, 5.0]), rng.choice([1.0, 9.0])
                for driver in (free, counted):
                    driver.begin_reserve(specs, wait, ttl)
            else:
                assert free.put(specs) == counted.put(specs)
            seconds = rng.choice([0.0, 0.5])
            free.tick(seconds)
            counted.tick(seconds)
            usage = counted.core.usage()
            assert usage.pop("index_bytes") == ENTRY_BYTES * counted.core.slots.granted_slots
            assert usage | {"index_bytes": 0} == free.core.usage()
            assert sorted(counted.core.resident_keys()) == sorted(free.core.resident_keys())


class TestCheck:
    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (
                lambda blocks: setattr(blocks, "reclaimable_slots", 0),
                "3 slots are unused, 0 booked",
            ),
            (lambda blocks: setattr(blocks, "entry_bytes", 1 << 20), "bytes, over the capacity"),
            (lambda blocks: blocks.slots.grant(1), "the index has 3 entries, and 4096 bytes"),
        ],
    )
    def test_it_counts_the_index_again(self, driver, spoil, message: str):
        driver.put(chain("a", 3))
        blocks: Residency = driver.core._blocks
        spoil(blocks)
        with pytest.raises(InvariantViolated, match=message):
            driver.core.check()


@given(blocks=st.integers(1, 60), block_units=st.integers(1, 40))
def test_the_capacity_for_some_blocks_holds_them_and_not_one_more(blocks: int, block_units: int):
    units = capacity_for(blocks, blocks * block_units * UNIT_BYTES) // UNIT_BYTES
    driver = Driver(units, entry_bytes=ENTRY_BYTES)
    assert driver.core.slots.capacity_bytes == units * UNIT_BYTES
    for i in range(blocks):
        lease_of = chain(f"{i}-", 1, units=block_units)
        assert driver.put(lease_of) == [GRANTED]
        driver.lease(lease_of)
    assert driver.put(chain("more", 1)) == [FULL]


class TestOpenedStore:
    @pytest.mark.parametrize(
        ("block_bytes", "fit"), [(64 * KIB, 16), (20 * KIB, 51), (4 * KIB, None)]
    )
    def test_it_holds_what_its_capacity_says(self, block_bytes: int, fit: int | None):
        if fit is None:  # 17/16 of a MiB, of which each takes its payload and an entry
            fit = (17 * 64 * KIB) // (block_bytes + ENTRY_BYTES)
            assert fit < 1024 * KIB // block_bytes
        namespace = a_namespace(block_bytes)
        with kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock()) as store:
            with store.session(namespace) as session:
                keys = namespace.keys(range(namespace.block_tokens * 300))
                outcomes = session.put(keys, [bytes(block_bytes)] * len(keys))
            assert outcomes == [Outcome.OK] * fit + [FULL] * (300 - fit)
            tiers: Any = store.stats()["tiers"]
            assert tiers["dram"]["index_bytes"] == fit * ENTRY_BYTES


def test_the_guide_says_what_an_entry_takes():
    guide = Path(__file__).resolve().parents[2] / "docs/configuration.md"
    assert f"{ENTRY_BYTES} bytes" in guide.read_text(encoding="utf-8")
