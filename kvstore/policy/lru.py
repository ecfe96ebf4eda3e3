"""`lru`, and two plainer ones that it is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.policy.base import Rung
from kvstore.policy.victims import Victims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index import Entry
    from kvstore.policy.base import Rank

# An enum's members are looked up slowly, and these are needed for every block.
_UNHIT_PARTIAL, _PLAIN, _SOFT_PIN = Rung


class LruPolicy:
    """Least recently used first, and of one prefix the tail first.

    A prefix is worth nothing without its beginning, so its blocks are stamped from last to first,
    and a block with resident children waits until they are gone; only when nothing else is left
    (all children are protected) does one go before them, and then again the last one first.
    """

    name = "lru"

    #: Whether final partial blocks that were never hit leave before all others.
    partial_first = True
    #: Whether blocks with resident children wait.
    children_first = True

    def __init__(self) -> None:
        self._clock = 0.0
        self._victims = Victims(self.rank)

    def rank(self, entry: Entry) -> Rank:
        """The rung, parents behind leaves, then the last use."""
        rung = _PLAIN
        if entry.is_soft_pinned:
            rung = _SOFT_PIN
        elif self.partial_first and entry.is_partial and not entry.hits:
            rung = _UNHIT_PARTIAL
        return rung, self.children_first and entry.children > 0, entry.stamp

    def touch(self, entries: Sequence[Entry]) -> None:
        """Stamp from last to first, so that the root is the most recent."""
        clock = self._clock
        for entry in reversed(entries):
            clock += 1.0
            entry.stamp = clock
        self._clock = clock

    def add(self, entry: Entry) -> None:
        """Queue an entry, unless it is queued and its rank has not sunk."""
        self._victims.add(entry)

    def remove(self, entry: Entry, *, is_evicted: bool) -> None:
        """Forget an entry; why it left makes no difference."""
        del is_evicted
        self._victims.remove(entry)

    def pop_victim(self) -> Entry | None:
        """The entry of the lowest rank."""
        return self._victims.pop()


class LruRPolicy(LruPolicy):
    """`lru` without a rule for partial blocks: the reference that traces are measured with."""

    name = "lru-r"
    partial_first = False


class LruNPolicy(LruPolicy):
    """One list of blocks, each touched on its own from first to last: what a plain LRU does.

    It evicts the beginning of a prefix before its tail, which strands the tail. For comparison.
    """

    name = "lru-n"
    partial_first = False
    children_first = False

    def touch(self, entries: Sequence[Entry]) -> None:
        """Stamp from first to last."""
        for entry in entries:
            self._clock += 1.0
            entry.stamp = self._clock
