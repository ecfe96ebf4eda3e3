"""The control thread: owns the core, and serves the Unix socket with a selector loop.

Nothing here runs for long: payload never comes this way, checksums are made by a worker, and what
a client may have under way is bounded.

    client ──> bytes ──> frame ──> request ──> core.begin ──> answers ──> frames ──> clients
                                                   └──> transfers ──> worker ──> core.complete
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kvstore.errors import WireError
from kvstore.messages import (
    AbortRequest,
    EndHolderRequest,
    LeaseAnswer,
    ReleaseRequest,
    ReserveAnswer,
    Step,
)
from kvstore.server.connection import Connection
from kvstore.server.connections import Connections
from kvstore.server.drain import refusal
from kvstore.server.inquiries import listed, stat
from kvstore.server.sessions import OF_WRITERS, Sessions, identify
from kvstore.server.status import status_fields, verified_fields, welcome_fields
from kvstore.types import SINGLE_DOMAIN
from kvstore.wire import WIRE_VERSION, frame, serves, unpack_numbers, version_of
from kvstore.wire_answers import answer_fields
from kvstore.wire_requests import request_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.clock import Clock
    from kvstore.messages import Answer, Request, Transfer
    from kvstore.server.pool import SharedPool
    from kvstore.server.sessions import Session
    from kvstore.store import Core
    from kvstore.types import Outcome

_ACCEPTED_AT_ONCE = 16
#: No longer than this without a look at the clock.
_IDLE_SECONDS = 1.0


class Control:
    """One core, one socket, and everybody who is connected to it.

    `listener` is a listening Unix socket; it and the pool stay the caller's. `incarnation` tells
    this run of the daemon from every other one. Use `run` in one thread; `stop`, `completed` and
    `populated` may be called from any.
    """

    def __init__(
        self,
        core: Core,
        pool: SharedPool,
        listener: socket.socket,
        clock: Clock,
        incarnation: bytes,
    ) -> None:
        self._core = core
        self._pool = pool
        self._listener = listener
        self._clock = clock
        self._incarnation = incarnation
        self._sessions = Sessions()
        self._connections = Connections()
        self._is_deaf = False  # out of descriptors: no more connections are accepted for a while
        self._asked: dict[int, tuple[Connection | None, int]] = {}  # by the core's request id
        self._last_request_id = 0
        self._started_at = self._cleaned_at = clock.now()
        #: What other threads have to say, and a descriptor that wakes this one up for it.
        self._news: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.work: SimpleQueue[Transfer | None] = SimpleQueue()
        self._is_stopping = False
        self._drained_at: float | None = None  # by then at the latest; None: not draining
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._hear)

    # -- from other threads --------------------------------------------------------------------

    def call_soon(self, action: Callable[[], None]) -> None:
        """Have something done in the control thread."""
        self._news.append(action)
        with suppress(OSError, ValueError):
            os.eventfd_write(self._wake_fd, 1)

    def completed(self, transfer: Transfer, outcome: Outcome, checksum: int | None) -> None:
        """A worker has carried a transfer out."""
        self.call_soon(lambda: self._take(self._core.complete(transfer, outcome, checksum)))

    def populated(self, usable_bytes: int) -> None:
        """More of the pool's memory is there."""
        self.call_soon(lambda: self._take(self._core.extend(usable_bytes)))

    def stop(self) -> None:
        """Let `run` return after the events at hand."""
        self.call_soon(lambda: setattr(self, "_is_stopping", True))

    def drain(self, grace_seconds: float) -> None:
        """Grant nothing new, and let `run` return once what is granted has ended, or so late."""
        drained_at = self._clock.now() + grace_seconds
        self.call_soon(lambda: setattr(self, "_drained_at", drained_at))

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`, or the end of `drain`; then close every connection."""
        try:
            while not (self._is_stopping or self._is_drained()):
                for key, events in self._selector.select(self._timeout()):
                    key.data(*((events,) if isinstance(key.fileobj, socket.socket) else ()))
                self._tick()
        finally:
            self._close()

    def _is_drained(self) -> bool:
        if self._drained_at is None:
            return False
        return self._clock.now() >= self._drained_at or not self._core.inspection().holds()

    def _timeout(self) -> float:
        times = [self._core.next_deadline(), self._drained_at]
        now = self._clock.now()
        left = (max(0.0, time - now) for time in times if time is not None)
        return min([_IDLE_SECONDS, *left])

    def _tick(self) -> None:
        deadline, now = self._core.next_deadline(), self._clock.now()
        if deadline is not None and deadline <= now:
            self._take(self._core.tick(now))
        if now >= self._cleaned_at + _IDLE_SECONDS:
            self._cleaned_at = now
            self._clean(now)

    def _clean(self, now: float) -> None:
        """Once a second: end what came to nothing, and listen again."""
        for connection in self._connections.silent(now):
            self._drop(connection)
        for session in self._sessions:
            self._end_if_idle(session)
        if self._is_deaf:
            self._is_deaf = False
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._news:
            self._news.popleft()()

    def _close(self) -> None:
        for connection in self._connections:
            self._drop(connection)
        for session in self._sessions:
            self._forget_process(session)
        self._selector.close()
        wake_fd, self._wake_fd = self._wake_fd, -1  # other threads may still want to call
        os.close(wake_fd)

    # -- connections ---------------------------------------------------------------------------

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # It would be reported as ready again and again.
                    self._is_deaf = True
                    self._selector.unregister(self._listener)
                return  # or there is none, or it has gone again
            oldest = self._connections.in_the_way()
            if oldest is not None:
                self._drop(oldest)
            if self._connections.is_full:
                accepted.close()
                continue
            connection = Connection(accepted, self._clock.now())
            self._connections.add(connection)
            self._selector.register(
                accepted, selectors.EVENT_READ, lambda events, c=connection: self._serve(c, events)
            )

    def _serve(self, connection: Connection, events: int) -> None:
        """Read what has come, answer it, write what can be written."""
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                for fields in connection.receive():
                    self._handle(connection, fields)
                self._count(connection)
                if connection.is_at_end:
                    self._drop(connection)
                    return
        except (WireError, OSError):
            self._drop(connection)
            return
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        # Whoever does not read is asked no more; epoll tells of its end all the same.
        events = selectors.EVENT_READ if connection.may_ask else 0
        if connection.has_output:
            events |= selectors.EVENT_WRITE
        key = self._selector.get_key(connection.socket)
        if key.events != events:
            self._selector.modify(connection.socket, events, key.data)

    def _drop(self, connection: Connection) -> None:
        """A connection has ended, by its own word or ours. Its process may go on."""
        if connection.is_closed:
            return
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.close()
        for request_id in connection.waiting:
            self._asked.pop(request_id, None)
            self._take(self._core.cancel(request_id))
        session = connection.session
        if session is not None:
            session.connections -= 1
            if not session.connections and not session.can_write:
                self._end(session)  # nobody else could tell us when it is gone
            else:
                self._end_if_idle(session)

    def _count(self, connection: Connection) -> None:
        """Its buffers have grown or shrunk."""
        if not connection.is_closed:
            largest = self._connections.count(connection)
            if largest is not None:
                self.call_soon(lambda: self._drop(largest))

    # -- frames --------------------------------------------------------------------------------

    def _handle(self, connection: Connection, fields: dict[str, Any]) -> None:
        kind = fields["t"]
        if connection.session is None:
            if kind != "hello":
                raise WireError("the first frame is a hello")
            self._greet(connection, fields)
            return
        for lease_id in unpack_numbers(fields.get("r", b"")):
            self._release(connection.session, lease_id)
        if kind in _INQUIRIES:
            self._send(connection, {"i": fields.get("i"), **_INQUIRIES[kind](self, fields)})
        elif kind != "releases":
            self._ask(connection, fields)

    def _greet(self, connection: Connection, fields: dict[str, Any]) -> None:
        if not serves(WIRE_VERSION, version_of(fields)):
            connection.send(frame({"t": "incompatible", "v": list(WIRE_VERSION)}), ())
            connection.flush()
            raise WireError("another version")
        identity = identify(connection.socket)
        try:
            self._connections.know(connection, identity.pid)
        except WireError:
            if identity.pidfd is not None:
                os.close(identity.pidfd)
            raise
        session: Session | None = None
        holder, secret = fields.get("session"), fields.get("secret")
        if holder is not None and secret is not None:
            session = self._sessions.join(holder, secret, identity)
        if session is None:
            session = self._sessions.open(identity, fields.get("name", "")[:64])
            if identity.pidfd is not None:
                self._selector.register(
                    identity.pidfd, selectors.EVENT_READ, lambda s=session: self._end(s)
                )
        elif identity.pidfd is not None:
            os.close(identity.pidfd)
        session.connections += 1
        connection.session = session
        connection.is_known()
        pool = self._pool
        pool_fd = pool.fd if session.can_write else pool.read_only_fd
        welcome = welcome_fields(session, pool, self._incarnation)
        connection.send(frame(welcome), (pool_fd, pool.read_only_words_fd))

    def _ask(self, connection: Connection, fields: dict[str, Any]) -> None:
        session = connection.session
        assert session is not None  # `_handle` has seen to it
        request = request_of(fields, SINGLE_DOMAIN, session.holder)
        if isinstance(request, OF_WRITERS) and not session.can_write:
            raise WireError("a client that may only read has asked for more")
        client_id = fields.get("i")
        if not isinstance(client_id, int):
            raise WireError("a request has a number, 'i'")
        request_id = self._begin_id(connection, client_id)
        if self._drained_at is not None:
            now, moves = self._clock.now(), self._core.slots.moves
            if (refused := refusal(request, now, moves)) is not None:
                self._take(Step([(request_id, refused)], []))
                return
        self._take(self._core.begin(request_id, request))

    def _begin_id(self, connection: Connection | None, client_id: int) -> int:
        self._last_request_id += 1
        self._asked[self._last_request_id] = connection, client_id
        if connection is not None:
            connection.begin(self._last_request_id)
        return self._last_request_id

    def _release(self, session: Session, lease_id: int) -> None:
        request_id = self._begin_id(None, 0)
        self._take(self._core.begin(request_id, ReleaseRequest(lease_id, session.holder)))

    def _take(self, step: Step) -> None:
        for transfer in step.transfers:
            self.work.put(transfer)
        now = self._clock.now()
        for request_id, answer in step.answers:
            connection, client_id = self._asked.pop(request_id, (None, 0))
            if connection is None:
                continue
            if not connection.is_closed:  # else it is looped over
                connection.waiting.discard(request_id)
            fields = {"i": client_id, **answer_fields(answer, now)}
            if connection.is_closed or not self._send(connection, fields):
                self._take_back(connection, answer)

    def _take_back(self, connection: Connection, answer: Answer) -> None:
        """What was granted and cannot be delivered, nobody would ever give back."""
        session = connection.session
        if session is None or session.is_over:
            return
        request: Request | None = None
        if isinstance(answer, LeaseAnswer) and answer.lease_id:
            request = ReleaseRequest(answer.lease_id, session.holder)
        elif isinstance(answer, ReserveAnswer) and answer.reservation_id:
            request = AbortRequest(answer.reservation_id, session.holder)
        if request is not None:
            self._take(self._core.begin(self._begin_id(None, 0), request))

    def _send(self, connection: Connection, fields: dict[str, Any]) -> bool:
        try:
            connection.send(frame(fields), ())
            connection.flush()
            self._count(connection)
        except (WireError, OSError):
            self.call_soon(lambda: self._drop(connection))
            return False
        self._watch(connection)
        return True

    # -- processes -----------------------------------------------------------------------------

    def _end(self, session: Session) -> None:
        """A process is gone, and all that it held with it."""
        session.is_over = True
        for connection in self._connections:
            if connection.session is session:
                self._drop(connection)
        self._forget_process(session)
        self._take(self._core.begin(self._begin_id(None, 0), EndHolderRequest(session.holder)))

    def _end_if_idle(self, session: Session) -> None:
        """A session that nobody is connected to and that holds nothing is worth no descriptor."""
        if not (session.connections or session.is_over or self._core.has_holder(session.holder)):
            self._end(session)

    def _forget_process(self, session: Session) -> None:
        if session.identity.pidfd is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(session.identity.pidfd)
        self._sessions.end(session)


_INQUIRIES: dict[str, Callable[[Control, dict[str, Any]], dict[str, Any]]] = {
    "status": lambda c, _: (
        status_fields(
            c._core, c._pool, c._sessions, len(c._connections), c._clock.now() - c._started_at
        )
        | {"incarnation": c._incarnation.hex(), "is_draining": c._drained_at is not None}
    ),
    "verify": lambda c, _: verified_fields(c._core),
    "list": lambda c, fields: listed(c._core, c._clock.now(), fields),
    "stat": lambda c, fields: stat(c._core, c._clock.now(), fields),
}
