"""The runner of the simulation: the core, the tier and the clients under one schedule.

It does what any runner must, and no better: answers go to whoever asked, transfers are carried out
and reported, `tick` is called at the core's next deadline or a bit later, and a process that is
gone has its waiting requests cancelled and its reservations aborted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.messages import (
    AbortRequest,
    LeaseAnswer,
    ReadAnswer,
    ReserveAnswer,
    ScrubAnswer,
    ScrubRequest,
    TransferKind,
)
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome
from tests.sim.promises import EPSILON_SECONDS, Promises

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.messages import Answer, Request, Step, Transfer
    from kvstore.store import Core
    from kvstore.types import Place
    from tests.sim.faulty_tier import FaultyTier
    from tests.sim.schedule import Schedule


class _Asked(NamedTuple):
    """A request that has no answer yet."""

    client: int
    request: Request
    due: float | None  # None: when its transfers are over
    on_answer: Callable[[Any], None]


class SimulationRunner:
    """Drives one core. After every step all promises are checked."""

    def __init__(self, core: Core, tier: FaultyTier, schedule: Schedule, *, recounts: bool) -> None:
        self.core = core
        self.tier = tier
        self.schedule = schedule
        self.promises = Promises(core, tier, schedule.clock)
        self._recounts = recounts
        self._asked: dict[int, _Asked] = {}
        self._last_id = 0
        self._tick_at: float | None = None
        self._cancelled_scrubs: set[int] = set()
        self._vouched: set[int] = set()  # generations whose checksum is of sound bytes

    # -- requests ----------------------------------------------------------------------------

    def begin(self, client: int, request: Request, on_answer: Callable[[Any], None]) -> int:
        """Start a request; its answer goes to `on_answer`, now or later."""
        self._last_id += 1
        request_id = self._last_id
        due: float | None = self.schedule.clock.now() + getattr(request, "wait_seconds", 0.0)
        if isinstance(request, ScrubRequest):
            due = None
        self._asked[request_id] = _Asked(client, request, due, on_answer)
        self._take(self.core.begin(request_id, request))
        if due is not None and request_id in self._asked:
            late = self.tier.faults.late_tick_seconds_max + EPSILON_SECONDS
            self.schedule.at(due + late, lambda: self._must_be_answered(request_id))
        return request_id

    def ask(self, client: int, request: Request) -> Any:
        """The answer of a request that does not wait."""
        answers: list[Any] = []
        self.begin(client, request, answers.append)
        assert answers, f"{type(request).__name__} was not answered at once"
        return answers[0]

    def cancel(self, request_id: int) -> bool:
        """Forget a request that waits; False where it was answered."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return False
        if isinstance(asked.request, ScrubRequest):
            self._cancelled_scrubs.add(request_id)  # its answer comes all the same, to nobody
        self.schedule.seen["cancelled request"] += 1
        self._take(self.core.cancel(request_id))
        return True

    def end_process(self, client: int) -> None:
        """A process is gone, and nothing of it writes any more."""
        self.schedule.note(f"client {client}", "gone")
        for request_id in [i for i, asked in self._asked.items() if asked.client == client]:
            self.cancel(request_id)
        writings = self.promises.writing.items()
        for reservation_id in [i for i, writing in writings if writing.writer == client]:
            self.schedule.seen["left in mid-fill"] += 1
            self.ask(client, AbortRequest(reservation_id))

    def check_process(self) -> None:
        """Nothing forks here."""

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        """The first place whose slot is another's now; their number if none is."""
        if self.core.slots.moves == moves:
            return len(places)
        generations = self.core.slots.generations
        for position, place in enumerate(places):
            if generations[place.offset_bytes // SLOT_ALIGNMENT_BYTES] != place.generation:
                return position
        return len(places)

    # -- steps -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Tell the core the time."""
        self._tick_at = None
        self._take(self.core.tick(self.schedule.clock.now()))

    def _take(self, step: Step) -> None:
        self.promises.presence.look()
        for request_id, answer in step.answers:
            if request_id in self._cancelled_scrubs:
                self._cancelled_scrubs.remove(request_id)
                continue
            asked = self._asked.pop(request_id, None)
            assert asked is not None, f"request {request_id} was answered twice, or never made"
            self.promises.see(asked.request, answer, asked.client)
            self.schedule.note(f"answer {asked.client}", _told(answer))
            self._count_wait(asked)
            asked.on_answer(answer)
        for transfer in step.transfers:
            self._start(transfer)
        self.promises.check(recounts=self._recounts)
        self._watch_deadline()

    def _count_wait(self, asked: _Asked) -> None:
        wait_seconds = getattr(asked.request, "wait_seconds", 0.0)
        if asked.due is None or not wait_seconds:
            return
        left = asked.due - self.schedule.clock.now()
        if left < wait_seconds - EPSILON_SECONDS:
            kind = "in time" if left > EPSILON_SECONDS else "at the deadline"
            self.schedule.seen[f"waited, {kind}"] += 1

    def _watch_deadline(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None or (self._tick_at is not None and self._tick_at <= deadline):
            return
        self._tick_at = deadline
        late = self.tier.faults.late_tick_seconds_max * self.tier.draw()
        self.schedule.at(deadline + late, self.tick)

    def _must_be_answered(self, request_id: int) -> None:
        asked = self._asked.get(request_id)
        assert asked is None, f"{type(asked.request).__name__} got no answer by its deadline"

    # -- transfers ---------------------------------------------------------------------------

    def _start(self, transfer: Transfer) -> None:
        seconds = self.tier.transfer_seconds()
        read_after = seconds * self.tier.draw()
        self.schedule.after(read_after, lambda: self._read(transfer, seconds - read_after))

    def _read(self, transfer: Transfer, seconds_left: float) -> None:
        """The bytes are read at this moment, and reported later."""
        place = transfer.place
        self.promises.check_in_place(place, "a part that we read")
        outcome = Outcome.OK
        checksum: int | None = self.tier.checksum(place)
        if self.tier.happens(self.tier.faults.failed_transfer):
            outcome, checksum = Outcome.UNAVAILABLE, None
        is_rotted = place.generation in self.tier.rotted
        self.schedule.after(
            seconds_left, lambda: self._complete(transfer, outcome, checksum, is_rotted=is_rotted)
        )

    def _complete(
        self, transfer: Transfer, outcome: Outcome, checksum: int | None, *, is_rotted: bool
    ) -> None:
        """Report a transfer; `is_rotted` where it read rot."""
        place = transfer.place
        self.schedule.note("transfer", f"{transfer.kind} {place.generation} {outcome} {checksum}")
        self.promises.check_in_place(place, "a part that we read")
        corrupt = self.core.counters["dropped_blocks", "corrupt"]
        self._take(self.core.complete(transfer, outcome, checksum))
        if self.core.counters["dropped_blocks", "corrupt"] > corrupt:
            self.promises.see_corrupt(place)
        if outcome is Outcome.OK and transfer.kind is TransferKind.CHECKSUM and not is_rotted:
            self._vouched.add(place.generation)
        elif outcome is Outcome.OK and is_rotted and place.generation in self._vouched:
            self.promises.see_scrubbed_rot(place)
        if self.tier.happens(self.tier.faults.repeated_completion):
            self._take(self.core.complete(transfer, outcome, checksum))


def _told(answer: Answer) -> str:
    """An answer in a few words, the same in every process."""
    name = type(answer).__name__
    match answer:
        case LeaseAnswer() | ReadAnswer():
            return f"{name} {answer.blocks} {_generations(answer.places)} {answer.reason}"
        case ReserveAnswer():
            generations = _generations(answer.places)
            return f"{name} {answer.reservation_id} {generations} {list(map(str, answer.outcomes))}"
        case ScrubAnswer():
            return f"{name} {answer.checked} {[key.hex()[:8] for key in answer.corrupt]}"
        case _:
            fields = [" ".join(map(str, f)) if isinstance(f, list) else str(f) for f in answer]
            return f"{name} {fields}"


def _generations(places: Sequence[Place | None]) -> list[int | None]:
    return [None if place is None else place.generation for place in places]
