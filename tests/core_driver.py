"""A core without a runner: no tier, no thread, time by hand, a recount after every event."""

from __future__ import annotations

from typing import Any

from kvstore.clock import FakeClock
from kvstore.messages import (
    AbortRequest,
    BlockSpec,
    CommitRequest,
    DeleteRequest,
    LeaseRequest,
    MatchRequest,
    ReleaseRequest,
    RenewRequest,
    Request,
    ReserveRequest,
    ScrubRequest,
    Step,
    Transfer,
    TransferKind,
)
from kvstore.policy import LruPolicy
from kvstore.settings import DEFAULT_SETTINGS, CoreSettings
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import SINGLE_DOMAIN, Outcome

UNIT_BYTES = 4096
#: What a checksum transfer reports unless a test says otherwise.
CHECKSUM = 77


def key_of(name: str) -> bytes:
    """A storage key that can be read."""
    return name.encode().ljust(32, b".")


def chain(name: str, blocks: int, *, units: int = 1, partial: bool = False) -> list[BlockSpec]:
    """A sequence of blocks of 16 tokens; the last one partial, of 5, where asked for."""
    specs = []
    for i in range(blocks):
        is_partial = partial and i == blocks - 1
        parent = key_of(f"{name}{i - 1}") if i else None
        tokens = 5 if is_partial else 16
        specs.append(
            BlockSpec(key_of(f"{name}{i}"), parent, units * UNIT_BYTES, tokens, is_partial)
        )
    return specs


def keys(specs: list[BlockSpec]) -> list[bytes]:
    return [spec.key for spec in specs]


class Driver:
    """Requests by their short names; answers by request id, as a runner would keep them.

    Transfers are completed at once unless `holds_transfers`. Every call recounts the core. All of
    the tier may be leased: tests of that cap set their own.
    """

    def __init__(
        self,
        units: int,
        *,
        holds_transfers: bool = False,
        entry_bytes: int = 0,
        settings: CoreSettings = DEFAULT_SETTINGS,
    ) -> None:
        self.clock = FakeClock()
        self.core = Core(
            self.clock,
            Slots(units * UNIT_BYTES),
            LruPolicy(),
            settings=settings,
            entry_bytes=entry_bytes,
        )
        self.core._leases.cap_bytes = units * UNIT_BYTES
        self.holds_transfers = holds_transfers
        self.transfers: list[Transfer] = []
        self.answers: dict[int, Any] = {}
        self.last_id = 0

    def begin(self, request: Request) -> int:
        """Start a request; its answer is in `answers`, now or later."""
        self.last_id += 1
        self._take(self.core.begin(self.last_id, request))
        return self.last_id

    def ask(self, request: Request) -> Any:
        """The answer of a request that does not wait."""
        return self.answers.pop(self.begin(request))

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, then tell the core."""
        self.clock.advance(seconds)
        self._take(self.core.tick(self.clock.now()))

    def complete(self, outcome: Outcome = Outcome.OK, checksum: int | None = CHECKSUM) -> None:
        """Complete the transfer that was started first."""
        self._take(self.core.complete(self.transfers.pop(0), outcome, checksum))

    def _take(self, step: Step) -> None:
        self.core.check()
        for request_id, answer in step.answers:
            assert request_id not in self.answers, f"{request_id} was answered twice"
            self.answers[request_id] = answer
        self.transfers += step.transfers
        while self.transfers and not self.holds_transfers:
            self.complete()

    # Requests.

    def cancel(self, request_id: int) -> None:
        """Forget a request that waits."""
        self._take(self.core.cancel(request_id))

    def match(self, specs: list[BlockSpec], *, domain: bytes = SINGLE_DOMAIN) -> Any:
        return self.ask(MatchRequest(domain, keys(specs), 0.0))

    def begin_match(self, specs: list[BlockSpec], wait_seconds: float) -> int:
        return self.begin(MatchRequest(SINGLE_DOMAIN, keys(specs), wait_seconds))

    def lease(
        self, specs: list[BlockSpec], ttl_seconds: float = 30.0, *, domain: bytes = SINGLE_DOMAIN
    ) -> Any:
        return self.ask(self._lease_request(specs, ttl_seconds, 0.0, domain))

    def begin_lease(
        self, specs: list[BlockSpec], wait_seconds: float, ttl_seconds: float = 30.0
    ) -> int:
        return self.begin(self._lease_request(specs, ttl_seconds, wait_seconds, SINGLE_DOMAIN))

    def release(self, lease: Any) -> bool:
        was_held: bool = self.ask(ReleaseRequest(lease.lease_id)).was_held
        return was_held

    def renew(self, lease: Any, ttl_seconds: float) -> float | None:
        deadline: float | None = self.ask(RenewRequest(lease.lease_id, ttl_seconds)).deadline
        return deadline

    def reserve(
        self,
        specs: list[BlockSpec],
        start: int = 0,
        ttl_seconds: float = 30.0,
        *,
        domain: bytes = SINGLE_DOMAIN,
    ) -> Any:
        return self.ask(ReserveRequest(domain, specs, start, ttl_seconds, 0.0, None))

    def begin_reserve(
        self, specs: list[BlockSpec], wait_seconds: float, ttl_seconds: float = 30.0
    ) -> int:
        return self.begin(ReserveRequest(SINGLE_DOMAIN, specs, 0, ttl_seconds, wait_seconds, None))

    def commit(self, reservation: Any, count: int | None = None) -> Outcome:
        count = len(reservation.outcomes) if count is None else count
        answer = self.ask(CommitRequest(reservation.reservation_id, count, 0))
        outcome: Outcome = answer.outcome
        return outcome

    def abort(self, reservation: Any) -> bool:
        was_open: bool = self.ask(AbortRequest(reservation.reservation_id)).was_open
        return was_open

    def put(self, specs: list[BlockSpec], start: int = 0, *, domain: bytes = SINGLE_DOMAIN) -> Any:
        """Reserve without waiting and commit; the outcomes of the reservation."""
        reservation = self.reserve(specs, start, domain=domain)
        assert self.commit(reservation) is Outcome.OK
        return reservation.outcomes

    def delete(self, specs: list[BlockSpec], *, domain: bytes = SINGLE_DOMAIN) -> list[Outcome]:
        outcomes: list[Outcome] = self.ask(DeleteRequest(domain, keys(specs))).outcomes
        return outcomes

    def begin_scrub(self, specs: list[BlockSpec]) -> int:
        return self.begin(ScrubRequest(SINGLE_DOMAIN, keys(specs)))

    def held(self, specs: list[BlockSpec], *, domain: bytes = SINGLE_DOMAIN) -> str:
        """Which blocks are readable, each by itself: "1" or "0" in order."""
        return "".join(str(self.match([spec], domain=domain).blocks) for spec in specs)

    def usage(self, name: str) -> int:
        """Units of the tier in a state, or free."""
        units, rest = divmod(self.core.usage()[f"{name}_bytes"], UNIT_BYTES)
        assert not rest
        return units

    def _lease_request(
        self, specs: list[BlockSpec], ttl_seconds: float, wait_seconds: float, domain: bytes
    ) -> LeaseRequest:
        tokens = sum(spec.token_count for spec in specs)
        return LeaseRequest(domain, keys(specs), tokens, ttl_seconds, wait_seconds)


__all__ = ["CHECKSUM", "UNIT_BYTES", "Driver", "TransferKind", "chain", "key_of", "keys"]
