"""One run of a daemon, as a client process is attached to it: sockets, and the mapped pool.

Whatever was granted under an attachment is worth something only while it lasts. When the daemon
goes, or answers no more, it ends, and the next call makes another one.
"""

from __future__ import annotations

import array
import os
import socket
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore import native
from kvstore.client.away import away_answer
from kvstore.errors import DaemonUnavailable, StoreForked, TierError, WireError
from kvstore.messages import ReleaseAnswer, ReleaseRequest
from kvstore.shared_memory import SharedMapping, check_sealed
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome
from kvstore.wire import LENGTH, WIRE_VERSION, body_length, fields_of, frame, pack_numbers
from kvstore.wire_answers import answer_of
from kvstore.wire_requests import request_fields

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.buffers import Bytes
    from kvstore.client.link import Link
    from kvstore.clock import Clock
    from kvstore.messages import Answer, Request
    from kvstore.tiers.base import Piece
    from kvstore.types import Place

#: A daemon that has not answered so long after it should have is as good as gone.
ANSWER_SECONDS = 2.0
#: Sockets that are kept for the next calls; more threads than that make their own.
_IDLE_SOCKETS_MAX = 16
#: As in the embedded runner: an array that only its list refers to.
_LONE_REFERENCES = 4


class Welcome(NamedTuple):
    """What a daemon says of itself to a new connection."""

    incarnation: bytes
    session: int
    secret: bytes
    can_write: bool
    pool_bytes: int
    words_bytes: int
    descriptors: tuple[int, ...]


class Incompatible(DaemonUnavailable):
    """A daemon of another version."""


class Attachment:
    """A link to one run of a daemon. Raises DaemonUnavailable where there is none."""

    def __init__(self, path: Path, clock: Clock, name: str) -> None:
        self.clock = clock
        self._path = path
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._last_id = 0
        self._released: deque[int] = deque()
        self._later: deque[tuple[Request, Sequence[Bytes | None]]] = deque()
        self.is_over = False
        connection, welcome = self._connect(None)
        try:
            self._map(welcome)
        except BaseException:
            connection.close()
            raise
        self._welcome = welcome
        self._idle.append(connection)

    def attached(self) -> Link:
        """Itself."""
        return self

    # -- calls ---------------------------------------------------------------------------------

    def call(self, request: Request) -> Answer:
        """Have a request answered; a miss where the daemon is gone, or says nothing in time."""
        self._check_process()
        if isinstance(request, ReleaseRequest):
            self._released.append(request.lease_id)
            self._send_releases()
            return ReleaseAnswer(was_held=True)  # nobody waits to hear whether it was
        self._settle()
        asked_at = self.clock.now()
        try:
            fields = self.inquire(request_fields(request), getattr(request, "wait_seconds", 0.0))
            return answer_of(fields, asked_at)
        except TimeoutError:
            self.end()
            return away_answer(request, Outcome.TIMEOUT, asked_at)
        except (OSError, WireError, DaemonUnavailable):
            self.end()
            return away_answer(request, Outcome.UNAVAILABLE, asked_at)

    def inquire(self, fields: dict[str, Any], wait_seconds: float = 0.0) -> dict[str, Any]:
        """Send a map, receive the one that answers it. Raises OSError, TimeoutError, WireError."""
        if self.is_over:
            raise DaemonUnavailable(f"the daemon at {self._path} is gone")
        connection = self._take_socket()
        try:
            with self._lock:
                self._last_id += 1
                request_id = self._last_id
            whole = {"i": request_id, **fields}
            released = self._take_released()
            if released:
                whole["r"] = pack_numbers(released)
            connection.settimeout(wait_seconds + ANSWER_SECONDS)
            connection.sendall(frame(whole))
            answer = _receive_answer(connection, request_id)
        except BaseException:
            # What comes over it later would be taken for the answer to something else.
            connection.close()
            raise
        self._give_back(connection)
        return answer

    def call_later(self, request: Request, memory: Sequence[Bytes | None]) -> None:
        """Send a request with the next call, once nobody refers to `memory`."""
        self._later.append((request, memory))

    # -- memory --------------------------------------------------------------------------------

    def view(self, place: Place) -> Bytes:
        """The pool's own memory at a place."""
        self._check_process()
        return self._pool.memory[place.offset_bytes : place.offset_bytes + place.length_bytes]

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out of the pool."""
        native.copy_batch([memory for _, memory in batch], [self.view(p) for p, _ in batch])
        return [Outcome.OK] * len(batch)

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy into the pool."""
        native.copy_batch([self.view(p) for p, _ in batch], [memory for _, memory in batch])
        return [Outcome.OK] * len(batch)

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        """The first of `places` whose slot is no longer whose it was; their number if none.

        All of them are once this run of the daemon is over.
        """
        if self.is_over or os.getpid() != self._pid:
            return 0
        words = self._words
        if words[0] == moves:
            return len(places)
        for position, place in enumerate(places):
            if words[1 + place.offset_bytes // SLOT_ALIGNMENT_BYTES] != place.generation:
                return position
        return len(places)

    # -- inside --------------------------------------------------------------------------------

    def end(self) -> None:
        """Nothing more comes of it. Views that are alive keep their memory."""
        self.is_over = True
        if os.getpid() != self._pid:
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreForked("what was granted before a fork is the parent's")

    def _connect(self, welcome: Welcome | None) -> tuple[socket.socket, Welcome]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(os.fspath(self._path))
            hello: dict[str, Any] = {"t": "hello", "v": list(WIRE_VERSION), "name": self._name}
            if welcome is not None:
                hello |= {"session": welcome.session, "secret": welcome.secret}
            connection.sendall(frame(hello))
            found = _welcome_of(*_receive_first(connection))
        except TimeoutError as error:
            connection.close()
            raise DaemonUnavailable(
                f"the daemon at {self._path} does not answer within {ANSWER_SECONDS:g} s"
            ) from error
        except (OSError, WireError) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise DaemonUnavailable(f"no daemon at {self._path}: {reason}") from error
        except BaseException:
            connection.close()
            raise
        return connection, found

    def _map(self, welcome: Welcome) -> None:
        pool_fd, words_fd = welcome.descriptors
        try:
            check_sealed(pool_fd, welcome.pool_bytes)
            check_sealed(words_fd, welcome.words_bytes)
            self._pool = SharedMapping(pool_fd, welcome.pool_bytes, is_writable=welcome.can_write)
            self._words_mapping = SharedMapping(words_fd, welcome.words_bytes, is_writable=False)
        except TierError as error:
            raise DaemonUnavailable(f"the daemon's memory at {self._path}: {error}") from error
        finally:
            for fd in welcome.descriptors:
                os.close(fd)
        self._words: memoryview[int] = self._words_mapping.memory.data.cast("Q")

    def _take_socket(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection, welcome = self._connect(self._welcome)
        for fd in welcome.descriptors:
            os.close(fd)
        if welcome.incarnation != self._welcome.incarnation:
            connection.close()
            self.end()
            raise DaemonUnavailable(f"the daemon at {self._path} is another one now")
        return connection

    def _give_back(self, connection: socket.socket) -> None:
        with self._lock:
            if not self.is_over and len(self._idle) < _IDLE_SOCKETS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _take_released(self) -> list[int]:
        released = []
        with suppress(IndexError):
            while True:
                released.append(self._released.popleft())
        return released

    def _send_releases(self) -> None:
        """Tell of ended leases at once, without waiting for anything."""
        released = self._take_released()
        if not released or self.is_over:
            return
        try:
            connection = self._take_socket()
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(frame({"t": "releases", "r": pack_numbers(released)}))
        except (OSError, DaemonUnavailable):
            self.end()
            return
        self._give_back(connection)

    def _settle(self) -> None:
        """Send what destructors have left, of which nobody refers to the memory any more."""
        for _ in range(len(self._later)):
            try:
                request, memory = self._later.popleft()
            except IndexError:
                return
            if any(_is_in_use(block) for block in memory if block is not None):
                self._later.append((request, memory))
            else:
                with suppress(OSError, WireError, DaemonUnavailable):
                    self.inquire(request_fields(request))


def _is_in_use(block: Bytes) -> bool:
    return sys.getrefcount(block) > _LONE_REFERENCES


def _receive(connection: socket.socket) -> bytes:
    """The body of one frame."""
    return _read_exactly(connection, body_length(_read_exactly(connection, LENGTH.size)))


def _receive_answer(connection: socket.socket, request_id: int) -> dict[str, Any]:
    answer = fields_of(_receive(connection))
    if answer.get("i") != request_id:
        raise WireError("an answer to another request")
    return answer


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    view = memoryview(received)
    done = 0
    while done < count:
        got = connection.recv_into(view[done:])
        if not got:
            raise ConnectionResetError("the daemon has closed the connection")
        done += got
    return bytes(received)


def _receive_first(connection: socket.socket) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The first frame, and the descriptors that come with it."""
    descriptors = array.array("i")
    header, ancillary, _, _ = connection.recvmsg(
        LENGTH.size, socket.CMSG_SPACE(2 * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) - len(data) % descriptors.itemsize
            descriptors.frombytes(data[:whole])
    found = tuple(descriptors)
    try:
        header += _read_exactly(connection, LENGTH.size - len(header))
        return fields_of(_read_exactly(connection, body_length(header))), found
    except BaseException:
        for fd in found:
            os.close(fd)
        raise


def _welcome_of(fields: dict[str, Any], descriptors: tuple[int, ...]) -> Welcome:
    if fields.get("t") == "incompatible":
        other = ".".join(map(str, fields.get("v") or ["?"]))
        own = ".".join(map(str, WIRE_VERSION))
        raise Incompatible(f"the daemon speaks version {other}, this client {own}")
    try:
        return _checked_welcome(fields, descriptors)
    except (KeyError, WireError) as error:
        for fd in descriptors:
            os.close(fd)
        raise WireError(f"no welcome: {error}") from error


def _checked_welcome(fields: dict[str, Any], descriptors: tuple[int, ...]) -> Welcome:
    if len(descriptors) != 2:
        raise WireError(f"{len(descriptors)} descriptors came with it, not 2")
    return Welcome(
        fields["incarnation"],
        fields["session"],
        fields["secret"],
        fields["writes"],
        fields["pool_bytes"],
        fields["words_bytes"],
        descriptors,
    )
