"""The clients of the simulation: what each of them does, and how it is moved on.

A script is a generator. It yields what it wants next (`Sleep`, `Call`, `Read`, `Write`) and gets
back what came of it; in between anything may happen, its own death included.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvstore.client.lease import Lease
from kvstore.messages import (
    AbortRequest,
    CommitRequest,
    DeleteRequest,
    LeaseRequest,
    LostRequest,
    MatchRequest,
    PinKind,
    PinRequest,
    ReadRequest,
    Request,
    ReserveAnswer,
    ReserveRequest,
    ScrubRequest,
    UnpinRequest,
)
from kvstore.types import Outcome, Place
from tests.sim.traffic import DOMAINS, specs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.link import Link
    from kvstore.messages import BlockSpec
    from tests.sim.runner import SimulationRunner
    from tests.sim.traffic import Conversations


class Sleep(NamedTuple):
    """Do nothing for a while."""

    seconds: float


class Call(NamedTuple):
    """Ask the store. None is given back where the client lost patience before the answer."""

    request: Request
    patience_seconds: float | None = None


class Read(NamedTuple):
    """Copy blocks out; gives back an outcome and the bytes of each."""

    places: list[Place]


class Write(NamedTuple):
    """Copy blocks in; gives back an outcome each."""

    batch: list[tuple[Place, bytes]]


Script = Generator[Sleep | Call | Read | Write, Any, Any]


class _LaggingClock:
    """A client's clock, a little behind the core's."""

    def __init__(self, now: Callable[[], float], lag_seconds: float) -> None:
        self._now = now
        self._lag_seconds = lag_seconds

    def now(self) -> float:
        return self._now() - self._lag_seconds


class Client:
    """One process: a script, and what the SDK's `Lease` needs of a link."""

    def __init__(
        self, number: int, runner: SimulationRunner, conversations: Conversations, rng: Random
    ) -> None:
        self.number = number
        self.rng = rng
        self.runner = runner
        self.conversations = conversations
        self.domain = rng.choice(DOMAINS)
        lag_seconds = rng.uniform(0.0, runner.tier.faults.clock_lag_seconds_max)
        self.clock: Any = _LaggingClock(runner.schedule.clock.now, lag_seconds)
        self.is_dead = False
        self._writes_land_by = 0.0

    # -- the link of its leases --------------------------------------------------------------

    def call(self, request: Request) -> Any:
        return self.runner.ask(self.number, request)

    def call_later(self, request: Request, _memory: object) -> None:
        self.call(request)

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        return self.runner.first_stale(places, moves)

    # -- being moved on ----------------------------------------------------------------------

    def start(self, script: Script) -> None:
        """Begin, some time soon."""
        self._script = script
        self.runner.schedule.after(self.rng.uniform(0.0, 1.0), lambda: self._resume(None))

    def _resume(self, result: Any) -> None:
        if self.is_dead:
            return
        try:
            wanted = self._script.send(result)
        except StopIteration:
            self.runner.end_process(self.number)
            return
        self._do(wanted)
        if self.runner.tier.happens(self.runner.tier.faults.death):
            self._die()

    def _do(self, wanted: Sleep | Call | Read | Write) -> None:
        schedule, tier = self.runner.schedule, self.runner.tier
        match wanted:
            case Sleep(seconds):
                schedule.after(seconds, lambda: self._resume(None))
            case Call(request, patience_seconds):
                schedule.note(f"client {self.number}", type(request).__name__)
                request_id = self.runner.begin(self.number, request, self._receive)
                if patience_seconds is not None:
                    schedule.after(patience_seconds, lambda: self._lose_patience(request_id))
            case Read(places):
                first = self.rng.random() * tier.batch_seconds()
                schedule.after(first, lambda: self._read(places))
            case Write(batch):
                seconds = tier.batch_seconds()
                first = self.rng.random() * seconds
                self._writes_land_by = schedule.clock.now() + seconds
                schedule.after(first, lambda: self._write(batch, seconds - first))

    def _receive(self, answer: Any) -> None:
        # An answer takes a moment to arrive.
        self.runner.schedule.after(self.rng.uniform(0.0, 0.001), lambda: self._resume(answer))

    def _lose_patience(self, request_id: int) -> None:
        if self.runner.cancel(request_id):
            self._resume(None)

    def _read(self, places: list[Place]) -> None:
        first = self.runner.tier.read_first(places)

        def finish() -> None:
            self._resume(self.runner.tier.read_second(places, first))

        self.runner.schedule.after(self.runner.tier.batch_seconds(), finish)

    def _write(self, batch: list[tuple[Place, bytes]], seconds_left: float) -> None:
        # Also of the dead: what is under way lands.
        self.runner.tier.write_first(batch)
        self.runner.promises.check_leased()

        def finish() -> None:
            outcomes = self.runner.tier.write_second(batch)
            self.runner.promises.check_leased()
            self._resume(outcomes)

        self.runner.schedule.after(seconds_left, finish)

    def _die(self) -> None:
        schedule = self.runner.schedule
        schedule.note(f"client {self.number}", "dies")
        schedule.seen["death"] += 1
        self.is_dead = True
        self._script.close()
        noticed_at = max(schedule.clock.now(), self._writes_land_by) + self.rng.uniform(0.001, 2.0)
        schedule.at(noticed_at, lambda: self.runner.end_process(self.number))

    # -- what chats do -----------------------------------------------------------------------

    def chat(self, turns: int) -> Script:
        """Load what is there of a prompt, compute the rest, store it; and so on."""
        for _ in range(turns):
            specs = specs_of(self.conversations.next_turn())
            if self.rng.random() < 0.4:
                loaded = yield from self._load_by_copy(specs)
            else:
                loaded = yield from self._load_by_lease(specs)
            yield Sleep(self.rng.uniform(0.0, 0.2))  # the prefill
            yield from self._store(specs, loaded)
            yield Sleep(self.rng.uniform(0.0, 0.5))

    def _load_by_lease(self, specs: Sequence[BlockSpec]) -> Script:
        rng = self.rng
        ttl_seconds = rng.choice([0.02, 0.3, 2.0, 10.0])
        request = LeaseRequest(
            self.domain, [s.key for s in specs], _tokens(specs), ttl_seconds, self._wait()
        )
        answer = yield Call(request, self._patience())
        if answer is None or not answer.lease_id:
            return 0
        lease = Lease(cast("Link", self), answer, [], cast("Any", None))
        found = yield Read(answer.places)
        if rng.random() < 0.2:  # and a second time, later
            yield Sleep(rng.uniform(0.0, ttl_seconds))
            if rng.random() < 0.5:
                lease.renew(rng.uniform(0.01, 2.0))
            found = yield Read(answer.places)
        was_valid = lease.valid()
        loaded = self._accept(answer.places, found) if was_valid else 0
        if rng.random() < 0.9:  # else it is forgotten
            lease.release()
            if rng.random() < 0.1:
                lease.release()
        if not was_valid:
            self._saw("read that outlived its lease")
            yield Call(LostRequest(len(found), Outcome.EXPIRED))
        yield from self._heal(specs, answer.places, loaded)
        return loaded

    def _load_by_copy(self, specs: Sequence[BlockSpec]) -> Script:
        request = ReadRequest(self.domain, [s.key for s in specs], _tokens(specs), self._wait())
        answer = yield Call(request, self._patience())
        if answer is None or not answer.places:
            return 0
        found = yield Read(answer.places)
        right = self.first_stale(answer.places, answer.moves)
        if right < len(answer.places):
            self._saw("copy that an eviction outran")
        loaded = self._accept(answer.places[:right], found[:right])
        yield from self._heal(specs, answer.places[:right], loaded)
        return loaded

    def _accept(self, places: list[Place], found: list[tuple[Outcome, bytes]]) -> int:
        """Take over the blocks up to the first that did not come; how many those are."""
        for position, (place, (outcome, content)) in enumerate(zip(places, found, strict=True)):
            if outcome is not Outcome.OK:
                self._saw(f"read that was {outcome}")
                return position
            self.runner.promises.accept(place, content)
        return len(places)

    def _heal(self, specs: Sequence[BlockSpec], places: list[Place], loaded: int) -> Script:
        """Drop a block that is found and cannot be read, so that the next put stores it anew."""
        if loaded < len(places) and self.rng.random() < 0.8:
            yield Call(DeleteRequest(self.domain, [specs[loaded].key]))

    def _store(self, specs: Sequence[BlockSpec], start: int) -> Script:
        rng = self.rng
        request = ReserveRequest(
            self.domain,
            specs,
            start,
            rng.choice([0.05, 0.5, 5.0]),
            self._wait(),
            rng.choice([None, None, None, 0.5, 5.0]),
        )
        answer = yield Call(request, self._patience())
        if answer is None or not answer.reservation_id:
            return
        promises = self.runner.promises
        pieces = [
            (position, (place, promises.payload_of(place, self.number)))
            for position, place in enumerate(answer.places)
            if place is not None
        ]
        if rng.random() < 0.1:
            yield Call(AbortRequest(answer.reservation_id))
            return
        total = len(answer.outcomes)
        layers = [total] if rng.random() < 0.6 else [rng.randint(0, total), total]
        done = 0
        for end in layers:
            now = [(i, piece) for i, piece in pieces if done <= i < end]
            good = yield from self._write_all(answer, now, end)
            committed = yield Call(CommitRequest(answer.reservation_id, good, 0))
            if committed.outcome is not Outcome.OK:
                return
            if good < end:
                break
            done = end
        if done < total and rng.random() < 0.9:  # else it is left to its deadline
            yield Call(AbortRequest(answer.reservation_id))

    def _write_all(
        self, answer: ReserveAnswer, pieces: list[tuple[int, tuple[Place, bytes]]], end: int
    ) -> Script:
        """Write, some of it again and late; up to which position all is written."""
        batch = [piece for _, piece in pieces]
        outcomes = yield Write(batch)
        if self.rng.random() < 0.2:
            late_by = self.rng.uniform(-0.05, 3.0)
            now = self.clock.now()
            yield Sleep(max(0.0, answer.deadline - now + late_by))
            if self.runner.schedule.clock.now() >= answer.deadline:
                self._saw("write after the deadline")
            outcomes = yield Write(batch)
        for (position, _), outcome in zip(pieces, outcomes, strict=True):
            if outcome is not Outcome.OK:
                self._saw("write that failed")
                return position
        return end

    def round_trip(self, specs: Sequence[BlockSpec], loaded: list[int]) -> Script:
        """Store a prompt without ado and load it; `loaded` gets how many blocks came back."""
        answer = yield Call(ReserveRequest(self.domain, specs, 0, 60.0, 0.0, None))
        promises = self.runner.promises
        places = [place for place in answer.places if place is not None]
        yield Write([(place, promises.payload_of(place, self.number)) for place in places])
        yield Call(CommitRequest(answer.reservation_id, len(specs), 0))
        loaded.append((yield from self._load_by_copy(specs)))

    # -- what operators do -------------------------------------------------------------------

    def operate(self, actions: int) -> Script:
        """Look, delete, pin, unpin and scrub, here and there."""
        rng = self.rng
        for _ in range(actions):
            yield Sleep(rng.uniform(0.0, 0.5))
            specs = specs_of(self.conversations.any())
            keys = [spec.key for spec in specs[rng.randrange(len(specs)) :]]
            request: Request
            match rng.randrange(8):
                case 0 | 1:
                    request = DeleteRequest(self.domain, keys)
                case 2:
                    request = PinRequest(self.domain, keys, PinKind.SOFT, rng.choice([None, 2.0]))
                case 3:
                    request = PinRequest(self.domain, keys, PinKind.HARD, rng.choice([None, 2.0]))
                case 4:
                    request = UnpinRequest(self.domain, [spec.key for spec in specs])
                case 5:
                    request = MatchRequest(self.domain, [spec.key for spec in specs], self._wait())
                case _:
                    resident = self.runner.core.resident_keys()
                    own = [key for domain, key in resident if domain == self.domain]
                    request = ScrubRequest(self.domain, own)
            yield Call(request, self._patience() if isinstance(request, MatchRequest) else None)

    def _saw(self, trouble: str) -> None:
        self.runner.schedule.seen[trouble] += 1

    # -- moods -------------------------------------------------------------------------------

    def _wait(self) -> float:
        return self.rng.choice([0.0, 0.0, 0.1, 1.0, 5.0])

    def _patience(self) -> float | None:
        return self.rng.uniform(0.0, 2.0) if self.rng.random() < 0.1 else None


def _tokens(specs: Sequence[BlockSpec]) -> int:
    return sum(spec.token_count for spec in specs)
