"""`kvstore.connect`: the store that the daemon of this node holds for all its processes."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvstore.client.daemon_link import DaemonLink
from kvstore.client.session import Session
from kvstore.clock import SystemClock
from kvstore.errors import ConfigError, InvalidRequest, LeaseInUse, StoreForked
from kvstore.keys import Namespace
from kvstore.paths import check_socket_path, find_socket
from kvstore.types import SINGLE_DOMAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.layout import Part

_SCHEME = "unix:"


class NodeStore:
    """A store behind a daemon of this node. Threads may share it.

    It may be made, and used, while no daemon runs: every lookup is then a miss, `unavailable`, and
    the daemon is found when it is there. A forked child makes a connection of its own.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._link = DaemonLink(path, SystemClock(), name)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def session(
        self, namespace: Namespace, *, part: Part | Sequence[Part] | None = None
    ) -> Session:
        """Read and write the blocks of one namespace; `part` as in a store that was opened."""
        if not isinstance(namespace, Namespace):
            raise InvalidRequest(
                f"a session needs a kvstore.Namespace, not {type(namespace).__name__}"
            )
        # The daemon puts the domain in; what a client says is never heard.
        session = Session(self._link, SINGLE_DOMAIN, namespace, part)
        self._sessions.add(session)
        return session

    def status(self) -> dict[str, Any]:
        """What the daemon says of itself: plain values. Raises DaemonUnavailable."""
        return self._link.inquire({"t": "status"})

    def stats(self) -> dict[str, object]:
        """`tiers` and `counters`, as a store that was opened has them. Raises DaemonUnavailable."""
        status = self.status()
        return {"tiers": status["tiers"], "counters": status["counters"]}

    def verify(self) -> dict[str, Any]:
        """Have the daemon recount everything: `audit`, and `problems`, which should be none."""
        return self._link.inquire({"t": "verify"})

    def close(self) -> None:
        """Close the sessions, and end the connection. The daemon goes on.

        A lease with a view that is alive ends at its deadline; the memory of a reservation with one
        is kept for it until this process ends.
        """
        for session in list(self._sessions):
            with suppress(LeaseInUse, StoreForked):
                session.close()
        self._link.close()


def connect(address: str | os.PathLike[str] | None = None, *, name: str = "") -> NodeStore:
    """The store of a daemon on this node; a session of it is that of `kvstore.open`.

    `address` is the daemon's socket, as a path or "unix:/path"; without one, this user's daemon's
    if there is one, else the system's. `name` is shown by `kvstore status`. Connects with the first
    call. Raises ConfigError for an address that cannot be one.
    """
    if address is None:
        path = find_socket()
    else:
        text = os.fspath(address)
        if not isinstance(text, str) or not text:
            raise ConfigError(f"address is {address!r}: give a path, or unix:/path")
        path = Path(text.removeprefix(_SCHEME))
    return NodeStore(check_socket_path(path), name or f"pid {os.getpid()}")
