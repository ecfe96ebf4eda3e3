"""One store, many threads: the GIL is free during copies, and no thread reads a wrong byte."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import codec, native
from kvstore.types import Outcome
from tests.payload import (
    a_namespace,
    empty_buffers,
    filled,
    payload,
    payloads,
    writers,
)

OK = Outcome.OK


def gil_is_free_during(call):
    """True where another thread ran during `call`.

    No thread is made to give way meanwhile, so the other one runs only if `call` lets go of the
    GIL by itself: without that the answer is False for sure.
    """
    ran, gate, interval = [], threading.Lock(), sys.getswitchinterval()

    def other():
        gate.acquire()
        ran.append(True)

    thread = threading.Thread(target=other)
    sys.setswitchinterval(60)
    try:
        with gate:
            thread.start()  # it runs until it waits at the gate
        call()
        return bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join(60)


class Worker:
    """One thread's random calls; each read is checked to be some writer's very bytes."""

    SIZE = 16 * 1024
    ROUNDS = 1_000

    def __init__(self, session, number):
        self.session = session
        self.number = number
        self.rng = random.Random(number)

    def run(self):
        """How many blocks were read, all of them right."""
        sequences = [self.session.namespace.keys([name] * 8) for name in range(24)]
        hits = 0
        for round_ in range(self.ROUNDS):
            keys = self.rng.choice(sequences)[: self.rng.randrange(1, 9)]
            writer = self.number * self.ROUNDS + round_
            change = self.rng.choice([self.put, self.put, self.fill, self.delete])
            change(keys, writer)
            read = self.rng.choice([self.get, self.look])
            hits += read(self.rng.choice(sequences))
        return hits

    def put(self, keys, writer):
        self.session.put(keys, payloads(keys, writer, self.SIZE), wait_seconds=0.01)

    def fill(self, keys, writer):
        with self.session.reserve(keys, wait_seconds=0.01) as reservation:
            for view, key in zip(reservation.views, keys, strict=True):
                if view is not None:
                    view[:] = payload(key, writer, self.SIZE)
            reservation.commit(self.rng.randrange(len(keys) + 1))

    def delete(self, keys, _):
        if self.rng.random() < 0.2:
            self.session.delete(keys[-2:])

    def get(self, keys):
        buffers = empty_buffers(len(keys), self.SIZE)
        outcomes = self.session.get_into(keys, buffers)
        hits = outcomes.count(OK)
        assert outcomes[:hits] == [OK] * hits
        return len(writers(buffers[:hits], keys))

    def look(self, keys):
        lease = self.session.lease(keys, ttl_seconds=30)
        copies = [bytes(view) for view in lease.views]
        assert lease.valid()
        lease.release()
        return len(writers(copies, keys))


class TestThreads:
    def test_the_gil_is_free_while_blocks_are_copied_and_checked(self):
        source = np.ones(256 << 20, np.uint8)
        target = np.zeros_like(source)
        calls = {
            "copy": lambda: native.copy_batch([target], [source]),
            "checksum": lambda: codec.checksum(source),
        }
        for name, call in calls.items():
            # The system may be slow to wake the other thread: once is enough.
            assert any(gil_is_free_during(call) for _ in range(50)), name
        assert not any(gil_is_free_during(lambda: None) for _ in range(50))

    @pytest.mark.slow
    def test_no_thread_ever_reads_a_wrong_byte(self):
        """CO11, CO14, CC06: eight threads on the same few keys, three times the pool."""
        namespace = a_namespace(Worker.SIZE)
        store = kvstore.open(dram_capacity_bytes="1MiB")
        session = store.session(namespace)
        workers = [Worker(session, number) for number in range(8)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(8) as pool:
                hits = sum(pool.map(Worker.run, workers))
        finally:
            sys.setswitchinterval(interval)
        audit = store.check()
        assert (audit.leases, audit.reservations, audit.condemned_bytes) == (0, 0, 0)
        assert hits > 100
        assert store.scrub().corrupt == []
        counters: Any = store.stats()["counters"]
        stored, dropped = counters["stored_blocks"]["dram"], counters["dropped_blocks"]
        assert stored - sum(dropped.values()) == audit.ready_blocks
        assert counters["lost_blocks"].keys() <= {"expired"}
        session.close()
        store.close()

    def test_one_release_among_many_counts(self, store, session):
        """CO12."""
        keys = filled(session, 1, 2)
        for _ in range(20):
            leases = [session.lease(keys) for _ in range(4)]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda lease: lease.release(), leases * 4))
        assert store.check().leases == 0
        assert store.stats()["counters"]["ended_leases"] == {"released": 80}

    def test_losers_of_a_race_hear_that_it_is_there(self, store, namespace):
        """CC06: each key is stored once."""
        keys = namespace.keys([1] * 4)

        def put(writer):
            with store.session(namespace) as session:
                session.match(keys)
                return session.put(keys, payloads(keys, writer))

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(put, range(32)))
        assert sum(outcome is OK for each in outcomes for outcome in each) == 4
        rest = {outcome for each in outcomes for outcome in each}
        assert rest <= {OK, Outcome.PRESENT, Outcome.PENDING}
        assert store.stats()["counters"]["stored_blocks"] == {"dram": 4}
