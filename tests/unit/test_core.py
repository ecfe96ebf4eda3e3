"""The core: what is found, what is remembered, what a transfer protects, and what is counted."""

from __future__ import annotations

import pytest

from kvstore.errors import InvariantViolated
from kvstore.index import Entry
from kvstore.messages import CommitRequest, LeaseRequest, LostRequest, ReleaseRequest, TransferKind
from kvstore.metrics import COUNTERS
from kvstore.slots import SlotState
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import CHECKSUM, UNIT_BYTES, Driver, chain, keys

OTHER_DOMAIN = b"\1" * 32
OK, ABSENT = Outcome.OK, Outcome.ABSENT


class TestLookup:
    def test_it_counts_the_prefix_up_to_the_first_hole_and_no_further(self):
        """CO03."""
        driver, blocks = Driver(16), chain("a", 10)
        driver.put(blocks)
        assert driver.delete(blocks[4:5]) == [OK]
        assert driver.match(blocks) == (4, {"dram": 4}, ABSENT)
        lease = driver.lease(blocks)
        assert [place.key for place in lease.places] == [
            SINGLE_DOMAIN + k for k in keys(blocks)[:4]
        ]
        assert driver.release(lease)
        assert driver.delete(blocks[:1]) == [OK]
        assert driver.match(blocks) == (0, {}, ABSENT)
        assert driver.lease(blocks).places == []

    def test_blocks_behind_a_hole_are_not_pinned_by_a_lease(self):
        """CO03."""
        driver, blocks = Driver(4), chain("a", 4)
        driver.put(blocks)
        driver.delete(blocks[1:2])
        driver.lease(blocks)
        assert driver.put(chain("b", 3)) == [Outcome.GRANTED] * 3
        assert driver.held(blocks) == "1000"

    def test_a_healed_hole_makes_the_blocks_behind_it_reachable_again(self):
        driver, blocks = Driver(16), chain("a", 6)
        driver.put(blocks)
        driver.delete(blocks[2:3])
        assert driver.put(blocks)[2] is Outcome.GRANTED
        assert driver.match(blocks) == (6, {"dram": 6}, None)

    def test_no_keys_are_found_completely(self):
        driver = Driver(1)
        assert driver.match([]) == (0, {}, None)
        assert driver.lease([]).lease_id == 0
        assert driver.delete([]) == []

    def test_two_domains_never_see_each_other(self):
        driver, blocks = Driver(8), chain("a", 2)
        driver.put(blocks)
        assert driver.match(blocks, domain=OTHER_DOMAIN) == (0, {}, ABSENT)
        assert driver.lease(blocks, domain=OTHER_DOMAIN).places == []
        assert driver.delete(blocks, domain=OTHER_DOMAIN) == [ABSENT] * 2
        assert driver.put(blocks, domain=OTHER_DOMAIN) == [Outcome.GRANTED] * 2
        mine, theirs = driver.lease(blocks), driver.lease(blocks, domain=OTHER_DOMAIN)
        assert not {p.offset_bytes for p in mine.places} & {p.offset_bytes for p in theirs.places}
        assert {p.key[:32] for p in theirs.places} == {OTHER_DOMAIN}
        assert driver.delete(blocks) == [OK] * 2
        assert driver.match(blocks, domain=OTHER_DOMAIN).blocks == 2

    def test_one_domain_learns_nothing_of_why_another_lost_its_blocks(self):
        driver, blocks = Driver(2), chain("a", 2)
        driver.put(blocks)
        driver.put(chain("b", 2))
        assert driver.match(blocks).reason is Outcome.EVICTED
        assert driver.match(blocks, domain=OTHER_DOMAIN).reason is ABSENT


class TestReasons:
    def test_what_was_never_stored_is_absent(self):
        assert Driver(1).match(chain("a", 1)).reason is ABSENT

    def test_what_made_room_is_evicted_until_it_is_back(self):
        driver, blocks = Driver(2), chain("a", 2)
        driver.put(blocks)
        driver.put(chain("b", 2))
        assert driver.match(blocks).reason is Outcome.EVICTED
        reservation = driver.reserve(blocks)
        assert driver.match(blocks).reason is Outcome.PENDING
        driver.abort(reservation)
        assert driver.match(blocks).reason is Outcome.EVICTED
        driver.put(blocks)
        driver.delete(blocks)
        assert driver.match(blocks).reason is ABSENT

    def test_what_was_deleted_is_absent_also_while_it_is_leased(self):
        driver, blocks = Driver(2), chain("a", 1)
        driver.put(blocks)
        lease = driver.lease(blocks)
        assert driver.delete(blocks) == [OK]
        assert driver.delete(blocks) == [ABSENT]
        assert driver.match(blocks).reason is ABSENT
        assert driver.release(lease)
        assert driver.match(blocks).reason is ABSENT

    def test_what_rotted_is_corrupt_until_a_put_heals_it(self):
        driver, blocks = Driver(2), chain("a", 1)
        driver.put(blocks)
        driver.holds_transfers = True
        scrub_id = driver.begin_scrub(blocks)
        driver.complete(checksum=CHECKSUM + 1)
        assert driver.answers.pop(scrub_id) == (1, keys(blocks))
        assert driver.match(blocks).reason is Outcome.CORRUPT
        driver.holds_transfers = False
        driver.put(blocks)
        assert driver.match(blocks) == (1, {"dram": 1}, None)

    def test_history_is_bounded_and_forgets_the_oldest_first(self):
        driver = Driver(1)
        driver.core._blocks.index._history_entries = 2
        losers = [chain(name, 1) for name in "abcd"]
        for blocks in losers:
            driver.put(blocks)
        found = [driver.match(blocks).reason for blocks in losers]
        assert found == [ABSENT, Outcome.EVICTED, Outcome.EVICTED, None]


class TestTransfers:
    def test_a_commit_has_its_blocks_read_and_they_are_found_meanwhile(self):
        driver, blocks = Driver(4, holds_transfers=True), chain("a", 2)
        driver.put(blocks)
        assert [t.kind for t in driver.transfers] == [TransferKind.CHECKSUM] * 2
        assert driver.match(blocks).blocks == 2
        assert driver.reserve(blocks).checksums == [None, None]
        driver.complete(checksum=5)
        driver.complete(checksum=6)
        assert driver.reserve(blocks).checksums == [5, 6]

    def test_a_block_that_is_read_by_us_is_not_evicted(self):
        driver, blocks = Driver(2, holds_transfers=True), chain("a", 2)
        driver.put(blocks)
        assert driver.reserve(chain("b", 1)).outcomes == [Outcome.FULL]
        driver.complete()
        assert driver.reserve(chain("b", 1)).outcomes == [Outcome.GRANTED]
        assert driver.held(blocks) == "01", "the first was free of its transfer, the second not"

    def test_a_delete_leaves_the_bytes_until_our_read_has_ended(self):
        driver, blocks = Driver(1, holds_transfers=True), chain("a", 1)
        driver.put(blocks)
        assert driver.delete(blocks) == [OK]
        assert driver.usage("condemned") == 1
        assert driver.reserve(chain("b", 1)).outcomes == [Outcome.FULL]
        driver.complete()
        assert driver.usage("free") == 1

    def test_a_key_stored_anew_during_a_read_of_its_past_keeps_its_own_checksum(self):
        driver, blocks = Driver(2, holds_transfers=True), chain("a", 1)
        driver.put(blocks)
        driver.delete(blocks)
        driver.put(blocks)
        driver.complete(checksum=1)
        driver.complete(checksum=2)
        assert driver.reserve(blocks).checksums == [2]

    def test_a_failed_read_leaves_a_block_that_a_scrub_gives_its_checksum(self):
        driver, blocks = Driver(1, holds_transfers=True), chain("a", 1)
        driver.put(blocks)
        driver.complete(Outcome.UNAVAILABLE, None)
        assert driver.reserve(blocks).checksums == [None]
        scrub_id = driver.begin_scrub(blocks)
        driver.complete()
        assert driver.answers[scrub_id] == (1, [])
        assert driver.reserve(blocks).checksums == [CHECKSUM]
        assert driver.put(chain("b", 1)) == [Outcome.GRANTED]

    def test_a_scrub_ignores_what_was_deleted_while_it_read(self):
        driver, blocks = Driver(2), chain("a", 2)
        driver.put(blocks)
        driver.holds_transfers = True
        scrub_id = driver.begin_scrub(blocks)
        driver.delete(blocks[:1])
        driver.complete(checksum=0)
        driver.complete(checksum=0)
        assert driver.answers[scrub_id] == (2, keys(blocks)[1:])
        assert driver.usage("free") == 2
        assert driver.core.counters.by_label("dropped_blocks") == {"deleted": 1, "corrupt": 1}

    def test_a_scrub_of_one_key_twice_drops_it_once(self):
        driver, blocks = Driver(2), chain("a", 1)
        driver.put(blocks)
        driver.holds_transfers = True
        scrub_id = driver.begin_scrub(blocks * 2)
        driver.complete(checksum=0)
        driver.complete(checksum=0)
        assert driver.answers[scrub_id] == (2, keys(blocks))
        assert driver.usage("free") == 2

    def test_rot_under_a_lease_hides_the_block_and_leaves_the_reader_its_memory(self):
        driver, blocks = Driver(1), chain("a", 1)
        driver.put(blocks)
        lease = driver.lease(blocks)
        driver.holds_transfers = True
        driver.begin_scrub(blocks)
        driver.complete(checksum=0)
        assert driver.match(blocks).reason is Outcome.CORRUPT
        assert driver.usage("condemned") == 1
        assert driver.release(lease)
        assert driver.usage("free") == 1

    def test_what_a_tier_finds_corrupt_is_dropped(self):
        driver, blocks = Driver(2), chain("a", 2)
        driver.put(blocks)
        driver.holds_transfers = True
        scrub_id = driver.begin_scrub(blocks)
        driver.complete()
        driver.complete(Outcome.CORRUPT, None)
        assert driver.answers[scrub_id] == (2, keys(blocks)[1:])
        found = driver.match(blocks)
        assert (found.blocks, found.reason) == (1, Outcome.CORRUPT)

    def test_a_scrub_that_could_not_read_drops_nothing(self):
        driver, blocks = Driver(1), chain("a", 1)
        driver.put(blocks)
        driver.holds_transfers = True
        scrub_id = driver.begin_scrub(blocks)
        driver.complete(Outcome.UNAVAILABLE, None)
        assert driver.answers[scrub_id] == (0, [])
        assert driver.match(blocks).blocks == 1


class TestCounters:
    def test_a_scripted_trace_is_counted_exactly(self):
        """OP01: once per request, loaded is not looked up, idling adds nothing."""
        driver = Driver(4)
        a, b = chain("a", 3), chain("b", 2)
        driver.put(a)  # 3 stored
        driver.put(a)  # present: nothing stored
        hit = driver.lease(a)  # 48 tokens, 3 blocks
        driver.ask(LostRequest(1, Outcome.EXPIRED))  # of its copies, one came too late
        driver.ask(ReleaseRequest(hit.lease_id))
        driver.lease(b)  # 2 misses
        driver.put(b)  # a2 makes room
        partly = driver.lease(a)  # 2 hits, 1 evicted
        driver.tick(60)  # it expires
        driver.ask(ReleaseRequest(partly.lease_id))  # too late: not counted again
        driver.match(a)  # a question is no lookup
        driver.delete(b)
        driver.abort(driver.reserve(b))
        for _ in range(3):
            driver.tick(60)
        assert driver.core.counters.snapshot() == {
            "lookup_tokens": 48 + 32 + 48,
            "hit_tokens": {"dram": 48 + 32},
            "hit_blocks": {"dram": 3 + 2},
            "misses": {"absent": 2, "evicted": 1},
            "stored_blocks": {"dram": 5},
            "stored_bytes": {"dram": 5 * UNIT_BYTES},
            "refused_blocks": {},
            "dropped_blocks": {"evicted": 1, "deleted": 2},
            "evicted_before_first_read": {"deleted": 2},
            "dropped_bytes": {"evicted": UNIT_BYTES, "deleted": 2 * UNIT_BYTES},
            "ended_leases": {"released": 1, "expired": 1},
            "ended_reservations": {"committed": 3, "aborted": 1},
            "differing_puts": 0,
            "lost_blocks": {"expired": 1},
        }

    def test_a_lease_that_waits_is_counted_once_when_it_is_answered(self):
        """OP01."""
        driver, blocks = Driver(4), chain("a", 2)
        reservation = driver.reserve(blocks)
        lease_id = driver.begin_lease(blocks, wait_seconds=10)
        driver.tick(1)
        driver.tick(1)
        assert driver.core.counters["lookup_tokens", ""] == 0
        driver.commit(reservation)
        assert lease_id in driver.answers
        assert driver.core.counters["lookup_tokens", ""] == 32
        assert driver.core.counters["hit_blocks", "dram"] == 2

    def test_a_cancelled_lease_is_not_counted(self):
        driver, blocks = Driver(4), chain("a", 2)
        driver.reserve(blocks)
        driver.cancel(driver.begin_lease(blocks, wait_seconds=10))
        driver.tick(20)
        assert driver.core.counters["lookup_tokens", ""] == 0

    def test_refusals_are_counted_by_reason_once_each(self):
        driver = Driver(2)
        driver.reserve(chain("a", 1))
        driver.reserve(chain("a", 1))
        driver.reserve(chain("b", 3))
        assert driver.core.counters.by_label("refused_blocks") == {"pending": 1, "full": 2}

    def test_differing_puts_are_the_writers_word(self):
        driver, blocks = Driver(2), chain("a", 1)
        driver.put(blocks)
        reservation = driver.reserve(blocks)
        driver.ask(CommitRequest(reservation.reservation_id, 1, 1))
        assert driver.core.counters["differing_puts", ""] == 1

    def test_every_counter_is_listed_and_no_other_can_be_counted(self):
        driver = Driver(1)
        assert driver.core.counters.snapshot().keys() == COUNTERS.keys()
        with pytest.raises(KeyError, match="no counter 'hits'"):
            driver.core.counters.add("hits")


class TestTime:
    def test_next_deadline_is_the_earliest_of_all_that_wait_or_hold(self):
        driver = Driver(8)
        assert driver.core.next_deadline() is None
        now = driver.clock.now()
        a, b = chain("a", 2), chain("b", 2)
        driver.put(a)
        lease = driver.lease(a, 50)
        assert driver.core.next_deadline() == now + 50
        reservation = driver.reserve(b, ttl_seconds=40)
        assert driver.core.next_deadline() == now + 40
        lease_id = driver.begin_lease(b, wait_seconds=30)
        assert driver.core.next_deadline() == now + 30
        room_id = driver.begin_reserve(chain("c", 5), wait_seconds=20)
        assert driver.core.next_deadline() == now + 20
        driver.cancel(room_id)
        driver.cancel(lease_id)
        driver.abort(reservation)
        assert driver.core.next_deadline() == now + 50
        driver.release(lease)
        assert driver.core.next_deadline() is None

    def test_a_tick_before_the_first_deadline_changes_nothing(self):
        driver, blocks = Driver(2), chain("a", 2)
        driver.put(blocks)
        driver.lease(blocks, 10)
        before = driver.core.check()
        driver.tick(10 - 1e-6)
        assert driver.core.check() == before
        driver.tick(1e-6)
        assert driver.core.check().leases == 0

    def test_an_event_sees_the_deadlines_that_came_before_it(self):
        """A lease that is due counts no more, whether or not anybody ticked."""
        driver, blocks = Driver(2), chain("a", 2)
        driver.put(blocks)
        driver.lease(blocks, 10)
        driver.clock.advance(10)
        assert driver.reserve(chain("b", 2)).outcomes == [Outcome.GRANTED] * 2


class TestAudit:
    def damaged(self):
        driver, blocks = Driver(4), chain("a", 2)
        driver.put(blocks)
        driver.lease(blocks[:1])
        entry = driver.core._blocks.index.find(SINGLE_DOMAIN, keys(blocks)[1])
        assert entry is not None
        return driver.core, entry

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda core, e: setattr(e, "users", 1), "has 1 users, 0 are known"),
            (lambda core, e: setattr(e, "children", 1), "1 children, 0 resident"),
            (lambda core, e: setattr(e, "queue_place", None), "its policy does not know it"),
            (lambda core, e: setattr(e, "is_ready", False), "readable is False"),
            (lambda core, e: setattr(e.slot, "size_bytes", 8192), "in no slot, or in two"),
            (lambda core, e: setattr(e.slot, "generation", 99), "generation table disagrees"),
            (lambda core, e: setattr(e.slot, "state", SlotState.HELD), "can be found"),
            (lambda core, e: core._blocks.slots.free(e.slot), "where no slot is"),
            (lambda core, e: core._blocks.index.remove(e, None), "owners|own the slot"),
            (lambda core, e: setattr(core._blocks, "reclaimable_bytes", 0), "bytes are unused"),
            (lambda core, e: core._blocks.condemned.add(e), "is condemned"),
        ],
    )
    def test_a_recount_notices(self, damage, message):
        core, entry = self.damaged()
        core.check()
        damage(core, entry)
        with pytest.raises(InvariantViolated, match=message):
            core.check()

    def test_an_entry_prints_what_matters(self):
        _, entry = self.damaged()
        assert isinstance(entry, Entry)
        assert "ready" in repr(entry)
        assert "users 0" in repr(entry)

    def test_a_request_that_no_one_handles_changes_nothing(self):
        driver, blocks = Driver(2), chain("a", 1)
        driver.put(blocks)
        with pytest.raises(KeyError):
            driver.core.begin(99, object())  # type: ignore[arg-type]
        driver.core.check()
        assert driver.ask(LeaseRequest(SINGLE_DOMAIN, keys(blocks), 16, 1.0, 0.0)).places
