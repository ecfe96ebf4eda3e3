"""The contract of a tier.

A tier knows places and bytes. It never evicts, never knows another tier, and never decides: the
core grants places, the tier moves bytes. Calls are synchronous; different threads may make them at
the same time for different places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.buffers import Bytes
    from kvstore.types import Outcome, Place


#: Bytes to move: a place, and a caller's memory of `place.length_bytes`. A plain tuple, since every
#: block of every batch makes one.
Piece = tuple["Place", "Bytes"]


class Tier(Protocol):
    """Bytes at places.

    A place is written before it is read. What was written comes back exactly, or as a miss: a
    tier that can lose or damage bytes must notice. A batch gives one outcome a piece, in order;
    a piece that fails does not fail its neighbours.
    """

    name: str

    @property
    def capacity_bytes(self) -> int:
        """Bytes that places may lie in: offsets from 0 up to this."""
        ...

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Fill each piece's memory from its place. Memory of a piece that missed is undefined."""
        ...

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Store each piece's memory at its place."""
        ...

    def delete(self, batch: Sequence[Place]) -> list[Outcome]:
        """These places hold nothing any more. Deleting what is not there is `ok`."""
        ...

    def close(self) -> None:
        """Give everything back. Calls after it raise TierError; closing again does nothing."""
        ...
