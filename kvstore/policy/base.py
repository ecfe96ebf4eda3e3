"""What the core and a policy promise each other.

A policy orders; it never decides whether a block may leave. The core tells it which blocks came to
be without protection, which were used and which are gone, and takes victims from it. The suite in
`kvstore.testing.policy_contract` checks a policy's side of this.

The order has three parts, compared from left to right:

    rung       what protection a block has left (`Rung`): the core's ladder, the same for all
    is parent  whether blocks that follow it are resident: they are worth nothing without it
    stamp      when it was used, in the policy's own reckoning
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index import Entry

Rank = tuple["Rung", bool, float]


class Rung(IntEnum):
    """The protection ladder, as far as eviction goes: leased and hard-pinned blocks are above."""

    UNHIT_PARTIAL = 0  # a final partial block that nobody has hit: only the same prompt ever will
    PLAIN = 1
    SOFT_PIN = 2


class Policy(Protocol):
    """The order in which unprotected blocks are evicted.

    Of an entry, a policy owns `stamp`, `last_use`, `past_hits` and `queue_place`, and reads the
    rest. `queue_place` is None for an entry that it does not know: the core adds those.
    """

    name: str

    def rank(self, entry: Entry) -> Rank:
        """Where `entry` stands: the lowest rank leaves first."""
        ...

    def touch(self, entries: Sequence[Entry]) -> None:
        """`entries`, a run of one prefix in prefix order, were committed or read just now.

        Every block is touched when it becomes visible, before it is added for the first time; a
        read counts it in `entry.hits` before. The run may be empty: a read that found nothing.
        """
        ...

    def add(self, entry: Entry) -> None:
        """Nothing protects `entry` any more, or its rung has sunk, or its children are gone.

        Adding again does no harm. A rank that has risen is not reported: the policy sees it when
        the entry's turn comes.
        """
        ...

    def remove(self, entry: Entry, *, is_evicted: bool) -> None:
        """`entry` is gone: evicted to make room, or deleted, expired or corrupt.

        What is merely protected need not be removed.
        """
        ...

    def pop_victim(self) -> Entry | None:
        """The evictable block that should leave first, and after it the next; None: there is none.

        The caller drops it, or adds it again to keep it.
        """
        ...
