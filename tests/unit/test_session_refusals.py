"""What a session refuses: each error names what was wrong, and nothing was changed."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore
from kvstore.clock import FakeClock
from kvstore.errors import (
    InvalidBuffer,
    InvalidKeys,
    InvalidLayout,
    InvalidRequest,
)
from kvstore.keys import Source
from kvstore.layout import Part
from kvstore.types import Outcome
from tests.payload import (
    BLOCK_BYTES,
    a_namespace,
    filled,
    payloads,
)

OK, PRESENT, FULL, EXPIRED, ABSENT = (
    Outcome.OK,
    Outcome.PRESENT,
    Outcome.FULL,
    Outcome.EXPIRED,
    Outcome.ABSENT,
)


class TestRefusals:
    """Each names what was wrong; none changes anything."""

    @pytest.fixture(autouse=True)
    def _unchanged(self, store, session):
        filled(session, 77, 2)
        before = store.check(), store.stats()["counters"]
        yield
        assert (store.check(), store.stats()["counters"]) == before

    def test_keys_of_another_namespace(self, session):
        keys = a_namespace(BLOCK_BYTES, model="other").keys(range(2))
        with pytest.raises(InvalidKeys, match=r"keys\[0\] is of namespace"):
            session.match(keys)
        with pytest.raises(InvalidKeys, match=r"keys\[0\]"):
            session.delete(keys)

    def test_keys_that_do_not_follow_each_other(self, session, namespace):
        keys = namespace.keys(range(4))
        for wrong in (keys[::-1], [keys[0], keys[2]], [keys[0], keys[0]]):
            for call in (session.match, session.lease, session.reserve):
                with pytest.raises(InvalidKeys, match=r"keys\[1\] does not follow keys\[0\]"):
                    call(wrong)

    def test_a_single_thing_that_is_no_key(self, session):
        with pytest.raises(InvalidKeys, match=r"keys\[0\] = b'x': expected a BlockKey"):
            session.match([b"x"])

    @pytest.mark.parametrize("keys", [[b"x", b"y"], None, 3, [None, None], "ab"])
    def test_things_that_are_no_keys(self, session, keys):
        for call in (session.match, session.lease, session.reserve, session.delete):
            with pytest.raises(InvalidRequest):
                call(keys)

    def test_a_put_of_things_that_are_no_keys(self, session):
        with pytest.raises(InvalidKeys):
            session.put([b"x"], [bytes(BLOCK_BYTES)])

    def test_one_key_twice(self, store, namespace):
        hash_ = b"h" * 32
        keys = namespace.keys_of_hashes([hash_, hash_], Source("engine"))
        with kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock()) as other:
            with pytest.raises(InvalidKeys):
                other.session(namespace).put(keys, payloads(keys))
            other.check()

    @pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", None, True])
    def test_times(self, session, namespace, seconds):
        keys = namespace.keys(range(2))
        with pytest.raises(InvalidRequest, match=r"wait_seconds is .*: allowed are 0 to 3600"):
            session.match(keys, wait_seconds=seconds)
        with pytest.raises(InvalidRequest, match="ttl_seconds"):
            session.lease(keys, ttl_seconds=seconds)
        with pytest.raises(InvalidRequest, match="ttl_seconds is 0: it must be more than 0"):
            session.reserve(keys, ttl_seconds=0)

    def test_a_wait_of_more_than_an_hour(self, session, namespace):
        with pytest.raises(InvalidRequest, match="wait_seconds is 3601: allowed are 0 to 3600"):
            session.match(namespace.keys(range(2)), wait_seconds=3601)

    @pytest.mark.parametrize("start", [-1, 3, "0", 1.0, None, True])
    def test_start_of_a_reservation(self, session, namespace, start):
        with pytest.raises(InvalidRequest, match=r"start is .*: allowed are 0 to 2"):
            session.reserve(namespace.keys(range(2)), start=start)

    @pytest.mark.parametrize("start", [-1, "0", 1.0, None])
    def test_start_of_a_put(self, session, namespace, start):
        keys = namespace.keys(range(2))
        for count in (1, 2, 3):
            with pytest.raises(InvalidRequest):
                session.put(keys, [bytes(BLOCK_BYTES)] * count, start=start)

    def test_buffers(self, session, namespace):
        keys = namespace.keys(range(2))
        good = bytes(BLOCK_BYTES)
        for blocks, message in (
            ([good], "1 blocks for keys 0 to 2"),
            (
                [good, good[:-1]],
                rf"blocks\[1\] has {BLOCK_BYTES - 1} bytes, its block {BLOCK_BYTES}",
            ),
            ([good, None], "NoneType is no buffer"),
            ([good, np.zeros((BLOCK_BYTES, 2), np.uint8)[:, 0]], "not C-contiguous"),
        ):
            with pytest.raises(InvalidBuffer, match=message):
                session.put(keys, blocks)

    def test_targets(self, session, namespace):
        keys = namespace.keys([77, 77])
        with pytest.raises(InvalidBuffer, match="1 buffers for 2 keys"):
            session.get_into(keys, [bytearray(BLOCK_BYTES)])
        with session.lease(keys) as lease:
            kept = bytearray(BLOCK_BYTES)
            for buffer, message in (
                (bytes(BLOCK_BYTES), "is read-only"),
                (
                    bytearray(BLOCK_BYTES + 1),
                    r"buffers\[1\] has 65537 bytes, its block 65536",
                ),
                ([], "list is no buffer"),
            ):
                with pytest.raises(InvalidBuffer, match=message):
                    lease.copy_into([kept, buffer])
            assert not any(kept), "refused before the first copy"
        # The lease above is an honest lookup: put its counts back for the fixture's comparison.
        counters = session._link._core.counters._values
        for name in ("lookup_tokens", "hit_tokens", "hit_blocks", "ended_leases"):
            for key in [key for key in counters if key[0] == name]:
                del counters[key]

    @pytest.mark.parametrize("namespace_", [None, "llama", object()])
    def test_sessions_of_no_namespace(self, store, namespace_):
        with pytest.raises(InvalidRequest, match=r"needs a kvstore\.Namespace, not"):
            store.session(namespace_)

    def test_parts_that_the_layout_does_not_have(self, store, namespace):
        with pytest.raises(InvalidLayout, match="end_layer=9"):
            store.session(namespace, part=Part(first_layer=0, end_layer=9))
