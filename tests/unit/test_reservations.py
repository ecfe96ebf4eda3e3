"""Reservations in the core: room, visibility, deadlines, and whose memory it is in between."""

from __future__ import annotations

import pytest

from kvstore.messages import CommitRequest
from kvstore.types import Outcome
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
