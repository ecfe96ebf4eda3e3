"""Reservations: slots that one writer fills, invisible until it commits."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from kvstore.deadlines import Deadlines
from kvstore.messages import ReserveAnswer
from kvstore.slots import slot_size_bytes
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    """What one writer was granted, block by block; `width` parts a block.

        block      0        1        2        3        4
        outcome    present  granted  granted  pending  granted
        entries    theirs   ours     ours     None     ours         two parts a block:
                   theirs   ours     theirs   None     ours         one of block 2 was there
                   |<--- committed --->|

    Blocks before `committed` are visible and no longer the writer's.
    """

    __slots__ = (
        "committed",
        "deadline",
        "entries",
        "expire_seconds",
        "holder",
        "is_ours",
        "outcomes",
        "prefix",
        "reservation_id",
        "state",
        "width",
    )

    def __init__(
        self,
        reservation_id: int,
        prefix: list[Entry],
        deadline: float,
        request: ReserveRequest,
    ) -> None:
        self.reservation_id = reservation_id
        self.width = request.width
        self.holder = request.holder
        self.expire_seconds = request.expire_seconds  # the TTL of its blocks, from their commit on
        self.prefix = prefix  # resident parts of the blocks before the first one
        self.entries: list[Entry | None] = []
        self.is_ours: list[bool] = []  # of each entry
        self.outcomes: list[Outcome] = []
        self.committed = 0
        self.deadline = deadline
        self.state = ReservationState.OPEN

    def granted(self, start: int, end: int) -> list[Entry]:
        """The writer's own entries of blocks start..end."""
        first, last = start * self.width, end * self.width
        pairs = zip(self.entries[first:last], self.is_ours[first:last], strict=True)
        return [entry for entry, is_ours in pairs if is_ours and entry is not None]

    def uncommitted(self) -> list[Entry]:
        """The writer's own entries that never became visible."""
        return self.granted(self.committed, len(self.outcomes))

    def answer(self) -> ReserveAnswer:
        """What the writer is told."""
        pairs = list(zip(self.entries, self.is_ours, strict=True))
        return ReserveAnswer(
            self.reservation_id,
            list(self.outcomes),
            [entry.place if entry and is_ours else None for entry, is_ours in pairs],
            [entry.checksum if entry and not is_ours else None for entry, is_ours in pairs],
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
        blocks, domain, width = self._blocks, request.domain, request.width
        start = request.start * width
        prefix = [
            entry
            for spec in request.blocks[:start]
            if spec and (entry := blocks.index.find_ready(domain, spec.key)) is not None
        ]
        batch = request.blocks[start:]
        if not batch:
            return ReserveAnswer(0, [], [], [], now)
        found = [spec and blocks.index.find(domain, spec.key) for spec in batch]
        present = [entry for entry in found if entry is not None and entry.is_ready]
        missing = [
            slot_size_bytes(spec.length_bytes)
            for spec, entry in zip(batch, found, strict=True)
            if spec is not None and entry is None
        ]
        missing_slots, missing_bytes = len(missing), sum(missing)
        # Making room for the tail of a prefix must not evict its beginning.
        protected = prefix + present
        blocks.add_users(protected)
        can_wait = can_wait and blocks.can_hold(missing_slots, missing_bytes)
        if can_wait and not blocks.can_make_room(missing_slots, missing_bytes):
            blocks.drop_users(protected)
            return None
        self._last_id += 1
        reservation = Reservation(self._last_id, prefix, now + request.ttl_seconds, request)
        for first in range(0, len(batch), width):
            self._reserve_block(domain, batch[first : first + width], reservation)
        blocks.drop_users(protected)
        if can_wait and Outcome.FULL in reservation.outcomes:
            # Enough bytes, but what is protected lies between them: wait with empty hands.
            for entry in reversed(reservation.uncommitted()):
                blocks.withdraw(entry, is_held=False)
            return None
        for outcome in reservation.outcomes:
            if outcome.is_miss and outcome is not Outcome.ABSENT:
                self._counters.add("refused_blocks", 1, outcome)
        self._reservations[reservation.reservation_id] = reservation
        self.deadlines.add(reservation.deadline, reservation.reservation_id)
        return reservation.answer()

    def commit(
        self, reservation_id: int, holder: int, count: int, now: float
    ) -> list[Entry] | None:
        """Make the first `count` positions visible and return the writer's own among them.

        Each comes with one user counted, the caller's. None: it has ended, nothing is visible,
        and what was held for the writer is free, since a writer that commits has stopped writing.
        """
        reservation = self._held(reservation_id, holder)
        if reservation is None:
            return None
        if reservation.state is ReservationState.EXPIRED:
            self._end(reservation, "expired")
            return None
        count = max(reservation.committed, min(count, len(reservation.outcomes)))
        published = reservation.granted(reservation.committed, count)
        for entry in published:
            self._blocks.publish(entry)
            if reservation.expire_seconds is not None:
                self._retention.expire_at(entry, now + reservation.expire_seconds)
        stored_bytes = sum(entry.length_bytes for entry in published)
        self._counters.add("stored_blocks", len(published), self._blocks.tier)
        self._counters.add("stored_bytes", stored_bytes, self._blocks.tier)
        reservation.committed = count
        visible = [e for e in reservation.entries[: count * reservation.width] if e is not None]
        self._blocks.touch(reservation.prefix + visible)
        if count == len(reservation.outcomes):
            self._end(reservation, "committed")
        return published

    def abort(self, reservation_id: int, holder: int) -> bool:
        """Take back what was not committed; False where the reservation had ended before."""
        reservation = self._held(reservation_id, holder)
        if reservation is None:
            return False
        was_open = reservation.state is ReservationState.OPEN
        self._end(reservation, "aborted" if was_open else "expired")
        return was_open

    def end_holder(self, holder: int) -> int:
        """A process is gone, so nothing of it is written any more; how many reservations it had."""
        held = [number for number, r in self._reservations.items() if r.holder == holder]
        for number in held:
            self.abort(number, holder)
        return len(held)

    def has_holder(self, holder: int) -> bool:
        """Has it any, open or with memory that is held for it?"""
        return any(r.holder == holder for r in self._reservations.values())

    def expire(self, now: float) -> None:
        """Close the reservations whose deadline has come.

        Their writers may be in mid-fill, so the slots are held until those say they are done.
        """
        for reservation_id in self.deadlines.pop_due(now):
            reservation = self._reservations[reservation_id]
            reservation.state = ReservationState.EXPIRED
            for entry in reservation.uncommitted():
                self._blocks.withdraw(entry, is_held=True)

    def _reserve_block(
        self, domain: bytes, specs: Sequence[BlockSpec | None], reservation: Reservation
    ) -> None:
        """Grant the parts of one block that are missing: all of them, or none."""
        index = self._blocks.index
        entries = [spec and index.find(domain, spec.key) for spec in specs]
        missing = [i for i, spec in enumerate(specs) if spec is not None and entries[i] is None]
        is_pending = any(entry is not None and not entry.is_ready for entry in entries)
        outcome = Outcome.PRESENT if any(specs) else Outcome.ABSENT
        if is_pending:
            outcome = Outcome.PENDING
        elif missing:
            outcome = Outcome.GRANTED
            # After the first block without room, later ones could not be reached anyway.
            is_full = Outcome.FULL in reservation.outcomes
            if is_full or not self._make(domain, specs, entries, missing):
                outcome = Outcome.FULL
        is_granted = outcome is Outcome.GRANTED
        is_known = is_granted or outcome is Outcome.PRESENT
        reservation.entries += entries if is_known else [None] * len(specs)
        reservation.is_ours += [is_granted and i in missing for i in range(len(specs))]
        reservation.outcomes.append(outcome)

    def _make(
        self,
        domain: bytes,
        specs: Sequence[BlockSpec | None],
        entries: list[Entry | None],
        missing: Sequence[int],
    ) -> bool:
        """Put new entries in the places of `missing`; False, and none made, without the room."""
        for i in missing:
            spec = specs[i]
            entries[i] = spec and self._blocks.reserve(domain, spec)
            if entries[i] is None:
                for entry in reversed([entries[j] for j in missing]):
                    if entry is not None:
                        self._blocks.withdraw(entry, is_held=False)
                return False
        return True

    def _held(self, reservation_id: int, holder: int) -> Reservation | None:
        reservation = self._reservations.get(reservation_id)
        return None if reservation is None or reservation.holder != holder else reservation

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
