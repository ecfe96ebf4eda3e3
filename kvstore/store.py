"""The core: what is where, who holds it, what leaves. It decides; its runner does.

A synchronous state machine without I/O. Every call returns a `Step`: answers to requests, this
one's or earlier ones', and transfers that the runner is to carry out and report with `complete`.
The caller serialises all calls.

    begin(request)  ──>  answers now, or waits for blocks or for room until its deadline
    complete(...)   ──>  a transfer's bytes were read; may free what it held
    tick(now)       ──>  deadlines: leases and reservations end, waiting requests are answered

docs/lease.md has the life of a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from kvstore.audit import audit
from kvstore.inspection import Inspection
from kvstore.lease import Leases, places_of
from kvstore.messages import (
    AbortAnswer,
    AbortRequest,
    AdoptRequest,
    Answer,
    CommitAnswer,
    CommitRequest,
    DeleteAnswer,
    DeleteRequest,
    EndHolderAnswer,
    EndHolderRequest,
    LeaseRequest,
    LostAnswer,
    LostRequest,
    MatchAnswer,
    MatchRequest,
    PinAnswer,
    PinRequest,
    ReadAnswer,
    ReadRequest,
    ReleaseAnswer,
    ReleaseRequest,
    RenewAnswer,
    RenewRequest,
    Request,
    ReserveRequest,
    ScrubAnswer,
    ScrubRequest,
    Step,
    TokenAnswer,
    TokenRequest,
    UnpinAnswer,
    UnpinRequest,
)
from kvstore.metrics import Counters
from kvstore.prefix import find_prefix
from kvstore.reservation import Reservations
from kvstore.residency import Residency
from kvstore.retention import Retention
from kvstore.settings import DEFAULT_SETTINGS
from kvstore.transfers import Transfers
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.audit import Audit
    from kvstore.clock import Clock
    from kvstore.messages import Transfer
    from kvstore.policy import Policy
    from kvstore.prefix import Prefix
    from kvstore.settings import CoreSettings
    from kvstore.slots import Slots


#: Evictions in one step; the next step is due at once if that was not enough.
_TRIM_BLOCKS = 64


class _Waiting(NamedTuple):
    """A request that is not answered yet, and the time at which it takes what there is."""

    request: Request
    deadline: float


class Core:
    """The state of one process's tiers: today one, in memory.

    `clock` is asked for the time and never waited on. `slots` describes the tier's bytes, which
    this class never sees. Above the high watermark it evicts by itself, down to the low one. What
    it knows of each block counts as `entry_bytes`, of which a sixteenth of the capacity is free.
    `token_secret`, of up to 64 bytes, makes the tokens of its leases its own.
    """

    def __init__(  # noqa: PLR0913  (all but three have defaults)
        self,
        clock: Clock,
        slots: Slots,
        policy: Policy,
        *,
        tier: str = "dram",
        settings: CoreSettings = DEFAULT_SETTINGS,
        entry_bytes: int = 0,
        token_secret: bytes = b"",
    ) -> None:
        self.counters = Counters()
        self._clock = clock
        self._blocks = Residency(
            slots,
            policy,
            self.counters,
            tier,
            history_entries=settings.history_entries,
            entry_bytes=entry_bytes,
        )
        high, low = settings.watermark_high, settings.watermark_low
        self._high_bytes = int(high * slots.capacity_bytes) if high < 1.0 else None
        self._low_bytes = int(low * slots.capacity_bytes)
        self._retention = Retention(self._blocks, settings)
        self._leases = Leases(self._blocks, self.counters, settings, token_secret)
        self._reservations = Reservations(self._blocks, self._retention, self.counters)
        self._holders = (self._leases, self._reservations, self._retention)
        self._transfers = Transfers(self._blocks)
        # First come, first served: dicts keep their order.
        self._waiting_for_blocks: dict[int, _Waiting] = {}
        self._waiting_for_room: dict[int, _Waiting] = {}
        self._must_trim = False
        self._state_when_retried: tuple[int, ...] = ()
        self._step = Step([], [])
        self._handlers: dict[type, Callable[[int, Request, float], None]] = {
            MatchRequest: self._begin_waitable,
            LeaseRequest: self._begin_waitable,
            ReadRequest: self._read,
            ReserveRequest: self._begin_waitable,
            AdoptRequest: self._adopt,
            TokenRequest: self._token,
            EndHolderRequest: self._end_holder,
            RenewRequest: self._renew,
            ReleaseRequest: self._release,
            LostRequest: self._count_lost,
            CommitRequest: self._commit,
            AbortRequest: self._abort,
            DeleteRequest: self._delete,
            PinRequest: self._pin,
            UnpinRequest: self._unpin,
            ScrubRequest: self._scrub,
        }

    # -- events ------------------------------------------------------------------------------

    def begin(self, request_id: int, request: Request) -> Step:
        """Start a request. Its answer is in this step or, if it waits, in a later one."""
        now = self._clock.now()
        self._expire(now)
        self._handlers[type(request)](request_id, request, now)
        return self._finish(now)

    def complete(self, transfer: Transfer, outcome: Outcome, checksum: int | None) -> Step:
        """A transfer has ended; its bytes are not touched any more. `checksum` where `ok`."""
        now = self._clock.now()
        self._expire(now)
        answered = self._transfers.complete(transfer, outcome, checksum)
        if answered is not None:
            self._answer(*answered)
        return self._finish(now)

    def tick(self, now: float) -> Step:
        """End what is due at `now`. Call it at `next_deadline()` or any time after."""
        self._expire(now)
        return self._finish(now)

    def extend(self, usable_bytes: int) -> Step:
        """More of the tier's memory is there; see `Slots.extend`."""
        now = self._clock.now()
        self._expire(now)
        self._blocks.slots.extend(usable_bytes)
        self._state_when_retried = ()
        return self._finish(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, at the earliest; None if never."""
        if self._must_trim:
            return self._clock.now()
        times = [holder.deadlines.next() for holder in self._holders]
        for waiting in (self._waiting_for_blocks, self._waiting_for_room):
            times.extend(item.deadline for item in waiting.values())
        return min((time for time in times if time is not None), default=None)

    def cancel(self, request_id: int) -> Step:
        """Forget a request that has no answer yet, and serve those who waited behind it."""
        for waiting in (self._waiting_for_blocks, self._waiting_for_room):
            waiting.pop(request_id, None)
        self._transfers.cancel(request_id)
        self._state_when_retried = ()  # somebody else is the first in line now
        now = self._clock.now()
        self._expire(now)
        return self._finish(now)

    def check(self) -> Audit:
        """Recount everything. Raises InvariantViolated with each thing that does not add up."""
        return audit(
            blocks=self._blocks,
            leases=self._leases,
            retention=self._retention,
            reservations=self._reservations,
            entries_in_transfer=self._transfers.entries(),
        )

    def inspection(self) -> Inspection:
        """What a person may look at, block by block and lease by lease."""
        return Inspection(self._blocks, self._leases, self._reservations)

    @property
    def slots(self) -> Slots:
        """The slots of the tier, of which readers may read `generations` and `moves`."""
        return self._blocks.slots

    def usage(self) -> dict[str, int]:
        """The tier's bytes: capacity, free, largest free, slots by state, and the index."""
        return self._blocks.usage()

    def has_holder(self, holder: int) -> bool:
        """Does this holder have a lease or a reservation, or memory that it may still write to?"""
        return self._leases.has_holder(holder) or self._reservations.has_holder(holder)

    def resident_keys(self) -> list[tuple[bytes, bytes]]:
        """(domain, key) of every block that a reader could find."""
        return [(e.domain, e.key) for e in self._blocks.index if e.is_ready]

    # -- time and waiting --------------------------------------------------------------------

    def _finish(self, now: float) -> Step:
        if self._waiting_for_blocks or self._waiting_for_room:
            self._retry_waiting(now)
        if self._high_bytes is not None:
            self._trim(self._high_bytes)
        step = self._step
        self._step = Step([], [])
        return step

    def _trim(self, high_bytes: int) -> None:
        if self._must_trim or self._blocks.used_bytes > high_bytes:
            self._must_trim = self._blocks.trim(self._low_bytes, _TRIM_BLOCKS)

    def _answer(self, request_id: int, answer: Answer) -> None:
        self._step.answers.append((request_id, answer))

    def _begin_waitable(self, request_id: int, request: Request, now: float) -> None:
        request = cast("MatchRequest | LeaseRequest | ReadRequest | ReserveRequest", request)
        is_final = request.wait_seconds <= 0
        is_writer = isinstance(request, ReserveRequest)
        answer = None
        if is_final or not (is_writer and self._waiting_for_room):  # else behind the others
            answer = self._attempt(request, now, is_final=is_final)
        if answer is not None:
            self._answer(request_id, answer)
        else:
            waiting = self._waiting_for_room if is_writer else self._waiting_for_blocks
            waiting[request_id] = _Waiting(request, now + request.wait_seconds)
            self._state_when_retried = ()  # it was not among those who were tried then

    def _read(self, request_id: int, request: Request, now: float) -> None:
        """Like other requests that may wait, and by a shorter way where it need not."""
        request = cast("ReadRequest", request)
        prefix = find_prefix(self._blocks.index, request)
        if prefix.reason is None:
            self._answer(request_id, self._read_answer(request, prefix))
        else:
            self._begin_waitable(request_id, request, now)

    def _read_answer(self, request: ReadRequest, prefix: Prefix) -> ReadAnswer:
        blocks, reason = prefix.blocks, prefix.reason
        self.counters.add("lookup_tokens", request.tokens)
        if reason is not None:
            self.counters.add("misses", len(request.keys) - blocks, reason)
        self._blocks.hit(prefix, request.tokens, len(request.keys))
        places = places_of(prefix, 1 + len(request.more))
        return ReadAnswer(blocks, places, reason, self._blocks.slots.moves)

    def _attempt(self, request: Request, now: float, *, is_final: bool) -> Answer | None:
        """The answer as things are; None where waiting may bring a better one."""
        if isinstance(request, ReserveRequest):
            return self._reservations.reserve(request, now, can_wait=not is_final)
        request = cast("MatchRequest | LeaseRequest | ReadRequest", request)
        prefix = find_prefix(self._blocks.index, request)
        if prefix.reason is Outcome.PENDING and not is_final:
            return None
        if isinstance(request, LeaseRequest):
            return self._leases.grant(request, prefix, now, can_wait=not is_final)
        if isinstance(request, ReadRequest):
            return self._read_answer(request, prefix)
        by_tier = {self._blocks.tier: prefix.blocks} if prefix.blocks else {}
        return MatchAnswer(prefix.blocks, by_tier, prefix.reason)

    def _retry_waiting(self, now: float) -> None:
        # Most events change nothing that anybody waits for.
        if self._state_of_room() == self._state_when_retried:
            return
        for request_id, (request, _) in list(self._waiting_for_blocks.items()):
            answer = self._attempt(request, now, is_final=False)
            if answer is not None:
                del self._waiting_for_blocks[request_id]
                self._answer(request_id, answer)
        # Whoever waits for room longest is served first, also before smaller requests.
        for request_id, (request, _) in list(self._waiting_for_room.items()):
            answer = self._attempt(request, now, is_final=False)
            if answer is None:
                break
            del self._waiting_for_room[request_id]
            self._answer(request_id, answer)
        self._state_when_retried = self._state_of_room()

    def _state_of_room(self) -> tuple[int, ...]:
        """What has to change before a request that waits can fare better."""
        blocks = self._blocks
        leased_bytes = self._leases.leased_bytes
        return blocks.slots.moves, blocks.changes, blocks.reclaimable_bytes, leased_bytes

    def _expire(self, now: float) -> None:
        for holder in self._holders:
            if holder.deadlines.earliest <= now:
                holder.expire(now)
        for waiting in (self._waiting_for_blocks, self._waiting_for_room):
            due = [request_id for request_id, item in waiting.items() if item.deadline <= now]
            for request_id in due:
                request = waiting.pop(request_id).request
                answer = self._attempt(request, now, is_final=True)
                self._answer(request_id, cast("Answer", answer))

    # -- requests that are answered at once --------------------------------------------------

    def _renew(self, request_id: int, request: Request, now: float) -> None:
        request = cast("RenewRequest", request)
        seconds, holder = request.ttl_seconds, request.holder
        deadline = self._leases.renew(request.lease_id, holder, seconds, now)
        self._answer(request_id, RenewAnswer(deadline))

    def _release(self, request_id: int, request: Request, _now: float) -> None:
        request = cast("ReleaseRequest", request)
        was_held = self._leases.release(request.lease_id, request.holder)
        self._answer(request_id, ReleaseAnswer(was_held))

    def _adopt(self, request_id: int, request: Request, now: float) -> None:
        answer = self._leases.adopt(cast("AdoptRequest", request), now)
        self._answer(request_id, answer)

    def _token(self, request_id: int, request: Request, _now: float) -> None:
        lease_id, holder = cast("TokenRequest", request)
        self._answer(request_id, TokenAnswer(self._leases.token(lease_id, holder)))

    def _end_holder(self, request_id: int, request: Request, _now: float) -> None:
        holder = cast("EndHolderRequest", request).holder
        leases = self._leases.end_holder(holder)
        reservations = self._reservations.end_holder(holder)
        self._answer(request_id, EndHolderAnswer(leases, reservations))

    def _count_lost(self, request_id: int, request: Request, _now: float) -> None:
        request = cast("LostRequest", request)
        self.counters.add("lost_blocks", request.blocks, request.outcome)
        self._answer(request_id, LostAnswer())

    def _commit(self, request_id: int, request: Request, now: float) -> None:
        request = cast("CommitRequest", request)
        self.counters.add("differing_puts", request.differing_puts)
        published = self._reservations.commit(
            request.reservation_id, request.holder, request.blocks, now
        )
        self._step.transfers.extend(self._transfers.start_checksums(published or (), request_id))
        outcome = Outcome.EXPIRED if published is None else Outcome.OK
        self._answer(request_id, CommitAnswer(outcome))

    def _abort(self, request_id: int, request: Request, _now: float) -> None:
        request = cast("AbortRequest", request)
        was_open = self._reservations.abort(request.reservation_id, request.holder)
        self._answer(request_id, AbortAnswer(was_open))

    def _delete(self, request_id: int, request: Request, _now: float) -> None:
        request = cast("DeleteRequest", request)
        outcomes = []
        for key in request.keys:
            entry = self._blocks.index.find_ready(request.domain, key)
            if entry is not None:
                self._blocks.drop(entry, None)
            outcomes.append(Outcome.ABSENT if entry is None else Outcome.OK)
        self._answer(request_id, DeleteAnswer(outcomes))

    def _pin(self, request_id: int, request: Request, now: float) -> None:
        self._answer(request_id, PinAnswer(self._retention.pin(cast("PinRequest", request), now)))

    def _unpin(self, request_id: int, request: Request, _now: float) -> None:
        outcomes = self._retention.unpin(cast("UnpinRequest", request))
        self._answer(request_id, UnpinAnswer(outcomes))

    def _scrub(self, request_id: int, request: Request, _now: float) -> None:
        transfers = self._transfers.start_scrub(request_id, cast("ScrubRequest", request))
        self._step.transfers.extend(transfers)
        if not transfers:
            self._answer(request_id, ScrubAnswer(0, []))
