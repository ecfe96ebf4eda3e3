"""All connections of a daemon, and what they may take up together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.server.connection import Connection

CONNECTIONS_MAX = 1_024
#: Of one process. A client has one for each of its threads that is in a call.
PROCESS_CONNECTIONS_MAX = 256
#: Whoever has said no hello so long after it came is dropped.
HELLO_SECONDS = 5.0
#: Begun frames and unread answers of all connections together.
BUFFERED_BYTES_MAX = 256 << 20


class Connections:
    """Connections by descriptor. Says which of them have to go; ends none by itself."""

    def __init__(self) -> None:
        self._all: dict[int, Connection] = {}
        self._unknown: dict[int, Connection] = {}  # those without a hello, the oldest first
        self._by_process: Counter[int] = Counter()
        self._buffered: dict[int, int] = {}  # bytes, by descriptor, where there are any
        self._buffered_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._all.values()))

    def add(self, connection: Connection) -> None:
        """One that has said nothing yet."""
        fd = connection.fileno()
        self._all[fd] = self._unknown[fd] = connection

    def know(self, connection: Connection, pid: int) -> None:
        """It has said hello, and is of this process. Raises WireError where that has too many."""
        if self._by_process[pid] >= PROCESS_CONNECTIONS_MAX:
            raise WireError(f"process {pid} has {PROCESS_CONNECTIONS_MAX} connections")
        self._by_process[pid] += 1
        connection.pid = pid
        del self._unknown[connection.fileno()]

    def remove(self, connection: Connection) -> None:
        """It is about to be closed."""
        fd = connection.fileno()
        del self._all[fd]
        self._unknown.pop(fd, None)
        self._buffered_bytes -= self._buffered.pop(fd, 0)
        if connection.pid is not None:
            self._by_process[connection.pid] -= 1
            if not self._by_process[connection.pid]:
                del self._by_process[connection.pid]

    def in_the_way(self) -> Connection | None:
        """Which one has to go before another can come: the oldest without a hello; else None."""
        if len(self._all) < CONNECTIONS_MAX:
            return None
        return next(iter(self._unknown.values()), None)

    @property
    def is_full(self) -> bool:
        """Is there no place for one more?"""
        return len(self._all) >= CONNECTIONS_MAX

    def silent(self, now: float) -> list[Connection]:
        """Those that should have said hello by now."""
        found = []
        for connection in self._unknown.values():
            if now - connection.accepted_at < HELLO_SECONDS:
                break
            found.append(connection)
        return found

    def count(self, connection: Connection) -> Connection | None:
        """Its buffers have changed; which connection has to go since all take up too much."""
        fd, now_bytes = connection.fileno(), connection.buffered_bytes
        self._buffered_bytes += now_bytes - self._buffered.pop(fd, 0)
        if now_bytes:
            self._buffered[fd] = now_bytes
        if self._buffered_bytes <= BUFFERED_BYTES_MAX:
            return None
        return self._all[max(self._buffered, key=self._buffered.__getitem__)]
