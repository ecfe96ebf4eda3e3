"""A session: what put, get, match and delete give, and how it ends."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore
from kvstore.clock import FakeClock
from kvstore.errors import (
    InvalidLayout,
    LeaseExpired,
    LeaseInUse,
    ReservationExpired,
    StoreClosed,
)
from kvstore.layout import Layout, Part
from kvstore.types import Outcome
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

OK, PRESENT, FULL, EXPIRED, ABSENT = (
    Outcome.OK,
    Outcome.PRESENT,
    Outcome.FULL,
    Outcome.EXPIRED,
    Outcome.ABSENT,
)


class TestPutAndGet:
    @pytest.mark.parametrize("length_bytes", [9, 4095, 4096, 4097, 777, 12_345, 100_003])
    def test_every_length_comes_back_exactly(self, store, length_bytes):
        """CO17."""
        namespace = a_namespace(length_bytes)
        with store.session(namespace) as session:
            keys = namespace.keys(range(3))
            assert session.put(keys, payloads(keys, 1, length_bytes)) == [OK] * 3
            buffers = empty_buffers(len(keys), length_bytes)
            assert session.get_into(keys, buffers) == [OK] * 3
            assert writers(buffers, keys) == [1, 1, 1]
            with session.lease(keys) as lease:
                assert [view.nbytes for view in lease.views] == [length_bytes] * 3

    def test_found_says_how_much_where_and_why_no_more(self, session, namespace):
        keys = namespace.keys(range(4))
        session.put(keys[:3], payloads(keys[:3]))
        assert session.match(keys) == (3, 3, {"dram": 3}, ABSENT)
        assert session.match(keys[:3]) == (3, 3, {"dram": 3}, None)
        assert session.match([]) == (0, 0, {}, None)

    def test_tokens_of_a_partial_block_count_as_they_are(self, store):
        namespace = a_namespace(4096, block_tokens=16)
        session = store.session(namespace)
        keys = namespace.keys(range(21), partial=True)
        assert [key.token_count for key in keys] == [16, 5]
        contents = [payload(keys[0], 1, 4096), payload(keys[1], 1, 5 * 256)]
        assert session.put(keys, contents) == [OK, OK]
        assert session.match(keys).tokens == 21
        buffers = [np.zeros(4096, np.uint8), np.zeros(5 * 256, np.uint8)]
        assert session.get_into(keys, buffers) == [OK, OK]
        assert writer_of(buffers[1], keys[1]) == 1

    def test_the_first_contents_stay_and_others_are_counted(self, store, session, namespace):
        """CO14."""
        keys = namespace.keys(range(2))
        assert session.put(keys, payloads(keys, writer=1)) == [OK, OK]
        assert session.put(keys, payloads(keys, writer=1)) == [PRESENT, PRESENT]
        assert store.stats()["counters"]["differing_puts"] == 0
        assert session.put(keys, payloads(keys, writer=2)) == [PRESENT, PRESENT]
        assert store.stats()["counters"]["differing_puts"] == 2
        buffers = empty_buffers(len(keys))
        session.get_into(keys, buffers)
        assert writers(buffers, keys) == [1, 1]

    def test_a_get_leaves_the_buffers_of_missing_blocks_as_they_were(self, session, namespace):
        """CO04."""
        keys = namespace.keys(range(3))
        session.put(keys[:1], payloads(keys[:1]))
        buffers = [np.full(BLOCK_BYTES, 9, np.uint8) for _ in keys]
        assert session.get_into(keys, buffers) == [OK, ABSENT, ABSENT]
        assert writer_of(buffers[0], keys[0]) == 1
        assert all((buffer == 9).all() for buffer in buffers[1:])

    def test_what_was_found_and_evicted_since_is_an_explicit_miss(self, store, session):
        """CO04."""
        keys = filled(session, 1, 4)
        assert session.match(keys).blocks == 4
        for name in range(2, 6):
            filled(session, name, 4)
        buffers = empty_buffers(len(keys))
        outcomes = session.get_into(keys, buffers)
        assert Outcome.EVICTED in outcomes
        assert set(outcomes) <= {OK, Outcome.EVICTED}
        for outcome, buffer, key in zip(outcomes, buffers, keys, strict=True):
            assert writer_of(buffer, key) == 1 if outcome is OK else not buffer.any()

    def test_many_kinds_of_buffers_are_accepted(self, session, namespace):
        torch = pytest.importorskip("torch")
        keys = namespace.keys(range(5))
        contents = payloads(keys)
        given = [
            contents[0].tobytes(),
            bytearray(contents[1]),
            memoryview(contents[2]),
            contents[3].reshape(16, -1),
            torch.from_numpy(contents[4]).view(torch.bfloat16).reshape(2, -1),
        ]
        assert session.put(keys, given) == [OK] * 5
        buffers = [
            bytearray(BLOCK_BYTES),
            memoryview(bytearray(BLOCK_BYTES)),
            np.zeros((4, BLOCK_BYTES // 16), np.float32),
            torch.zeros(BLOCK_BYTES // 4, dtype=torch.float32),
            torch.zeros(BLOCK_BYTES, dtype=torch.uint8, requires_grad=False),
        ]
        assert session.get_into(keys, buffers) == [OK] * 5
        for key, buffer in zip(keys, buffers, strict=True):
            memory = buffer.view(torch.uint8).numpy() if hasattr(buffer, "numpy") else buffer
            assert writer_of(bytes(memory), key) == 1

    def test_buffers_are_the_callers_again_after_the_call(self, session, namespace):
        keys = namespace.keys(range(2))
        contents = payloads(keys)
        session.put(keys, contents)
        for content in contents:
            content[:] = 0
        buffers = empty_buffers(len(keys))
        session.get_into(keys, buffers)
        assert writers(buffers, keys) == [1, 1]

    def test_a_put_of_a_tail_needs_the_prefix_and_start(self, session, namespace):
        keys = namespace.keys(range(4))
        session.put(keys[:2], payloads(keys[:2]))
        assert session.put(keys, payloads(keys[2:]), start=2) == [OK, OK]
        assert session.match(keys).blocks == 4

    def test_a_full_store_refuses_and_works_again(self, session, namespace, clock):
        """CA03."""
        lease = session.lease(filled(session, 1, 8))
        writer = session.reserve(namespace.keys([2] * 8))
        started = clock.now()
        keys = namespace.keys([9])
        assert session.put(keys, payloads(keys), wait_seconds=2) == [FULL]
        assert clock.now() == started + 2
        lease.release()
        assert session.put(keys, payloads(keys)) == [OK]
        writer.abort()

    def test_five_times_its_size_stays_in_the_store(self, store, session):
        """CA01."""
        for name in range(20):
            filled(session, name, 4)
            assert store.check().ready_bytes <= 1024 * 1024

    def test_deleted_blocks_are_gone_and_can_be_stored_anew(self, session, namespace):
        keys = namespace.keys(range(3))
        session.put(keys, payloads(keys, writer=1))
        assert session.delete(keys[1:]) == [OK, OK]
        assert session.delete(keys[1:]) == [ABSENT, ABSENT]
        assert session.put(keys, payloads(keys, writer=2)) == [PRESENT, OK, OK]
        buffers = empty_buffers(len(keys))
        session.get_into(keys, buffers)
        assert writers(buffers, keys) == [1, 2, 2]

    def test_namespaces_do_not_see_each_other(self, store, session, namespace):
        other = a_namespace(BLOCK_BYTES, model="other")
        mine, theirs = namespace.keys(range(2)), other.keys(range(2))
        session.put(mine, payloads(mine))
        with store.session(other) as second:
            assert second.match(theirs).blocks == 0
            assert second.delete(theirs) == [ABSENT, ABSENT]
            second.put(theirs, payloads(theirs))
        buffers = empty_buffers(len(mine))
        session.get_into(mine, buffers)
        assert writer_of(buffers[0], mine[0]) == 1


def test_a_part_of_a_layout_is_as_long_as_it_is():
    layout = Layout.gqa(layers=4, kv_heads=2, head_dim=64, dtype="int8")
    namespace = kvstore.Namespace(model="m", fingerprint="f", layout=layout, block_tokens=16)
    keys = namespace.keys(range(16))
    with kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock()) as store:
        part = Part(first_layer=0, end_layer=2)
        try:
            session = store.session(namespace, part=part)
        except InvalidLayout:
            return  # said at once: there are no parts yet
        half = layout.bytes_per_block(16) // 2
        assert session.put(keys, [payload(keys[0], 1, half)]) == [OK]


class TestClose:
    def test_a_closed_session_refuses_every_call(self, session, namespace):
        keys = namespace.keys(range(2))
        session.close()
        session.close()
        for call in (session.match, session.lease, session.reserve, session.delete):
            with pytest.raises(StoreClosed, match="session is closed"):
                call(keys)
        with pytest.raises(StoreClosed, match="session is closed"):
            session.put(keys, payloads(keys))
        with pytest.raises(StoreClosed, match="session is closed"):
            session.get_into(keys, empty_buffers(len(keys)))

    def test_it_ends_leases_and_reservations(self, store, namespace):
        with store.session(namespace) as session:
            keys = filled(session, 1, 2)
            lease = session.lease(keys)
            reservation = session.reserve(namespace.keys([5, 6]))
        audit = store.check()
        assert (audit.leases, audit.reservations, audit.reserved_bytes) == (0, 0, 0)
        with pytest.raises(LeaseExpired):
            _ = lease.views
        with pytest.raises(ReservationExpired):
            reservation.commit()

    def test_a_live_view_is_told_and_everything_else_is_ended(self, store, namespace, clock):
        session = store.session(namespace)
        keys = filled(session, 1, 2)
        held, other = session.lease(keys), session.lease(keys)
        array = np.frombuffer(held.views[0], np.uint8)
        with pytest.raises(LeaseInUse, match="1 views of 2 leased blocks"):
            session.close()
        assert store.check().leases == 1
        with pytest.raises(LeaseExpired):
            _ = other.views
        assert writer_of(array, keys[0]) == 1
        del array
        held.release()

    def test_leaving_by_an_error_passes_that_error_on(self, store, namespace):
        kept = []

        def leave():
            with store.session(namespace) as session:
                lease = session.lease(filled(session, 1, 1))
                kept.extend([lease, np.frombuffer(lease.views[0], np.uint8)])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            leave()

    def test_sessions_of_one_store_share_blocks_and_not_leases(self, store, namespace):
        first, second = store.session(namespace), store.session(namespace)
        keys = filled(first, 1, 2)
        lease = second.lease(keys)
        first.close()
        assert lease.valid()
        assert second.match(keys).blocks == 2
        second.close()
