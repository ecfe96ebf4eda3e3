"""A reservation in the hands of a writer."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, cast

from kvstore.client.parts import by_block
from kvstore.errors import InvalidRequest, KVStoreError, ReservationExpired
from kvstore.messages import AbortRequest, CommitRequest
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.buffers import Bytes
    from kvstore.client.link import Link
    from kvstore.messages import CommitAnswer, ReserveAnswer
    from kvstore.tiers.base import Piece
    from kvstore.types import Place


class Reservation:
    """Slots to fill, invisible to everybody until `commit`.

    `outcomes[i]` says of the i-th block of the batch whether it is `granted`, `present` already,
    `pending` in another writer's hands, or why there is no room. Use it in a `with` block: what is
    not committed when the block is left is given back.
    """

    _is_done = True  # until there is something to give back

    def __init__(self, link: Link, answer: ReserveAnswer, width: int) -> None:
        self.outcomes = answer.outcomes
        self.deadline = answer.deadline  # on the store's clock
        self._link = link
        self._width = width
        self._reservation_id = answer.reservation_id
        self._places = answer.places
        self._checksums = answer.checksums
        self._committed = 0
        self._views: list[Bytes | None] = []
        self._is_done = not self.outcomes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.abort()
            return
        with suppress(KVStoreError):  # what left the block matters more
            self.abort()

    def __del__(self) -> None:
        """Whoever drops a reservation has stopped writing, once the views of it are gone, too."""
        self.give_up()

    @property
    def places(self) -> list[Place | None]:
        """Where each part of each block is to be written; None where there is nothing to write."""
        return self._places

    @property
    def checksums(self) -> list[int | None]:
        """What the store knows of the contents of each part that is there."""
        return self._checksums

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy into granted places, over the link that granted them; one outcome a piece."""
        return self._link.write(batch)

    @property
    def views(self) -> list[Any]:
        """Writable memory of the pool for each block that is yet to commit, None for the others.

        Where blocks have several parts here, a tuple of one memoryview, or None, a part. It is the
        store's. Write to it before the commit only; afterwards it is every reader's.
        Raises ReservationExpired once all is committed or given back.
        """
        self._link.check_process()
        if self._is_done:
            raise ReservationExpired("the reservation was committed or aborted")
        if not self._views:
            view = self._link.view
            self._views = [None if place is None else view(place) for place in self._places]
        committed = self._committed * self._width
        views = [
            None if array is None or position < committed else array.data
            for position, array in enumerate(self._views)
        ]
        return by_block(views, self._width)

    def commit(self, count: int | None = None, *, differing_puts: int = 0) -> None:
        """Make the first `count` blocks of the batch visible at once; all of them by default.

        Positions count every block of the batch, `present` ones included. May be called again for
        more. Raises ReservationExpired where the deadline has passed: then nothing became visible
        by this call, and the memory is no longer the writer's.
        """
        total = len(self.outcomes)
        count = total if count is None else count
        is_count = isinstance(count, int) and not isinstance(count, bool)
        if not is_count or not 0 <= count <= total:
            raise InvalidRequest(f"commit({count!r}) of a batch of {total} blocks")
        if count <= self._committed:
            return
        if self._is_done:
            raise ReservationExpired("the reservation was aborted, or its deadline has passed")
        request = CommitRequest(self._reservation_id, count, differing_puts)
        answer = cast("CommitAnswer", self._link.call(request))
        if answer.outcome is not Outcome.OK:
            if answer.outcome is Outcome.EXPIRED:
                self._is_done = True
                raise ReservationExpired("the reservation's deadline passed before the commit")
            self.give_up()  # it may have been heard, or not: what is not committed is given back
            raise ReservationExpired(f"the commit was not answered: {answer.outcome}")
        self._committed = count
        self._is_done = count == total

    def give_up(self) -> None:
        """Commit nothing more, and give the memory back once nobody refers to a view of it.

        For whoever ends a reservation that is perhaps not its own to end: its writer may be in the
        middle of a write.
        """
        if not self._is_done:
            self._is_done = True
            self._link.call_later(AbortRequest(self._reservation_id), self._views)

    def abort(self) -> None:
        """Give back what was not committed; its writer writes no more. Again does nothing."""
        if not self._is_done:
            self._is_done = True
            self._link.call(AbortRequest(self._reservation_id))
