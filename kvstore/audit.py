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
    from kvstore.lease import Lease
    from kvstore.reservation import Reservation
    from kvstore.residency import Residency


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
    leases: Iterable[Lease],
    reservations: Iterable[Reservation],
    entries_in_transfer: Iterable[Entry],
) -> Audit:
    """Count slots, users, children and owners again, each by another route than the core did.

    Raises InvariantViolated with every disagreement in one message.
    """
    leases, reservations = list(leases), list(reservations)
    slots = blocks.slots
    problems = slots.problems()
    problems += _users_problems(blocks, leases, entries_in_transfer)
    problems += _owner_problems(blocks, reservations)
    problems += _eviction_problems(blocks)
    by_state = {state: slots.bytes_in(state) for state in SlotState}
    if slots.free_bytes + sum(by_state.values()) != slots.capacity_bytes:
        problems.append("free + ready + reserved + held + condemned is not the capacity")
    if problems:
        raise InvariantViolated("; ".join(problems))
    return Audit(
        slots.capacity_bytes,
        slots.free_bytes,
        by_state[SlotState.READY],
        by_state[SlotState.RESERVED],
        by_state[SlotState.HELD],
        by_state[SlotState.CONDEMNED],
        sum(entry.slot.state is SlotState.READY for entry in blocks.index),
        len(leases),
        len(reservations),
    )


def _users_problems(
    blocks: Residency, leases: list[Lease], entries_in_transfer: Iterable[Entry]
) -> list[str]:
    expected = Counter(entry for lease in leases for entry in lease.entries)
    expected.update(entries_in_transfer)
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
    owners: Counter[int] = Counter()
    problems = []
    for entry in blocks.index:
        owners[entry.slot.offset_bytes] += 1
        if entry.slot.state not in (SlotState.READY, SlotState.RESERVED):
            problems.append(f"{entry!r} can be found")
    for entry in blocks.condemned:
        owners[entry.slot.offset_bytes] += 1
        if entry.slot.state is not SlotState.CONDEMNED or not entry.users:
            problems.append(f"{entry!r} is condemned without reason")
    reserved = set()
    for reservation in reservations:
        is_open = reservation.state is ReservationState.OPEN
        for entry in reservation.uncommitted():
            expected_state = SlotState.RESERVED if is_open else SlotState.HELD
            if entry.slot.state is not expected_state:
                problems.append(f"{entry!r} belongs to a reservation that is {reservation.state}")
            if is_open:
                reserved.add(entry)
            else:
                owners[entry.slot.offset_bytes] += 1
    for entry in blocks.index:
        if entry.slot.state is SlotState.RESERVED and entry not in reserved:
            problems.append(f"{entry!r} has no writer")
    for slot in blocks.slots.granted():
        if owners[slot.offset_bytes] != 1:
            problems.append(f"{slot!r} has {owners[slot.offset_bytes]} owners")
        del owners[slot.offset_bytes]
    problems += [f"an entry lies at {offset}, where no slot is" for offset in owners]
    return problems


def _eviction_problems(blocks: Residency) -> list[str]:
    """What may be evicted is what is ready and unused; children are counted right."""
    problems = []
    reclaimable_bytes = 0
    children = Counter(entry.parent for entry in blocks.index if entry.parent is not None)
    for entry in blocks.index:
        is_reclaimable = entry.slot.state is SlotState.READY and not entry.users
        if is_reclaimable:
            reclaimable_bytes += entry.slot.size_bytes
        if entry.is_evictable != is_reclaimable:
            problems.append(f"{entry!r}: may be evicted: {entry.is_evictable}, wrongly")
        if entry.children != children[entry]:
            problems.append(f"{entry!r}: {entry.children} children, {children[entry]} resident")
    if reclaimable_bytes != blocks.reclaimable_bytes:
        problems.append(
            f"{reclaimable_bytes} bytes are unused, {blocks.reclaimable_bytes} booked"
        )
    return problems
