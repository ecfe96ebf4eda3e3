"""The real embedded store against a model, step by step, under a clock that the test moves.

Never a wrong byte; a leased block stays what it was until its deadline, under any pressure; a match
is a prefix of what was committed and not deleted; nothing leaves while there is room; the recount
is clean after every step.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvstore
from kvstore.clock import FakeClock
from kvstore.errors import ReservationExpired
from kvstore.slots import slot_size_bytes
from kvstore.storage_keys import KeyMaker
from kvstore.types import Outcome
from tests.model.store_model import MARGIN_SECONDS, LeaseRecord, ReservationRecord, StoreModel
from tests.payload import a_namespace, payload, writer_of

CAPACITY_BYTES = 1 << 20
BLOCK_TOKENS = 4
#: Blocks of three sizes, two of them no whole number of slots, in namespaces of their own.
NAMESPACES = [
    a_namespace(size, block_tokens=BLOCK_TOKENS, model=str(size))
    for size in (40_000, 65_536, 100_004)
]
#: Six blocks and a bit; all share the first two blocks, the last two the first four.
PROMPTS = [[1] * 8 + [2] * 17, [1] * 8 + [3] * 17, [1] * 8 + [3] * 8 + [4] * 9]
HOLDERS_MAX = 5

namespaces = st.integers(0, len(NAMESPACES) - 1)
prompts = st.integers(0, len(PROMPTS) - 1)
tokens = st.integers(0, len(PROMPTS[0]))
picks = st.integers(0, 99)
ttls = st.sampled_from([0.5, 5.0, 30.0])
waits = st.sampled_from([0.0, 0.0, 0.1, 10.0])


def slot_size_of(key: Any) -> int:
    layouts = {namespace.digest: namespace.layout for namespace in NAMESPACES}
    return slot_size_bytes(layouts[key.namespace_digest].bytes_per_block(key.token_count))


class StoreMachine(RuleBasedStateMachine):
    """Rules are calls of the SDK; invariants hold after each."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store = kvstore.open(dram_capacity_bytes=CAPACITY_BYTES, clock=self.clock)
        self.sessions = [self.store.session(namespace) for namespace in NAMESPACES]
        self.model = StoreModel()
        self.writers = 0
        self.evictions = 0  # counted by the store so far
        self.may_evict = False  # whether the rule that ran had to make room
        self.names: dict[bytes, Any] = {}  # storage key -> BlockKey

    # -- writing -----------------------------------------------------------------------------

    @rule(n=namespaces, prompt=prompts, tokens=tokens, skip=st.integers(0, 2), wait=waits)
    def put(self, n: int, prompt: int, tokens: int, skip: int, wait: float) -> None:
        keys, start, writer = self.batch(n, prompt, tokens, skip)
        blocks = [payload(key, writer, self.length_of(n, key)) for key in keys[start:]]
        outcomes = self.sessions[n].put(keys, blocks, start=start, wait_seconds=wait)
        self.model.settle(self.clock.now())
        self.model.expect_batch(keys[start:], outcomes, Outcome.OK)
        stored = [k for k, o in zip(keys[start:], outcomes, strict=True) if o is Outcome.OK]
        self.lose_evicted(stored)
        self.model.publish(stored, writer)

    @precondition(lambda self: len(self.model.reservations) < HOLDERS_MAX)
    @rule(n=namespaces, prompt=prompts, tokens=tokens, skip=st.integers(0, 2), ttl=ttls, wait=waits)
    def reserve(self, n: int, prompt: int, tokens: int, skip: int, ttl: float, wait: float) -> None:
        keys, start, writer = self.batch(n, prompt, tokens, skip)
        reservation = self.sessions[n].reserve(
            keys, start=start, ttl_seconds=ttl, wait_seconds=wait
        )
        self.model.settle(self.clock.now())
        batch = keys[start:]
        self.model.expect_batch(batch, reservation.outcomes, Outcome.GRANTED)
        record = ReservationRecord(reservation, batch, writer)
        if not batch:
            return  # nothing to fill, commit or abort
        for key, view in zip(batch, reservation.views, strict=True):
            if view is not None:
                view[:] = payload(key, writer, self.length_of(n, key)).data
                self.model.pending[key] = record
        self.model.reservations.append(record)

    @precondition(lambda self: self.model.reservations)
    @rule(pick=picks, count=st.integers(0, 7))
    def commit(self, pick: int, count: int) -> None:
        record = self.model.reservations[pick % len(self.model.reservations)]
        count = min(count, len(record.keys))
        is_late = record.deadline <= self.clock.now()
        if is_late and count > record.committed:
            with pytest.raises(ReservationExpired):
                record.reservation.commit(count)
            self.end(record)
            return
        record.reservation.commit(count)
        if count > record.committed:
            self.model.publish(record.granted(record.committed, count), record.writer)
            record.committed = count
            if count == len(record.keys):
                self.end(record)

    @precondition(lambda self: self.model.reservations)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        record = self.model.reservations[pick % len(self.model.reservations)]
        record.reservation.abort()
        record.reservation.abort()
        self.end(record)

    @rule(n=namespaces, prompt=prompts, first=st.integers(0, 6), count=st.integers(0, 7))
    def delete(self, n: int, prompt: int, first: int, count: int) -> None:
        keys = self.keys(n, prompt, len(PROMPTS[prompt]))[first : first + count]
        assert self.sessions[n].delete(keys) == self.model.delete(keys)

    # -- reading -----------------------------------------------------------------------------

    @rule(n=namespaces, prompt=prompts, tokens=tokens, wait=waits)
    def match(self, n: int, prompt: int, tokens: int, wait: float) -> None:
        keys = self.keys(n, prompt, tokens)
        found = self.sessions[n].match(keys, wait_seconds=wait)
        self.model.settle(self.clock.now())
        assert (found.blocks, found.reason) == self.model.prefix(keys)
        assert found.tokens == sum(key.token_count for key in keys[: found.blocks])

    @rule(n=namespaces, prompt=prompts, tokens=tokens, wait=waits)
    def get_into(self, n: int, prompt: int, tokens: int, wait: float) -> None:
        keys = self.keys(n, prompt, tokens)
        buffers = [np.full(self.length_of(n, key), 0xEE, np.uint8) for key in keys]
        outcomes = self.sessions[n].get_into(keys, buffers, wait_seconds=wait)
        self.model.settle(self.clock.now())
        blocks, reason = self.model.prefix(keys)
        assert outcomes == [Outcome.OK] * blocks + [reason] * (len(keys) - blocks)
        for key, buffer in zip(keys[:blocks], buffers, strict=False):
            assert writer_of(buffer, key) == self.model.stored[key]
        assert all((buffer == 0xEE).all() for buffer in buffers[blocks:])

    @precondition(lambda self: len(self.model.leases) < HOLDERS_MAX)
    @rule(n=namespaces, prompt=prompts, tokens=tokens, ttl=ttls, wait=waits)
    def lease(self, n: int, prompt: int, tokens: int, ttl: float, wait: float) -> None:
        keys = self.keys(n, prompt, tokens)
        lease = self.sessions[n].lease(keys, ttl_seconds=ttl, wait_seconds=wait)
        now = self.clock.now()
        self.model.settle(now)
        assert (lease.blocks, lease.reason) == self.leasable(keys)
        held = {key: self.model.stored[key] for key in keys[: lease.blocks]}
        if held:
            self.model.leases.append(LeaseRecord(lease, held, now, ttl))

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks, ttl=ttls)
    def renew(self, pick: int, ttl: float) -> None:
        record = self.model.leases[pick % len(self.model.leases)]
        now = self.clock.now()
        is_alive = record.deadline > now
        assert record.lease.renew(ttl) is is_alive
        if is_alive:
            record.deadline = max(record.deadline, now + ttl)

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks)
    def copy_into(self, pick: int) -> None:
        record = self.model.leases[pick % len(self.model.leases)]
        buffers = [np.zeros(view.nbytes, np.uint8) for view in record.views]
        is_valid = record.deadline - MARGIN_SECONDS > self.clock.now()
        expected = Outcome.OK if is_valid else Outcome.EXPIRED
        assert record.lease.copy_into(buffers) == [expected] * len(buffers)
        for (key, writer), buffer in zip(record.held.items(), buffers, strict=True):
            assert not is_valid or writer_of(buffer, key) == writer

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks, times=st.integers(1, 2))
    def release(self, pick: int, times: int) -> None:
        record = self.model.leases.pop(pick % len(self.model.leases))
        record.views.clear()
        for _ in range(times):
            record.lease.release()

    # -- the rest ----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 4.995, 29.0, 61.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.settle(self.clock.now())

    @rule()
    def scrub(self) -> None:
        assert self.store.scrub() == (len(self.model.stored), [])

    @rule(n=namespaces)
    def close_session(self, n: int) -> None:
        session, self.sessions[n] = self.sessions[n], self.store.session(NAMESPACES[n])
        digest = NAMESPACES[n].digest
        ended = [r for r in self.model.leases if digest in {k.namespace_digest for k in r.held}]
        for record in ended:
            record.views.clear()
            self.model.leases.remove(record)
        session.close()
        for writer in [r for r in self.model.reservations if r.keys[0].namespace_digest == digest]:
            self.end(writer)

    # -- what holds after each step ----------------------------------------------------------

    @invariant()
    def nothing_is_lost_but_what_had_to_make_room(self) -> None:
        self.lose_evicted([])
        self.may_evict = False

    @invariant()
    def the_recount_is_clean(self) -> None:
        audit = self.store.check()
        parts = audit.free_bytes + audit.ready_bytes + audit.reserved_bytes + audit.held_bytes
        assert parts + audit.condemned_bytes == audit.capacity_bytes
        assert audit.ready_blocks == len(self.model.stored)
        now = self.clock.now()
        assert audit.leases == sum(record.deadline > now for record in self.model.leases)
        assert audit.reservations == len(self.model.reservations)

    @invariant()
    def leased_blocks_are_what_they_were(self) -> None:
        now = self.clock.now()
        for record in self.model.leases:
            assert record.lease.valid() is (record.deadline - MARGIN_SECONDS > now)
            if record.deadline > now:
                for view, (key, writer) in zip(record.views, record.held.items(), strict=True):
                    assert writer_of(view, key) == writer

    def teardown(self) -> None:
        """All holders end, and all memory is free or ready."""
        for record in self.model.leases:
            record.views.clear()
        self.model.leases.clear()
        gc.collect()
        for session in self.sessions:
            session.close()
        self.clock.advance(4_000)
        with self.store.session(NAMESPACES[0]) as session:
            session.match([])
        audit = self.store.check()
        assert audit.leases == 0
        assert audit.free_bytes + audit.ready_bytes == audit.capacity_bytes
        self.store.close()

    # -- parts of rules ----------------------------------------------------------------------

    def keys(self, n: int, prompt: int, tokens: int) -> list[Any]:
        """Keys of the first `tokens` of a prompt, its final partial block included."""
        keys = NAMESPACES[n].keys(PROMPTS[prompt][:tokens], partial=True)
        maker = KeyMaker(NAMESPACES[n], NAMESPACES[n].layout.parts[0])
        self.names.update(zip(maker.keys(keys, is_prefix=True), keys, strict=True))
        return keys

    def batch(self, n: int, prompt: int, tokens: int, skip: int) -> tuple[list[Any], int, int]:
        """Keys, a start in them and a writer; notes whether room must be made."""
        keys = self.keys(n, prompt, tokens)
        start = min(skip, len(keys))
        self.writers += 1
        missing = sum(
            slot_size_bytes(self.length_of(n, key))
            for key in keys[start:]
            if key not in self.model.stored and key not in self.model.pending
        )
        tier: Any = self.store.stats()["tiers"]
        # A reservation whose time is up is no longer pending: leave room for its keys, too.
        pending = [key for key in keys[start:] if key in self.model.pending]
        room = tier["dram"]["largest_free_bytes"]
        self.may_evict = bool(pending) or missing > room
        return keys, start, self.writers

    def leasable(self, keys: list[Any]) -> tuple[int, Outcome | None]:
        """What a lease must give now: at most half of the tier is leased at a time."""
        return self.model.leasable(keys, self.clock.now(), CAPACITY_BYTES // 2, slot_size_of)

    def length_of(self, n: int, key: Any) -> int:
        return NAMESPACES[n].layout.bytes_per_block(key.token_count)

    def end(self, record: ReservationRecord) -> None:
        self.model.forget(record)
        self.model.reservations.remove(record)

    def lose_evicted(self, new: list[Any]) -> None:
        """Take over what the store evicted; it must be as many as it says."""
        resident = {self.names[key] for _, key in self.store._runner.resident_keys()}
        assert resident <= self.model.stored.keys() | set(new), "found, and never committed"
        lost = self.model.stored.keys() - resident
        counters: Any = self.store.stats()["counters"]
        evictions = counters["dropped_blocks"].get("evicted", 0)
        assert len(lost) == evictions - self.evictions
        assert not lost or self.may_evict, "evicted while there was room"
        self.evictions = evictions
        self.model.evict(set(lost), self.clock.now())


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(stateful_step_count=50)
TestStoreModel.pytestmark = [  # type: ignore[attr-defined]
    pytest.mark.slow,
    pytest.mark.timeout(1_800),  # the nightly profile, and shrinking what it finds
]
