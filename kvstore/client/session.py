"""A session: one namespace's blocks, read and written in batches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self, cast

from kvstore import codec
from kvstore.client.durations import lasting_seconds
from kvstore.client.durations import wait_seconds as checked_wait_seconds
from kvstore.client.lease import Lease
from kvstore.client.parts import BlockParts, check_start, pieces_of, tokens_of
from kvstore.client.reservation import Reservation
from kvstore.errors import (
    InvalidBuffer,
    InvalidKeys,
    InvalidRequest,
    KVStoreError,
    LeaseInUse,
    ReservationExpired,
    StoreClosed,
)
from kvstore.messages import (
    AdoptRequest,
    DeleteRequest,
    LeaseRequest,
    LostRequest,
    MatchRequest,
    PinKind,
    PinRequest,
    ReadRequest,
    ReserveRequest,
    UnpinRequest,
)
from kvstore.types import Found, Outcome

if TYPE_CHECKING:
    from kvstore.buffers import Bytes
    from kvstore.client.link import Link
    from kvstore.client.parts import Lookup
    from kvstore.keys import Namespace
    from kvstore.layout import Part
    from kvstore.messages import (
        DeleteAnswer,
        LeaseAnswer,
        MatchAnswer,
        PinAnswer,
        ReadAnswer,
        Request,
        ReserveAnswer,
        UnpinAnswer,
    )
    from kvstore.types import BlockKey, Place

LEASE_SECONDS = 30.0
PUT_WAIT_SECONDS = 0.1


class Session:
    """Reads and writes of one namespace. Any number of threads may share it.

    Every call has a deadline: `wait_seconds` after it was made it answers with what there is. A
    block that is not there is an outcome, not an exception; InvalidRequest and its kinds mean that
    the call itself cannot be right, and then nothing was changed.

    `keys` are always consecutive blocks of one sequence, as `Namespace.keys` makes them.
    """

    def __init__(
        self,
        link: Link,
        domain: bytes,
        namespace: Namespace,
        part: Part | Sequence[Part] | None = None,
    ) -> None:
        self.namespace = namespace
        self._link = link
        self._domain = domain
        self._parts = BlockParts(namespace, part)
        self._open: weakref.WeakSet[Lease | Reservation] = weakref.WeakSet()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(KVStoreError):  # what left the block matters more
            self.close()

    def match(self, keys: Sequence[BlockKey], *, wait_seconds: float = 0.0) -> Found:
        """How long a prefix of `keys` is held, where, and why it ends there.

        Holds nothing: a block found may be gone a moment later. With `wait_seconds`, waits for
        blocks that another writer is filling.
        """
        found = self._lookup(keys)
        wait = checked_wait_seconds(wait_seconds)
        request = MatchRequest(self._domain, found.keys, wait, found.first_needed, found.more)
        answer = cast("MatchAnswer", self._link.call(request))
        tokens = tokens_of(keys[: answer.blocks])
        return Found(answer.blocks, tokens, answer.by_tier, answer.reason)

    def lease(
        self,
        keys: Sequence[BlockKey],
        *,
        ttl_seconds: float = LEASE_SECONDS,
        wait_seconds: float = 0.0,
    ) -> Lease:
        """Keep the longest prefix of `keys` readable for `ttl_seconds`.

        `lease.blocks` counts it; with nothing held it is 0, never an error.
        """
        found = self._lookup(keys)
        request = LeaseRequest(
            self._domain,
            found.keys,
            tokens_of(keys),
            lasting_seconds("ttl_seconds", ttl_seconds),
            checked_wait_seconds(wait_seconds),
            found.first_needed,
            found.more,
        )
        return self._lease(request, keys)

    def adopt(self, token: bytes, keys: Sequence[BlockKey]) -> Lease:
        """Hold a lease that another session, perhaps of another process, has: see `Lease.token`.

        `keys` are those that it was asked for. The memory stays until all who hold the lease have
        released it, or their processes are gone, at the latest until its deadline. Of a lease that
        has ended, or was never granted here, nothing is held: `blocks` is 0, the reason `expired`;
        of one on other blocks than `keys` the reason is `absent`.
        """
        if not isinstance(token, bytes):
            raise InvalidRequest(f"token is a {type(token).__name__}: expected bytes")
        self._lookup(keys)  # that they are a prefix
        request = AdoptRequest(self._domain, token, self._parts.all_keys(keys), self._parts.width)
        return self._lease(request, keys)

    def _lease(self, request: Request, keys: Sequence[BlockKey]) -> Lease:
        link = self._link.attached()
        lease = Lease(link, cast("LeaseAnswer", link.call(request)), keys, self._parts)
        self._open.add(lease)
        return lease

    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        start: int = 0,
        ttl_seconds: float = LEASE_SECONDS,
        wait_seconds: float = PUT_WAIT_SECONDS,
        expire_seconds: float | None = None,
        wanted: Sequence[Sequence[bool]] | None = None,
    ) -> Reservation:
        """Make room for `keys[start:]`, to be filled in place and committed.

        Waits up to `wait_seconds` for room; then takes what fits, from the first block on. Give
        the whole prefix and `start`, so that room for its tail is not made at its own expense. The
        reservation ends after `ttl_seconds`, the blocks `expire_seconds` after their commit (None:
        when they are evicted). Where blocks have several parts here, `wanted[i]` has a truth value
        for each part of the i-th block of the batch: whether it is to be written (None: all are).
        """
        reservation = self._reserve(keys, start, ttl_seconds, wait_seconds, expire_seconds, wanted)
        self._open.add(reservation)
        return reservation

    def _reserve(
        self,
        keys: Sequence[BlockKey],
        start: int,
        ttl_seconds: float,
        wait_seconds: float,
        expire_seconds: float | None,
        wanted: Sequence[Sequence[bool]] | None,
    ) -> Reservation:
        self._check_keys(keys)
        check_start(start, keys)
        if wanted is not None:
            self._parts.check_wanted(wanted, len(keys) - start)
        width = self._parts.width
        request = ReserveRequest(
            self._domain,
            self._parts.specs(keys, start, wanted),
            start,
            lasting_seconds("ttl_seconds", ttl_seconds),
            checked_wait_seconds(wait_seconds),
            None if expire_seconds is None else lasting_seconds("expire_seconds", expire_seconds),
            width,
        )
        link = self._link.attached()
        return Reservation(link, cast("ReserveAnswer", link.call(request)), width)

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[object],
        *,
        start: int = 0,
        wait_seconds: float = PUT_WAIT_SECONDS,
        expire_seconds: float | None = None,
    ) -> list[Outcome]:
        """Store copies of `blocks`, the contents of `keys[start:]`; one outcome each.

        They are gone `expire_seconds` after their commit, if that is given. Where blocks have
        several parts here, blocks[i] is a list of one buffer a part; None for one that is not to be
        stored, such as the state of a block at which none was taken.

        `ok`, or `present` where the key was stored before: the first contents stay, and others are
        counted as `differing_puts`. A refused block (`full`, `pending`) is worth another try
        later. The buffers stay the caller's and are not used after the call.
        """
        sources = self._sources(keys, blocks, start)
        wanted = None if self._parts.is_single else self._given(sources)
        # Not one of the session's own: closing it in another thread must not give memory back that
        # this thread is writing to.
        with self._reserve(
            keys, start, LEASE_SECONDS, wait_seconds, expire_seconds, wanted
        ) as reservation:
            outcomes = list(reservation.outcomes)
            differing = {
                position // self._parts.width
                for position, (source, known) in enumerate(
                    zip(sources, reservation.checksums, strict=True)
                )
                if source is not None and known is not None and known != codec.checksum(source)
            }
            pieces = pieces_of(reservation.places, sources, self._parts.width)
            written = pieces.by_block(reservation.write(pieces.batch), len(outcomes))
            granted = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.GRANTED]
            # A prefix ends at the first block that could not be written.
            end = len(outcomes)
            for position in granted:
                outcomes[position] = written[position]
                if written[position] is not Outcome.OK:
                    end = min(end, position)
            try:
                reservation.commit(end, differing_puts=len(differing))
            except ReservationExpired:
                end = 0
            for position in granted:
                if position >= end and outcomes[position] is Outcome.OK:
                    outcomes[position] = Outcome.EXPIRED
        return outcomes

    def _given(self, sources: Sequence[object]) -> list[list[bool]]:
        """Which parts of each block the caller has."""
        width = self._parts.width
        return [
            [source is not None for source in sources[i : i + width]]
            for i in range(0, len(sources), width)
        ]

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[object], *, wait_seconds: float = 0.0
    ) -> list[Outcome]:
        """Copy the contents of `keys` into the caller's `buffers`; one outcome each.

        The blocks of the longest prefix held are `ok`; from there on each outcome says why the
        prefix ended, and its buffer is as it was, or, where it is `expired`, undefined: the block
        left while it was copied. Where blocks have several parts here, buffers[i] is a list of one
        a part; None for one that is not wanted, and those that the prefix does not need are left
        as they are.
        """
        found = self._lookup(keys)
        if len(buffers) != len(keys):
            raise InvalidBuffer(f"{len(buffers)} buffers for {len(keys)} keys")
        memories = self._parts.memories(keys, buffers, is_writable=True, name="buffers")
        wait = checked_wait_seconds(wait_seconds)
        request = ReadRequest(
            self._domain, found.keys, tokens_of(keys), wait, found.first_needed, found.more
        )
        link = self._link.attached()
        answer = cast("ReadAnswer", link.call(request))
        blocks = answer.blocks
        # Nothing is held meanwhile: a slot whose generation is the same after the last byte was
        # nobody else's before it.
        if self._parts.is_single:
            places = cast("list[Place]", answer.places)
            sure = cast("list[Bytes]", memories)  # a block of one part has its buffer
            outcomes = link.read(list(zip(places, sure, strict=False)))
            right = link.first_stale(places, answer.moves)
        else:
            outcomes, right = self._read_parts(link, answer, memories)
        lost = blocks - right
        if lost:
            outcomes[right:] = [Outcome.EXPIRED] * lost
            link.call_later(LostRequest(lost, Outcome.EXPIRED), ())
        return outcomes + [cast("Outcome", answer.reason)] * (len(keys) - blocks)

    def _read_parts(
        self, link: Link, answer: ReadAnswer, memories: Sequence[Bytes | None]
    ) -> tuple[list[Outcome], int]:
        """Copy what was found; one outcome a block, and the first block that was lost meanwhile.

        A window's lost block makes the whole prefix worthless, whatever its position.
        """
        pieces = pieces_of(answer.places, memories, self._parts.width)
        outcomes = pieces.by_block(link.read(pieces.batch), answer.blocks)
        places = [place for place, _ in pieces.batch]
        stale = link.first_stale(places, answer.moves)
        is_right = stale == len(places)
        return outcomes, answer.blocks if is_right else 0

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Hide blocks at once; `ok` each, or `absent`. Leases on them keep their bytes.

        Blocks that follow a deleted one stay, out of reach until it is stored again.
        """
        self._check_keys(keys)
        request = DeleteRequest(self._domain, self._parts.all_keys(keys))
        of_parts = cast("DeleteAnswer", self._link.call(request)).outcomes
        # The first part takes the others along, so it is the only one that is `ok`.
        width = self._parts.width
        blocks = [of_parts[i : i + width] for i in range(0, len(of_parts), width)]
        return [Outcome.OK if Outcome.OK in block else block[0] for block in blocks]

    def pin(
        self,
        keys: Sequence[BlockKey],
        *,
        kind: str = PinKind.SOFT,
        ttl_seconds: float | None = None,
    ) -> list[Outcome]:
        """Keep blocks beyond their use; `ok` each, or why not.

        A `soft` pin lets them be evicted after all others; it ends after `ttl_seconds`, at the
        latest after 30 days. A `hard` pin keeps them until `unpin`, or for `ttl_seconds`, against
        the tenant's quota (`quota` beyond it). Pins outlive the session, and reading a block does
        not prolong them; pinning it again does, and never shortens.
        """
        self._check_keys(keys)
        if kind not in tuple(PinKind):
            raise InvalidRequest(f"kind is {kind!r}: allowed are 'soft' and 'hard'")
        request = PinRequest(
            self._domain,
            self._parts.all_keys(keys),
            PinKind(kind),
            None if ttl_seconds is None else lasting_seconds("ttl_seconds", ttl_seconds),
            self._parts.width,
        )
        return self._parts.outcomes(cast("PinAnswer", self._link.call(request)).outcomes)

    def unpin(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """End all pins of blocks; `ok` each, or `absent` where there was none."""
        self._check_keys(keys)
        request = UnpinRequest(self._domain, self._parts.all_keys(keys))
        return self._parts.outcomes(cast("UnpinAnswer", self._link.call(request)).outcomes)

    def close(self) -> None:
        """Release the session's leases and abort its reservations.

        Raises LeaseInUse where a view of a lease is alive; such a lease ends at its deadline. The
        memory of a reservation whose views are alive is given back when they are gone. A put that
        another thread is in the middle of is finished.
        """
        if self._is_closed:
            return
        self._is_closed = True
        in_use: LeaseInUse | None = None
        for held in list(self._open):
            try:
                if isinstance(held, Lease):
                    held.release()
                else:
                    held.give_up()
            except LeaseInUse as error:
                in_use = error
            except StoreClosed:
                return  # the store went first, and took everything with it
        if in_use is not None:
            raise in_use

    def _lookup(self, keys: Sequence[BlockKey]) -> Lookup:
        self._check_keys(keys)
        return self._parts.lookup(keys)

    def _check_keys(self, keys: Sequence[BlockKey]) -> None:
        self._check_open()
        if not isinstance(keys, Sequence) or isinstance(keys, (str, bytes)):
            raise InvalidKeys(f"keys is a {type(keys).__name__}: expected a list of BlockKeys")

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed("the session is closed")

    def _sources(
        self, keys: Sequence[BlockKey], blocks: Sequence[object], start: int
    ) -> list[Bytes | None]:
        self._check_keys(keys)
        check_start(start, keys)
        self._parts.all_keys(keys)  # that they are keys, before anything is asked of them
        if len(blocks) != len(keys) - start:
            raise InvalidBuffer(f"{len(blocks)} blocks for keys {start} to {len(keys)}")
        return self._parts.memories(keys[start:], blocks, is_writable=False, name="blocks")
