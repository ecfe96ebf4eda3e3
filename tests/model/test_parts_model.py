"""The real embedded store against a model where blocks have several parts, under a moved clock.

Never a wrong byte, and never bytes of another part; a prefix is found exactly where every part has
what it needs of it; a part that is leased or pinned stays, and what it is worth nothing without;
parts leave together; the recount is clean after every step.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvstore
from kvstore.clock import FakeClock
from kvstore.errors import ReservationExpired
from kvstore.types import Outcome
from tests.model.parts_model import (
    VIEWS,
    LeaseRecord,
    Name,
    PartsModel,
    ReservationRecord,
    View,
    tag_of,
)
from tests.model.store_model import MARGIN_SECONDS
from tests.payload import payload, writer_of

CAPACITY_BYTES = 1 << 20
LEASE_CAP_BYTES = CAPACITY_BYTES // 2
QUOTA_BYTES = CAPACITY_BYTES // 4
HOLDERS_MAX = 5


#: Six blocks and a bit; all share the first two blocks, the last two the first four.
PROMPTS = [[1] * 8 + [2] * 17, [1] * 8 + [3] * 17, [1] * 8 + [3] * 8 + [4] * 9]

sessions = st.integers(0, len(VIEWS) - 1)
prompts = st.integers(0, len(PROMPTS) - 1)
tokens = st.integers(0, len(PROMPTS[0]))
picks = st.integers(0, 99)
ttls = st.sampled_from([0.5, 5.0, 30.0])
expiries = st.sampled_from([None, None, 3.0, 40.0])
waits = st.sampled_from([0.0, 0.0, 0.1, 10.0])
#: Which parts a writer has, block by block; of more blocks than a batch has.
havings = st.lists(
    st.lists(st.booleans(), min_size=4, max_size=4), min_size=7, max_size=7
) | st.just([[True] * 4] * 7)


class PartsMachine(RuleBasedStateMachine):
    """Rules are calls of the SDK; invariants hold after each."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store = kvstore.open(dram_capacity_bytes=CAPACITY_BYTES, clock=self.clock)
        self.sessions = [self.store.session(view.namespace, part=view.parts) for view in VIEWS]
        self.model = PartsModel()
        for view in VIEWS:
            self.model.views[view.namespace.digest] = view
        self.writers = 0
        self.evictions = 0  # counted by the store so far
        self.may_evict = False  # whether the rule that ran had to make room
        self.names: dict[bytes, Name] = {}  # by storage key

    # -- writing -----------------------------------------------------------------------------

    @initialize(filled=st.lists(st.tuples(sessions, prompts), max_size=5))
    def fill(self, filled: list[tuple[int, int]]) -> None:
        """Whole prompts, of which three or four fill the tier."""
        for n, prompt in filled:
            having = [[True] * 4] * 7
            self.put(n, prompt, len(PROMPTS[prompt]), 0, having, None, 0.0)

    @rule(
        n=sessions, prompt=prompts, tokens=tokens, skip=st.integers(0, 2), having=havings,
        expiry=expiries, wait=waits,
    )  # fmt: skip
    def put(
        self, n: int, prompt: int, tokens: int, skip: int, having: list[list[bool]],
        expiry: float | None, wait: float,
    ) -> None:  # fmt: skip
        """Some parts may be missing, but not those that every prefix needs."""
        view, keys, start = VIEWS[n], self.keys(n, prompt, tokens), min(skip, tokens // 4)
        wanted = [
            [x for i, x in enumerate(view.names([key])) if has[i] or view.is_always_needed(x)]
            for key, has in zip(keys[start:], having, strict=False)
        ]
        self.begin_write(wanted)
        blocks = [
            [self.content(view, name) if name in names else None for name in view.names([key])]
            for key, names in zip(keys[start:], wanted, strict=True)
        ]
        outcomes = self.sessions[n].put(
            keys, blocks, start=start, wait_seconds=wait, expire_seconds=expiry
        )
        now = self.clock.now()
        self.model.settle(now)
        granted = self.model.expect_batch(wanted, outcomes, Outcome.OK)
        stored = [name for names in granted for name in names]
        self.lose_evicted(stored)
        self.model.publish(stored, self.writers, now, expiry)

    @precondition(lambda self: len(self.model.reservations) < HOLDERS_MAX)
    @rule(
        n=sessions, prompt=prompts, tokens=tokens, skip=st.integers(0, 2), having=havings,
        ttl=ttls, expiry=expiries, wait=waits,
    )  # fmt: skip
    def reserve(
        self, n: int, prompt: int, tokens: int, skip: int, having: list[list[bool]],
        ttl: float, expiry: float | None, wait: float,
    ) -> None:  # fmt: skip
        """Any part may be missing."""
        view, keys, start = VIEWS[n], self.keys(n, prompt, tokens), min(skip, tokens // 4)
        having = [has[: len(view.parts)] for has in having[: len(keys) - start]]
        wanted = [
            [name for name, is_wanted in zip(view.names([key]), has, strict=True) if is_wanted]
            for key, has in zip(keys[start:], having, strict=True)
        ]
        self.begin_write(wanted)
        reservation = self.sessions[n].reserve(
            keys,
            start=start,
            ttl_seconds=ttl,
            wait_seconds=wait,
            expire_seconds=expiry,
            wanted=having,
        )
        self.model.settle(self.clock.now())
        granted = self.model.expect_batch(wanted, reservation.outcomes, Outcome.GRANTED)
        if not wanted:
            return  # nothing to fill, commit or abort
        record = ReservationRecord(reservation, granted, self.writers, expiry)
        for key, names, views in zip(keys[start:], granted, reservation.views, strict=True):
            for name, memory in zip(view.names([key]), views, strict=True):
                assert (memory is not None) == (name in names)
                if memory is not None:
                    memory[:] = self.content(view, name).data
                    self.model.pending[name] = record
        self.model.reservations.append(record)

    @precondition(lambda self: self.model.reservations)
    @rule(pick=picks, count=st.integers(0, 7))
    def commit(self, pick: int, count: int) -> None:
        record = self.model.reservations[pick % len(self.model.reservations)]
        count = min(count, len(record.granted))
        now = self.clock.now()
        if record.deadline <= now and count > record.committed:
            with pytest.raises(ReservationExpired):
                record.reservation.commit(count)
            self.end(record)
            return
        record.reservation.commit(count)
        if count > record.committed:
            new = [name for names in record.granted[record.committed : count] for name in names]
            self.model.publish(new, record.writer, now, record.expire_seconds)
            record.committed = count
            if count == len(record.granted):
                self.end(record)

    @precondition(lambda self: self.model.reservations)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        record = self.model.reservations[pick % len(self.model.reservations)]
        record.reservation.abort()
        self.end(record)

    @rule(n=sessions, prompt=prompts, first=st.integers(0, 6), count=st.integers(0, 4))
    def delete(self, n: int, prompt: int, first: int, count: int) -> None:
        keys = self.keys(n, prompt, len(PROMPTS[prompt]))[first : first + count]
        assert self.sessions[n].delete(keys) == self.model.delete(VIEWS[n], keys)

    # -- reading -----------------------------------------------------------------------------

    @rule(n=sessions, prompt=prompts, tokens=tokens, wait=waits)
    def match(self, n: int, prompt: int, tokens: int, wait: float) -> None:
        keys = self.keys(n, prompt, tokens)
        found = self.sessions[n].match(keys, wait_seconds=wait)
        self.model.settle(self.clock.now())
        assert found.blocks == self.model.longest(VIEWS[n], keys)
        assert found.tokens == sum(key.token_count for key in keys[: found.blocks])
        self.model.check_reason(VIEWS[n], keys, found.blocks, found.reason)

    @rule(n=sessions, prompt=prompts, tokens=tokens, having=havings, wait=waits)
    def get_into(
        self, n: int, prompt: int, tokens: int, having: list[list[bool]], wait: float
    ) -> None:
        view, keys = VIEWS[n], self.keys(n, prompt, tokens)
        buffers = [
            [
                np.full(view.length_of(name), 0xEE, np.uint8) if is_wanted else None
                for name, is_wanted in zip(view.names([key]), has, strict=False)
            ]
            for key, has in zip(keys, having, strict=False)
        ]
        outcomes = self.sessions[n].get_into(keys, buffers, wait_seconds=wait)
        self.model.settle(self.clock.now())
        blocks = self.model.longest(view, keys)
        assert outcomes[:blocks] == [Outcome.OK] * blocks
        assert len(outcomes) == len(keys)
        reason = outcomes[-1] if blocks < len(keys) else None
        self.model.check_reason(view, keys, blocks, reason)
        assert outcomes[blocks:] == [reason] * (len(keys) - blocks)
        needed = set(view.needed(keys, blocks))
        for key, given in zip(keys, buffers, strict=True):
            for name, buffer in zip(view.names([key]), given, strict=True):
                if buffer is None:
                    continue
                if name in needed:
                    assert writer_of(buffer, tag_of(name)) == self.model.stored[name].writer
                else:
                    assert (buffer == 0xEE).all()

    @precondition(lambda self: len(self.model.leases) < HOLDERS_MAX)
    @rule(n=sessions, prompt=prompts, tokens=tokens, ttl=ttls, wait=waits)
    def lease(self, n: int, prompt: int, tokens: int, ttl: float, wait: float) -> None:
        view, keys = VIEWS[n], self.keys(n, prompt, tokens)
        lease = self.sessions[n].lease(keys, ttl_seconds=ttl, wait_seconds=wait)
        now = self.clock.now()
        self.model.settle(now)
        longest = self.model.longest(view, keys)
        needed = view.needed(keys, lease.blocks)
        assert all(name in self.model.stored for name in needed)
        if self.model.fits(view.needed(keys, longest), now, LEASE_CAP_BYTES):
            assert lease.blocks == longest
            self.model.check_reason(view, keys, longest, lease.reason)
        else:
            assert lease.blocks < longest
            assert lease.reason is Outcome.BUSY
            assert self.model.fits(needed, now, LEASE_CAP_BYTES)
        if lease.blocks:
            held = {name: self.model.stored[name] for name in needed}
            self.model.leases.append(LeaseRecord(lease, held, now + ttl))
            found = [memory is not None for block in lease.views for memory in block]
            assert found == [name in held for name in view.names(keys[: lease.blocks])]

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
        buffers = [
            [None if memory is None else np.zeros(memory.nbytes, np.uint8) for memory in block]
            for block in record.views
        ]
        is_valid = record.deadline - MARGIN_SECONDS > self.clock.now()
        expected = Outcome.OK if is_valid else Outcome.EXPIRED
        assert record.lease.copy_into(buffers) == [expected] * len(buffers)
        copied = [buffer for block in buffers for buffer in block if buffer is not None]
        for (name, stored), buffer in zip(record.held.items(), copied, strict=True):
            assert not is_valid or writer_of(buffer, tag_of(name)) == stored.writer

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        record = self.model.leases.pop(pick % len(self.model.leases))
        record.views.clear()
        record.lease.release()

    # -- keeping -----------------------------------------------------------------------------

    @rule(
        n=sessions, prompt=prompts, tokens=tokens, is_hard=st.booleans(),
        ttl=st.sampled_from([None, 5.0, 50.0]),
    )  # fmt: skip
    def pin(self, n: int, prompt: int, tokens: int, is_hard: bool, ttl: float | None) -> None:
        keys = self.keys(n, prompt, tokens)
        kind = "hard" if is_hard else "soft"
        outcomes = self.sessions[n].pin(keys, kind=kind, ttl_seconds=ttl)
        longest = math.inf if is_hard else 30 * 24 * 3_600.0
        until = self.clock.now() + (longest if ttl is None else ttl)
        quota_bytes = QUOTA_BYTES if is_hard else None
        for key, outcome in zip(keys, outcomes, strict=True):
            self.model.pin(VIEWS[n], key, until, quota_bytes, outcome)

    @rule(n=sessions, prompt=prompts, tokens=tokens)
    def unpin(self, n: int, prompt: int, tokens: int) -> None:
        keys = self.keys(n, prompt, tokens)
        for key, outcome in zip(keys, self.sessions[n].unpin(keys), strict=True):
            self.model.unpin(VIEWS[n], key, outcome)

    # -- the rest ----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 2.995, 4.995, 29.0, 61.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.settle(self.clock.now())

    @rule()
    def scrub(self) -> None:
        assert self.store.scrub() == (len(self.model.stored), [])

    # -- what holds after each step ----------------------------------------------------------

    @invariant()
    def nothing_is_lost_but_what_had_to_make_room(self) -> None:
        self.lose_evicted([])
        self.may_evict = False

    @invariant()
    def the_recount_is_clean(self) -> None:
        audit = self.store.check()
        assert audit.ready_blocks == len(self.model.stored)
        now = self.clock.now()
        assert audit.leases == sum(record.deadline > now for record in self.model.leases)
        assert audit.reservations == len(self.model.reservations)

    @invariant()
    def leased_parts_are_what_they_were(self) -> None:
        now = self.clock.now()
        for record in self.model.leases:
            assert record.lease.valid() is (record.deadline - MARGIN_SECONDS > now)
            if record.deadline > now:
                memories = [memory for block in record.views for memory in block if memory]
                for memory, (name, stored) in zip(memories, record.held.items(), strict=True):
                    assert writer_of(memory, tag_of(name)) == stored.writer

    def teardown(self) -> None:
        """All holders end, and all memory is free or ready."""
        for record in self.model.leases:
            record.views.clear()
        self.model.leases.clear()
        gc.collect()
        for session in self.sessions:
            session.close()
        self.clock.advance(4_000)
        audit = self.store.check()
        assert audit.leases == 0
        assert audit.free_bytes + audit.ready_bytes == audit.capacity_bytes
        self.store.close()

    # -- parts of rules ----------------------------------------------------------------------

    def keys(self, n: int, prompt: int, tokens: int) -> list[Any]:
        """Keys of the first `tokens` of a prompt, its final partial block included."""
        view = VIEWS[n]
        keys = view.namespace.keys(PROMPTS[prompt][:tokens], partial=True)
        for key in keys:
            for part in view.all_parts:
                name = Name(key, part)
                self.names[tag_of(name)] = name
        return keys

    def content(self, view: View, name: Name) -> Any:
        return payload(tag_of(name), self.writers, view.length_of(name))

    def begin_write(self, wanted: list[list[Name]]) -> None:
        """A new writer; notes whether room must be made."""
        self.writers += 1
        names = [name for of_block in wanted for name in of_block]
        missing_bytes = sum(
            self.model.size_of(name)
            for name in names
            if name not in self.model.stored and name not in self.model.pending
        )
        tier: Any = self.store.stats()["tiers"]
        # While it waits, reservations may end, and blocks whose TTL is over are missing, too.
        may_change = any(name in self.model.pending or self.model.expires(name) for name in names)
        self.may_evict = may_change or missing_bytes > tier["dram"]["largest_free_bytes"]

    def end(self, record: ReservationRecord) -> None:
        self.model.forget(record)
        self.model.reservations.remove(record)

    def lose_evicted(self, new: list[Name]) -> None:
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


TestPartsModel = PartsMachine.TestCase
TestPartsModel.settings = settings(stateful_step_count=50)
TestPartsModel.pytestmark = [  # type: ignore[attr-defined]
    pytest.mark.slow,
    pytest.mark.timeout(1_800),  # the nightly profile, and shrinking what it finds
]
