"""`credit`: like `lru`, and blocks that were read before are given more time."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.policy.lru import LruPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index import Entry

#: Past hits of a block that count, at most.
HITS_MAX = 4
#: How much younger each of them makes it, as a share of the turnover.
CREDIT_PER_HIT = 0.1
#: The weight of one victim's age in the turnover.
TURNOVER_WEIGHT = 0.01


class CreditPolicy(LruPolicy):
    """Least recently used first, less a credit for each past hit.

    Age counts uses: every read and every commit of a run of blocks is one, whatever its length.
    The *turnover* is a running mean of the age at which blocks are evicted: how long one stays that
    nobody uses. Each past hit of a block, four at most, makes it a tenth of the turnover younger
    when it is used. So what was read again and again outlives what came by once, by 40 % of the
    time that a block has, and not for ever: no block has to be aged, and none gets stuck.

    A ghost remembers the hits of as many evicted blocks as the cache has held at most; the return
    of one is a hit as well, only too late. A ghost's key never lets anybody read anything.
    """

    name = "credit"

    def __init__(self) -> None:
        super().__init__()
        self._turnover = 0.0
        self._residents = 0
        self._residents_max = 0
        self._ghost: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()

    def touch(self, entries: Sequence[Entry]) -> None:
        """Stamp from last to first with the time of this use and the credit of past hits."""
        self._clock += 1.0
        clock = self._clock
        credit = CREDIT_PER_HIT * self._turnover
        # Less than one use apart, so that the root is the most recent and nothing else changes.
        step = 1.0 / (len(entries) + 1)
        offset = 0.0
        for entry in reversed(entries):
            if not entry.last_use:
                self._welcome(entry)
            entry.last_use = clock
            hits = entry.hits + entry.past_hits
            stamp = clock + offset + credit * (hits if hits < HITS_MAX else HITS_MAX)
            # While the turnover falls, a use never makes a block older than it was.
            if stamp > entry.stamp:
                entry.stamp = stamp
            offset += step

    def remove(self, entry: Entry, *, is_evicted: bool) -> None:
        """Forget an entry; of one that was evicted, remember its hits and take its age."""
        super().remove(entry, is_evicted=is_evicted)
        if not entry.last_use:
            return
        self._residents -= 1
        if is_evicted:
            age = self._clock - entry.last_use
            self._turnover += TURNOVER_WEIGHT * (age - self._turnover)
            self._ghost[entry.domain, entry.key] = entry.hits + entry.past_hits
            if len(self._ghost) > self._residents_max:
                self._ghost.popitem(last=False)

    def _welcome(self, entry: Entry) -> None:
        """A block has become visible: has it been here before?"""
        self._residents += 1
        self._residents_max = max(self._residents_max, self._residents)
        hits = self._ghost.pop((entry.domain, entry.key), None)
        entry.past_hits = 0 if hits is None else hits + 1
