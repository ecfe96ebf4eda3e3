"""Writers that wait for room: served in turn, in one piece, or at their deadline."""

from __future__ import annotations

import pytest

from kvstore.messages import ReserveRequest
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import Driver, chain

GRANTED, PRESENT, PENDING, FULL = (
    Outcome.GRANTED,
    Outcome.PRESENT,
    Outcome.PENDING,
    Outcome.FULL,
)
OK, EXPIRED = Outcome.OK, Outcome.EXPIRED


class TestWaiting:
    @pytest.fixture
    def full(self):
        """Room for four blocks, all of them leased: two by each of two leases."""
        driver = Driver(4)
        driver.put(chain("x", 2))
        driver.put(chain("y", 2))
        return driver, driver.lease(chain("x", 2)), driver.lease(chain("y", 2), 100)

    def test_a_full_tier_refuses_at_the_deadline_and_works_again_after_the_release(self, full):
        """CA03."""
        driver, lease, _ = full
        reserve_id = driver.begin_reserve(chain("a", 2), wait_seconds=2)
        assert reserve_id not in driver.answers
        driver.tick(2)
        assert driver.answers[reserve_id].outcomes == [FULL] * 2
        driver.release(lease)
        assert driver.put(chain("a", 2)) == [GRANTED] * 2

    def test_room_that_comes_in_time_is_granted_at_once(self, full):
        driver, lease, _ = full
        reserve_id = driver.begin_reserve(chain("a", 2), wait_seconds=5, ttl_seconds=7)
        driver.tick(1)
        driver.release(lease)
        answer = driver.answers[reserve_id]
        assert answer.outcomes == [GRANTED] * 2
        assert answer.deadline == driver.clock.now() + 7

    def test_the_deadline_gives_what_there_is(self, full):
        driver, lease, _ = full
        reserve_id = driver.begin_reserve(chain("a", 3), wait_seconds=5)
        driver.release(lease)
        assert reserve_id not in driver.answers
        driver.tick(5)
        assert driver.answers[reserve_id].outcomes == [GRANTED, GRANTED, FULL]

    def test_a_lease_that_expires_makes_room(self, full):
        """LI01."""
        driver, _, _ = full
        reserve_id = driver.begin_reserve(chain("a", 2), wait_seconds=60)
        driver.tick(30)
        assert driver.answers[reserve_id].outcomes == [GRANTED] * 2

    def test_who_waits_longest_is_served_first_also_before_smaller_ones(self, full):
        driver, first_lease, second_lease = full
        large = driver.begin_reserve(chain("a", 3), wait_seconds=60)
        small = driver.begin_reserve(chain("b", 1), wait_seconds=60)
        driver.release(first_lease)
        assert not {large, small} & driver.answers.keys()
        driver.release(second_lease)
        assert driver.answers[large].outcomes == [GRANTED] * 3
        assert driver.answers[small].outcomes == [GRANTED]

    def test_a_newcomer_does_not_pass_those_that_wait(self, full):
        driver, lease, _ = full
        large = driver.begin_reserve(chain("a", 3), wait_seconds=10)
        driver.release(lease)
        newcomer = driver.begin_reserve(chain("b", 1), wait_seconds=10)
        assert newcomer not in driver.answers
        driver.tick(10)
        assert driver.answers[large].outcomes == [GRANTED, GRANTED, FULL]

    def test_what_another_stored_meanwhile_is_present(self, full):
        driver, lease, _ = full
        first = driver.begin_reserve(chain("a", 2), wait_seconds=60)
        second = driver.begin_reserve(chain("a", 2), wait_seconds=60)
        driver.release(lease)
        assert driver.answers[first].outcomes == [GRANTED] * 2
        assert driver.answers[second].outcomes == [PENDING] * 2

    def test_a_delete_makes_room_for_who_waits(self):
        driver = Driver(2)
        driver.put(chain("x", 2))
        lease = driver.lease(chain("x", 2))
        reserve_id = driver.begin_reserve(chain("a", 1), wait_seconds=60)
        driver.delete(chain("x", 2))
        assert reserve_id not in driver.answers, "leased memory stays"
        driver.release(lease)
        assert driver.answers[reserve_id].outcomes == [GRANTED]

    def test_an_expired_writer_makes_no_room_until_it_is_done(self):
        driver = Driver(2)
        writer = driver.reserve(chain("x", 2), ttl_seconds=5)
        reserve_id = driver.begin_reserve(chain("a", 1), wait_seconds=60)
        driver.tick(5)
        assert reserve_id not in driver.answers
        driver.abort(writer)
        assert driver.answers[reserve_id].outcomes == [GRANTED]

    def test_the_end_of_our_own_read_makes_room(self):
        driver = Driver(1, holds_transfers=True)
        driver.put(chain("x", 1))
        reserve_id = driver.begin_reserve(chain("a", 1), wait_seconds=60)
        assert reserve_id not in driver.answers
        driver.complete()
        assert driver.answers[reserve_id].outcomes == [GRANTED]

    def test_a_cancelled_writer_gets_nothing(self, full):
        """LI02."""
        driver, lease, _ = full
        reserve_id = driver.begin_reserve(chain("a", 2), wait_seconds=60)
        driver.cancel(reserve_id)
        driver.release(lease)
        assert reserve_id not in driver.answers
        assert driver.core.check().reservations == 0

    def test_who_waits_behind_a_cancelled_writer_is_served_at_once(self, full):
        driver, lease, _ = full
        large = driver.begin_reserve(chain("a", 3), wait_seconds=60)
        small = driver.begin_reserve(chain("b", 1), wait_seconds=60)
        driver.release(lease)
        driver.cancel(large)
        assert small in driver.answers


class TestFragments:
    """Room in bytes that is not room in one piece."""

    @pytest.fixture
    def comb(self):
        """Eight blocks of one unit, every second one leased."""
        driver = Driver(8)
        for i in range(8):
            driver.put(chain(f"s{i}-", 1))
        leases = [driver.lease(chain(f"s{i}-", 1)) for i in range(0, 8, 2)]
        return driver, leases

    def test_nothing_leaves_where_its_going_makes_no_room(self, comb):
        """CA09."""
        driver, _ = comb
        assert driver.reserve(chain("l", 1, units=2)).outcomes == [FULL]
        assert driver.core.counters["dropped_blocks", "evicted"] == 0

    def test_a_writer_waits_for_a_run_that_a_release_can_bring(self, comb):
        """CA03."""
        driver, leases = comb
        reserve_id = driver.begin_reserve(chain("l", 1, units=2), wait_seconds=5)
        assert reserve_id not in driver.answers
        driver.release(leases[0])
        assert driver.answers[reserve_id].outcomes == [GRANTED]

    def test_free_neighbours_are_one_run(self):
        driver = Driver(8)
        for i in range(8):
            driver.put(chain(f"s{i}-", 1))
        driver.delete([chain(f"s{i}-", 1)[0] for i in (2, 4, 3, 5)])
        assert driver.put(chain("l", 1, units=4)) == [GRANTED]
        assert driver.core.counters["dropped_blocks", "evicted"] == 0


class TestOddBatches:
    def test_an_empty_batch_leaves_nothing_behind(self):
        driver, blocks = Driver(4), chain("a", 2)
        driver.put(blocks)
        assert driver.reserve(blocks, start=2).outcomes == []
        driver.tick(100)
        assert driver.core.check().reservations == 0

    def test_one_key_twice_is_granted_once(self):
        driver = Driver(4)
        block = chain("a", 1)[0]
        reservation = driver.ask(ReserveRequest(SINGLE_DOMAIN, [block, block], 0, 30.0, 0.0, None))
        assert reservation.outcomes.count(GRANTED) == 1
        driver.commit(reservation)
        assert driver.match([block]).blocks == 1

    def test_a_batch_of_which_nothing_is_granted_can_be_committed(self):
        driver, blocks = Driver(4), chain("a", 2)
        driver.put(blocks)
        assert driver.commit(driver.reserve(blocks)) is OK
        assert driver.core.check().reservations == 0
