"""Who talks to the daemon: processes, recognised by a descriptor that outlives their sockets.

A process holds leases and reservations as one holder, over any number of connections. What it may
still write to is given back when the *process* is gone, since a copy can outlive a socket.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvstore.messages import (
    DeleteRequest,
    PinRequest,
    ReserveRequest,
    ScrubRequest,
    UnpinRequest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_SO_PEERPIDFD = 77  # linux/socket.h, since 6.5; Python has no name for it
#: Requests that change other processes' blocks, or keep them: not for those who may only read.
OF_WRITERS = ReserveRequest | DeleteRequest | PinRequest | UnpinRequest | ScrubRequest
SECRET_BYTES = 16


class PeerIdentity(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel tells it."""

    pid: int
    uid: int
    pidfd: int | None  # readable once the process is gone; None where the kernel has none


def identify(connection: socket.socket) -> PeerIdentity:
    """Who is it? The descriptor, if there is one, is the caller's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pidfd = None
    return PeerIdentity(pid, uid, pidfd)


class Session:
    """One process. `secret` lets further connections of it join."""

    __slots__ = ("connections", "holder", "identity", "is_over", "name", "secret")

    def __init__(self, holder: int, identity: PeerIdentity, name: str) -> None:
        self.holder = holder
        self.identity = identity
        self.name = name
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.connections = 0
        self.is_over = False

    @property
    def can_write(self) -> bool:
        """Is its end known for certain, and is it one of ours?"""
        return self.identity.pidfd is not None and self.identity.uid == os.geteuid()

    def close(self) -> None:
        """Give the descriptor of the process back."""
        if self.identity.pidfd is not None:
            with suppress(OSError):
                os.close(self.identity.pidfd)


class Sessions:
    """All of them, by holder."""

    def __init__(self) -> None:
        self._by_holder: dict[int, Session] = {}
        self._last_holder = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_holder.values()))

    def __len__(self) -> int:
        return len(self._by_holder)

    def open(self, identity: PeerIdentity, name: str) -> Session:
        """A session of its own."""
        self._last_holder += 1
        session = Session(self._last_holder, identity, name)
        self._by_holder[session.holder] = session
        return session

    def join(self, holder: int, secret: bytes, identity: PeerIdentity) -> Session | None:
        """The session of an earlier connection of the same process; None for anything else."""
        session = self._by_holder.get(holder)
        if session is None or not secrets.compare_digest(session.secret, secret):
            return None
        same = (session.identity.pid, session.identity.uid) == (identity.pid, identity.uid)
        return session if same else None

    def end(self, session: Session) -> None:
        """The process is gone, or a reader that holds nothing has left."""
        self._by_holder.pop(session.holder, None)
        session.close()
