"""Ctrl-C at any point of a call leaves nothing granted, protected or waiting."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from kvstore import codec
from kvstore.clock import FakeClock
from kvstore.types import Outcome
from tests.payload import (
    filled,
    payloads,
)

OK = Outcome.OK


class InterruptingClock(FakeClock):
    """Waiting is where a user presses Ctrl-C; `before` happens first."""

    def __init__(self):
        super().__init__()
        self.before = lambda: None

    def wait(self, condition, timeout_seconds):
        condition.release()  # as a real wait does
        self.before()
        condition.acquire()
        raise KeyboardInterrupt


class InterruptedLock:
    """A lock whose n-th acquisition is interrupted, as a blocked one is by Ctrl-C."""

    def __init__(self, lock, interrupted_at):
        self._lock = lock
        self._left = interrupted_at

    def __enter__(self):
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._lock, name)


class InterruptedResults(deque[Any]):
    """A queue whose first append is interrupted when it is done: Python looks there for signals."""

    def append(self, item):
        super().append(item)
        if len(self) == 1:
            raise KeyboardInterrupt


class TestInterrupts:
    @pytest.fixture
    def clock(self):
        return InterruptingClock()

    def test_an_interrupted_wait_leaves_nothing_behind(self, store, session, namespace):
        """LI02."""
        writer = session.reserve(namespace.keys([1] * 16))
        with pytest.raises(KeyboardInterrupt):
            session.put(namespace.keys([3]), payloads(namespace.keys([3])), wait_seconds=5)
        writer.abort()
        assert store.check().reservations == 0
        assert store._runner._core.next_deadline() is None
        assert store._runner._answers == {}
        filled(session, 3, 4)

    def test_an_interrupted_wait_for_a_block_leaves_nothing_behind(self, store, session, namespace):
        """LI02."""
        keys = namespace.keys([1, 2])
        reservation = session.reserve(keys)
        for call in (session.match, session.lease):
            with pytest.raises(KeyboardInterrupt):
                call(keys, wait_seconds=5)
        reservation.commit()
        assert store.check().leases == 0
        assert store._runner._answers == {}

    def test_room_that_was_granted_to_an_interrupted_writer_comes_back(
        self, store, session, namespace, clock
    ):
        """LI02."""
        clock.before = session.reserve(namespace.keys([1] * 16)).abort
        with pytest.raises(KeyboardInterrupt):
            session.reserve(namespace.keys([3]), wait_seconds=5)
        clock.advance(1_000)
        session.match([])
        audit = store.check()
        assert (audit.reservations, audit.reserved_bytes, audit.held_bytes) == (0, 0, 0)

    def test_a_lease_that_was_granted_to_an_interrupted_reader_ends(
        self, store, session, namespace, clock
    ):
        """LI02: at its deadline at the latest."""
        keys = namespace.keys([1, 2])
        reservation = session.reserve(keys)
        clock.before = reservation.commit
        with pytest.raises(KeyboardInterrupt):
            session.lease(keys, ttl_seconds=10, wait_seconds=5)
        clock.advance(10)
        session.match([])
        assert store.check().leases == 0
        assert store._runner._answers == {}

    @pytest.mark.parametrize("interrupted_at", [1, 2, 3])
    def test_an_interrupted_checksum_leaves_blocks_that_can_be_evicted(
        self, store, session, namespace, monkeypatch, interrupted_at
    ):
        keys, calls = namespace.keys([1] * 3), iter(range(1, 100))
        real = codec.checksum

        def checksum(memory):
            if next(calls) == interrupted_at:
                raise KeyboardInterrupt
            return real(memory)

        monkeypatch.setattr(codec, "checksum", checksum)
        with pytest.raises(KeyboardInterrupt):
            session.put(keys, payloads(keys))
        store.check()
        assert session.match(keys).blocks == 3, "they were visible before the interrupt"
        assert store._runner._answers == {}
        for name in range(2, 7):
            filled(session, name, 4)
        assert session.match(keys).reason is Outcome.EVICTED

    @pytest.mark.parametrize("interrupted_at", [1, 2])
    def test_a_commit_interrupted_at_the_lock_leaves_blocks_that_can_be_evicted(
        self, store, session, namespace, interrupted_at
    ):
        runner, keys = store._runner, namespace.keys([1] * 3)
        reservation = session.reserve(keys)
        runner._lock = InterruptedLock(runner._lock, interrupted_at)
        with pytest.raises(KeyboardInterrupt):
            reservation.commit()
        reservation.abort()
        for name in range(2, 7):
            filled(session, name, 4)
        assert session.match(keys).blocks == 0

    def test_a_checksum_interrupted_after_its_report_is_reported_once(
        self, store, session, namespace
    ):
        """LI02: a completion that comes twice is ignored."""
        reservation = session.reserve(namespace.keys([1] * 3))
        store._runner._results = InterruptedResults()
        with pytest.raises(KeyboardInterrupt):
            reservation.commit()
        assert session.match(namespace.keys([1] * 3)).blocks == 3
        store.check()
