"""Random traffic on blocks of five sizes, in a core without memory, and what must hold of it.

The core moves no bytes, so a tier of any size costs nothing: what is watched is who owns which
bytes, what is found and what is lost, and whether any size is kept out by the others.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.clock import FakeClock
from kvstore.messages import (
    AbortRequest,
    BlockSpec,
    CommitRequest,
    DeleteRequest,
    LeaseRequest,
    PinKind,
    PinRequest,
    ReadRequest,
    ReleaseRequest,
    RenewRequest,
    ReserveRequest,
    ScrubRequest,
    UnpinRequest,
)
from kvstore.policy import LruPolicy
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import SINGLE_DOMAIN, SLOT_ALIGNMENT_BYTES, Outcome
from tests.core_driver import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.messages import Request, Step, Transfer
    from kvstore.types import Place

MIB = 1 << 20
#: Bytes of a block, and how many of them a sequence has.
SIZES = {4 << 10: 20, 64 << 10: 20, 256 << 10: 16, 1 * MIB: 8, 4 * MIB: 2}
#: Sequences of each size: together several times what fits.
SEQUENCES = 40
LEASES_MAX = 24
BLOCK_TOKENS = 16


class Stored(NamedTuple):
    """What was committed under a key."""

    generation: int
    expires_at: float | None


class FiveSizes:
    """A core, its clients' operations, and all that they were told."""

    def __init__(self, seed: int, capacity_bytes: int) -> None:
        self.rng = Random(seed)
        self.clock = FakeClock()
        self.capacity_bytes = capacity_bytes
        self.core = Core(self.clock, Slots(capacity_bytes), LruPolicy())
        self.sequences = {
            size: [_sequence(size, number, blocks) for number in range(SEQUENCES)]
            for size, blocks in SIZES.items()
        }
        self.stored: dict[bytes, Stored] = {}
        self.leases: dict[int, tuple[list[Place], float]] = {}
        self.hard_pins: dict[bytes, float] = {}  # until when
        self.transfers: deque[Transfer] = deque()
        self.answers: dict[int, Any] = {}
        self.granted: Counter[int] = Counter()  # blocks by size
        self.refused: Counter[int] = Counter()
        self.refused_in_a_row: Counter[int] = Counter()  # puts of a size, all of them refused
        self.most_in_a_row = 0
        self.hits: Counter[int] = Counter()
        self._last_id = 0
        self._operations: list[tuple[Callable[[], None], int]] = [
            (self.put, 36),
            (self.get, 20),
            (self.lease, 14),
            (self.renew, 3),
            (self.release, 6),
            (self.pin, 7),
            (self.unpin, 2),
            (self.delete, 3),
            (self.scrub, 2),
            (self.let_time_pass, 7),
        ]

    def run(self, operations: int, recount_every: int) -> None:
        """So many operations, and a recount after every so many of them."""
        calls, weights = zip(*self._operations, strict=True)
        for number, operation in enumerate(self.rng.choices(calls, weights, k=operations), 1):
            operation()
            while len(self.transfers) > 4:
                self._complete()
            if number % recount_every == 0:
                self.recount()

    # -- operations --------------------------------------------------------------------------

    def put(self) -> None:
        """Store the rest of a prefix, or some of it; sometimes with a TTL, sometimes not at all."""
        specs = self._prefix()
        rng = self.rng
        start = rng.choice([0, 0, rng.randrange(len(specs))])
        expire_seconds = rng.choice([None, None, None, None, 5.0, 60.0])
        self.store(specs, start, expire_seconds, gives_up=rng.random() < 0.03)

    def store(
        self,
        specs: list[BlockSpec],
        start: int,
        expire_seconds: float | None,
        *,
        gives_up: bool = False,
    ) -> None:
        """Reserve and commit, or abort."""
        request = ReserveRequest(SINGLE_DOMAIN, specs, start, 30.0, 0.0, expire_seconds)
        answer = self.ask(request)
        for spec, outcome in zip(specs[start:], answer.outcomes, strict=True):
            is_there = outcome is Outcome.PRESENT
            assert not is_there or self._is_live(spec.key), "present, and never stored"
        self._count(specs[0].length_bytes, answer.outcomes)
        if gives_up:
            self.ask(AbortRequest(answer.reservation_id))
            return
        committed = self.ask(CommitRequest(answer.reservation_id, len(answer.outcomes), 0))
        assert committed.outcome is Outcome.OK
        expires_at = None if expire_seconds is None else self.clock.now() + expire_seconds
        for place in answer.places:
            if place is not None:
                self.stored[place.key[32:]] = Stored(place.generation, expires_at)
                self.hard_pins.pop(place.key[32:], None)  # of what its TTL ended

    def get(self) -> None:
        """Where is a prefix?"""
        specs = self._prefix()
        tokens = BLOCK_TOKENS * len(specs)
        answer = self.ask(ReadRequest(SINGLE_DOMAIN, _keys(specs), tokens, 0.0))
        self._see_prefix(specs, answer)
        self.hits[specs[0].length_bytes] += answer.blocks

    def lease(self) -> None:
        """Hold a prefix for a while."""
        if len(self.leases) >= LEASES_MAX:
            return
        specs, ttl_seconds = self._prefix(), self.rng.choice([0.5, 20.0, 200.0])
        tokens = BLOCK_TOKENS * len(specs)
        request = LeaseRequest(SINGLE_DOMAIN, _keys(specs), tokens, ttl_seconds, 0.0)
        answer = self.ask(request)
        self._see_prefix(specs, answer)
        if answer.lease_id:
            self.leases[answer.lease_id] = answer.places, answer.deadline

    def renew(self) -> None:
        """Hold it for longer."""
        if self.leases:
            lease_id = self.rng.choice(list(self.leases))
            places, deadline = self.leases[lease_id]
            answer = self.ask(RenewRequest(lease_id, 5.0))
            assert (answer.deadline is not None) == (deadline > self.clock.now())
            self.leases[lease_id] = places, answer.deadline or deadline

    def release(self) -> None:
        """Be done with it; it must have been whole until its deadline."""
        if self.leases:
            lease_id = self.rng.choice(list(self.leases))
            self._check_lease(lease_id)
            _, deadline = self.leases.pop(lease_id)
            was_held = self.ask(ReleaseRequest(lease_id)).was_held
            assert was_held == (deadline > self.clock.now())

    def pin(self) -> None:
        """Keep the beginning of a sequence."""
        keys = _keys(self._prefix()[:4])
        kind, ttl_seconds = self.rng.choice([*PinKind]), self.rng.choice([20.0, 200.0])
        answer = self.ask(PinRequest(SINGLE_DOMAIN, keys, kind, ttl_seconds))
        for key, outcome in zip(keys, answer.outcomes, strict=True):
            if outcome is Outcome.OK:
                assert self._is_live(key), "pinned, and not there"
                if kind is PinKind.HARD:
                    until = self.clock.now() + ttl_seconds
                    self.hard_pins[key] = max(self.hard_pins.get(key, 0.0), until)

    def unpin(self) -> None:
        """Let go of it."""
        keys = _keys(self._prefix())
        self.ask(UnpinRequest(SINGLE_DOMAIN, keys))
        for key in keys:
            self.hard_pins.pop(key, None)

    def delete(self) -> None:
        """Hide some blocks."""
        specs = self._prefix()
        self._delete(_keys(specs[self.rng.randrange(len(specs)) :]))

    def scrub(self) -> None:
        """Have some blocks read again; all of them are sound."""
        keys = _keys(self._prefix())
        request_id = self.begin(ScrubRequest(SINGLE_DOMAIN, keys))
        while request_id not in self.answers:
            self._complete()
        assert self.answers.pop(request_id).corrupt == []

    def let_time_pass(self) -> None:
        """Deadlines come."""
        self.clock.advance(self.rng.choice([0.01, 0.1, 1.0, 10.0]))
        self._take(self.core.tick(self.clock.now()))
        now = self.clock.now()
        self.hard_pins = {key: until for key, until in self.hard_pins.items() if until > now}

    # -- what must hold ----------------------------------------------------------------------

    def recount(self) -> None:
        """The core's books, the largest free extent, and what nobody may take away."""
        self.core.check()
        usage = self.core.usage()
        assert usage["largest_free_bytes"] == self._largest_gap()
        resident = {key for _, key in self.core.resident_keys()}
        assert all(self._is_live(key) for key in resident), "there, and deleted or never stored"
        for lease_id in self.leases:
            self._check_lease(lease_id)
        now = self.clock.now()
        for key, until in self.hard_pins.items():
            assert until <= now or not self._is_live(key) or key in resident, "a pinned block left"
        counters = self.core.counters
        dropped = sum(counters.by_label("dropped_blocks").values())
        assert sum(counters.by_label("stored_blocks").values()) - dropped == len(resident)

    def end_all_holders(self) -> None:
        """No lease, no pin, no transfer."""
        while self.transfers:
            self._complete()
        for lease_id in list(self.leases):
            self._check_lease(lease_id)
            del self.leases[lease_id]
            self.ask(ReleaseRequest(lease_id))
        keys = [key for _, key in self.core.resident_keys()]
        self.ask(UnpinRequest(SINGLE_DOMAIN, keys))
        self.hard_pins.clear()

    def delete_all(self, size: int) -> None:
        """All blocks of one size."""
        self._delete([spec.key for sequence in self.sequences[size] for spec in sequence])

    def fill_with(self, size: int) -> float:
        """Store new blocks of one size until they would fill the tier three times.

        What part of the tier they have then.
        """
        specs = _sequence(size, SEQUENCES, 3 * self.capacity_bytes // size)
        for spec in specs:
            self.store([spec._replace(parent_key=None)], 0, None)
            while self.transfers:
                self._complete()
        new = set(_keys(specs))
        here = sum(key in new for _, key in self.core.resident_keys())
        return here * size / self.capacity_bytes

    def _check_lease(self, lease_id: int) -> None:
        places, deadline = self.leases[lease_id]
        if deadline > self.clock.now():
            generations = self.core.slots.generations
            for place in places:
                unit = place.offset_bytes // SLOT_ALIGNMENT_BYTES
                assert generations[unit] == place.generation, "a leased block gave way"

    def _largest_gap(self) -> int:
        """The longest run of bytes that no slot has."""
        ends, starts = [0], []
        for slot in self.core.slots.granted():
            starts.append(slot.offset_bytes)
            ends.append(slot.end_bytes)
        starts.append(self.capacity_bytes)
        return max(start - end for start, end in zip(starts, ends, strict=True))

    def _see_prefix(self, specs: Sequence[BlockSpec], answer: Any) -> None:
        assert answer.blocks == len(answer.places)
        assert (answer.reason is None) == (answer.blocks == len(specs))
        for spec, place in zip(specs, answer.places, strict=False):
            assert self._is_live(spec.key), "found, and never stored, deleted or past its TTL"
            assert place.key == SINGLE_DOMAIN + spec.key
            assert place.generation == self.stored[spec.key].generation

    def _is_live(self, key: bytes) -> bool:
        stored = self.stored.get(key)
        if stored is None:
            return False
        return stored.expires_at is None or stored.expires_at > self.clock.now()

    # -- inside ------------------------------------------------------------------------------

    def begin(self, request: Request) -> int:
        self._last_id += 1
        self._take(self.core.begin(self._last_id, request))
        return self._last_id

    def ask(self, request: Request) -> Any:
        return self.answers.pop(self.begin(request))

    def _take(self, step: Step) -> None:
        self.answers.update(step.answers)
        self.transfers += step.transfers

    def _complete(self) -> None:
        transfer = self.transfers.popleft()
        self._take(self.core.complete(transfer, Outcome.OK, transfer.place.generation))

    def _prefix(self) -> list[BlockSpec]:
        """The first blocks of a sequence of any size, most often of a few that are popular."""
        rng = self.rng
        sequences = self.sequences[rng.choice([*SIZES])]
        sequence = sequences[int(len(sequences) * rng.random() ** 2)]
        return sequence[: rng.randint(1, len(sequence))]

    def _delete(self, keys: list[bytes]) -> None:
        answer = self.ask(DeleteRequest(SINGLE_DOMAIN, keys))
        for key, outcome in zip(keys, answer.outcomes, strict=True):
            assert outcome is Outcome.ABSENT or self._is_live(key), "deleted, and not there"
            self.stored.pop(key, None)
            self.hard_pins.pop(key, None)

    def _count(self, size: int, outcomes: list[Outcome]) -> None:
        self.granted[size] += outcomes.count(Outcome.GRANTED)
        self.refused[size] += outcomes.count(Outcome.FULL)
        if Outcome.GRANTED in outcomes:
            self.refused_in_a_row[size] = 0
        elif Outcome.FULL in outcomes:
            self.refused_in_a_row[size] += 1
            self.most_in_a_row = max(self.most_in_a_row, self.refused_in_a_row[size])


def _keys(specs: Sequence[BlockSpec]) -> list[bytes]:
    return [spec.key for spec in specs]


def _sequence(size: int, number: int, blocks: int) -> list[BlockSpec]:
    names = [key_of(f"{size}/{number}/{block}") for block in range(blocks)]
    parents = [None, *names]
    return [
        BlockSpec(key, parent, size, BLOCK_TOKENS, False)
        for key, parent in zip(names, parents, strict=False)
    ]
