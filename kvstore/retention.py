"""How long blocks are kept, apart from their use: TTLs and pins.

A pin belongs to the tenant and outlives the client that set it. Reading a block never revives a
pin or a TTL that has run out.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from kvstore.deadlines import Deadlines
from kvstore.messages import PinKind
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index import Entry
    from kvstore.messages import PinRequest, UnpinRequest
    from kvstore.residency import Residency
    from kvstore.settings import CoreSettings


class Retention:
    """The deadlines of a tier's blocks, and who has pinned how much."""

    def __init__(self, blocks: Residency, settings: CoreSettings) -> None:
        self.quota_bytes = int(blocks.slots.capacity_bytes * settings.hard_pin_fraction)
        self._pin_seconds_max = settings.pin_seconds_max
        self.hard_pinned_bytes: Counter[bytes] = Counter()  # by domain
        self._blocks = blocks
        self._watched: dict[int, Entry] = {}  # by entry id: whatever has a deadline
        self.deadlines = Deadlines(self._deadline_of)
        blocks.before_drop = self._forget

    def expire_at(self, entry: Entry, expires_at: float) -> None:
        """Drop a ready block at that time, whoever uses it."""
        entry.expires_at = expires_at
        self._watch(entry)

    def pin(self, request: PinRequest, now: float) -> list[Outcome]:
        """Pin what is there; one outcome a key. Pinning again never shortens a pin."""
        outcomes: list[Outcome] = []
        domain, ttl_seconds, width = request.domain, request.ttl_seconds, request.width
        for first in range(0, len(request.keys), width):
            keys = request.keys[first : first + width]
            found = [self._blocks.index.find_ready(domain, key) for key in keys]
            entries = [entry for entry in found if entry is not None]
            outcome = Outcome.OK
            if request.kind is PinKind.HARD:
                outcome = self._pin_hard(domain, entries, ttl_seconds, now)
            else:
                self._pin_soft(entries, ttl_seconds, now)
            outcomes += [
                self._blocks.index.why_missing(domain, key) if entry is None else outcome
                for key, entry in zip(keys, found, strict=True)
            ]
        return outcomes

    def unpin(self, request: UnpinRequest) -> list[Outcome]:
        """End both kinds of pin."""
        outcomes = []
        for key in request.keys:
            entry = self._blocks.index.find_ready(request.domain, key)
            is_pinned = entry is not None and (
                entry.is_soft_pinned or entry.hard_pinned_until is not None
            )
            if entry is not None and is_pinned:
                self._unpin_soft(entry)
                self._unpin_hard(entry)
            outcomes.append(Outcome.OK if is_pinned else Outcome.ABSENT)
        return outcomes

    def expire(self, now: float) -> None:
        """Do what is due: end pins, drop blocks whose TTL has run out."""
        for entry_id in self.deadlines.pop_due(now):
            entry = self._watched.pop(entry_id, None)
            if entry is None:
                continue  # left just now, with another part of its block
            if entry.expires_at is not None and entry.expires_at <= now:
                self._blocks.drop(entry, Outcome.EXPIRED)
                continue
            if entry.is_soft_pinned and entry.soft_pinned_until <= now:
                self._unpin_soft(entry)
            if entry.hard_pinned_until is not None and entry.hard_pinned_until <= now:
                self._unpin_hard(entry)
            self._watch(entry)

    def _pin_soft(self, entries: Sequence[Entry], ttl_seconds: float | None, now: float) -> None:
        longest = self._pin_seconds_max
        until = now + (longest if ttl_seconds is None else min(ttl_seconds, longest))
        for entry in entries:
            entry.soft_pinned_until = max(entry.soft_pinned_until, until)
            entry.is_soft_pinned = True
            self._watch(entry)

    def _pin_hard(
        self, domain: bytes, entries: Sequence[Entry], ttl_seconds: float | None, now: float
    ) -> Outcome:
        """Pin the parts of one block, all or, where the quota does not allow that, none."""
        longest = self._pin_seconds_max
        until = math.inf if ttl_seconds is None else now + min(ttl_seconds, longest)
        new = [entry for entry in entries if entry.hard_pinned_until is None]
        size = sum(entry.size_bytes for entry in new)
        if new and self.hard_pinned_bytes[domain] + size > self.quota_bytes:
            return Outcome.QUOTA
        self.hard_pinned_bytes[domain] += size
        self._blocks.add_users(new)
        for entry in entries:
            before = entry.hard_pinned_until
            entry.hard_pinned_until = until if before is None else max(before, until)
            self._watch(entry)
        return Outcome.OK

    def _unpin_soft(self, entry: Entry) -> None:
        entry.is_soft_pinned = False
        entry.soft_pinned_until = 0.0
        self._blocks.rerank(entry)

    def _unpin_hard(self, entry: Entry) -> None:
        if entry.hard_pinned_until is not None:
            entry.hard_pinned_until = None
            self.hard_pinned_bytes[entry.domain] -= entry.size_bytes
            self._blocks.drop_users((entry,))

    def _forget(self, entry: Entry) -> None:
        """A block is about to leave."""
        if self._watched.pop(entry.entry_id, None) is not None:
            self.deadlines.drop(entry.entry_id)
        self._unpin_hard(entry)

    def _watch(self, entry: Entry) -> None:
        deadline = _next_of(entry)
        if deadline is None:
            return
        self._watched[entry.entry_id] = entry
        self.deadlines.add(deadline, entry.entry_id)

    def _deadline_of(self, entry_id: int) -> float | None:
        entry = self._watched.get(entry_id)
        return None if entry is None else _next_of(entry)


def _next_of(entry: Entry) -> float | None:
    """The first thing that will happen to an entry by itself."""
    times = [] if entry.expires_at is None else [entry.expires_at]
    if entry.is_soft_pinned:
        times.append(entry.soft_pinned_until)
    if entry.hard_pinned_until is not None and entry.hard_pinned_until < math.inf:
        times.append(entry.hard_pinned_until)
    return min(times, default=None)
