"""One socket to a daemon: frames out and in, each by a deadline of the whole call.

What has come of a frame is kept when a call gives up, so that its answer can be read later: it may
have granted something that nobody else would give back.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from typing import TYPE_CHECKING, Any

from kvstore.errors import WireError
from kvstore.wire import LENGTH, body_length, fields_of, frame

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.clock import Clock

_RECEIVED_BYTES = 64 << 10
_DESCRIPTORS_MAX = 8


class Channel:
    """A connected socket. `deadline` is on `clock`. Raises OSError, TimeoutError and WireError."""

    def __init__(self, path: Path, clock: Clock, deadline: float) -> None:
        self._clock = clock
        self._input = bytearray()
        self.descriptors: list[int] = []  # that came and that nobody has taken yet
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._connect(path, deadline)
        except BaseException:
            self._socket.close()
            raise

    def send(self, fields: dict[str, Any], deadline: float) -> None:
        """Send a map. After an error part of it may be on its way: close the channel."""
        data = frame(fields)
        self._await(deadline)
        self._socket.sendall(data)

    def receive(self, deadline: float, request_id: int | None = None) -> dict[str, Any]:
        """The next map, which answers this request. Can be called again after TimeoutError."""
        while True:
            body = self._next_body()
            if body is not None:
                fields = fields_of(body)
                if fields.get("i") != request_id:
                    raise WireError("an answer to another request")
                return fields
            self._await(deadline)
            self._receive_some()

    @property
    def is_closed(self) -> bool:
        """Was it closed on this side?"""
        return self._socket.fileno() < 0

    def is_ended(self) -> bool:
        """Has the other side closed it? Asks the system, and waits for nothing."""
        fd = self._socket.fileno()
        if fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)
        return bool(poll.poll(0))

    def drop_descriptors(self) -> None:
        """Close those that have come."""
        descriptors, self.descriptors = self.descriptors, []
        for fd in descriptors:
            os.close(fd)

    def close(self) -> None:
        """End it."""
        self.drop_descriptors()
        self._socket.close()

    def _connect(self, path: Path, deadline: float) -> None:
        # A socket with a timeout of Python's would not wait at all where the daemon is behind with
        # accepting; the system's own timeout does.
        left = max(deadline - self._clock.now(), 0.001)
        timeval = struct.pack("ll", int(left), int(left % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        try:
            self._socket.connect(os.fspath(path))
        except BlockingIOError as error:
            raise TimeoutError("the daemon has not accepted in time") from error

    def _await(self, deadline: float) -> None:
        left = deadline - self._clock.now()
        if left <= 0:
            raise TimeoutError("the daemon has not answered in time")
        self._socket.settimeout(left)

    def _receive_some(self) -> None:
        space = socket.CMSG_SPACE(_DESCRIPTORS_MAX * array.array("i").itemsize)
        received, ancillary, _, _ = self._socket.recvmsg(
            _RECEIVED_BYTES, space, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self.descriptors.extend(descriptors)
        if not received:
            raise ConnectionResetError("the daemon has closed the connection")
        self._input += received

    def _next_body(self) -> bytes | None:
        if len(self._input) < LENGTH.size:
            return None
        end = LENGTH.size + body_length(bytes(self._input[: LENGTH.size]))
        if len(self._input) < end:
            return None
        body = bytes(self._input[LENGTH.size : end])
        del self._input[:end]
        if not body:
            raise WireError("a frame of no bytes")
        return body
