"""Which failures of a store are a miss to an engine, and how they are told.

A cache that fails is a slower engine, never a broken one: these are counted, warned of once, and
not raised. Errors that say that the call was wrong are not among them.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvstore.errors import (
    KVStoreError,
    LeaseExpired,
    ReservationExpired,
    StoreBroken,
    StoreClosed,
    StoreForked,
    TierError,
)
from kvstore.types import Outcome

logger = logging.getLogger("kvstore.connectors.transformers")

#: The store is away, broken, or was too slow.
FAULTS = (LeaseExpired, ReservationExpired, StoreBroken, StoreClosed, StoreForked, TierError)

#: Reasons that a cache in good health gives every day.
_EVERYDAY = frozenset(
    {
        Outcome.OK,
        Outcome.PRESENT,
        Outcome.ABSENT,
        Outcome.EVICTED,
        Outcome.PENDING,
        Outcome.SLOWER_THAN_RECOMPUTE,
    }
)


def outcome_of(fault: KVStoreError) -> Outcome:
    """The reason of the miss that this fault is."""
    if isinstance(fault, LeaseExpired | ReservationExpired):
        return Outcome.EXPIRED
    return Outcome.UNAVAILABLE


class MissCounter:
    """Counts misses and refusals by reason; warns once of each reason that asks for attention."""

    def __init__(self) -> None:
        self.counts: Counter[Outcome] = Counter()

    def count(self, reason: Outcome, blocks: int, work: str) -> None:
        """Count `blocks` that were not loaded, or not stored (`work` says which)."""
        if reason not in _EVERYDAY and not self.counts[reason]:
            logger.warning(
                "%s: %s. The model computes what is missing; its answers are not affected. "
                "Further cases are counted, not logged.",
                work,
                reason,
            )
        self.counts[reason] += blocks
