"""Leases and reservations in the hands of a client."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kvstore.errors import (
    InvalidBuffer,
    InvalidRequest,
    LeaseExpired,
    ReservationExpired,
)
from kvstore.types import Outcome
from tests.payload import (
    BLOCK_BYTES,
    empty_buffers,
    filled,
    payload,
    payloads,
    writer_of,
    writers,
)

OK, PRESENT, FULL, EXPIRED, ABSENT = (
    Outcome.OK,
    Outcome.PRESENT,
    Outcome.FULL,
    Outcome.EXPIRED,
    Outcome.ABSENT,
)


class TestLease:
    def test_it_holds_the_longest_prefix_and_never_raises_for_a_miss(self, session, namespace):
        keys = namespace.keys(range(3))
        with session.lease(keys) as empty:
            assert (empty.blocks, empty.views, empty.reason) == (0, [], ABSENT)
            assert empty.valid()
            assert empty.renew(10)
            assert empty.copy_into(empty_buffers(len(keys))) == [ABSENT] * 3
        session.put(keys[:2], payloads(keys[:2]))
        with session.lease(keys) as lease:
            assert (lease.blocks, lease.by_tier, lease.reason) == (2, {"dram": 2}, ABSENT)
            assert writers(lease.views, keys) == [1, 1]

    def test_reads_count_until_a_margin_before_the_deadline(self, session, clock):
        keys = filled(session, 1, 2)
        lease = session.lease(keys, ttl_seconds=1)
        clock.advance(0.989)
        assert lease.valid()
        assert lease.copy_into(empty_buffers(len(keys))) == [OK, OK]
        assert lease.remaining_seconds() == pytest.approx(0.001)
        clock.advance(0.002)
        assert not lease.valid()
        assert lease.remaining_seconds() == 0
        assert lease.copy_into(empty_buffers(len(keys))) == [EXPIRED, EXPIRED]

    def test_leaving_the_block_too_late_raises(self, store, session, clock):
        keys = filled(session, 1, 2)
        lease = session.lease(keys, ttl_seconds=1)
        with pytest.raises(LeaseExpired, match="discard what was read"), lease:
            clock.advance(2)
        lease.release()
        assert store.check().leases == 0

    def test_leaving_by_an_error_passes_that_error_on(self, store, session, clock):
        keys = filled(session, 1, 2)

        def leave():
            with session.lease(keys, ttl_seconds=1):
                clock.advance(2)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            leave()
        assert store.check().leases == 0

    def test_leaving_by_an_error_while_a_view_is_alive_passes_that_error_on(self, session):
        keys = filled(session, 1, 2)
        lease, arrays = session.lease(keys), []

        def leave():
            with lease:
                arrays.append(np.frombuffer(lease.views[0], np.uint8))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            leave()
        assert writer_of(arrays.pop(), keys[0]) == 1
        lease.release()

    def test_a_read_across_its_end_is_expired_even_if_the_bytes_are_still_there(
        self, session, clock
    ):
        keys = filled(session, 1, 2)
        lease = session.lease(keys, ttl_seconds=1)
        views = lease.views
        clock.advance(1)
        assert writer_of(views[0], keys[0]) == 1
        assert not lease.valid()
        del views
        lease.release()

    def test_a_reader_whose_memory_went_to_another_knows(self, session, clock):
        keys = filled(session, 1, 4)
        lease = session.lease(keys, ttl_seconds=1)
        clock.advance(1)
        for name in range(2, 6):
            filled(session, name, 4, writer=name)
        clock.advance(-0.0)
        assert not lease.valid()
        lease.deadline = clock.now() + 1_000  # whatever it believes of the time
        assert not lease.valid(), "the generations have changed"
        lease.release()

    def test_renewal_lengthens_and_says_when_it_came_too_late(self, session, clock):
        keys = filled(session, 1, 2)
        lease = session.lease(keys, ttl_seconds=1)
        assert lease.renew(5)
        clock.advance(4)
        assert lease.valid()
        assert lease.renew(0.5), "it never becomes shorter"
        assert lease.remaining_seconds() == pytest.approx(0.99)
        clock.advance(1)
        assert not lease.renew(5)
        assert not lease.valid()
        lease.release()

    def test_a_released_lease_gives_nothing_more(self, store, session):
        keys = filled(session, 1, 2)
        lease = session.lease(keys)
        lease.release()
        lease.release()  # CO12
        for call in (lambda: lease.views, lambda: lease.renew(1), lambda: lease.copy_into([])):
            with pytest.raises(LeaseExpired, match="was released"):
                call()
        assert not lease.valid()
        assert lease.remaining_seconds() == 0
        assert store.check().leases == 0

    def test_fewer_buffers_are_the_first_blocks_and_more_get_the_reason(self, session, namespace):
        keys = namespace.keys(range(4))
        session.put(keys[:2], payloads(keys[:2]))
        with session.lease(keys) as lease:
            buffers = empty_buffers(len(keys))
            assert lease.copy_into(buffers[:1]) == [OK]
            assert lease.copy_into(buffers) == [OK, OK, ABSENT, ABSENT]
            assert lease.copy_into([]) == []
            with pytest.raises(InvalidBuffer, match="5 buffers for 4 keys"):
                lease.copy_into(empty_buffers(5))

    def test_copies_that_came_too_late_are_counted(self, store, session, clock):
        """OP01: a copy that came too late is no load."""
        keys = filled(session, 1, 2)
        with session.lease(keys) as lease:
            lease.copy_into(empty_buffers(len(keys)))
        late = session.lease(keys, ttl_seconds=1)
        clock.advance(1)
        late.copy_into(empty_buffers(len(keys)))
        late.release()
        assert store.stats()["counters"]["lost_blocks"] == {"expired": 2}

    def test_readers_may_hold_half_of_the_store(self, session):
        keys = filled(session, 1, 12)
        with session.lease(keys) as lease:
            assert (lease.blocks, lease.reason) == (8, Outcome.BUSY)
        assert session.get_into(keys, empty_buffers(12)) == [OK] * 12, "a copy holds nothing"

    def test_deleted_blocks_stay_readable_under_a_lease(self, store, session):
        keys = filled(session, 1, 2)
        with session.lease(keys) as lease:
            session.delete(keys)
            session.put(keys, payloads(keys, writer=2))
            for name in range(2, 5):
                filled(session, name, 4)
            assert writers(lease.views, keys) == [1, 1]
            assert lease.valid()


class TestReservation:
    def test_it_is_filled_in_place_and_seen_after_the_commit(self, session, namespace):
        keys = namespace.keys(range(3))
        with session.reserve(keys) as reservation:
            for view, key in zip(reservation.views, keys, strict=True):
                view[:] = payload(key, 1, BLOCK_BYTES)
            assert session.match(keys) == (0, 0, {}, Outcome.PENDING)
            reservation.commit(2)
            assert session.match(keys).blocks == 2
        assert session.match(keys) == (2, 2, {"dram": 2}, ABSENT)
        with session.lease(keys) as lease:
            assert writers(lease.views, keys) == [1, 1]

    def test_views_are_there_where_granted(self, session, namespace):
        keys = namespace.keys(range(3))
        session.put(keys[:1], payloads(keys[:1]))
        with session.reserve(keys[:2]) as other, session.reserve(keys) as reservation:
            assert reservation.outcomes == [PRESENT, Outcome.PENDING, Outcome.GRANTED]
            assert [view is None for view in reservation.views] == [True, True, False]
            assert [place is None for place in reservation.places] == [True, True, False]
            assert reservation.checksums[0] is not None
            assert reservation.checksums[1:] == [None, None]
            other.abort()

    def test_no_writable_view_of_a_committed_block_is_handed_out(self, session, namespace):
        keys = namespace.keys(range(2))
        with session.reserve(keys) as reservation:
            reservation.commit(1)
            assert reservation.views[0] is None

    def test_a_late_commit_is_refused(self, store, session, namespace, clock):
        keys = namespace.keys(range(2))
        with session.reserve(keys, ttl_seconds=1) as reservation:
            clock.advance(1)
            with pytest.raises(ReservationExpired, match="deadline passed"):
                reservation.commit()
        assert session.match(keys).reason is ABSENT
        assert store.check().held_bytes == 0

    def test_leaving_the_block_too_late_gives_the_memory_back(
        self, store, session, namespace, clock
    ):
        with session.reserve(namespace.keys(range(2)), ttl_seconds=1):
            clock.advance(1)
            session.match([])
            assert store.check().held_bytes == 2 * BLOCK_BYTES
        assert store.check().held_bytes == 0

    def test_an_ended_reservation_takes_nothing_more(self, session, namespace):
        keys = namespace.keys(range(2))
        with session.reserve(keys) as reservation:
            pass
        reservation.abort()
        with pytest.raises(ReservationExpired, match="committed or aborted"):
            _ = reservation.views
        with pytest.raises(ReservationExpired, match="was aborted"):
            reservation.commit()
        with session.reserve(keys) as reservation:
            reservation.commit()
            reservation.commit()  # all of it is committed: nothing to do
            with pytest.raises(ReservationExpired):
                _ = reservation.views

    @pytest.mark.parametrize("count", [-1, 3])
    def test_a_count_that_no_batch_has_is_refused(self, session, namespace, count):
        reservation = session.reserve(namespace.keys(range(2)))
        with pytest.raises(InvalidRequest, match=rf"commit\({count}\) of a batch of 2"):
            reservation.commit(count)

    @pytest.mark.parametrize("count", [1.5, "1"])
    def test_a_count_that_is_no_integer_is_refused(self, session, namespace, count):
        reservation = session.reserve(namespace.keys(range(2)))
        with pytest.raises(InvalidRequest):
            reservation.commit(count)

    def test_memory_of_a_forgotten_reservation_comes_back(self, store, session, namespace, clock):
        session.reserve(namespace.keys(range(2)), ttl_seconds=1)
        gc.collect()
        clock.advance(10)
        session.match([])
        assert store.check().held_bytes == 0

    def test_a_put_of_nothing_leaves_nothing_behind(self, store, session):
        keys = filled(session, 1, 2)
        assert session.put(keys, [], start=2) == []
        assert store.check().reservations == 0


@pytest.mark.parametrize("seconds", [float("nan"), -1, "x", None, True, 0])
def test_renew_refuses_what_lease_refuses(session, seconds):
    with session.lease(filled(session, 1, 1)) as lease, pytest.raises(InvalidRequest):
        lease.renew(seconds)
