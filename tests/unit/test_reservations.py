"""Reservations in the core: room, visibility, deadlines, and whose memory it is in between."""

from __future__ import annotations

import pytest

from kvstore.messages import CommitRequest, ReserveRequest
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import UNIT_BYTES, Driver, chain

GRANTED, PRESENT, PENDING, FULL = (
    Outcome.GRANTED,
    Outcome.PRESENT,
    Outcome.PENDING,
    Outcome.FULL,
)
OK, EXPIRED = Outcome.OK, Outcome.EXPIRED


class TestVisibility:
    def test_nothing_is_seen_before_the_commit(self):
        driver, blocks = Driver(4), chain("a", 3)
        reservation = driver.reserve(blocks)
        assert reservation.outcomes == [GRANTED] * 3
        assert driver.match(blocks) == (0, {}, PENDING)
        assert driver.lease(blocks).places == []
        assert driver.core.resident_keys() == []
        assert driver.commit(reservation) is OK
        assert driver.match(blocks).blocks == 3

    def test_a_batch_becomes_visible_as_a_prefix(self):
        driver, blocks = Driver(4), chain("a", 4)
        reservation = driver.reserve(blocks)
        for count in (1, 3):
            assert driver.commit(reservation, count) is OK
            assert driver.match(blocks) == (count, {"dram": count}, PENDING)
        driver.abort(reservation)
        assert driver.match(blocks) == (3, {"dram": 3}, Outcome.ABSENT)
        assert driver.usage("free") == 1

    def test_committing_less_or_the_same_again_changes_nothing(self):
        driver, blocks = Driver(4), chain("a", 3)
        reservation = driver.reserve(blocks)
        driver.commit(reservation, 2)
        for count in (2, 0, 1, -5):
            assert driver.commit(reservation, count) is OK
        assert driver.match(blocks).blocks == 2
        assert driver.core.counters["stored_blocks", "dram"] == 2

    def test_committing_beyond_the_batch_is_committing_all_of_it(self):
        driver, blocks = Driver(4), chain("a", 3)
        assert driver.commit(driver.reserve(blocks), 99) is OK
        assert driver.match(blocks).blocks == 3

    def test_positions_count_what_was_present(self):
        driver, blocks = Driver(8), chain("a", 4)
        driver.put(blocks[:2])
        reservation = driver.reserve(blocks)
        assert reservation.outcomes == [PRESENT, PRESENT, GRANTED, GRANTED]
        assert [place is None for place in reservation.places] == [True, True, False, False]
        driver.commit(reservation, 3)
        assert driver.match(blocks).blocks == 3

    def test_start_leaves_the_beginning_out_of_the_batch(self):
        driver, blocks = Driver(8), chain("a", 4)
        driver.put(blocks[:2])
        reservation = driver.reserve(blocks, start=2)
        assert reservation.outcomes == [GRANTED] * 2
        driver.commit(reservation, 1)
        assert driver.match(blocks).blocks == 3

    def test_the_first_commit_of_a_key_wins(self):
        """CO14, CC06."""
        driver, blocks = Driver(8), chain("a", 2)
        winner = driver.reserve(blocks)
        losers = [driver.reserve(blocks) for _ in range(3)]
        assert all(loser.outcomes == [PENDING] * 2 for loser in losers)
        driver.commit(winner)
        assert all(driver.commit(loser) is OK for loser in losers)
        assert driver.reserve(blocks).outcomes == [PRESENT] * 2
        assert driver.core.counters["stored_blocks", "dram"] == 2

    def test_two_writers_of_one_key_never_share_memory(self):
        """CO14."""
        driver, blocks = Driver(8), chain("a", 2)
        late = driver.reserve(blocks, ttl_seconds=1)
        driver.tick(1)
        early = driver.reserve(blocks)
        assert early.outcomes == [GRANTED] * 2
        offsets = {place.offset_bytes for place in late.places + early.places}
        assert len(offsets) == 4

    def test_a_commit_after_the_delete_of_the_parent_is_stored_behind_a_hole(self):
        driver, blocks = Driver(8), chain("a", 3)
        driver.put(blocks[:2])
        reservation = driver.reserve(blocks, start=2)
        driver.delete(blocks[:2])
        assert driver.commit(reservation) is OK
        assert driver.held(blocks) == "001"
        driver.put(blocks)
        assert driver.match(blocks).blocks == 3

    def test_a_commit_does_not_bring_back_what_left_since_it_was_present(self):
        driver, blocks = Driver(8), chain("a", 3)
        driver.put(blocks[:2])
        reservation = driver.reserve(blocks)
        driver.delete(blocks[1:2])
        assert driver.commit(reservation) is OK
        assert driver.held(blocks) == "101"

    def test_a_delete_does_not_see_what_is_not_committed(self):
        driver, blocks = Driver(8), chain("a", 2)
        reservation = driver.reserve(blocks)
        assert driver.delete(blocks) == [Outcome.ABSENT] * 2
        assert driver.commit(reservation) is OK
        assert driver.match(blocks).blocks == 2


class TestDeadline:
    def test_a_commit_at_the_deadline_is_too_late(self):
        driver, blocks = Driver(4), chain("a", 2)
        reservation = driver.reserve(blocks, ttl_seconds=5)
        driver.clock.advance(5)
        assert driver.commit(reservation) is EXPIRED
        assert driver.match(blocks) == (0, {}, Outcome.ABSENT)
        assert driver.core.counters["stored_blocks", "dram"] == 0

    def test_a_commit_just_before_it_counts(self):
        driver, blocks = Driver(4), chain("a", 2)
        reservation = driver.reserve(blocks, ttl_seconds=5)
        driver.clock.advance(5 - 1e-9)
        assert driver.commit(reservation) is OK

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_memory_is_held_until_the_late_writer_says_that_it_is_done(self, end):
        driver, blocks = Driver(2), chain("a", 2)
        reservation = driver.reserve(blocks, ttl_seconds=5)
        driver.tick(5)
        assert (driver.usage("held"), driver.usage("free")) == (2, 0)
        driver.tick(1_000)
        refused = driver.reserve(chain("b", 1))
        assert refused.outcomes == [FULL], "it may still write"
        driver.abort(refused)
        if end == "commit":
            assert driver.commit(reservation) is EXPIRED
        else:
            assert not driver.abort(reservation)
        assert driver.usage("free") == 2
        assert driver.core.check().reservations == 0
        assert driver.commit(reservation) is EXPIRED
        assert driver.core.counters["ended_reservations", "expired"] == 1

    def test_what_was_committed_in_time_stays(self):
        driver, blocks = Driver(4), chain("a", 3)
        reservation = driver.reserve(blocks, ttl_seconds=5)
        driver.commit(reservation, 1)
        driver.tick(5)
        assert driver.commit(reservation) is EXPIRED
        assert driver.match(blocks) == (1, {"dram": 1}, Outcome.ABSENT)
        assert driver.usage("free") == 3

    def test_a_late_writer_does_not_disturb_the_one_that_came_after_it(self):
        driver, blocks = Driver(4), chain("a", 2)
        late = driver.reserve(blocks, ttl_seconds=5)
        driver.tick(5)
        early = driver.reserve(blocks)
        assert driver.commit(late) is EXPIRED
        assert driver.match(blocks).reason is PENDING
        assert driver.commit(early) is OK
        assert driver.match(blocks).blocks == 2

    def test_generations_change_before_held_memory_is_anothers(self):
        driver = Driver(1)
        late = driver.reserve(chain("a", 1), ttl_seconds=5)
        driver.tick(5)
        driver.abort(late)
        early = driver.reserve(chain("b", 1))
        assert early.places[0].offset_bytes == late.places[0].offset_bytes
        assert early.places[0].generation != late.places[0].generation

    def test_unknown_and_ended_reservations_are_refused_without_effect(self):
        driver, blocks = Driver(4), chain("a", 2)
        reservation = driver.reserve(blocks)
        assert driver.abort(reservation)
        assert not driver.abort(reservation)
        assert driver.commit(reservation) is EXPIRED
        assert driver.ask(CommitRequest(999, 1, 0)).outcome is EXPIRED
        assert driver.usage("free") == 4


class TestRoom:
    def test_nothing_leaves_while_there_is_room(self):
        driver = Driver(4)
        driver.put(chain("a", 2))
        driver.put(chain("b", 2))
        assert driver.core.counters.by_label("dropped_blocks") == {}

    def test_no_more_leaves_than_is_needed(self):
        """CA01, CA09."""
        driver = Driver(8)
        for name in "abcd":
            driver.put(chain(name, 2))
        driver.put(chain("e", 3))
        assert driver.core.counters["dropped_blocks", "evicted"] == 3
        assert driver.usage("ready") == 8

    def test_five_times_the_capacity_stays_under_the_capacity(self):
        """CA01."""
        driver = Driver(8)
        for i in range(20):
            driver.put(chain(f"s{i}-", 2))
            assert driver.usage("ready") + driver.usage("reserved") <= 8
        assert driver.core.counters["dropped_blocks", "evicted"] == 32

    def test_large_and_small_blocks_displace_each_other_by_bytes(self):
        """CA09."""
        driver = Driver(64)
        for i in range(48):
            driver.put(chain(f"s{i}-", 1))
        driver.put(chain("l", 1, units=16))
        assert driver.core.counters["dropped_blocks", ""] == 0
        driver.put(chain("m", 1, units=16))
        assert driver.core.counters["dropped_bytes", "evicted"] == 16 * UNIT_BYTES

    def test_without_room_the_first_blocks_are_granted_and_the_rest_is_full(self):
        driver = Driver(4)
        driver.put(chain("x", 2))
        driver.lease(chain("x", 2))
        assert driver.reserve(chain("a", 4)).outcomes == [GRANTED, GRANTED, FULL, FULL]

    def test_a_batch_larger_than_the_tier_takes_what_fits_at_once(self):
        driver = Driver(4)
        driver.put(chain("x", 4))
        reserve_id = driver.begin_reserve(chain("a", 6), wait_seconds=60)
        assert driver.answers[reserve_id].outcomes == [GRANTED] * 4 + [FULL] * 2

    def test_after_the_first_full_block_what_is_present_is_still_told(self):
        driver, blocks = Driver(2), chain("a", 4)
        driver.put(blocks[2:3])
        held = driver.lease(blocks[2:3])
        assert held.places
        assert driver.reserve(blocks).outcomes == [GRANTED, FULL, PRESENT, FULL]

    def test_a_batch_never_evicts_its_own_prefix(self):
        driver, blocks = Driver(4), chain("a", 6)
        driver.put(blocks[:3])
        reservation = driver.reserve(blocks, start=3)
        assert reservation.outcomes == [GRANTED, FULL, FULL]
        assert driver.held(blocks) == "111000"
        driver.commit(reservation)
        assert driver.reserve(blocks).outcomes == [PRESENT] * 4 + [FULL] * 2

    def test_a_refused_batch_leaves_what_it_could_not_use(self):
        driver = Driver(4)
        driver.put(chain("a", 2))
        assert driver.reserve(chain("b", 1, units=5)).outcomes == [FULL]
        assert driver.match(chain("a", 2)).blocks == 2


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
