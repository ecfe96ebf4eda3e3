"""The embedded runner under stress: closing, waiting, interrupts beside other threads."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import kvstore
from kvstore.clock import FakeClock, SystemClock
from kvstore.errors import KVStoreError, StoreBroken, StoreClosed
from kvstore.types import Outcome
from tests.payload import BLOCK_BYTES, a_namespace, empty_buffers, filled, payloads, writers

OK = Outcome.OK


class TestCloseBesideAPut:
    def test_memory_that_a_put_is_writing_to_is_not_given_to_another(self, monkeypatch):
        """A session that is closed in the middle of a put of another thread."""
        namespace = a_namespace(BLOCK_BYTES)
        with kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock()) as store:
            mine, other = store.session(namespace), store.session(namespace)
            keys = namespace.keys([1])
            write = store._runner.write
            others = namespace.keys([2] * 16)

            def write_while_it_closes(batch):
                monkeypatch.setattr(store._runner, "write", write)
                mine.close()
                stored = other.put(others, payloads(others, 2))
                assert stored == [OK] * 15 + [Outcome.FULL], "all memory but what is written to"
                return write(batch)

            monkeypatch.setattr(store._runner, "write", write_while_it_closes)
            assert mine.put(keys, payloads(keys, 1)) == [OK]
            buffers = empty_buffers(15)
            assert other.get_into(others[:15], buffers) == [OK] * 15
            assert writers(buffers, others[:15]) == [2] * 15
            store.check()

    def test_views_that_live_keep_their_memory_from_others(self):
        namespace = a_namespace(BLOCK_BYTES)
        with kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock()) as store:
            session = store.session(namespace)
            reservation = session.reserve(namespace.keys([1]))
            view = reservation.views[0]
            session.close()
            store.stats()
            assert store.check().reserved_bytes == BLOCK_BYTES
            assert view is not None
            view[:8] = bytes(8)
            del view
            store.stats()
            assert store.check().reserved_bytes == 0


class CountingClock(SystemClock):
    def __init__(self):
        self.waits = 0

    def wait(self, condition, timeout_seconds):
        self.waits += 1
        condition.wait(timeout_seconds)


def test_threads_that_wait_do_not_wake_each_other():
    namespace, clock = a_namespace(BLOCK_BYTES), CountingClock()
    with kvstore.open(dram_capacity_bytes="1MiB", clock=clock) as store:
        session = store.session(namespace)
        reservation = session.reserve(namespace.keys([1]))
        with ThreadPoolExecutor(6) as pool:
            waiting = [
                pool.submit(session.match, namespace.keys([1]), wait_seconds=0.4) for _ in range(6)
            ]
            found = [each.result() for each in waiting]
        assert {each.reason for each in found} == {Outcome.PENDING}
        # Each waits once, and once more where it woke up a little before its time.
        assert clock.waits <= 6 * 8
        reservation.abort()


class TestInterruptedSteps:
    def test_a_store_whose_step_was_interrupted_refuses_all_further_calls(self, monkeypatch):
        namespace = a_namespace(BLOCK_BYTES)
        store = kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock())
        session = store.session(namespace)
        keys = filled(session, 1, 2)

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(store._runner._core._blocks, "hit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.get_into(keys, empty_buffers(2))
        for call in (lambda: session.match(keys), store.check, store.stats):
            with pytest.raises(StoreBroken, match="open another one"):
                call()
        store.close()
        with pytest.raises(StoreClosed):
            session.match(keys)

    # Raised in a destructor or a callback of the collector, it is told there and goes no further.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.slow
    def test_signals_at_any_time_break_a_store_openly_or_not_at_all(self):
        """Ctrl-C anywhere: every later call works on sound state, or says that it cannot."""

        class InterruptError(Exception):
            pass

        def interrupt(*_):
            raise InterruptError

        namespace = a_namespace(BLOCK_BYTES)
        before = signal.signal(signal.SIGALRM, interrupt)
        rng = np.random.default_rng(5)
        try:
            for _ in range(60):
                self.run_until_interrupted(namespace, InterruptError, float(rng.random()))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def run_until_interrupted(self, namespace, interrupt, fraction):
        store = kvstore.open(dram_capacity_bytes="1MiB")
        session = store.session(namespace)
        sequences = [namespace.keys([name] * 3) for name in range(9)]
        contents = [payloads(keys) for keys in sequences]
        signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.01 * fraction)
        try:
            for turn in range(10_000):
                keys, blocks = sequences[turn % 9], contents[turn % 9]
                session.put(keys, blocks, wait_seconds=0)
                session.lease(keys).release()
                session.delete(keys[-1:])
        except interrupt:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        with suppress(StoreBroken):  # openly; anything else fails
            store.check()
        store.close()


def test_a_waiting_thread_hears_of_a_break_by_another(monkeypatch):
    namespace = a_namespace(BLOCK_BYTES)
    store = kvstore.open(dram_capacity_bytes="1MiB")
    session = store.session(namespace)
    session_keys = namespace.keys([1])
    reservation = session.reserve(session_keys)
    failed: list[BaseException] = []

    def wait():
        try:
            session.match(session_keys, wait_seconds=30)
        except KVStoreError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not store._runner._sleepers:
        pass

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(store._runner._core._blocks.index, "find_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.delete(session_keys)
    thread.join(20)
    assert [type(error) for error in failed] == [StoreBroken]
    with pytest.raises(StoreBroken):
        reservation.abort()
    store.close()
