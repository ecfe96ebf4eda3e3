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
    fields_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.server.sessions import Session

_RECEIVED_BYTES = 256 << 10
#: What a client may leave unread before it is dropped.
_OUTPUT_BYTES_MAX = 64 << 20
#: Requests of one connection that wait for their answers.
WAITING_MAX = 256


class Connection:
    """What has come over a socket and is no whole frame yet, and what is still to be sent."""

    def __init__(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.session: Session | None = None
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
            yield fields_of(body)

    @property
    def has_output(self) -> bool:
        """Is there something that the socket did not take yet?"""
        return bool(self._output)

    def send(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Queue a frame, with descriptors that go along with its first byte."""
        self._output.append((memoryview(data), descriptors))
        self._output_bytes += len(data)
        if self._output_bytes > _OUTPUT_BYTES_MAX:
            raise WireError("the client does not read its answers")

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
        self.socket.close()
