"""Bugs to plant into what the store does with blocks of several parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import lease, prefix, store
from kvstore.index import Entry, Index
from kvstore.messages import Column, PinKind
from kvstore.prefix import Prefix, find_prefix
from kvstore.reservation import Reservation, Reservations
from kvstore.retention import Retention
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from tests.sim.planted_bugs import Plant


def leaving_forgets_the_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "leaving", lambda entry: [entry])


def a_window_takes_its_block_along(patch: pytest.MonkeyPatch) -> None:
    def leaving(entry: Entry) -> list[Entry]:
        return [part for part in entry.parts or [entry] if part.is_ready]

    patch.setattr(Entry, "leaving", leaving)


def a_rank_takes_its_own_parts_only(patch: pytest.MonkeyPatch) -> None:
    """Of a cache group that two ranks share, half of the heads stays."""
    leaving = Entry.leaving

    def left(entry: Entry) -> list[Entry]:
        found = leaving(entry)
        if entry.link is None or entry.link.is_always_needed:
            return found
        return [part for part in found if part is entry]

    patch.setattr(Entry, "leaving", left)


def a_draft_takes_nothing_along(patch: pytest.MonkeyPatch) -> None:
    """A companion's part is taken for one that a prefix can do without."""
    leaving = Entry.leaving

    def left(entry: Entry) -> list[Entry]:
        if entry.link is None or entry.link.group[0] is None:
            return leaving(entry)
        return [entry]

    patch.setattr(Entry, "leaving", left)


def users_of_other_parts_count_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "is_evictable", property(lambda entry: entry.is_ready and not entry.users))


def windows_are_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    """A prefix is as long as its parts of full attention allow."""
    longest = prefix._longest

    def found(columns: Sequence[Column], blocks: int, has: Any) -> int:
        full = [column for column in columns if column.first_needed is None]
        return longest(full, blocks, has)

    patch.setattr(prefix, "_longest", found)


def a_window_is_a_block_shorter(patch: pytest.MonkeyPatch) -> None:
    """The search looks for one block less than a prefix needs."""
    longest = prefix._longest

    def found(columns: Sequence[Column], blocks: int, has: Any) -> int:
        return longest([_later(column) for column in columns], blocks, has)

    patch.setattr(prefix, "_longest", found)


def a_window_is_a_block_longer(patch: pytest.MonkeyPatch) -> None:
    """The search looks for one block more than a prefix needs."""
    longest = prefix._longest

    def found(columns: Sequence[Column], blocks: int, has: Any) -> int:
        return longest([_earlier(column) for column in columns], blocks, has)

    patch.setattr(prefix, "_longest", found)


def a_lease_leaves_out_a_block_of_the_window(patch: pytest.MonkeyPatch) -> None:
    """What is found is right, and what is held of it begins one block late."""
    needed = prefix._needed

    def held(index: Index, domain: bytes, columns: Sequence[Column], blocks: int) -> Any:
        return needed(index, domain, [_later(column) for column in columns], blocks)

    patch.setattr(prefix, "_needed", held)


def _later(column: Column) -> Column:
    if column.first_needed is None:
        return column
    return Column(column.keys, [min(n, b + 1) for n, b in enumerate(column.first_needed)])


def _earlier(column: Column) -> Column:
    if column.first_needed is None:
        return column
    return Column(column.keys, [max(0, b - 1) for b in column.first_needed])


def the_other_parts_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    def found(index: Index, request: Any) -> Any:
        return find_prefix(index, request._replace(more=()))

    patch.setattr(store, "find_prefix", found)


def a_capped_lease_keeps_the_longer_windows(patch: pytest.MonkeyPatch) -> None:
    """Where a lease is cut short, it holds what the longer prefix would have needed."""

    def fitting(self: lease.Leases, request: Any, found: Prefix) -> Prefix:
        width = 1 + len(request.more)
        positions = found.positions or range(len(found.entries))
        for blocks in range(found.blocks - 1, 0, -1):
            pairs = zip(positions, found.entries, strict=True)
            kept = [pair for pair in pairs if pair[0] < blocks * width]
            entries = [entry for _, entry in kept]
            if self._fits(entries):
                return Prefix(blocks, entries, [place for place, _ in kept], Outcome.BUSY)
        return Prefix(0, [], None, Outcome.BUSY)

    patch.setattr(lease.Leases, "_fitting", fitting)


def a_block_is_granted_as_far_as_there_is_room(patch: pytest.MonkeyPatch) -> None:
    """Some of the parts of a block, where there is no room for all."""

    def made(
        self: Reservations, domain: bytes, specs: Any, entries: list[Any], missing: Sequence[int]
    ) -> bool:
        for i in missing:
            entries[i] = self._blocks.reserve(domain, specs[i])
        return any(entries[i] is not None for i in missing)

    patch.setattr(Reservations, "_make", made)


def a_block_without_room_keeps_its_first_part(patch: pytest.MonkeyPatch) -> None:
    """What was reserved of a block before the room ran out is not given back."""

    def made(
        self: Reservations, domain: bytes, specs: Any, entries: list[Any], missing: Sequence[int]
    ) -> bool:
        for i in missing:
            entries[i] = self._blocks.reserve(domain, specs[i])
            if entries[i] is None:
                return False
        return True

    patch.setattr(Reservations, "_make", made)


def a_block_in_other_hands_is_shared(patch: pytest.MonkeyPatch) -> None:
    """A block of which another writer has a part is granted for the rest."""
    find = Index.find
    reserve_block = Reservations._reserve_block

    def reserved(self: Reservations, domain: bytes, specs: Any, reservation: Any) -> None:
        index = self._blocks.index
        free = [s if s and not _is_written(find(index, domain, s.key)) else None for s in specs]
        reserve_block(self, domain, free if any(free) else specs, reservation)

    patch.setattr(Reservations, "_reserve_block", reserved)


def _is_written(entry: Entry | None) -> bool:
    return entry is not None and not entry.is_ready


def a_commit_counts_parts_for_blocks(patch: pytest.MonkeyPatch) -> None:
    def granted(self: Reservation, start: int, end: int) -> list[Entry]:
        last = end if end < len(self.outcomes) else len(self.entries)
        pairs = zip(self.entries[start:last], self.is_ours[start:last], strict=True)
        return [entry for entry, is_ours in pairs if is_ours and entry is not None]

    patch.setattr(Reservation, "granted", granted)


def a_quota_is_for_parts(patch: pytest.MonkeyPatch) -> None:
    """Of a block for which a hard pin has no room, some parts are pinned."""
    pin = Retention.pin

    def pinned(self: Retention, request: Any, now: float) -> Any:
        is_hard = request.kind is PinKind.HARD
        return pin(self, request._replace(width=1) if is_hard else request, now)

    patch.setattr(Retention, "pin", pinned)


def parts_that_are_due_together_are_ended_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Whatever is due is looked up, though another part may have taken it along."""
    expire = Retention.expire

    def expired(self: Retention, now: float) -> None:
        due = self.deadlines.pop_due(now)
        for entry_id in due:
            entry = self._watched[entry_id]
            self.deadlines.add(now, entry_id)
            assert entry.is_ready
            expire(self, now)

    patch.setattr(Retention, "expire", expired)


#: As `PLANTED` in tests/sim/planted_bugs.py.
PLANTED_IN_PARTS: list[tuple[Plant, str]] = [
    (leaving_forgets_the_others, "a part stayed that is worth nothing"),
    (a_window_takes_its_block_along, "without a cause"),
    (a_rank_takes_its_own_parts_only, "a part stayed that is worth nothing"),
    (a_draft_takes_nothing_along, "a part stayed that is worth nothing"),
    (users_of_other_parts_count_for_nothing, "a part that needs it is leased"),
    (windows_are_not_asked_for, "found, and never committed|a place is missing"),
    (a_window_is_a_block_shorter, "found, and never committed|a place is missing"),
    (a_window_is_a_block_longer, "blocks was found, and"),
    (a_lease_leaves_out_a_block_of_the_window, "a place is missing"),
    (the_other_parts_are_not_looked_at, "a place is missing|never committed"),
    (a_capped_lease_keeps_the_longer_windows, "a place is missing"),
    (a_block_is_granted_as_far_as_there_is_room, "granted in part"),
    (a_block_without_room_keeps_its_first_part, "leaked|should be here"),
    (a_block_in_other_hands_is_shared, "granted in part"),
    (a_commit_counts_parts_for_blocks, "that nobody committed|other parts visible"),
    (a_quota_is_for_parts, "pinned in part"),
    (parts_that_are_due_together_are_ended_one_by_one, r"^\d+$"),
]
