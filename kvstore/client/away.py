"""What a session hears while no daemon answers: misses, each with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.errors import DaemonUnavailable
from kvstore.messages import (
    AbortAnswer,
    AbortRequest,
    AdoptRequest,
    CommitAnswer,
    CommitRequest,
    DeleteAnswer,
    DeleteRequest,
    LeaseAnswer,
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
    ReserveAnswer,
    ReserveRequest,
    ScrubAnswer,
    ScrubRequest,
    TokenAnswer,
    TokenRequest,
    UnpinAnswer,
    UnpinRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.buffers import Bytes
    from kvstore.client.link import Link
    from kvstore.clock import Clock
    from kvstore.messages import Answer, Request
    from kvstore.tiers.base import Piece
    from kvstore.types import Outcome, Place


def away_answer(request: Request, reason: Outcome, now: float) -> Answer:
    """The answer of nobody to a request: nothing found, nothing granted, and why."""
    return _ANSWERS[type(request)](request, reason, now)


def _reserve(request: ReserveRequest, reason: Outcome, now: float) -> Answer:
    parts = len(request.blocks) - request.start * request.width
    nothing: list[None] = [None] * parts
    return ReserveAnswer(0, [reason] * (parts // request.width), [*nothing], [*nothing], now)


def _lease(request: LeaseRequest, reason: Outcome, now: float) -> Answer:
    return LeaseAnswer(0, 0, [], now, {}, reason if request.keys else None, 0)


_ANSWERS: dict[type, Callable[[Any, Outcome, float], Answer]] = {
    MatchRequest: lambda r, why, _: MatchAnswer(0, {}, why if r.keys else None),
    LeaseRequest: _lease,
    AdoptRequest: lambda _, why, now: LeaseAnswer(0, 0, [], now, {}, why, 0),
    TokenRequest: lambda _r, _why, _: TokenAnswer(None),
    ReadRequest: lambda r, why, _: ReadAnswer(0, [], why if r.keys else None, 0),
    ReserveRequest: _reserve,
    CommitRequest: lambda _r, why, _: CommitAnswer(why),
    DeleteRequest: lambda r, why, _: DeleteAnswer([why] * len(r.keys)),
    PinRequest: lambda r, why, _: PinAnswer([why] * len(r.keys)),
    UnpinRequest: lambda r, why, _: UnpinAnswer([why] * len(r.keys)),
    ScrubRequest: lambda _r, _why, _: ScrubAnswer(0, []),
    RenewRequest: lambda _r, _why, _: RenewAnswer(None),
    ReleaseRequest: lambda _r, _why, _: ReleaseAnswer(was_held=False),
    AbortRequest: lambda _r, _why, _: AbortAnswer(was_open=False),
    LostRequest: lambda _r, _why, _: LostAnswer(),
}


class AwayLink:
    """A way to nowhere."""

    def __init__(self, clock: Clock, reason: Outcome) -> None:
        self.clock = clock
        self._reason = reason

    def attached(self) -> Link:
        """Itself."""
        return self

    def call(self, request: Request) -> Answer:
        """A miss, at once."""
        return away_answer(request, self._reason, self.clock.now())

    def call_later(self, request: Request, memory: Sequence[Bytes | None]) -> None:
        """Nobody would hear it."""

    def check_process(self) -> None:
        """Nothing is held here, in any process."""

    def view(self, place: Place) -> NoReturn:
        """There is no memory; nobody was given a place here."""
        raise DaemonUnavailable(f"no daemon: nothing lies at {place.offset_bytes}")

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Nothing is read."""
        return [self._reason] * len(batch)

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Nothing is written."""
        return [self._reason] * len(batch)

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        """The first, if any: they are nobody's."""
        del moves
        return 0 if places else len(places)
