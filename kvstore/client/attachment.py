"""One run of a daemon, as a client process is attached to it: sockets, and the mapped pool.

Whatever was granted under an attachment is worth something only while that run lasts. When the
daemon is gone, it is over, and the next call makes another one. When the daemon answers no more,
calls are misses until it does, and what was granted stays.

    attached ── no answer in time ──> silent ── it answers again ──> attached
        └─────── the run has ended ─────┴──────────────────────────> over
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvstore import native
from kvstore.client.away import away_answer
from kvstore.client.greeting import ANSWER_SECONDS
from kvstore.errors import DaemonUnavailable, StoreForked, TierError, WireError
from kvstore.messages import (
    AbortRequest,
    LeaseAnswer,
    ReleaseAnswer,
    ReleaseRequest,
    ReserveAnswer,
)
from kvstore.shared_memory import SharedMapping, check_sealed
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome
from kvstore.wire import pack_numbers
from kvstore.wire_answers import answer_of
from kvstore.wire_requests import request_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.buffers import Bytes
    from kvstore.client.backoff import Backoff
    from kvstore.client.channel import Channel
    from kvstore.client.greeting import Caller, Welcome
    from kvstore.client.link import Link
    from kvstore.messages import Answer, Request
    from kvstore.tiers.base import Piece
    from kvstore.types import Place

#: Sockets that are kept for the next calls; more threads than that make their own.
_IDLE_CHANNELS_MAX = 16
#: Sockets that are kept for an answer that nobody waits for any more.
_LATE_CHANNELS_MAX = 64
#: As in the embedded runner: an array that only its list refers to.
_LONE_REFERENCES = 4


class Attachment:
    """A link to one run of a daemon. Raises DaemonUnavailable where there is none."""

    def __init__(self, caller: Caller, backoff: Backoff) -> None:
        self.clock = caller.clock
        self._caller = caller
        self._backoff = backoff
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._late: list[tuple[Channel, int]] = []  # and the number of the request
        self._last_id = 0
        self._released: deque[int] = deque()
        self._later: deque[tuple[Request, Sequence[Bytes | None]]] = deque()
        self.is_over = False
        self.is_silent = False
        channel, self._welcome = caller.connect(self.clock.now() + ANSWER_SECONDS, None)
        try:
            self._map(channel, self._welcome)
        except BaseException:
            channel.close()
            raise
        self._idle.append(channel)

    def attached(self) -> Link:
        """Itself."""
        return self

    def check_process(self) -> None:
        """Raise StoreForked in a forked child: what was granted is its parent's."""
        if os.getpid() != self._pid:
            raise StoreForked("what was granted before a fork is the parent's")

    # -- calls ---------------------------------------------------------------------------------

    def call(self, request: Request) -> Answer:
        """Have a request answered; a miss where the daemon is gone, or says nothing in time."""
        self.check_process()
        if isinstance(request, ReleaseRequest):
            self._released.append(request.lease_id)
            self._send_releases()
            return ReleaseAnswer(was_held=True)  # nobody waits to hear whether it was
        asked_at = self.clock.now()
        wait_seconds: float = getattr(request, "wait_seconds", 0.0)
        deadline = asked_at + wait_seconds + ANSWER_SECONDS
        try:
            self._settle(deadline)
            return answer_of(self.inquire(request_fields(request), deadline), asked_at)
        except TimeoutError:
            reason = Outcome.TIMEOUT
        except (OSError, WireError, DaemonUnavailable):
            reason = Outcome.UNAVAILABLE
        if isinstance(request, AbortRequest):
            self._later.append((request, ()))
        return away_answer(request, reason, asked_at)

    def ask(self, fields: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Have a map answered, after all that was said before. Raises as `inquire`."""
        self.check_process()
        self._settle(deadline)
        return self.inquire(fields, deadline)

    def inquire(self, fields: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send a map, receive the one that answers it. Raises DaemonUnavailable, TimeoutError."""
        channel = self._take_channel(deadline)
        with self._lock:
            self._last_id += 1
            request_id = self._last_id
        whole = {"i": request_id, **fields}
        released = self._take_released()
        if released:
            whole["r"] = pack_numbers(released)
        try:
            channel.send(whole, deadline)
        except BaseException as error:
            self._released.extend(released)
            self._lose(channel, error)
            raise
        try:
            answer = channel.receive(deadline, request_id)
        except (TimeoutError, KeyboardInterrupt, SystemExit) as error:
            self._keep_late(channel, request_id)
            if isinstance(error, TimeoutError):
                self._fall_silent()
            raise
        except BaseException as error:
            self._lose(channel, error)
            raise
        self._give_back(channel)
        return answer

    def call_later(self, request: Request, memory: Sequence[Bytes | None]) -> None:
        """Send a request with the next call, once nobody refers to `memory`."""
        self._later.append((request, memory))

    def is_gone(self) -> bool:
        """Has this run of the daemon ended? Looks at a socket that nobody uses."""
        if not self.is_over and os.getpid() == self._pid:
            with suppress(IndexError):
                channel = self._idle[-1] if self._idle else self._late[-1][0]
                if channel.is_ended() and not channel.is_closed:  # by another thread, meanwhile
                    self.end()
        return self.is_over

    # -- memory --------------------------------------------------------------------------------

    def view(self, place: Place) -> Bytes:
        """The pool's own memory at a place."""
        self.check_process()
        return self._pool.memory[place.offset_bytes : place.offset_bytes + place.length_bytes]

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out of the pool."""
        native.copy_batch([memory for _, memory in batch], self._views(batch))
        return [Outcome.OK] * len(batch)

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy into the pool."""
        native.copy_batch(self._views(batch), [memory for _, memory in batch])
        return [Outcome.OK] * len(batch)

    def _views(self, batch: Sequence[Piece]) -> list[Bytes]:
        """As `view`, with one look at the process for all of them."""
        self.check_process()
        pool = self._pool.memory
        return [
            pool[place.offset_bytes : place.offset_bytes + place.length_bytes] for place, _ in batch
        ]

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        """The first of `places` whose slot is no longer whose it was; their number if none.

        All of them are once this run of the daemon is over.
        """
        if self.is_gone() or os.getpid() != self._pid:
            return 0
        words = self._words
        if words[0] == moves:
            return len(places)
        for position, place in enumerate(places):
            if words[1 + place.offset_bytes // SLOT_ALIGNMENT_BYTES] != place.generation:
                return position
        return len(places)

    # -- the end, and the return ---------------------------------------------------------------

    def end(self) -> None:
        """Nothing more comes of it. Views that are alive keep their memory."""
        self.is_over = True
        if os.getpid() != self._pid:
            return
        with self._lock:
            channels = self._idle + [channel for channel, _ in self._late]
            self._idle, self._late = [], []
        for channel in channels:
            channel.close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets. The parent's stay."""
        self.is_over = True
        for channel in self._idle + [channel for channel, _ in self._late]:
            channel.close()
        self._idle, self._late = [], []

    def resume(self, deadline: float) -> None:
        """See whether a silent daemon answers again. Raises DaemonUnavailable where not."""
        channel = self._connect(deadline)
        with self._lock:
            self.is_silent = False
            self._idle.append(channel)
        self._hear_late()

    def settle_and_end(self) -> None:
        """Say what is yet to be said, and end it."""
        if not (self.is_over or self.is_silent) and os.getpid() == self._pid:
            with suppress(OSError, WireError, DaemonUnavailable):
                self._settle(self.clock.now() + ANSWER_SECONDS)
        self.end()

    # -- inside --------------------------------------------------------------------------------

    def _map(self, channel: Channel, welcome: Welcome) -> None:
        pool_fd, words_fd = channel.descriptors
        try:
            check_sealed(pool_fd, welcome.pool_bytes)
            check_sealed(words_fd, welcome.words_bytes)
            self._pool = SharedMapping(pool_fd, welcome.pool_bytes, is_writable=welcome.can_write)
            self._words_mapping = SharedMapping(words_fd, welcome.words_bytes, is_writable=False)
        except TierError as error:
            raise DaemonUnavailable(
                f"the daemon's memory at {self._caller.path}: {error}"
            ) from error
        self._words: memoryview[int] = self._words_mapping.memory.data.cast("Q")
        channel.drop_descriptors()

    def _connect(self, deadline: float) -> Channel:
        """One more channel to the same run."""
        channel, welcome = self._caller.connect(deadline, self._welcome)
        channel.drop_descriptors()
        if welcome.incarnation != self._welcome.incarnation:
            channel.close()
            self.end()
            raise DaemonUnavailable(f"the daemon at {self._caller.path} is another one now")
        self._welcome = welcome  # of another session where that of before held nothing any more
        return channel

    def _take_channel(self, deadline: float) -> Channel:
        if self.is_gone():
            raise DaemonUnavailable(f"the daemon at {self._caller.path} is gone")
        if self.is_silent:
            self._backoff.check(self.clock.now())
            self._try_to_resume(deadline)
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect(deadline)
        except DaemonUnavailable:
            self._fall_silent()
            raise

    def _try_to_resume(self, deadline: float) -> None:
        try:
            self.resume(deadline)
        except DaemonUnavailable:
            self._backoff.fail(self.clock.now())
            raise
        self._backoff.succeed()

    def _fall_silent(self) -> None:
        if not self.is_silent:
            self.is_silent = True
            self._backoff.fail(self.clock.now())

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            if not self.is_over and len(self._idle) < _IDLE_CHANNELS_MAX:
                self._idle.append(channel)
                return
        channel.close()

    def _lose(self, channel: Channel, error: BaseException) -> None:
        """A call has failed in the middle of a frame, or over a socket that is no more."""
        channel.close()
        if isinstance(error, TimeoutError):
            self._fall_silent()
        elif isinstance(error, OSError):
            self.end()

    def _keep_late(self, channel: Channel, request_id: int) -> None:
        with self._lock:
            if not self.is_over and len(self._late) < _LATE_CHANNELS_MAX:
                self._late.append((channel, request_id))
                return
        channel.close()

    def _hear_late(self) -> None:
        """Read answers that nobody waits for any more, and give back what they grant."""
        with self._lock:
            late, self._late = self._late, []
        for channel, request_id in late:
            try:
                deadline = self.clock.now() + _LATE_SECONDS
                self._decline(channel.receive(deadline, request_id))
            except TimeoutError:
                self._keep_late(channel, request_id)
            except (OSError, WireError):
                channel.close()
            else:
                self._give_back(channel)

    def _decline(self, fields: dict[str, Any]) -> None:
        answer = answer_of(fields, self.clock.now())
        if isinstance(answer, LeaseAnswer) and answer.lease_id:
            self._released.append(answer.lease_id)
        elif isinstance(answer, ReserveAnswer) and answer.reservation_id:
            self._later.append((AbortRequest(answer.reservation_id), ()))

    def _take_released(self) -> list[int]:
        released = []
        with suppress(IndexError):
            while True:
                released.append(self._released.popleft())
        return released

    def _send_releases(self) -> None:
        """Tell of ended leases at once, without waiting for anything."""
        if self.is_over or self.is_silent:
            return  # a daemon that answers again will be told
        released = self._take_released()
        if not released:
            return
        deadline = self.clock.now() + ANSWER_SECONDS
        try:
            channel = self._take_channel(deadline)
        except (OSError, DaemonUnavailable):
            self._released.extend(released)
            return
        try:
            channel.send({"t": "releases", "r": pack_numbers(released)}, deadline)
        except OSError as error:
            self._released.extend(released)
            self._lose(channel, error)
            return
        self._give_back(channel)

    def _settle(self, deadline: float) -> None:
        """Send what destructors have left, of which nobody refers to the memory any more."""
        if self._late and not self.is_silent:
            self._hear_late()
        for _ in range(len(self._later)):
            try:
                request, memory = self._later.popleft()
            except IndexError:
                return
            if any(_is_in_use(block) for block in memory if block is not None):
                self._later.append((request, memory))
                continue
            try:
                self.inquire(request_fields(request), deadline)
            except (OSError, DaemonUnavailable):
                self._later.append((request, memory))
                raise


#: For an answer that is late already: it is there, or it is not.
_LATE_SECONDS = 0.001


def _is_in_use(block: Bytes) -> bool:
    return sys.getrefcount(block) > _LONE_REFERENCES
