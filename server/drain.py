"""What a daemon that is about to end still answers: it grants nothing new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.messages import LeaseAnswer, LeaseRequest, ReserveAnswer, ReserveRequest
from kvstore.types import Outcome

if TYPE_CHECKING:
    from kvstore.messages import Answer, Request


def refusal(request: Request, now: float, moves: int) -> Answer | None:
    """The answer `unavailable` to whoever asks for a lease or for room; None for all others.

    Matches and reads go on: they hold nothing.
    """
    match request:
        case LeaseRequest():
            reason = Outcome.UNAVAILABLE if request.keys else None
            return LeaseAnswer(0, 0, [], now, {}, reason, moves)
        case ReserveRequest():
            parts = len(request.blocks) - request.start * request.width
            outcomes = [Outcome.UNAVAILABLE] * (parts // request.width)
            return ReserveAnswer(0, outcomes, [None] * parts, [None] * parts, now)
        case _:
            return None
