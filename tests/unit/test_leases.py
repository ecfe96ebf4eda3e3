"""Leases in the core: protection to the last tick and not beyond, and waiting for blocks."""

from __future__ import annotations

import pytest

from kvstore.settings import CoreSettings
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import UNIT_BYTES, Driver, chain

GRANTED, FULL = Outcome.GRANTED, Outcome.FULL


@pytest.fixture
def driver():
    """Room for four blocks, and the chain a0..a3 in it."""
    driver = Driver(4)
    driver.put(chain("a", 4))
    return driver


def generations(driver, lease):
    return [driver.core.slots.generations[place.offset_bytes // 4096] for place in lease.places]


class TestProtection:
    def test_no_pressure_takes_a_leased_block(self, driver):
        """CA03."""
        lease = driver.lease(chain("a", 4))
        for name in "bcd":
            assert driver.reserve(chain(name, 4)).outcomes == [FULL] * 4
        assert driver.match(chain("a", 4)).blocks == 4
        assert [p.generation for p in lease.places] == generations(driver, lease)
        assert driver.release(lease)
        assert driver.put(chain("b", 4)) == [GRANTED] * 4

    def test_two_leases_on_one_block_both_count(self, driver):
        first, second = driver.lease(chain("a", 4)), driver.lease(chain("a", 4))
        assert driver.release(first)
        assert driver.reserve(chain("b", 1)).outcomes == [FULL]
        assert driver.release(second)
        assert driver.reserve(chain("b", 1)).outcomes == [GRANTED]

    def test_a_lease_names_places_in_prefix_order_that_do_not_overlap(self, driver):
        lease = driver.lease(chain("a", 4))
        assert len({place.offset_bytes for place in lease.places}) == 4
        assert [place.key[32:34] for place in lease.places] == [b"a0", b"a1", b"a2", b"a3"]

    def test_generations_change_before_the_memory_is_anothers(self, driver):
        lease = driver.lease(chain("a", 4), ttl_seconds=5)
        driver.tick(5)
        assert [p.generation for p in lease.places] == generations(driver, lease)
        driver.reserve(chain("b", 4))
        now = generations(driver, lease)
        assert all(place.generation != new for place, new in zip(lease.places, now, strict=True))

    def test_a_generation_is_never_used_twice(self):
        driver, seen = Driver(2), set()
        for i in range(50):
            driver.put(chain("a", 1))
            lease = driver.lease(chain("a", 1))
            place = lease.places[0]
            assert place.generation not in seen
            seen.add(place.generation)
            driver.release(lease)
            if i % 2:
                driver.delete(chain("a", 1))
            else:
                driver.put(chain(f"n{i}-", 2))

    def test_deleted_blocks_stay_whole_until_the_last_lease_has_ended(self, driver):
        first, second = driver.lease(chain("a", 4)), driver.lease(chain("a", 2))
        assert driver.delete(chain("a", 4)) == [Outcome.OK] * 4
        assert driver.match(chain("a", 4)).blocks == 0
        assert driver.usage("condemned") == 4
        assert driver.release(first)
        assert driver.usage("condemned") == 2
        assert [p.generation for p in second.places] == generations(driver, second)
        assert driver.release(second)
        assert driver.usage("free") == 4

    def test_a_deleted_and_leased_key_can_be_stored_anew_beside_its_past(self):
        driver, blocks = Driver(4), chain("a", 2)
        driver.put(blocks)
        past = driver.lease(blocks)
        driver.delete(blocks)
        assert driver.put(blocks) == [GRANTED] * 2
        present = driver.lease(blocks)
        offsets = {place.offset_bytes for place in past.places + present.places}
        assert len(offsets) == 4
        assert driver.release(past)
        assert driver.match(blocks).blocks == 2

    def test_a_lease_on_condemned_blocks_ends_at_its_deadline_too(self, driver):
        driver.lease(chain("a", 4), ttl_seconds=5)
        driver.delete(chain("a", 4))
        driver.tick(5)
        assert driver.usage("free") == 4


class TestEnd:
    def test_it_lasts_until_the_tick_of_its_deadline_and_not_one_more(self, driver):
        """LI01."""
        lease = driver.lease(chain("a", 4), ttl_seconds=5)
        assert lease.deadline == driver.clock.now() + 5
        driver.tick(5 - 1e-9)
        assert driver.reserve(chain("b", 1)).outcomes == [FULL]
        driver.clock.advance(lease.deadline - driver.clock.now())
        assert driver.reserve(chain("b", 1)).outcomes == [GRANTED]
        assert driver.core.counters.by_label("ended_leases") == {"expired": 1}

    def test_a_hundred_forgotten_leases_end_and_their_memory_is_had_again(self, driver):
        """LI01."""
        for _ in range(100):
            driver.lease(chain("a", 4), ttl_seconds=30)
        assert driver.core.check().leases == 100
        driver.tick(30)
        assert driver.core.check().leases == 0
        assert driver.put(chain("b", 4)) == [GRANTED] * 4

    def test_release_counts_once_whoever_calls_it_again(self, driver):
        """CO12: twice, after expiry, an unknown id; no other holder's protection is dropped."""
        first, second = driver.lease(chain("a", 4)), driver.lease(chain("a", 4), ttl_seconds=5)
        assert driver.release(first)
        assert not driver.release(first)
        assert driver.reserve(chain("b", 1)).outcomes == [FULL], "the second still holds"
        driver.tick(5)
        assert not driver.release(second)
        assert not driver.release(first._replace(lease_id=12_345))
        assert not driver.release(driver.lease(chain("x", 1)))
        assert driver.core.counters.by_label("ended_leases") == {"released": 1, "expired": 1}

    def test_use_does_not_lengthen_a_lease(self, driver):
        """LI13."""
        driver.lease(chain("a", 4), ttl_seconds=1)
        for _ in range(4):
            driver.tick(0.25)
            driver.release(driver.lease(chain("a", 4), ttl_seconds=0.1))
        assert driver.reserve(chain("b", 1)).outcomes == [GRANTED]

    def test_a_second_lease_does_not_revive_the_first(self, driver):
        """LI13."""
        first = driver.lease(chain("a", 4), ttl_seconds=1)
        driver.tick(2)
        second = driver.lease(chain("a", 4), ttl_seconds=1)
        assert driver.renew(first, 60) is None
        assert driver.release(second)
        assert driver.reserve(chain("b", 1)).outcomes == [GRANTED]


class TestRenew:
    def test_it_only_lengthens(self, driver):
        lease = driver.lease(chain("a", 4), ttl_seconds=10)
        assert driver.renew(lease, 1) == lease.deadline
        assert driver.renew(lease, 20) == lease.deadline + 10
        driver.tick(19.5)
        assert driver.reserve(chain("b", 1)).outcomes == [FULL]
        driver.tick(0.5)
        assert driver.reserve(chain("b", 1)).outcomes == [GRANTED]

    def test_it_comes_too_late_at_the_deadline(self, driver):
        lease = driver.lease(chain("a", 4), ttl_seconds=10)
        driver.clock.advance(10)
        assert driver.renew(lease, 20) is None
        assert driver.core.check().leases == 0

    def test_it_has_a_hard_maximum(self, driver):
        """LI13."""
        granted_at = driver.clock.now()
        lease = driver.lease(chain("a", 4), ttl_seconds=3_000)
        for _ in range(9):
            driver.tick(400)
            deadline = driver.renew(lease, 3_000)
            if deadline is not None:
                assert deadline <= granted_at + CoreSettings().lease_seconds_max
        assert driver.renew(lease, 3_000) is None
        assert driver.reserve(chain("b", 1)).outcomes == [GRANTED]

    def test_a_renewed_lease_leaves_no_deadline_in_the_past(self, driver):
        lease = driver.lease(chain("a", 4), ttl_seconds=10)
        driver.renew(lease, 100)
        driver.tick(10)
        assert driver.core.next_deadline() == driver.clock.now() + 90

    def test_a_released_lease_is_not_renewed(self, driver):
        lease = driver.lease(chain("a", 4))
        driver.release(lease)
        assert driver.renew(lease, 20) is None


class TestWaiting:
    def test_a_lease_waits_for_a_block_that_is_being_written(self):
        driver, blocks = Driver(4), chain("a", 3)
        driver.put(blocks[:1])
        reservation = driver.reserve(blocks)
        lease_id = driver.begin_lease(blocks, wait_seconds=5)
        driver.commit(reservation, 2)
        assert lease_id not in driver.answers, "the third is still pending"
        driver.commit(reservation)
        lease = driver.answers[lease_id]
        assert (len(lease.places), lease.reason) == (3, None)

    def test_it_takes_what_there_is_at_its_deadline(self):
        driver, blocks = Driver(4), chain("a", 3)
        reservation = driver.reserve(blocks)
        driver.commit(reservation, 1)
        lease_id = driver.begin_lease(blocks, wait_seconds=5, ttl_seconds=7)
        driver.tick(5)
        lease = driver.answers[lease_id]
        assert (len(lease.places), lease.reason) == (1, Outcome.PENDING)
        assert lease.deadline == driver.clock.now() + 7, "the time of waiting is not its holder's"

    def test_it_does_not_wait_for_what_nobody_writes(self):
        driver, blocks = Driver(4), chain("a", 3)
        driver.put(blocks[:1])
        lease = driver.answers[driver.begin_lease(blocks, wait_seconds=5)]
        assert (len(lease.places), lease.reason) == (1, Outcome.ABSENT)

    def test_it_does_not_wait_for_a_block_behind_a_hole(self):
        driver, blocks = Driver(4), chain("a", 3)
        driver.reserve(blocks, start=1)
        assert driver.answers[driver.begin_match(blocks, 5)].reason is Outcome.ABSENT

    @pytest.mark.parametrize("end", ["abort", "deadline"])
    def test_a_writer_that_gives_up_ends_the_wait_at_once(self, end):
        driver, blocks = Driver(4), chain("a", 3)
        reservation = driver.reserve(blocks, ttl_seconds=3)
        waiting = [driver.begin_match(blocks, 60), driver.begin_lease(blocks, 60)]
        if end == "abort":
            driver.abort(reservation)
        else:
            driver.tick(3)
        assert [driver.answers[i].reason for i in waiting] == [Outcome.ABSENT] * 2

    def test_a_delete_of_the_beginning_ends_the_wait(self):
        driver, blocks = Driver(4), chain("a", 3)
        driver.put(blocks[:1])
        driver.reserve(blocks)
        match_id = driver.begin_match(blocks, 60)
        driver.delete(blocks[:1])
        assert driver.answers[match_id] == (0, {}, Outcome.ABSENT)

    def test_a_second_writer_keeps_the_wait_alive(self):
        driver, blocks = Driver(4), chain("a", 2)
        first = driver.reserve(blocks[:1])
        second = driver.reserve(blocks)
        assert second.outcomes == [Outcome.PENDING, GRANTED]
        match_id = driver.begin_match(blocks, 60)
        driver.commit(second)
        assert match_id not in driver.answers
        driver.commit(first)
        assert driver.answers[match_id].blocks == 2

    def test_a_cancelled_lease_holds_nothing(self):
        """LI02."""
        driver, blocks = Driver(4), chain("a", 3)
        reservation = driver.reserve(blocks)
        lease_id = driver.begin_lease(blocks, wait_seconds=5)
        driver.cancel(lease_id)
        driver.cancel(lease_id)
        driver.commit(reservation)
        assert lease_id not in driver.answers
        assert driver.core.check().leases == 0
        assert driver.put(chain("b", 4)) == [GRANTED] * 4

    def test_what_is_leased_at_the_moment_of_the_commit_cannot_be_evicted_after_it(self):
        """CO04: a waiting lease is granted in the same event that makes its blocks visible."""
        driver, blocks = Driver(2), chain("a", 2)
        reservation = driver.reserve(blocks)
        lease_id = driver.begin_lease(blocks, wait_seconds=5)
        room_id = driver.begin_reserve(chain("b", 2), wait_seconds=1)
        driver.commit(reservation)
        assert len(driver.answers[lease_id].places) == 2
        assert room_id not in driver.answers
        driver.tick(1)
        assert driver.answers[room_id].outcomes == [FULL] * 2
        assert driver.match(blocks, domain=SINGLE_DOMAIN).blocks == 2


class TestCap:
    """Readers may hold half of the tier; the rest stays open to writers."""

    @pytest.fixture
    def capped(self):
        """Room for eight blocks, four of which may be leased; a0..a3 and b0..b3 in it."""
        driver = Driver(8)
        driver.core._leases.cap_bytes = 4 * UNIT_BYTES
        driver.put(chain("a", 4))
        driver.put(chain("b", 4))
        return driver

    def test_what_goes_over_it_is_busy(self, capped):
        first = capped.lease(chain("a", 3))
        second = capped.lease(chain("b", 4))
        assert (len(second.places), second.reason) == (1, Outcome.BUSY)
        assert capped.lease(chain("b", 1)).reason is None, "leased already: it costs nothing"
        assert capped.release(first)
        assert len(capped.lease(chain("b", 4)).places) == 4

    def test_a_writer_always_finds_the_other_half(self, capped):
        """CA03."""
        capped.lease(chain("a", 4))
        capped.lease(chain("b", 4))
        assert capped.put(chain("c", 4)) == [GRANTED] * 4

    def test_deleted_blocks_count_while_they_are_leased(self, capped):
        lease = capped.lease(chain("a", 4))
        capped.delete(chain("a", 4))
        assert capped.lease(chain("b", 1)).reason is Outcome.BUSY
        assert capped.release(lease)
        assert capped.lease(chain("b", 1)).reason is None

    def test_our_own_reads_do_not_make_readers_miss(self):
        driver = Driver(8)
        driver.core._leases.cap_bytes = 4 * UNIT_BYTES
        driver.put(chain("a", 1))
        driver.holds_transfers = True
        driver.put(chain("b", 5))
        assert driver.lease(chain("a", 1)).reason is None

    def test_a_lease_waits_for_a_release_that_makes_place(self, capped):
        first = capped.lease(chain("a", 4))
        lease_id = capped.begin_lease(chain("b", 4), wait_seconds=5)
        assert lease_id not in capped.answers
        capped.release(first)
        assert len(capped.answers[lease_id].places) == 4

    def test_it_takes_what_fits_at_its_deadline(self, capped):
        capped.lease(chain("a", 3))
        lease_id = capped.begin_lease(chain("b", 4), wait_seconds=5)
        capped.tick(5)
        assert len(capped.answers[lease_id].places) == 1
        assert capped.answers[lease_id].reason is Outcome.BUSY

    def test_a_lease_that_can_never_fit_does_not_wait(self):
        driver = Driver(8)
        driver.core._leases.cap_bytes = 4 * UNIT_BYTES
        driver.put(chain("a", 6))
        lease_id = driver.begin_lease(chain("a", 6), wait_seconds=5)
        assert len(driver.answers[lease_id].places) == 4
