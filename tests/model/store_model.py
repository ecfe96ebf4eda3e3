"""What an embedded store must answer, as dicts: everything but which blocks it chose to evict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.types import Outcome

#: A lease's reads count until this long before its deadline.
MARGIN_SECONDS = 0.010


class LeaseRecord:
    """A lease as its holder knows it, with the views that it must keep whole."""

    def __init__(self, lease: Any, held: dict[Any, int], now: float, ttl_seconds: float) -> None:
        self.lease = lease
        self.held = held  # key -> writer, in order
        self.deadline = now + ttl_seconds
        self.views = lease.views


class ReservationRecord:
    """A reservation as its holder knows it."""

    def __init__(self, reservation: Any, keys: list[Any], writer: int) -> None:
        self.reservation = reservation
        self.keys = keys
        self.writer = writer
        self.committed = 0
        self.deadline = reservation.deadline

    def granted(self, start: int, end: int) -> list[Any]:
        pairs = zip(self.keys[start:end], self.reservation.outcomes[start:end], strict=True)
        return [key for key, outcome in pairs if outcome is Outcome.GRANTED]


class StoreModel:
    """Keys here are BlockKeys, which name their namespace."""

    def __init__(self) -> None:
        self.stored: dict[Any, int] = {}  # key -> who wrote what readers must find
        self.evicted: set[Any] = set()
        self.pending: dict[Any, ReservationRecord] = {}
        self.leases: list[LeaseRecord] = []
        self.reservations: list[ReservationRecord] = []

    def settle(self, now: float) -> None:
        """Let the deadlines pass that have come."""
        for record in self.reservations:
            if record.deadline <= now:
                self.forget(record)

    def forget(self, record: ReservationRecord) -> None:
        """What a reservation did not commit is not being written any more."""
        for key in [key for key, writer in self.pending.items() if writer is record]:
            del self.pending[key]

    def prefix(self, keys: list[Any]) -> tuple[int, Outcome | None]:
        """Blocks of the longest prefix, and why the next one is missing."""
        for position, key in enumerate(keys):
            if key not in self.stored:
                return position, self.why_missing(key)
        return len(keys), None

    def leasable(
        self, keys: list[Any], now: float, cap_bytes: int, size_of: Callable[[Any], int]
    ) -> tuple[int, Outcome | None]:
        """Blocks of the longest prefix that may be leased: all leased bytes have a cap."""
        live = [record for record in self.leases if record.deadline > now]
        leased = {block for record in live for block in record.held.items()}
        room_bytes = cap_bytes - sum(size_of(key) for key, _ in leased)
        blocks, reason = self.prefix(keys)
        for position, key in enumerate(keys[:blocks]):
            if (key, self.stored[key]) not in leased:
                room_bytes -= size_of(key)
                if room_bytes < 0:
                    return position, Outcome.BUSY
        return blocks, reason

    def why_missing(self, key: Any) -> Outcome:
        if key in self.pending:
            return Outcome.PENDING
        return Outcome.EVICTED if key in self.evicted else Outcome.ABSENT

    def expect_batch(self, keys: list[Any], outcomes: list[Outcome], granted: Outcome) -> None:
        """What a writer may be told of each block; after the first `full` nothing is granted."""
        is_full = False
        for key, outcome in zip(keys, outcomes, strict=True):
            if key in self.stored:
                assert outcome is Outcome.PRESENT
            elif key in self.pending:
                assert outcome is Outcome.PENDING
            else:
                assert outcome is Outcome.FULL or (outcome is granted and not is_full)
                is_full = is_full or outcome is Outcome.FULL

    def publish(self, keys: list[Any], writer: int) -> None:
        for key in keys:
            assert key not in self.stored
            self.stored[key] = writer
            self.pending.pop(key, None)
            self.evicted.discard(key)

    def delete(self, keys: list[Any]) -> list[Outcome]:
        """What a delete answers: a block is hidden once."""
        outcomes = []
        for key in keys:
            was_stored = self.stored.pop(key, None) is not None
            outcomes.append(Outcome.OK if was_stored else Outcome.ABSENT)
        return outcomes

    def evict(self, keys: set[Any], now: float) -> None:
        """The store chose these; none may be leased."""
        leased = {key for r in self.leases if r.deadline > now for key in r.held}
        for key in keys:
            # A leased key may be stored anew after its delete, and that one may leave.
            writers = {r.held[key] for r in self.leases if r.deadline > now and key in r.held}
            assert key not in leased or self.stored[key] not in writers, f"{key} was leased"
            del self.stored[key]
            self.evicted.add(key)
