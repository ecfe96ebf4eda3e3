"""Bugs to plant into the store, each one mistake that its code takes care not to make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import store
from kvstore.client.lease import Lease
from kvstore.index import Entry, Index
from kvstore.lease import Leases
from kvstore.messages import TransferKind
from kvstore.prefix import find_prefix
from kvstore.reservation import Reservations
from kvstore.residency import Residency
from kvstore.retention import Retention
from kvstore.slots import Slots, SlotState
from kvstore.store import Core
from kvstore.transfers import Transfers
from kvstore.types import SLOT_ALIGNMENT_BYTES
from tests.sim.traffic import DOMAINS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    Plant = Callable[[pytest.MonkeyPatch], None]


def eviction_ignores_users(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "is_evictable", property(lambda entry: entry.is_ready))
    _drop_frees_at_once(patch)


def delete_frees_what_is_read(patch: pytest.MonkeyPatch) -> None:
    _drop_frees_at_once(patch)


def _drop_frees_at_once(patch: pytest.MonkeyPatch) -> None:
    drop, drop_users = Residency.drop, Residency.drop_users

    def dropped(self: Residency, entry: Entry, reason: Any) -> None:
        drop(self, entry, reason)
        if entry in self.condemned:
            self.condemned.remove(entry)
            self.slots.free(entry.slot)

    def users_dropped(self: Residency, entries: Any) -> None:
        drop_users(self, [e for e in entries if e.is_ready or e in self.condemned])

    patch.setattr(Residency, "drop", dropped)
    patch.setattr(Residency, "drop_users", users_dropped)


def generation_stays(patch: pytest.MonkeyPatch) -> None:
    """A slot keeps the first generation that its offset ever had."""

    def next_generation(self: Slots, offset_bytes: int) -> int:
        self.moves += 1
        unit = offset_bytes // SLOT_ALIGNMENT_BYTES
        self.generations[unit] = self.generations[unit] or self.moves
        return self.generations[unit]

    patch.setattr(Slots, "_next_generation", next_generation)


def moves_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Generations change, and the number that says so does not."""

    def next_generation(self: Slots, offset_bytes: int) -> int:
        generation = max(self.generations) + 1
        self.generations[offset_bytes // SLOT_ALIGNMENT_BYTES] = generation
        return generation

    patch.setattr(Slots, "_next_generation", next_generation)


def late_commit_is_accepted(patch: pytest.MonkeyPatch) -> None:
    def expire(self: Reservations, now: float) -> None:
        self.deadlines.pop_due(now)

    patch.setattr(Reservations, "expire", expire)


def late_writer_loses_its_memory(patch: pytest.MonkeyPatch) -> None:
    """At the deadline the slots are free, and the writer may be in mid-copy."""

    def expire(self: Reservations, now: float) -> None:
        for reservation_id in self.deadlines.pop_due(now):
            reservation = self._reservations.pop(reservation_id)
            for entry in reservation.uncommitted():
                self._blocks.withdraw(entry, is_held=False)

    patch.setattr(Reservations, "expire", expire)


def commit_shows_the_whole_batch(patch: pytest.MonkeyPatch) -> None:
    commit = Reservations.commit

    def committed(self: Reservations, number: int, holder: int, _: int, now: float) -> Any:
        return commit(self, number, holder, 1_000, now)

    patch.setattr(Reservations, "commit", committed)


def waiting_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    def next_deadline(self: Core) -> float | None:
        times = [holder.deadlines.next() for holder in self._holders]
        return min((time for time in times if time is not None), default=None)

    patch.setattr(Core, "next_deadline", next_deadline)


def checksums_protect_nothing(patch: pytest.MonkeyPatch) -> None:
    start, complete = Transfers.start_checksums, Transfers.complete

    def started(self: Transfers, entries: Any, request_id: int) -> Any:
        entries = list(entries)
        transfers = start(self, entries, request_id)
        self._blocks.drop_users(entries)
        return transfers

    def completed(self: Transfers, transfer: Any, outcome: Any, checksum: Any) -> Any:
        if transfer.kind is not TransferKind.CHECKSUM:
            return complete(self, transfer, outcome, checksum)
        running = self._running.pop(transfer.transfer_id, None)
        if running is not None:
            running.entry.checksum = checksum
        return None

    patch.setattr(Transfers, "start_checksums", started)
    patch.setattr(Transfers, "complete", completed)


def scrub_keeps_what_rotted(patch: pytest.MonkeyPatch) -> None:
    complete = Transfers.complete

    def completed(self: Transfers, transfer: Any, outcome: Any, checksum: Any) -> Any:
        running = self._running.get(transfer.transfer_id)
        if running is not None and running.kind is TransferKind.SCRUB:
            checksum = running.entry.checksum
        return complete(self, transfer, outcome, checksum)

    patch.setattr(Transfers, "complete", completed)


def time_to_live_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retention, "expire_at", lambda *_: None)


def hard_pin_protects_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "is_evictable", property(_is_evictable_though_pinned))
    add_users = Residency.add_users

    def users_added(self: Residency, entries: Any) -> None:
        add_users(self, entries)
        for entry in entries:
            self._policy.add(entry)

    patch.setattr(Residency, "add_users", users_added)


def _is_evictable_though_pinned(entry: Entry) -> bool:
    return entry.is_ready and entry.users - (entry.hard_pinned_until is not None) <= 0


def leases_end_early(patch: pytest.MonkeyPatch) -> None:
    expire = Leases.expire
    patch.setattr(Leases, "expire", lambda self, now: expire(self, now + 1.0))


def reader_never_asks_whether_it_was_in_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "valid", lambda _: True)


def domains_see_each_other(patch: pytest.MonkeyPatch) -> None:
    def found(index: Index, request: Any) -> Any:
        own = find_prefix(index, request)
        other = DOMAINS[1] if request.domain == DOMAINS[0] else DOMAINS[0]
        return own if own.blocks else find_prefix(index, request._replace(domain=other))

    patch.setattr(store, "find_prefix", found)


def slot_is_leaked(patch: pytest.MonkeyPatch) -> None:
    """What was deleted while it was read is never freed."""

    free = Slots.free

    def freed(self: Slots, slot: Any) -> None:
        if slot.state is not SlotState.CONDEMNED:
            free(self, slot)

    patch.setattr(Slots, "free", freed)


#: Each bug, and what the simulation must say of it, which it sees from outside.
PLANTED: list[tuple[Plant, str]] = [
    (eviction_ignores_users, "gave way|bytes changed under a lease|'s still"),
    (delete_frees_what_is_read, "gave way|bytes changed under a lease|'s still"),
    (generation_stays, "a wrong byte was accepted"),
    (moves_are_not_counted, "a wrong byte was accepted"),
    (late_commit_is_accepted, "a commit, late or not"),
    (late_writer_loses_its_memory, "'s still"),
    (commit_shows_the_whole_batch, "visible that nobody committed"),
    (waiting_has_no_deadline, "got no answer by its deadline"),
    (checksums_protect_nothing, "a part that we read .* gave way"),
    (scrub_keeps_what_rotted, "rot outlived a scrub"),
    (time_to_live_is_forgotten, "found after its TTL"),
    (hard_pin_protects_nothing, "a hard-pinned block left"),
    (leases_end_early, "gave way|at another time than said|'s still|in its time"),
    (reader_never_asks_whether_it_was_in_time, "a wrong byte was accepted"),
    (domains_see_each_other, "another block than was asked for|never committed"),
    (slot_is_leaked, "leaked"),
]
