"""What a person asks of a running daemon, beside its state: lists, and one block.

The fields of the answers are for people and may gain new ones; rows are plain maps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.errors import WireError
from kvstore.types import KEY_BYTES, SINGLE_DOMAIN

if TYPE_CHECKING:
    from kvstore.inspection import Inspection, Slice
    from kvstore.store import Core

    Fields = dict[str, Any]

LIMIT_MAX = 1_000


def listed(core: Core, now: float, fields: Fields) -> Fields:
    """`what`: blocks, leases or reservations; at most `limit` of them. Raises WireError."""
    limit, prefix = fields.get("limit", 100), fields.get("prefix", b"")
    if not isinstance(limit, int) or not 1 <= limit <= LIMIT_MAX:
        raise WireError(f"field 'limit' is no number from 1 to {LIMIT_MAX}")
    if not isinstance(prefix, bytes) or len(prefix) > KEY_BYTES:
        raise WireError(f"field 'prefix' is no binary of at most {KEY_BYTES} bytes")
    inspection: Inspection = core.inspection()
    found: Slice
    match fields.get("what"):
        case "blocks":
            is_newest_first = bool(fields.get("newest", True))
            found = inspection.blocks(
                SINGLE_DOMAIN, prefix, now, limit=limit, is_newest_first=is_newest_first
            )
        case "leases":
            found = inspection.leases(now, limit=limit)
        case "reservations":
            found = inspection.reservations(now, limit=limit)
        case other:
            raise WireError(f"there is no list of {other!r:.40}")
    return {"t": "listed", **found._asdict()}


def stat(core: Core, now: float, fields: Fields) -> Fields:
    """The block whose key is `k`, or why there is none. Raises WireError."""
    key = fields.get("k")
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise WireError(f"field 'k' is no key of {KEY_BYTES} bytes")
    inspection = core.inspection()
    found = inspection.blocks(SINGLE_DOMAIN, key, now, limit=1, is_newest_first=True)
    if found.rows:
        return {"t": "stat", "block": found.rows[0], "reason": None}
    return {"t": "stat", "block": None, "reason": inspection.why_missing(SINGLE_DOMAIN, key)}
