"""What a daemon says of itself: to a client that comes, and to a person who asks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore.errors import InvariantViolated
from kvstore.wire import WIRE_VERSION

if TYPE_CHECKING:
    from kvstore.server.pool import SharedPool
    from kvstore.server.sessions import Session, Sessions
    from kvstore.store import Core


def welcome_fields(session: Session, pool: SharedPool, incarnation: bytes) -> dict[str, Any]:
    """The answer to a hello."""
    return {
        "t": "welcome",
        "v": list(WIRE_VERSION),
        "incarnation": incarnation,
        "session": session.holder,
        "secret": session.secret,
        "writes": session.can_write,
        "pool_bytes": pool.capacity_bytes,
        "words_bytes": pool.words_bytes,
    }


def status_fields(
    core: Core, pool: SharedPool, sessions: Sessions, connections: int, uptime_seconds: float
) -> dict[str, Any]:
    """Tiers, counters, and who is connected: plain values."""
    return {
        "t": "status",
        "pid": os.getpid(),
        "uptime_seconds": uptime_seconds,
        "version": kvstore.__version__,
        "wire": list(WIRE_VERSION),
        "tiers": {pool.name: {**core.usage(), "huge_bytes": pool.huge_bytes}},
        "counters": core.counters.snapshot(),
        "connections": connections,
        "clients": [
            {
                "session": session.holder,
                "pid": session.identity.pid,
                "uid": session.identity.uid,
                "name": session.name,
                "connections": session.connections,
                "writes": session.can_write,
            }
            for session in sessions
        ],
    }


def verified_fields(core: Core) -> dict[str, Any]:
    """A recount, and what does not add up, which should be nothing."""
    try:
        return {"t": "verified", "audit": core.check()._asdict(), "problems": []}
    except InvariantViolated as error:
        return {"t": "verified", "audit": None, "problems": str(error).split("; ")}
