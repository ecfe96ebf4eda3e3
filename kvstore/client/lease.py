"""A lease in the hands of a reader."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, cast

from kvstore.client.durations import lasting_seconds
from kvstore.client.parts import by_block, pieces_of
from kvstore.client.views import PoolView
from kvstore.errors import (
    InvalidBuffer,
    InvalidRequest,
    KVStoreError,
    LeaseExpired,
    LeaseInUse,
)
from kvstore.messages import LostRequest, ReleaseRequest, RenewRequest, TokenRequest
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.link import Link
    from kvstore.client.parts import BlockParts
    from kvstore.messages import LeaseAnswer, RenewAnswer, TokenAnswer
    from kvstore.types import BlockKey

#: A read counts only if it was over this long before the lease's deadline: whoever takes the
#: memory next may have a clock that is a little ahead, and a reader may lose the CPU between its
#: last byte and its look at the clock.
MARGIN_SECONDS = 0.010


class Lease:
    """The longest prefix that was held, kept readable until `deadline`.

    Use it in a `with` block: leaving the block releases it, and raises LeaseExpired where that
    came too late, since what was read may then be another block's bytes. Any thread may use it,
    one at a time.
    """

    def __init__(
        self, link: Link, answer: LeaseAnswer, keys: Sequence[BlockKey], parts: BlockParts
    ) -> None:
        self.blocks = answer.blocks
        self.by_tier = answer.by_tier
        self.reason = answer.reason
        self.deadline = answer.deadline  # on the store's clock
        self._keys = keys
        self._parts = parts
        self._link = link
        self._lease_id = answer.lease_id
        self._places = answer.places
        self._held = [place for place in answer.places if place is not None]
        self._moves = answer.moves
        self._views: list[PoolView | None] = []
        self._views_in_use: list[
            PoolView | None
        ] = []  # found alive at an earlier attempt to release
        self._is_released = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_released:
            return
        if kind is not None:
            # What left the block matters more; its traceback may keep views alive, too. Then the
            # deadline ends the lease.
            with suppress(KVStoreError):
                self.release()
            return
        was_valid = self.valid()
        self.release()
        if not was_valid:
            raise LeaseExpired("the lease ended before its with block did: discard what was read")

    @property
    def views(self) -> list[Any]:
        """Read-only memory of the pool, one memoryview a block, without a copy.

        It is the store's and valid until the lease ends: read it, then ask `valid()`. Whatever is
        made from a view (arrays, slices) must be gone before the lease is released, which then
        refuses; the one thing that it cannot see is a tensor made by `torch.frombuffer`, since
        that keeps no export. Where blocks have several parts here, a tuple of one memoryview a
        part; None stands for a part that a prefix of this length does not need, such as that of a
        window that has passed. Raises LeaseExpired after the release or the deadline.
        """
        self._check_held()
        if self._held and not self.remaining_seconds():
            raise LeaseExpired("the lease's deadline has passed: its memory may be another's now")
        if not self._views:
            view = self._link.view
            self._views = [
                None if place is None else PoolView(view(place)) for place in self._places
            ]
        views = [None if pool_view is None else pool_view.view for pool_view in self._views]
        return by_block(views, self._parts.width)

    def remaining_seconds(self) -> float:
        """How long reads still count; 0 once they do not."""
        if self._is_released:
            return 0.0
        return max(0.0, self.deadline - MARGIN_SECONDS - self._link.clock.now())

    def valid(self) -> bool:
        """True if everything read so far under this lease was this lease's bytes.

        Ask after the last byte was read. An empty lease is always valid.
        """
        if not self._held:
            return True
        if self._is_released or self._link.clock.now() >= self.deadline - MARGIN_SECONDS:
            return False
        return self._link.first_stale(self._held, self._moves) == len(self._held)

    def copy_into(self, buffers: Sequence[object]) -> list[Outcome]:
        """Copy block i into buffers[i], and say of each whether it was copied.

        Buffers are the caller's: contiguous, writable, as long as their block. There may be fewer
        than blocks, or more, up to the keys that were asked for; what is beyond the lease gets
        the reason why the prefix ended. Where blocks have several parts here, buffers[i] is a list
        of one a part; None for one that is not wanted, and those that the prefix does not need are
        left as they are; there are then no fewer buffers than blocks. After a copy that took longer
        than the lease every block is `expired` and the buffers hold anything. Raises InvalidBuffer
        before the first copy.
        """
        self._check_held()
        if len(buffers) > len(self._keys):
            raise InvalidBuffer(f"{len(buffers)} buffers for {len(self._keys)} keys")
        if len(buffers) < self.blocks and not self._parts.is_single:
            # A shorter prefix may need parts, of a window, that this one does not hold.
            raise InvalidBuffer(
                f"{len(buffers)} buffers for a prefix of {self.blocks} blocks: to read a shorter "
                "one, lease its keys"
            )
        memories = self._parts.memories(self._keys, buffers, is_writable=True, name="buffers")
        pieces = pieces_of(self._places, memories, self._parts.width)
        copied = min(self.blocks, len(buffers))
        outcomes = pieces.by_block(self._link.read(pieces.batch), copied)
        if not self.valid():
            outcomes = [Outcome.EXPIRED] * len(outcomes)
            self._link.call_later(LostRequest(len(outcomes), Outcome.EXPIRED), ())
        beyond = len(buffers) - len(outcomes)
        return outcomes + [cast("Outcome", self.reason)] * beyond

    def renew(self, ttl_seconds: float) -> bool:
        """Let the lease last at least `ttl_seconds` from now; False where it has ended.

        It never becomes shorter, and no renewal goes beyond the store's maximum.
        """
        self._check_held()
        request = RenewRequest(self._lease_id, lasting_seconds("ttl_seconds", ttl_seconds))
        if not self._lease_id:
            return True
        answer = cast("RenewAnswer", self._link.call(request))
        if answer.deadline is not None:
            self.deadline = answer.deadline
        return answer.deadline is not None

    def token(self) -> bytes:
        """Opaque bytes with which `Session.adopt` in another process holds this lease, too.

        They are worth something while the lease lasts, to whoever reaches the same store. Raises
        LeaseExpired where it has ended, and InvalidRequest for a lease of no blocks.
        """
        self._check_held()
        if not self._lease_id:
            raise InvalidRequest("a lease of no blocks holds nothing that could be adopted")
        answer = cast("TokenAnswer", self._link.call(TokenRequest(self._lease_id)))
        if answer.token is None:
            raise LeaseExpired("the lease has ended: nobody can adopt it any more")
        return answer.token

    def release(self) -> None:
        """End the lease. Releasing again, or after the deadline, does nothing.

        Raises LeaseInUse, and stays held until its deadline, where a view handed out or something
        made from one is alive.
        """
        if self._is_released:
            return
        # A released view cannot be had back, so `views` makes new ones after a refusal.
        handed_out, self._views = self._views + self._views_in_use, []
        self._views_in_use = [view for view in handed_out if view and not view.release()]
        if self._views_in_use:
            raise LeaseInUse(
                f"{len(self._views_in_use)} views of {self.blocks} leased blocks are still in "
                "use: drop the arrays and tensors made from lease.views before the lease ends"
            )
        self._is_released = True
        if self._lease_id:
            self._link.call(ReleaseRequest(self._lease_id))

    def _check_held(self) -> None:
        self._link.check_process()
        if self._is_released:
            raise LeaseExpired("the lease was released")
