"""What the simulation and its promises found, each as the few events that it takes."""

from __future__ import annotations

from kvstore.messages import BlockSpec, PartLink, ReserveRequest
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import CHECKSUM, UNIT_BYTES, Driver, chain, key_of


def test_a_cancelled_scrub_is_not_answered():
    driver, blocks = Driver(2), chain("a", 1)
    driver.put(blocks)
    driver.holds_transfers = True
    scrub_id = driver.begin_scrub(blocks)
    driver.cancel(scrub_id)
    driver.complete(checksum=CHECKSUM)
    assert scrub_id not in driver.answers


def test_the_end_of_a_transfer_sees_the_deadlines_that_came_before_it():
    """A waiting reader is not given a block whose TTL has run out."""
    driver, blocks = Driver(4), chain("a", 3)
    expiring = ReserveRequest(SINGLE_DOMAIN, blocks[:1], 0, 30.0, 0.0, 10.0)
    assert driver.commit(driver.ask(expiring)) is Outcome.OK
    driver.put(blocks[:2])
    driver.reserve(blocks)  # a2 is being written
    driver.holds_transfers = True
    driver.begin_scrub(blocks[1:2])
    lease_id = driver.begin_lease(blocks, wait_seconds=60)
    assert lease_id not in driver.answers, "it waits for a2"
    driver.clock.advance(10)  # a0's time is up, and nobody has ticked yet
    driver.complete(checksum=CHECKSUM + 1)  # a1 is dropped, so there is nothing to wait for
    assert driver.answers[lease_id].places == []


def test_the_parts_of_a_block_whose_time_is_up_together_leave_once():
    """The first part to go takes the others along, which were due, too."""
    driver = Driver(4)
    link = PartLink(key_of("block"), (None, 0), True)
    parts = [BlockSpec(key_of(f"part {i}"), None, UNIT_BYTES, 16, False, link) for i in range(2)]
    expiring = ReserveRequest(SINGLE_DOMAIN, parts, 0, 30.0, 0.0, 10.0, 2)
    assert driver.commit(driver.ask(expiring)) is Outcome.OK
    driver.tick(10)
    assert driver.held(parts) == "00"
    assert driver.core.counters["dropped_blocks", "expired"] == 2
