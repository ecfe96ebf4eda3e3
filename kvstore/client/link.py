"""What a session needs of the store behind it, wherever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.buffers import Bytes
    from kvstore.clock import Clock
    from kvstore.messages import Answer, Request
    from kvstore.tiers.base import Piece
    from kvstore.types import Outcome, Place


class Link(Protocol):
    """A way to the core, and to the pool's memory."""

    clock: Clock  # on which the deadlines in answers are told

    def attached(self) -> Link:
        """The link to whoever answers now: what is granted over it is of no use over another."""
        ...

    def call(self, request: Request) -> Answer:
        """Have a request answered, waiting no longer than it says."""
        ...

    def call_later(self, request: Request, memory: Sequence[Bytes | None]) -> None:
        """Send a request whose answer nobody needs, once nobody refers to `memory` any more.

        For destructors: takes no lock and never raises.
        """
        ...

    def check_process(self) -> None:
        """Raise StoreForked where what was granted is a parent process's."""
        ...

    def view(self, place: Place) -> Bytes:
        """The pool's own memory at a place."""
        ...

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out of the pool."""
        ...

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy into the pool."""
        ...

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        """The first of `places` whose slot is no longer whose it was; their number if none.

        `moves` comes from the answer that they came with.
        """
        ...
