"""One connection of a client: bytes in, frames out, nothing blocks."""

from __future__ import annotations

import array
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

from kvstore.errors import WireError
from kvstore.wire import (
    BODY_BYTES_MAX,
    HELLO_BYTES_MAX,
    LENGTH,
    body_length,
    request_fields_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.server.sessions import Session

_RECEIVED_BYTES = 256 << 10
#: What a client may leave unread before it is dropped, beside one answer of the greatest length.
_OUTPUT_BYTES_MAX = 8 << 20
#: From a client that has left so much unread, nothing more is read.
_UNREAD_BYTES_MAX = 1 << 20
#: Requests of one connection that wait for their answers.
WAITING_MAX = 256


class Connection:
    """What has come over a socket and is no whole frame yet, and what is still to be sent."""

    def __init__(self, accepted: socket.socket, accepted_at: float) -> None:
        self.accepted_at = accepted_at
        accepted.setblocking(False)
        self.socket = accepted
        self.session: Session | None = None
        self.pid: int | None = None  # of a process that has said hello
        self.waiting: set[int] = set()  # the core's ids of requests without an answer
        self.is_at_end = False
        self.is_closed = False
        self._bytes_max = HELLO_BYTES_MAX
        self._input = bytearray()
        self._output: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._output_bytes = 0

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.socket.fileno()

    def is_known(self) -> None:
        """It has said hello: from now on frames may be long."""
        self._bytes_max = BODY_BYTES_MAX

    def begin(self, request_id: int) -> None:
        """A request has come. Raises WireError where too many wait."""
        if len(self.waiting) >= WAITING_MAX:
            raise WireError(f"more than {WAITING_MAX} requests at a time")
        self.waiting.add(request_id)

    def receive(self) -> Iterator[dict[str, Any]]:
        """The frames that are complete. Raises WireError for what is none, OSError at a break."""
        try:
            received = self.socket.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        if not received:
            self.is_at_end = True
        self._input += received
        while len(self._input) >= LENGTH.size:
            length = body_length(bytes(self._input[: LENGTH.size]), bytes_max=self._bytes_max)
            end = LENGTH.size + length
            if len(self._input) < end:
                return
            body = bytes(self._input[LENGTH.size : end])
            del self._input[:end]
            yield request_fields_of(body)

    @property
    def buffered_bytes(self) -> int:
        """What is kept of it: begun frames, and answers that it did not read yet."""
        return len(self._input) + self._output_bytes

    @property
    def may_ask(self) -> bool:
        """Does it read its answers?"""
        return self._output_bytes < _UNREAD_BYTES_MAX

    @property
    def has_output(self) -> bool:
        """Is there something that the socket did not take yet?"""
        return bool(self._output)

    def send(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Queue a frame, with descriptors that go along with its first byte."""
        self._output.append((memoryview(data), descriptors))
        if self._output_bytes > _OUTPUT_BYTES_MAX:
            raise WireError("the client does not read its answers")
        self._output_bytes += len(data)

    def flush(self) -> None:
        """Send what the socket takes."""
        while self._output:
            data, descriptors = self._output[0]
            ancillary = []
            if descriptors:
                raw = array.array("i", descriptors)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, raw)]
            try:
                sent = self.socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self._output_bytes -= sent
            if sent == len(data):
                self._output.popleft()
            else:
                self._output[0] = (data[sent:], ())

    def close(self) -> None:
        """End it."""
        self.is_closed = True
        self._output.clear()
        self._input.clear()
        self._output_bytes = 0
        self.socket.close()
