"""What a person may look at: blocks, leases and reservations as plain values, in bounded slices.

Everything here is asked of a running daemon, so nothing looks at more than `SCANNED_MAX` blocks.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.reservation import ReservationState
from kvstore.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstore.index import Entry
    from kvstore.lease import Leases
    from kvstore.reservation import Reservations
    from kvstore.residency import Residency

#: Blocks that one question looks at: less than a millisecond or two of the control thread.
SCANNED_MAX = 10_000


class Holds(NamedTuple):
    """What has been granted and has not ended. False where that is nothing."""

    leases: int
    reservations: int

    def __bool__(self) -> bool:
        return any(self)


class Slice(NamedTuple):
    """Some of `total` things, after a look at `scanned` of them."""

    rows: list[dict[str, Any]]
    scanned: int
    total: int


class Inspection:
    """A look at a core. Ages and deadlines are told as seconds from now."""

    def __init__(self, blocks: Residency, leases: Leases, reservations: Reservations) -> None:
        self._blocks = blocks
        self._leases = leases
        self._reservations = reservations

    def holds(self) -> Holds:
        """How many leases there are, and reservations that may still commit."""
        is_open = [r.state is ReservationState.OPEN for r in self._reservations]
        return Holds(sum(1 for _ in self._leases), sum(is_open))

    def blocks(
        self, domain: bytes, key_prefix: bytes, now: float, *, limit: int, is_newest_first: bool
    ) -> Slice:
        """Blocks whose key begins so, in the order in which they came."""
        index = self._blocks.index
        if len(key_prefix) == KEY_BYTES:
            entry = index.find(domain, key_prefix)
            return Slice([] if entry is None else [_block(entry, now)], 1, len(index))
        rows: list[dict[str, Any]] = []
        scanned = 0
        for entry in islice(index.in_order(domain, newest_first=is_newest_first), SCANNED_MAX):
            if len(rows) >= limit:
                break
            scanned += 1
            if entry.key.startswith(key_prefix):
                rows.append(_block(entry, now))
        return Slice(rows, scanned, len(index))

    def why_missing(self, domain: bytes, key: bytes) -> str:
        """The reason why a key is not there."""
        return str(self._blocks.index.why_missing(domain, key))

    def leases(self, now: float, *, limit: int) -> Slice:
        """The leases, the oldest first."""
        every = list(self._leases)
        rows: list[dict[str, Any]] = []
        scanned = 0
        for lease in every[:limit]:
            scanned += len(lease.entries)
            if rows and scanned > SCANNED_MAX:
                break
            rows.append(
                {
                    "lease": lease.lease_id,
                    "holders": sorted(lease.holders),
                    "blocks": lease.prefix.blocks,
                    "bytes": sum(entry.size_bytes for entry in lease.entries),
                    "left_seconds": lease.deadline - now,
                }
            )
        return Slice(rows, len(rows), len(every))

    def reservations(self, now: float, *, limit: int) -> Slice:
        """The reservations, also those that are too late and whose memory is held."""
        every = list(self._reservations)
        rows = []
        for reservation in every[:limit]:
            entries = list(reservation.uncommitted())
            rows.append(
                {
                    "reservation": reservation.reservation_id,
                    "holder": reservation.holder,
                    "state": str(reservation.state),
                    "blocks": len(reservation.outcomes),
                    "committed": reservation.committed,
                    "bytes": sum(entry.size_bytes for entry in entries),
                    "left_seconds": reservation.deadline - now,
                }
            )
        return Slice(rows, len(rows), len(every))


def _block(entry: Entry, now: float) -> dict[str, Any]:
    """One block, or one part of a block, as plain values."""
    pinned = entry.hard_pinned_until
    return {
        "key": entry.key.hex(),
        "parent": None if entry.parent_key is None else entry.parent_key.hex(),
        "block": None if entry.link is None else entry.link.block.hex(),
        "parts": len(entry.parts or (entry,)),
        "state": "ready" if entry.is_ready else "being written",
        "tokens": entry.token_count,
        "is_partial": entry.is_partial,
        "bytes": entry.length_bytes,
        "slot_bytes": entry.size_bytes,
        "offset_bytes": entry.place.offset_bytes,
        "generation": entry.place.generation,
        "children": entry.children,
        "users": entry.users,
        "leases": entry.leases,
        "hits": entry.hits,
        "expires_seconds": None if entry.expires_at is None else entry.expires_at - now,
        "soft_pin_seconds": entry.soft_pinned_until - now if entry.is_soft_pinned else None,
        "is_hard_pinned": pinned is not None,
        "hard_pin_seconds": None if pinned is None or math.isinf(pinned) else pinned - now,
        "checksum": None if entry.checksum is None else f"{entry.checksum:016x}",
    }
