"""The embedded store as a whole: closing, counting, scrubbing, and transfers that take too long."""

from __future__ import annotations

import json

import pytest

import kvstore
from kvstore.clock import FakeClock
from kvstore.errors import ReservationExpired, StoreClosed
from kvstore.messages import ScrubAnswer
from kvstore.residency import ENTRY_BYTES
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.payload import (
    BLOCK_BYTES,
    a_namespace,
    empty_buffers,
    filled,
    payload,
    payloads,
    writer_of,
    writers,
)

OK = Outcome.OK


class TestClose:
    def test_a_closed_store_refuses_every_call(self, store, session, namespace):
        keys = filled(session, 1, 2)
        store.close()
        store.close()
        for call in (store.check, store.stats, store.scrub, lambda: session.match(keys)):
            with pytest.raises(StoreClosed, match="the store is closed"):
                call()
        with pytest.raises(StoreClosed, match="the store is closed"):
            session.put(keys, payloads(keys))
        store.check = lambda: None  # for the fixture

    def test_a_lease_and_a_reservation_say_that_the_store_is_closed(self, namespace):
        store = kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock())
        session = store.session(namespace)
        keys = filled(session, 1, 2)
        lease, reservation = session.lease(keys), session.reserve(namespace.keys([8]))
        store.close()
        for call in (
            lambda: lease.views,
            lambda: lease.copy_into(empty_buffers(2)),
            lambda: reservation.views,
        ):
            with pytest.raises(StoreClosed):
                call()

    def test_a_session_closes_quietly_after_its_store(self, namespace):
        with kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock()) as store:
            session = store.session(namespace)
            held = session.lease(filled(session, 1, 2)), session.reserve(namespace.keys([8]))
        session.close()
        assert len(held) == 2

    def test_who_waits_hears_of_the_close(self, namespace):
        class ClosingClock(FakeClock):
            def wait(self, condition, timeout_seconds):
                condition.release()  # as a real wait does
                store.close()
                condition.acquire()

        store = kvstore.open(dram_capacity_bytes="1MiB", clock=ClosingClock())
        session = store.session(namespace)
        reservation = session.reserve(namespace.keys([1]))
        with pytest.raises(StoreClosed):
            session.match(namespace.keys([1]), wait_seconds=5)
        assert reservation.outcomes == [Outcome.GRANTED]


class TestStats:
    def test_they_are_plain_values(self, store, session):
        session.get_into(filled(session, 1, 2), empty_buffers(2))
        read = json.loads(json.dumps(store.stats()))
        assert read["tiers"]["dram"] == {
            "capacity_bytes": 1 << 20,
            "usable_bytes": 1 << 20,
            "free_bytes": (1 << 20) - 2 * BLOCK_BYTES,
            "largest_free_bytes": (1 << 20) - 2 * BLOCK_BYTES,
            "ready_bytes": 2 * BLOCK_BYTES,
            "reserved_bytes": 0,
            "condemned_bytes": 0,
            "held_bytes": 0,
            "index_bytes": 2 * ENTRY_BYTES,
        }
        assert read["counters"]["hit_blocks"] == {"dram": 2}
        assert read["checksum_cpu_seconds"] >= 0

    def test_a_lease_that_ended_is_not_reported(self, store, session, clock):
        """LI01: the number of leases returns to 0, also where nobody calls any more."""
        session.lease(filled(session, 1, 2), ttl_seconds=1)
        clock.advance(1)
        assert store.check().leases == 0


class TestScrub:
    def flip(self, store, session, keys, position):
        with session.lease(keys) as lease:
            place = lease._places[position]
        store._runner.view(place)[100] ^= 1

    def test_a_flipped_byte_is_found_dropped_and_healed_by_a_put(self, store, session):
        keys = filled(session, 1, 4)
        assert store.scrub() == ScrubAnswer(4, [])
        self.flip(store, session, keys, 2)
        checked, corrupt = store.scrub()
        assert (checked, len(corrupt)) == (4, 1)
        assert session.match(keys) == (2, 2, {"dram": 2}, Outcome.CORRUPT)
        assert store.stats()["counters"]["dropped_blocks"] == {"corrupt": 1}
        assert session.put(keys, payloads(keys, 7))[2] is OK
        buffers = empty_buffers(4)
        assert session.get_into(keys, buffers) == [OK] * 4
        assert writers(buffers, keys) == [1, 1, 7, 1]
        assert store.scrub() == ScrubAnswer(4, [])

    def test_a_reader_of_a_corrupt_block_keeps_its_memory(self, store, session):
        keys = filled(session, 1, 2)
        with session.lease(keys) as lease:
            self.flip(store, session, keys, 0)
            store.scrub()
            assert lease.valid()
            assert lease.blocks == 2
            assert store.check().condemned_bytes == BLOCK_BYTES
        assert store.check().condemned_bytes == 0

    def test_more_blocks_than_one_batch_are_all_read(self, clock):
        namespace = a_namespace(4096)
        with kvstore.open(dram_capacity_bytes="1MiB", clock=clock) as store:
            session = store.session(namespace)
            keys = namespace.keys([5] * 200)
            session.put(keys, payloads(keys, 1, 4096))
            assert store.scrub() == ScrubAnswer(200, [])

    def test_an_empty_store_has_nothing_to_scrub(self, store):
        assert store.scrub() == ScrubAnswer(0, [])

    def test_what_is_not_committed_is_not_read(self, store, session, namespace):
        with session.reserve(namespace.keys([1, 2])):
            assert store.scrub() == ScrubAnswer(0, [])


def test_a_put_whose_copy_took_too_long_is_expired(store, session, namespace, clock, monkeypatch):
    keys = namespace.keys([1, 2])
    write = store._runner.write

    def slow_write(batch):
        clock.advance(60)
        return write(batch)

    monkeypatch.setattr(store._runner, "write", slow_write)
    assert session.put(keys, payloads(keys)) == [Outcome.EXPIRED] * 2
    assert session.match(keys).reason is Outcome.ABSENT
    assert store.check().free_bytes == 1 << 20


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_get_says_so_where_its_blocks_left_while_they_were_copied(
    store, session, monkeypatch, lost
):
    """CO04: whoever comes back from a long copy never takes another block's bytes for its own."""
    keys = filled(session, 1, 3)
    read = store._runner.read

    def read_while_they_leave(batch):
        session.delete(keys[lost:])
        filled(session, 2, 13)  # in the same memory, before the copy
        return read(batch)

    monkeypatch.setattr(store._runner, "read", read_while_they_leave)
    outcomes = session.get_into(keys, empty_buffers(3))
    assert outcomes == [OK] * lost + [Outcome.EXPIRED] * (3 - lost)
    assert store.stats()["counters"]["lost_blocks"] == {"expired": 3 - lost}


class SteppedClock(FakeClock):
    """A waiting thread, seen from the others: they act while it sleeps, and may wake it."""

    def __init__(self):
        super().__init__()
        self.acts = []

    def wait(self, condition, timeout_seconds):
        wakes = []
        condition.notify_all = lambda: wakes.append(True)
        condition.release()
        if self.acts:
            self.acts.pop(0)()
        condition.acquire()
        if not wakes:
            self.advance(timeout_seconds)


def test_who_waits_for_room_is_served_when_a_later_and_shorter_lease_ends(namespace):
    """LI01: nobody else calls the store; the deadline itself has to wake the sleeper."""
    clock = SteppedClock()
    store = kvstore.open(dram_capacity_bytes="1MiB", clock=clock)
    session = store.session(namespace)
    keys = filled(session, 1, 8)
    long_lease = session.lease(keys, ttl_seconds=100)
    writer = session.reserve(namespace.keys([2] * 8), ttl_seconds=200)
    short_leases = []

    def change_leases():
        short_leases.append(session.lease(keys, ttl_seconds=1))
        long_lease.release()

    clock.acts = [change_leases]
    started = clock.now()
    new = namespace.keys([3])
    assert session.put(new, payloads(new), wait_seconds=150) == [OK]
    assert clock.now() - started == 1
    writer.abort()


def test_a_writer_that_fails_half_way_gives_everything_back(store, session, namespace):
    def leave():
        with session.reserve(namespace.keys([1, 2, 3])) as reservation:
            reservation.views[0][:] = payload(namespace.keys([1])[0], 1, BLOCK_BYTES)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert store.check().free_bytes == 1 << 20


def test_a_failed_write_makes_a_shorter_prefix(session, namespace, store, monkeypatch):
    keys = namespace.keys([1] * 3)

    def write(batch):
        return [OK, Outcome.TIMEOUT, OK]

    monkeypatch.setattr(store._runner, "write", write)
    outcomes = session.put(keys, payloads(keys))
    assert outcomes == [OK, Outcome.TIMEOUT, Outcome.EXPIRED]
    assert session.match(keys).blocks == 1
    assert store.check().reserved_bytes == 0


def test_all_keys_live_in_the_single_domain(store, session):
    filled(session, 1, 2)
    assert {domain for domain, _ in store._runner.resident_keys()} == {SINGLE_DOMAIN}


def test_a_commit_after_the_session_ended_is_refused(store, namespace):
    session = store.session(namespace)
    reservation = session.reserve(namespace.keys([1]))
    session.close()
    with pytest.raises(ReservationExpired):
        reservation.commit()
    assert writer_of(payload(b"k", 3, 64), b"k") == 3
