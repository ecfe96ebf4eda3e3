"""Leases: blocks that stay readable until their holder is done, or until a deadline."""

from __future__ import annotations

import hmac
import struct
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvstore.deadlines import Deadlines
from kvstore.messages import Column, LeaseAnswer
from kvstore.prefix import Prefix, find_prefix
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore import metrics
    from kvstore.index import Entry
    from kvstore.messages import AdoptRequest, LeaseRequest
    from kvstore.residency import Residency
    from kvstore.settings import CoreSettings
    from kvstore.types import Place


_LEASE_ID = struct.Struct("<Q")


def places_of(prefix: Prefix, width: int) -> list[Place | None]:
    """Where each part of each block lies: `width` elements a block, None where it is not needed."""
    if prefix.positions is None:
        return [entry.place for entry in prefix.entries]
    places: list[Place | None] = [None] * (prefix.blocks * width)
    for position, entry in zip(prefix.positions, prefix.entries, strict=True):
        places[position] = entry.place
    return places


def _first(request: LeaseRequest, blocks: int) -> LeaseRequest:
    """The same request, for its first blocks only."""
    more = [Column(keys[:blocks], needed) for keys, needed in request.more]
    return request._replace(keys=request.keys[:blocks], more=more)


def _is_of(lease: Lease, keys: Sequence[bytes], width: int) -> bool:
    """Does the lease protect what lies under these keys, as far as it goes?"""
    prefix = lease.prefix
    if width != lease.width or len(keys) < prefix.blocks * width:
        return False
    positions = range(len(prefix.entries)) if prefix.positions is None else prefix.positions
    return all(keys[p] == e.key for p, e in zip(positions, prefix.entries, strict=True))


class Lease:
    """The entries of a prefix, each counted as used once, until `deadline`.

    Whoever adopts it holds it once more, and it ends when all have released it as often.
    """

    __slots__ = ("deadline", "holders", "latest_deadline", "lease_id", "prefix", "width")

    def __init__(
        self,
        lease_id: int,
        prefix: Prefix,
        request: LeaseRequest,
        deadline: float,
        latest_deadline: float,
    ) -> None:
        self.lease_id = lease_id
        self.prefix = prefix
        self.width = 1 + len(request.more)
        self.holders = Counter({request.holder: 1})
        self.latest_deadline = latest_deadline
        self.deadline = min(deadline, latest_deadline)

    @property
    def entries(self) -> list[Entry]:
        """What it protects."""
        return self.prefix.entries


class Leases:
    """All leases of a core."""

    def __init__(
        self,
        blocks: Residency,
        counters: metrics.Counters,
        settings: CoreSettings,
        token_secret: bytes = b"",
    ) -> None:
        self._token_secret = token_secret
        self._blocks = blocks
        self._counters = counters
        self._leases: dict[int, Lease] = {}
        self.deadlines = Deadlines(self._deadline_of)
        self._last_id = 0
        self.leased_bytes = 0  # slots of entries that are leased at least once
        self.cap_bytes = int(blocks.slots.capacity_bytes * settings.leased_fraction)
        self._lease_seconds_max = settings.lease_seconds_max

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def grant(
        self,
        request: LeaseRequest,
        prefix: Prefix,
        now: float,
        *,
        can_wait: bool,
    ) -> LeaseAnswer | None:
        """Lease the longest prefix of what was asked for, and count hit and miss.

        What would take the leased bytes over their cap is `busy`; None where `can_wait` and a
        release may make place for it.
        """
        counters = self._counters
        if not self._fits(prefix.entries):
            all_bytes = sum(entry.size_bytes for entry in prefix.entries)
            if can_wait and all_bytes <= self.cap_bytes:
                return None
            prefix = self._fitting(request, prefix)
        counters.add("lookup_tokens", request.tokens)
        if prefix.reason is not None:
            counters.add("misses", len(request.keys) - prefix.blocks, prefix.reason)
        moves = self._blocks.slots.moves
        if not prefix.blocks:
            return LeaseAnswer(0, 0, [], now, {}, prefix.reason, moves)
        entries = prefix.entries
        self._blocks.hit(prefix, request.tokens, len(request.keys))
        self._blocks.add_users(entries)
        for entry in entries:
            if not entry.leases:
                self.leased_bytes += entry.size_bytes
            entry.leases += 1
        self._last_id += 1
        latest = now + self._lease_seconds_max
        lease = Lease(self._last_id, prefix, request, now + request.ttl_seconds, latest)
        self._leases[lease.lease_id] = lease
        self.deadlines.add(lease.deadline, lease.lease_id)
        return self._answer(lease)

    def token(self, lease_id: int, holder: int) -> bytes | None:
        """What lets somebody else adopt a lease; None where it has ended.

        Its number, and a keyed hash of that and its domain, which nobody else can make.
        """
        lease = self._held(lease_id, holder)
        return None if lease is None else self._token_of(lease)

    def adopt(self, request: AdoptRequest, now: float) -> LeaseAnswer:
        """Hold a lease once more; without a lease where there is none for this token and keys."""
        lease = self._adoptable(request)
        if lease is None:
            return LeaseAnswer(0, 0, [], now, {}, Outcome.EXPIRED, self._blocks.slots.moves)
        if not _is_of(lease, request.keys, request.width):
            return LeaseAnswer(0, 0, [], now, {}, Outcome.ABSENT, self._blocks.slots.moves)
        lease.holders[request.holder] += 1
        return self._answer(lease)

    def renew(self, lease_id: int, holder: int, ttl_seconds: float, now: float) -> float | None:
        """Move a deadline on, never back, never past the maximum; None where it has ended."""
        lease = self._held(lease_id, holder)
        if lease is None:
            return None
        lease.deadline = max(lease.deadline, min(now + ttl_seconds, lease.latest_deadline))
        return lease.deadline

    def release(self, lease_id: int, holder: int) -> bool:
        """End a lease by the word of its last holder; False where it had ended before."""
        lease = self._held(lease_id, holder)
        if lease is None:
            return False
        lease.holders[holder] -= 1
        if not lease.holders[holder]:
            del lease.holders[holder]
        if not lease.holders:
            del self._leases[lease_id]
            self.deadlines.drop(lease_id)
            self._end(lease, "released")
        return True

    def end_holder(self, holder: int) -> int:
        """A process is gone; how many leases it had."""
        held = [lease_id for lease_id, lease in self._leases.items() if holder in lease.holders]
        for lease_id in held:
            self._leases[lease_id].holders[holder] = 1
            self.release(lease_id, holder)
        return len(held)

    def has_holder(self, holder: int) -> bool:
        """Has it any lease?"""
        return any(holder in lease.holders for lease in self._leases.values())

    def expire(self, now: float) -> None:
        """End the leases whose deadline has come."""
        for lease_id in self.deadlines.pop_due(now):
            self._end(self._leases.pop(lease_id), "expired")

    def _token_of(self, lease: Lease) -> bytes:
        number = _LEASE_ID.pack(lease.lease_id)
        signed = lease.entries[0].domain + number
        return number + blake2b(signed, digest_size=16, key=self._token_secret).digest()

    def _adoptable(self, request: AdoptRequest) -> Lease | None:
        token = request.token
        if len(token) < _LEASE_ID.size:
            return None
        lease = self._leases.get(_LEASE_ID.unpack_from(token)[0])
        if lease is None or lease.entries[0].domain != request.domain:
            return None
        return lease if hmac.compare_digest(token, self._token_of(lease)) else None

    def _held(self, lease_id: int, holder: int) -> Lease | None:
        lease = self._leases.get(lease_id)
        return lease if lease is not None and holder in lease.holders else None

    def _answer(self, lease: Lease) -> LeaseAnswer:
        prefix = lease.prefix
        return LeaseAnswer(
            lease.lease_id,
            prefix.blocks,
            places_of(prefix, lease.width),
            lease.deadline,
            {self._blocks.tier: prefix.blocks},
            prefix.reason,
            self._blocks.slots.moves,
        )

    def _fits(self, entries: list[Entry]) -> bool:
        """Can these be leased within the cap?"""
        room_bytes = self.cap_bytes - self.leased_bytes
        for entry in entries:
            if not entry.leases:
                room_bytes -= entry.size_bytes
        return room_bytes >= 0

    def _fitting(self, request: LeaseRequest, prefix: Prefix) -> Prefix:
        """The longest prefix that can be leased within the cap, and that it is `busy` beyond.

        A shorter one may need other blocks (a window's), so each length is a search of its own;
        a bisection, since a prefix takes hardly more than a longer one.
        """
        low, high = 0, prefix.blocks  # of `low` blocks it fits, of `high` it does not
        best = Prefix(0, [], None, Outcome.BUSY)
        while high - low > 1:
            middle = (low + high) // 2
            shorter = find_prefix(self._blocks.index, _first(request, middle))
            if self._fits(shorter.entries):
                best = shorter._replace(reason=Outcome.BUSY)
                low = middle
            else:
                high = middle
        return best

    def _end(self, lease: Lease, reason: str) -> None:
        self._counters.add("ended_leases", 1, reason)
        for entry in lease.entries:
            entry.leases -= 1
            if not entry.leases:
                self.leased_bytes -= entry.size_bytes
        # From last to first, as their stamps ascend: the policy's queue is made for that.
        self._blocks.drop_users(reversed(lease.entries))

    def _deadline_of(self, lease_id: int) -> float | None:
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.deadline
