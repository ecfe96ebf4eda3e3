"""Reservations: slots that one writer fills, invisible until it commits."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from kvstore.deadlines import Deadlines
from kvstore.messages import ReserveAnswer
from kvstore.slots import slot_size_bytes
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.index import Entry
    from kvstore.messages import BlockSpec, ReserveRequest
    from kvstore.metrics import Counters
    from kvstore.residency import Residency
    from kvstore.retention import Retention


class ReservationState(StrEnum):
    """Whether a writer may still commit."""

    OPEN = "open"
    EXPIRED = "expired"  # too late to commit; its memory is held until the writer is done


class Reservation:
    """What one writer was granted, position by position.

        position   0        1        2        3        4
        outcome    present  granted  granted  pending  granted
        entry      theirs   ours     ours     None     ours
                   |<--- committed --->|

    Positions before `committed` are visible and no longer the writer's.
    """

    __slots__ = (
        "committed",
        "deadline",
        "entries",
        "expire_seconds",
        "outcomes",
        "prefix",
        "reservation_id",
        "state",
    )

    def __init__(
        self,
        reservation_id: int,
        prefix: list[Entry],
        deadline: float,
        expire_seconds: float | None,
    ) -> None:
        self.reservation_id = reservation_id
        self.expire_seconds = expire_seconds  # the TTL of its blocks, from their commit on
        self.prefix = prefix  # resident blocks before the first position
        self.entries: list[Entry | None] = []
        self.outcomes: list[Outcome] = []
        self.committed = 0
        self.deadline = deadline
        self.state = ReservationState.OPEN

    def granted(self, start: int, end: int) -> list[Entry]:
        """The writer's own entries of positions start..end."""
        pairs = zip(self.entries[start:end], self.outcomes[start:end], strict=True)
        return [e for e, outcome in pairs if e is not None and outcome is Outcome.GRANTED]

    def uncommitted(self) -> list[Entry]:
        """The writer's own entries that never became visible."""
        return self.granted(self.committed, len(self.entries))

    def answer(self) -> ReserveAnswer:
        """What the writer is told."""
        pairs = list(zip(self.entries, self.outcomes, strict=True))
        return ReserveAnswer(
            self.reservation_id,
            list(self.outcomes),
            [e.place if e and outcome is Outcome.GRANTED else None for e, outcome in pairs],
            [e.checksum if e and outcome is Outcome.PRESENT else None for e, outcome in pairs],
            self.deadline,
        )


class Reservations:
    """All reservations of a core."""

    def __init__(self, blocks: Residency, retention: Retention, counters: Counters) -> None:
        self._blocks = blocks
        self._retention = retention
        self._counters = counters
        self._reservations: dict[int, Reservation] = {}
        self.deadlines = Deadlines(self._deadline_of)
        self._last_id = 0

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._reservations.values())

    def reserve(
        self, request: ReserveRequest, now: float, *, can_wait: bool
    ) -> ReserveAnswer | None:
        """Grant what is missing and fits; None where `can_wait` and waiting may bring more."""
        blocks, domain, start = self._blocks, request.domain, request.start
        prefix_keys = [spec.key for spec in request.blocks[:start]]
        prefix = [e for key in prefix_keys if (e := blocks.find_ready(domain, key)) is not None]
        batch = request.blocks[start:]
        if not batch:
            return ReserveAnswer(0, [], [], [], now)
        found = [blocks.index.find(domain, spec.key) for spec in batch]
        present = [e for e in found if e is not None and e.is_ready]
        missing_bytes = sum(
            slot_size_bytes(spec.length_bytes)
            for spec, entry in zip(batch, found, strict=True)
            if entry is None
        )
        # Making room for the tail of a prefix must not evict its beginning.
        protected = prefix + present
        blocks.add_users(protected)
        can_wait = can_wait and missing_bytes <= blocks.slots.capacity_bytes
        if can_wait and missing_bytes > blocks.obtainable_bytes():
            blocks.drop_users(protected)
            return None
        self._last_id += 1
        deadline = now + request.ttl_seconds
        reservation = Reservation(self._last_id, prefix, deadline, request.expire_seconds)
        for spec in batch:
            self._reserve_one(domain, spec, reservation)
        blocks.drop_users(protected)
        if can_wait and Outcome.FULL in reservation.outcomes:
            # Enough bytes, but what is protected lies between them: wait with empty hands.
            for entry in reversed(reservation.uncommitted()):
                blocks.withdraw(entry, is_held=False)
            return None
        for outcome in reservation.outcomes:
            if outcome.is_miss:
                self._counters.add("refused_blocks", 1, outcome)
        self._reservations[reservation.reservation_id] = reservation
        self.deadlines.add(reservation.deadline, reservation.reservation_id)
        return reservation.answer()

    def commit(self, reservation_id: int, count: int, now: float) -> list[Entry] | None:
        """Make the first `count` positions visible and return the writer's own among them.

        Each comes with one user counted, the caller's. None: it has ended, nothing is visible,
        and what was held for the writer is free, since a writer that commits has stopped writing.
        """
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            return None
        if reservation.state is ReservationState.EXPIRED:
            self._end(reservation, "expired")
            return None
        count = max(reservation.committed, min(count, len(reservation.entries)))
        published = reservation.granted(reservation.committed, count)
        for entry in published:
            self._blocks.publish(entry)
            if reservation.expire_seconds is not None:
                self._retention.expire_at(entry, now + reservation.expire_seconds)
        stored_bytes = sum(entry.length_bytes for entry in published)
        self._counters.add("stored_blocks", len(published), self._blocks.tier)
        self._counters.add("stored_bytes", stored_bytes, self._blocks.tier)
        reservation.committed = count
        visible = [e for e in reservation.entries[:count] if e is not None]
        self._blocks.touch(reservation.prefix + visible)
        if count == len(reservation.entries):
            self._end(reservation, "committed")
        return published

    def abort(self, reservation_id: int) -> bool:
        """Take back what was not committed; False where the reservation had ended before."""
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            return False
        was_open = reservation.state is ReservationState.OPEN
        self._end(reservation, "aborted" if was_open else "expired")
        return was_open

    def expire(self, now: float) -> None:
        """Close the reservations whose deadline has come.

        Their writers may be in mid-fill, so the slots are held until those say they are done.
        """
        for reservation_id in self.deadlines.pop_due(now):
            reservation = self._reservations[reservation_id]
            reservation.state = ReservationState.EXPIRED
            for entry in reservation.uncommitted():
                self._blocks.withdraw(entry, is_held=True)

    def _reserve_one(self, domain: bytes, spec: BlockSpec, reservation: Reservation) -> None:
        entry = self._blocks.index.find(domain, spec.key)
        outcome = Outcome.PRESENT
        if entry is None:
            # After the first block without room, later ones could not be reached anyway.
            if Outcome.FULL not in reservation.outcomes:
                entry = self._blocks.reserve(domain, spec)
            outcome = Outcome.FULL if entry is None else Outcome.GRANTED
        elif not entry.is_ready:
            entry, outcome = None, Outcome.PENDING
        reservation.entries.append(entry)
        reservation.outcomes.append(outcome)

    def _end(self, reservation: Reservation, reason: str) -> None:
        del self._reservations[reservation.reservation_id]
        self._counters.add("ended_reservations", 1, reason)
        if reservation.state is ReservationState.OPEN:
            self.deadlines.drop(reservation.reservation_id)
            for entry in reservation.uncommitted():
                self._blocks.withdraw(entry, is_held=False)
        else:
            for entry in reservation.uncommitted():
                self._blocks.slots.free(entry.slot)

    def _deadline_of(self, reservation_id: int) -> float | None:
        reservation = self._reservations.get(reservation_id)
        if reservation is None or reservation.state is not ReservationState.OPEN:
            return None
        return reservation.deadline
