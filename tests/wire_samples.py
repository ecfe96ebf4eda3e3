"""One message of each kind, and of each shape that its map can have."""

from __future__ import annotations

from typing import Any

from kvstore.messages import (
    AbortAnswer,
    AbortRequest,
    AdoptRequest,
    BlockSpec,
    Column,
    CommitAnswer,
    CommitRequest,
    DeleteAnswer,
    DeleteRequest,
    LeaseAnswer,
    LeaseRequest,
    LostAnswer,
    LostRequest,
    MatchAnswer,
    MatchRequest,
    PartLink,
    PinAnswer,
    PinKind,
    PinRequest,
    ReadAnswer,
    ReadRequest,
    ReleaseAnswer,
    ReleaseRequest,
    RenewAnswer,
    RenewRequest,
    ReserveAnswer,
    ReserveRequest,
    ScrubAnswer,
    ScrubRequest,
    TokenAnswer,
    TokenRequest,
    UnpinAnswer,
    UnpinRequest,
)
from kvstore.types import SINGLE_DOMAIN, Outcome, Place

DOMAIN, HOLDER = SINGLE_DOMAIN, 7
KEYS = [bytes([n]) * 32 for n in range(1, 7)]
OK, ABSENT, EXPIRED = Outcome.OK, Outcome.ABSENT, Outcome.EXPIRED
PLACES = [Place(b"", 4096 * n, 100 + n, 9 + n) for n in range(2)]

_PLAIN = BlockSpec(KEYS[0], None, 4096, 16, False)
_PARTIAL = BlockSpec(KEYS[1], KEYS[0], 100, 3, True)
_LINKED = [
    BlockSpec(KEYS[2], None, 64, 16, False, PartLink(KEYS[4], (None, 0), True)),
    BlockSpec(KEYS[3], KEYS[2], 32, 16, False, PartLink(KEYS[4], ("draft", 1), False)),
]

REQUESTS: dict[str, Any] = {
    "match": MatchRequest(DOMAIN, KEYS[:2], 0.0),
    "match of several parts": MatchRequest(
        DOMAIN, KEYS[:2], 0.5, [0, 0, 1], [Column(KEYS[2:4], None), Column(KEYS[4:], [0, 1, 2])]
    ),
    "lease": LeaseRequest(DOMAIN, KEYS[:2], 32, 30.0, 0.25, holder=HOLDER),
    "lease of several parts": LeaseRequest(
        DOMAIN, KEYS[:1], 16, 1.0, 0.0, [0, 0], [Column(KEYS[1:2], None)], HOLDER
    ),
    "adopt": AdoptRequest(DOMAIN, b"token", KEYS[:2], 2, HOLDER),
    "token": TokenRequest(5, HOLDER),
    "read": ReadRequest(DOMAIN, KEYS[:2], 32, 0.0),
    "renew": RenewRequest(5, 12.5, HOLDER),
    "release": ReleaseRequest(5, HOLDER),
    "lost": LostRequest(3, EXPIRED),
    "reserve": ReserveRequest(DOMAIN, [_PLAIN, _PARTIAL], 1, 30.0, 0.1, None, 1, HOLDER),
    "reserve of several parts": ReserveRequest(
        DOMAIN, [*_LINKED, None, _LINKED[0]], 0, 30.0, 0.1, 60.0, 2, HOLDER
    ),
    "commit": CommitRequest(6, 2, 1, HOLDER),
    "abort": AbortRequest(6, HOLDER),
    "delete": DeleteRequest(DOMAIN, KEYS[:2]),
    "pin": PinRequest(DOMAIN, KEYS[:2], PinKind.HARD, None, 2),
    "pin for a time": PinRequest(DOMAIN, KEYS[:1], PinKind.SOFT, 60.0),
    "unpin": UnpinRequest(DOMAIN, KEYS[:1]),
    "scrub": ScrubRequest(DOMAIN, KEYS[:1]),
}

#: Deadlines are of a clock that shows `NOW`.
NOW = 1_000.0
ANSWERS: dict[str, Any] = {
    "matched": MatchAnswer(2, {"dram": 2}, ABSENT),
    "matched all": MatchAnswer(2, {"dram": 2}, None),
    "leased": LeaseAnswer(5, 2, [*PLACES], NOW + 30, {"dram": 2}, None, 11),
    "leased nothing": LeaseAnswer(0, 0, [], NOW, {}, Outcome.PENDING, 11),
    "leased a window": LeaseAnswer(5, 2, [None, PLACES[0]], NOW + 1, {"dram": 2}, ABSENT, 11),
    "token": TokenAnswer(b"token"),
    "no token": TokenAnswer(None),
    "readable": ReadAnswer(2, [*PLACES], ABSENT, 11),
    "renewed": RenewAnswer(NOW + 12.5),
    "not renewed": RenewAnswer(None),
    "released": ReleaseAnswer(True),
    "counted": LostAnswer(),
    "reserved": ReserveAnswer(
        6, [Outcome.GRANTED, Outcome.PRESENT], [PLACES[0], None], [None, 2**64 - 1], NOW + 30
    ),
    "committed": CommitAnswer(OK),
    "aborted": AbortAnswer(False),
    "deleted": DeleteAnswer([OK, ABSENT]),
    "pinned": PinAnswer([OK, Outcome.QUOTA]),
    "unpinned": UnpinAnswer([ABSENT]),
    "scrubbed": ScrubAnswer(2, [KEYS[0]]),
}

HELLOS: dict[str, dict[str, Any]] = {
    "hello": {"t": "hello", "v": [1, 0], "name": "a client"},
    "hello once more": {
        "t": "hello",
        "v": [1, 0],
        "name": "a client",
        "session": HOLDER,
        "secret": bytes(range(16)),
    },
}
WELCOME: dict[str, Any] = {
    "t": "welcome",
    "v": [1, 0],
    "incarnation": bytes(range(16)),
    "session": HOLDER,
    "secret": bytes(range(16, 32)),
    "writes": True,
    "pool_bytes": 1 << 21,
    "words_bytes": 8192,
}
