"""The clients of the simulation: how each of them is moved on.

A script is a generator. It yields what it wants next (`Sleep`, `Call`, `Read`, `Write`, `Await`)
and gets back what came of it; in between anything may happen, its own death included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.messages import Request
from kvstore.types import Place
from tests.sim.traffic import DOMAINS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.runner import SimulationRunner
    from tests.sim.traffic import Conversations, Prompt


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


class Await(NamedTuple):
    """Wait for the next job, which is given back; None where there will be no more."""


class Job(NamedTuple):
    """A prompt whose blocks a rank is to store, of which so many were found."""

    prompt: Prompt
    found: int


Wanted = Sleep | Call | Read | Write | Await
Script = Generator[Wanted, Any, Any]


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
        self.domain = rng.choices(DOMAINS, [4, 1])[0]
        lag_seconds = rng.uniform(0.0, runner.tier.faults.clock_lag_seconds_max)
        self.clock: Any = _LaggingClock(runner.schedule.clock.now, lag_seconds)
        self.is_dead = False
        self._jobs: deque[Job | None] = deque()
        self._is_waiting_for_a_job = False
        self._writes_land_by = 0.0

    # -- the link of its leases --------------------------------------------------------------

    def call(self, request: Request) -> Any:
        return self.runner.ask(self.number, request)

    def call_later(self, request: Request, _memory: object) -> None:
        self.call(request)

    def check_process(self) -> None:
        """Nothing forks here."""

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        return self.runner.first_stale(places, moves)

    # -- being moved on ----------------------------------------------------------------------

    def start(self, script: Script) -> None:
        """Begin, some time soon."""
        self._script = script
        self.runner.schedule.after(self.rng.uniform(0.0, 1.0), lambda: self._resume(None))

    def give(self, job: Job | None) -> None:
        """Something to do, after what it was given before; None: nothing more."""
        self._jobs.append(job)
        if self._is_waiting_for_a_job:
            self._take_job()

    def _take_job(self) -> None:
        self._is_waiting_for_a_job = False
        job = self._jobs.popleft()
        self.runner.schedule.after(self.rng.uniform(0.0, 0.01), lambda: self._resume(job))

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

    def _do(self, wanted: Wanted) -> None:
        schedule, tier = self.runner.schedule, self.runner.tier
        match wanted:
            case Sleep(seconds):
                schedule.after(seconds, lambda: self._resume(None))
            case Call(request, patience_seconds):
                schedule.note(f"client {self.number}", type(request).__name__)
                request_id = self.runner.begin(self.number, request, self._receive)
                if patience_seconds is not None:
                    schedule.after(patience_seconds, lambda: self._lose_patience(request_id))
            case Await():
                self._is_waiting_for_a_job = True
                if self._jobs:
                    self._take_job()
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

    def _saw(self, trouble: str) -> None:
        self.runner.schedule.seen[trouble] += 1

    # -- moods -------------------------------------------------------------------------------

    def _wait(self) -> float:
        return self.rng.choice([0.0, 0.0, 0.1, 1.0, 5.0])

    def _patience(self) -> float | None:
        return self.rng.uniform(0.0, 2.0) if self.rng.random() < 0.1 else None
