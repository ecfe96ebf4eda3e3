"""Recount everything the core believes. Product code: tests, CLI and daemon call it at any time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import InvariantViolated
from kvstore.reservation import ReservationState
from kvstore.slots import SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.index import Entry
    from kvstore.lease import Leases
    from kvstore.reservation import Reservation
    from kvstore.residency import Residency
    from kvstore.retention import Retention


class Audit(NamedTuple):
    """What a recount found: all bytes of a tier, by who may touch them, and the holders."""

    capacity_bytes: int
    free_bytes: int
    ready_bytes: int
    reserved_bytes: int
    held_bytes: int
    condemned_bytes: int
    ready_blocks: int
    leases: int
    reservations: int


def audit(
    *,
    blocks: Residency,
    leases: Leases,
    retention: Retention,
    reservations: Iterable[Reservation],
    entries_in_transfer: Iterable[Entry],
) -> Audit:
    """Count slots, users, children and owners again, each by another route than the core did.

    Raises InvariantViolated with every disagreement in one message.
    """
    reservations = list(reservations)
    slots = blocks.slots
    problems = slots.problems()
    problems += _users_problems(blocks, leases, entries_in_transfer)
    problems += _owner_problems(blocks, reservations)
    problems += _eviction_problems(blocks)
    problems += _quota_problems(blocks, leases, retention)
    problems += _index_problems(blocks, reservations)
    by_state = {state: slots.bytes_in(state) for state in SlotState}
    if slots.free_bytes + sum(by_state.values()) != slots.usable_bytes:
        problems.append("free + ready + reserved + held + condemned is not what is usable")
    if problems:
        raise InvariantViolated("; ".join(problems))
    return Audit(
        slots.capacity_bytes,
        slots.free_bytes,
        by_state[SlotState.READY],
        by_state[SlotState.RESERVED],
        by_state[SlotState.HELD],
        by_state[SlotState.CONDEMNED],
        sum(entry.is_ready for entry in blocks.index),
        len(list(leases)),
        len(reservations),
    )


def _index_problems(blocks: Residency, reservations: list[Reservation]) -> list[str]:
    """What the index counts as is what there is of it, and fits."""
    writing = [entry for r in reservations for entry in r.uncommitted()]
    entries = len({*blocks.index, *blocks.condemned, *writing})
    problems = []
    if blocks.index_bytes != entries * blocks.entry_bytes:
        problems.append(f"the index has {entries} entries, and {blocks.index_bytes} bytes booked")
    if blocks.used_bytes > blocks.slots.capacity_bytes:
        problems.append(f"slots and index count as {blocks.used_bytes} bytes, over the capacity")
    return problems


def _quota_problems(blocks: Residency, leases: Leases, retention: Retention) -> list[str]:
    """What caps and quotas are measured by is what is leased and pinned."""
    problems = []
    leased_bytes = sum(e.size_bytes for e in {e for lease in leases for e in lease.entries})
    if leased_bytes != leases.leased_bytes:
        problems.append(f"{leased_bytes} bytes are leased, {leases.leased_bytes} booked")
    pinned_bytes = sum(e.size_bytes for e in blocks.index if e.hard_pinned_until is not None)
    booked_bytes = sum(retention.hard_pinned_bytes.values())
    if pinned_bytes != booked_bytes:
        problems.append(f"{pinned_bytes} bytes are hard-pinned, {booked_bytes} booked")
    return problems


def _users_problems(
    blocks: Residency, leases: Leases, entries_in_transfer: Iterable[Entry]
) -> list[str]:
    expected = Counter(entry for lease in leases for entry in lease.entries)
    expected.update(entries_in_transfer)
    expected.update(entry for entry in blocks.index if entry.hard_pinned_until is not None)
    entries = set(blocks.index) | blocks.condemned
    problems = [
        f"{entry!r} has {entry.users} users, {expected[entry]} are known"
        for entry in entries
        if entry.users != expected[entry]
    ]
    problems += [f"{entry!r} is in use and unknown" for entry in expected if entry not in entries]
    return problems


def _owner_problems(blocks: Residency, reservations: list[Reservation]) -> list[str]:
    """Each slot belongs to one entry: found by its key, condemned, or of an expired writer."""
    problems = []
    writing = {entry for r in reservations for entry in r.uncommitted()}
    for reservation in reservations:
        is_open = reservation.state is ReservationState.OPEN
        expected_state = SlotState.RESERVED if is_open else SlotState.HELD
        problems += [
            f"{entry!r} belongs to a reservation that is {reservation.state}"
            for entry in reservation.uncommitted()
            if entry.slot.state is not expected_state
        ]
    for entry in blocks.index:
        is_written = entry in writing and entry.slot.state is SlotState.RESERVED
        if not is_written and entry.slot.state is not SlotState.READY:
            problems.append(f"{entry!r} can be found, and is neither ready nor being written")
    problems += [
        f"{entry!r} is condemned without a user"
        for entry in blocks.condemned
        if entry.slot.state is not SlotState.CONDEMNED or not entry.users
    ]
    owners = Counter(e.slot.offset_bytes for e in {*blocks.index, *blocks.condemned, *writing})
    slots = {slot.offset_bytes for slot in blocks.slots.granted()}
    problems += [f"{owners[o]} entries own the slot at {o}" for o in slots if owners[o] != 1]
    problems += [f"an entry lies at {o}, where no slot is" for o in owners if o not in slots]
    return problems


def _eviction_problems(blocks: Residency) -> list[str]:
    """What may be evicted is what is ready and unused; children are counted right."""
    problems = []
    reclaimable = []
    children = Counter((entry.domain, entry.parent_key) for entry in blocks.index)
    for entry in blocks.index:
        if entry.is_ready != (entry.slot.state is SlotState.READY):
            problems.append(f"{entry!r}: readable is {entry.is_ready}")
        if entry.is_ready and not entry.users:
            reclaimable.append(entry.slot.size_bytes)
        if entry.is_evictable and entry.queue_place is None:
            problems.append(f"{entry!r} could leave, and its policy does not know it")
        if entry.link is not None and entry not in (entry.parts or ()):
            problems.append(f"{entry!r} is unknown to the parts of its block")
        resident = children[entry.domain, entry.key]
        if entry.children != resident:
            problems.append(f"{entry!r}: {entry.children} children, {resident} resident")
    if sum(reclaimable) != blocks.reclaimable_bytes:
        problems.append(f"{sum(reclaimable)} bytes are unused, {blocks.reclaimable_bytes} booked")
    if len(reclaimable) != blocks.reclaimable_slots:
        problems.append(f"{len(reclaimable)} slots are unused, {blocks.reclaimable_slots} booked")
    return problems
