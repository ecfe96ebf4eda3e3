"""Operators: they look, delete, pin, unpin and scrub, here and there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.messages import (
    DeleteRequest,
    MatchRequest,
    PinKind,
    PinRequest,
    ScrubRequest,
    UnpinRequest,
)
from tests.sim.clients import Call, Client, Script, Sleep

if TYPE_CHECKING:
    from kvstore.messages import Request
    from tests.sim.traffic import Prompt


class Operator(Client):
    """Somebody with a shell."""

    def operate(self, actions: int) -> Script:
        """One thing after the other, on prompts that somebody talked about."""
        for _ in range(actions):
            yield Sleep(self.rng.uniform(0.0, 0.5))
            request = self._next(self.conversations.recent())
            yield Call(request, self._patience() if isinstance(request, MatchRequest) else None)

    def _next(self, prompt: Prompt) -> Request:
        rng, domain = self.rng, self.domain
        parts = rng.choice([prompt.model.whole, *prompt.model.ranks])
        all_keys = parts.all_keys(prompt.keys)
        width = parts.width
        keys = all_keys[width * rng.randrange(len(prompt.keys)) :]
        if rng.random() < 0.2:  # one part of a model that may have several
            keys, width = keys[rng.randrange(width) :: width], 1
        match rng.randrange(8):
            case 0 | 1:
                return DeleteRequest(domain, keys)
            case 2:
                return PinRequest(domain, keys, PinKind.SOFT, rng.choice([None, 2.0]), width)
            case 3:
                return PinRequest(domain, keys, PinKind.HARD, rng.choice([None, 2.0]), width)
            case 4:
                return UnpinRequest(domain, all_keys)
            case 5:
                found = parts.lookup(prompt.keys)
                return MatchRequest(
                    domain, found.keys, self._wait(), found.first_needed, found.more
                )
            case _:
                resident = self.runner.core.resident_keys()
                return ScrubRequest(domain, [key for owner, key in resident if owner == domain])
