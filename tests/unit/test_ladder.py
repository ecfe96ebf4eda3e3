"""The protection ladder: what leaves first, what later, and what does not leave at all."""

from __future__ import annotations

import pytest

from kvstore.messages import PinKind, PinRequest, ReserveRequest, UnpinRequest
from kvstore.policy import LruPolicy
from kvstore.settings import CoreSettings
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import UNIT_BYTES, Driver, chain, keys

OK, FULL, GRANTED, BUSY = Outcome.OK, Outcome.FULL, Outcome.GRANTED, Outcome.BUSY


def pin(driver, specs, kind=PinKind.SOFT, ttl_seconds=None, domain=SINGLE_DOMAIN):
    return driver.ask(PinRequest(domain, keys(specs), kind, ttl_seconds)).outcomes


def unpin(driver, specs):
    return driver.ask(UnpinRequest(SINGLE_DOMAIN, keys(specs))).outcomes


def put_expiring(driver, specs, expire_seconds):
    request = ReserveRequest(SINGLE_DOMAIN, specs, 0, 30.0, 0.0, expire_seconds)
    assert driver.commit(driver.ask(request)) is OK


class TestTimeToLive:
    def test_a_block_is_gone_at_its_time_and_not_before(self):
        driver, blocks = Driver(4), chain("a", 2)
        put_expiring(driver, blocks, 10.0)
        driver.tick(9.99)
        assert driver.match(blocks).blocks == 2
        driver.tick(0.01)
        assert driver.match(blocks) == (0, {}, Outcome.EXPIRED)
        assert driver.usage("free") == 4

    def test_it_is_gone_without_anybody_asking(self):
        driver = Driver(4)
        put_expiring(driver, chain("a", 2), 10.0)
        assert driver.core.next_deadline() == driver.clock.now() + 10.0
        driver.tick(10.0)
        assert driver.usage("free") == 4
        assert driver.core.next_deadline() is None

    def test_reading_does_not_prolong_it(self):
        """LI13, of a TTL."""
        driver, blocks = Driver(4), chain("a", 1)
        put_expiring(driver, blocks, 10.0)
        for _ in range(9):
            driver.tick(1.0)
            driver.release(driver.lease(blocks))
        driver.tick(1.0)
        assert driver.match(blocks).blocks == 0

    def test_a_reader_keeps_its_bytes_to_the_end_of_its_lease(self):
        driver, blocks = Driver(2), chain("a", 2)
        put_expiring(driver, blocks, 10.0)
        lease = driver.lease(blocks, ttl_seconds=30.0)
        driver.tick(10.0)
        assert driver.match(blocks).reason is Outcome.EXPIRED
        assert driver.usage("condemned") == 2
        assert driver.reserve(chain("b", 1)).outcomes == [FULL]
        driver.release(lease)
        assert driver.usage("free") == 2

    def test_a_block_that_left_before_its_time_is_not_missed_then(self):
        driver, blocks = Driver(2), chain("a", 1)
        put_expiring(driver, blocks, 10.0)
        driver.delete(blocks)
        driver.put(blocks)
        driver.tick(20.0)
        assert driver.match(blocks).blocks == 1


class TestSoftPins:
    def test_it_leaves_after_everything_that_is_not_pinned(self):
        driver = Driver(4)
        driver.put(chain("a", 2))
        assert pin(driver, chain("a", 2), ttl_seconds=60) == [OK, OK]
        for name in "bcdef":
            driver.put(chain(name, 2))
            assert driver.held(chain("a", 2)) == "11"

    def test_it_makes_room_when_nothing_else_is_left(self):
        driver = Driver(2)
        driver.put(chain("a", 2))
        pin(driver, chain("a", 2), ttl_seconds=60)
        assert driver.put(chain("b", 1)) == [GRANTED]
        assert driver.held(chain("a", 2)) == "10"

    def test_it_ends_at_its_deadline_however_often_it_is_read(self):
        """LI13."""
        driver = Driver(2)
        driver.put(chain("a", 1))
        pin(driver, chain("a", 1), ttl_seconds=1)
        for _ in range(4):
            driver.tick(0.5)
            driver.release(driver.lease(chain("a", 1)))
        driver.put(chain("b", 1))
        driver.release(driver.lease(chain("b", 1)))
        driver.put(chain("c", 1))
        assert driver.held(chain("a", 1)) == "0"

    def test_pinning_again_prolongs_it_and_never_shortens(self):
        driver = Driver(2)
        driver.put(chain("a", 1))
        for ttl_seconds in (10, 100, 5):
            pin(driver, chain("a", 1), ttl_seconds=ttl_seconds)
        driver.tick(99)
        for name in "bcd":
            driver.put(chain(name, 1))
        assert driver.held(chain("a", 1)) == "1"
        driver.tick(1)
        driver.put(chain("e", 2))
        assert driver.held(chain("a", 1)) == "0"

    def test_it_has_a_longest_time(self):
        driver = Driver(2)
        driver.put(chain("a", 1))
        pin(driver, chain("a", 1), ttl_seconds=1e12)
        assert driver.core.next_deadline() == driver.clock.now() + CoreSettings().pin_seconds_max

    def test_large_blocks_do_not_take_it_with_them_while_others_can_go(self):
        driver = Driver(6)
        for name in "abc":
            driver.put(chain(name, 2))
        pin(driver, chain("b", 2), ttl_seconds=60)
        assert driver.put(chain("x", 1, units=2)) == [GRANTED]
        assert driver.held(chain("b", 2)) == "11"


class TestHardPins:
    def test_nothing_evicts_it(self):
        driver = Driver(8)
        driver.put(chain("a", 2))
        assert pin(driver, chain("a", 2), PinKind.HARD) == [OK, OK]
        outcomes = driver.reserve(chain("b", 8)).outcomes
        assert outcomes == [GRANTED] * 6 + [FULL] * 2
        assert driver.held(chain("a", 2)) == "11"

    def test_the_quota_is_a_quarter_of_the_tier_for_each_domain(self):
        driver, other = Driver(16), b"other domain".ljust(32, b".")
        driver.put(chain("a", 6))
        driver.put(chain("a", 6), domain=other)
        assert pin(driver, chain("a", 6), PinKind.HARD) == [OK] * 4 + [Outcome.QUOTA] * 2
        assert pin(driver, chain("a", 2), PinKind.HARD, domain=other) == [OK] * 2
        assert unpin(driver, chain("a", 6)) == [OK] * 4 + [Outcome.ABSENT] * 2
        assert pin(driver, chain("a", 6)[4:], PinKind.HARD) == [OK] * 2

    def test_pinning_twice_counts_once(self):
        driver = Driver(8)
        driver.put(chain("a", 2))
        for _ in range(3):
            assert pin(driver, chain("a", 2), PinKind.HARD) == [OK, OK]
        assert unpin(driver, chain("a", 2)) == [OK, OK]
        assert driver.reserve(chain("b", 8)).outcomes == [GRANTED] * 8

    def test_it_can_be_for_a_time(self):
        driver = Driver(4)
        driver.put(chain("a", 1))
        pin(driver, chain("a", 1), PinKind.HARD, ttl_seconds=10)
        driver.tick(10)
        assert driver.reserve(chain("b", 4)).outcomes == [GRANTED] * 4

    def test_a_delete_ends_it_and_gives_the_quota_back(self):
        driver = Driver(4)
        driver.put(chain("a", 1))
        pin(driver, chain("a", 1), PinKind.HARD)
        assert driver.delete(chain("a", 1)) == [OK]
        assert driver.usage("free") == 4
        driver.put(chain("a", 1))
        assert pin(driver, chain("a", 1), PinKind.HARD) == [OK]

    def test_what_is_not_there_cannot_be_pinned(self):
        driver = Driver(4)
        reservation = driver.reserve(chain("a", 1))
        assert pin(driver, chain("a", 1), PinKind.HARD) == [Outcome.PENDING]
        assert pin(driver, chain("b", 1), PinKind.HARD) == [Outcome.ABSENT]
        driver.abort(reservation)


class TestOrder:
    def test_the_whole_ladder_from_its_foot(self):
        driver = Driver(8)
        put_expiring(driver, chain("t", 1), 1.0)  # its time is up first
        driver.put(chain("p", 2, partial=True))  # p1 is a final partial block, never hit
        driver.put(chain("n", 1))  # plain
        driver.put(chain("s", 1))
        pin(driver, chain("s", 1), ttl_seconds=600)
        driver.put(chain("h", 1))
        pin(driver, chain("h", 1), PinKind.HARD)
        driver.put(chain("l", 1))
        lease = driver.lease(chain("l", 1), ttl_seconds=600)
        watched = [*chain("t", 1), *chain("p", 2), *chain("n", 1), *chain("s", 1)]
        watched += [*chain("h", 1), *chain("l", 1)]
        driver.tick(1.0)
        seen = [driver.held(watched)]
        for i in range(8):
            driver.reserve(chain(f"new{i}-", 1))
            if driver.held(watched) != seen[-1]:
                seen.append(driver.held(watched))
        assert seen == ["0111111", "0101111", "0001111", "0000111", "0000011"]
        assert driver.reserve(chain("more", 1)).outcomes == [FULL]
        driver.release(lease)

    def test_what_nobody_read_is_counted_by_why_it_left(self):
        driver = Driver(3)
        put_expiring(driver, chain("t", 1), 1.0)
        driver.put(chain("a", 2))
        driver.release(driver.lease(chain("a", 1)))
        driver.tick(1.0)
        driver.put(chain("b", 3))
        driver.delete(chain("b", 1))
        counted = driver.core.counters.by_label("evicted_before_first_read")
        assert counted == {"expired": 1, "evicted": 1, "deleted": 1}


class TestLeasedBytes:
    @pytest.fixture
    def driver(self):
        driver = Driver(8)
        driver.core._leases.cap_bytes = 4 * UNIT_BYTES
        driver.put(chain("a", 4))
        driver.put(chain("b", 4))
        return driver

    def test_beyond_the_cap_a_lease_ends_early_and_says_busy(self, driver):
        driver.lease(chain("a", 3))
        lease = driver.lease(chain("b", 4))
        assert (len(lease.places), lease.reason) == (1, BUSY)
        assert driver.lease(chain("b", 4)[1:]).lease_id == 0

    def test_a_second_lease_on_the_same_blocks_costs_nothing(self, driver):
        for _ in range(5):
            assert driver.lease(chain("a", 4)).reason is None

    def test_writers_always_have_the_other_half(self, driver):
        """CA03."""
        driver.lease(chain("a", 4))
        driver.lease(chain("b", 4))
        assert driver.reserve(chain("c", 4)).outcomes == [GRANTED] * 4

    def test_a_reader_that_waits_is_served_by_a_release(self, driver):
        first = driver.lease(chain("a", 4))
        waiting = driver.begin_lease(chain("b", 4), wait_seconds=10)
        assert waiting not in driver.answers
        driver.release(first)
        assert driver.answers.pop(waiting).reason is None

    def test_a_reader_that_waited_in_vain_gets_what_there_is(self, driver):
        driver.lease(chain("a", 3))
        waiting = driver.begin_lease(chain("b", 4), wait_seconds=10)
        driver.tick(10)
        answer = driver.answers.pop(waiting)
        assert (len(answer.places), answer.reason) == (1, BUSY)


class TestWatermarks:
    def make(self, units, high, low):
        driver = Driver(units)
        driver.core = Core(
            driver.clock,
            Slots(units * UNIT_BYTES),
            LruPolicy(),
            settings=CoreSettings(watermark_high=high, watermark_low=low),
        )
        driver.core._leases.cap_bytes = units * UNIT_BYTES
        return driver

    def test_above_the_high_one_it_evicts_by_itself_down_to_the_low_one(self):
        """CA04."""
        driver = self.make(10, 0.8, 0.5)
        driver.put(chain("a", 8))
        assert driver.usage("free") == 2
        driver.put(chain("b", 1))
        assert driver.usage("free") == 5
        assert driver.held(chain("b", 1)) == "1"
        assert driver.held(chain("a", 8)) == "11110000"

    def test_what_is_protected_stays_and_a_release_lets_it_go(self):
        """CA04."""
        driver = self.make(10, 0.8, 0.5)
        driver.put(chain("a", 8))
        lease = driver.lease(chain("a", 8))
        driver.put(chain("b", 1))
        assert driver.usage("free") == 2
        driver.put(chain("c", 1))
        assert driver.held(chain("a", 8)) == "1" * 8
        driver.release(lease)
        driver.put(chain("d", 1))
        assert driver.usage("free") == 5

    def test_a_long_way_down_goes_in_slices_that_are_due_at_once(self):
        driver = self.make(400, 1.0, 1.0)
        driver.put(chain("a", 380))
        driver.core._low_bytes = int(0.1 * driver.core.slots.capacity_bytes)
        driver.core._high_bytes = 360 * UNIT_BYTES
        driver.tick()
        assert driver.usage("free") == 20 + 64
        assert driver.core.next_deadline() == driver.clock.now()
        for _ in range(20):
            driver.tick()
        assert driver.usage("free") == 360
        assert driver.core.next_deadline() is None
