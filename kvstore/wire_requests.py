"""Requests as maps of a frame, and back. docs/wire.md has the same as a table.

A domain never travels: the daemon puts in that of the authenticated peer. Times are durations.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvstore.errors import WireError
from kvstore.messages import (
    AbortRequest,
    AdoptRequest,
    BlockSpec,
    Column,
    CommitRequest,
    DeleteRequest,
    LeaseRequest,
    LostRequest,
    MatchRequest,
    PartLink,
    PinKind,
    PinRequest,
    ReadRequest,
    ReleaseRequest,
    RenewRequest,
    ReserveRequest,
    ScrubRequest,
    TokenRequest,
    UnpinRequest,
)
from kvstore.wire import (
    KEYS_MAX,
    NONE_U64,
    pack_keys,
    pack_numbers,
    pack_outcome,
    unpack_keys,
    unpack_numbers,
    unpack_outcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.messages import Request
    from kvstore.types import Outcome

    Fields = dict[str, Any]

_NO_KEY = bytes(32)
_PARTIAL, _LINKED, _NEEDED, _WANTED = 1, 2, 4, 8
WAIT_SECONDS_MAX = 3_600.0


def request_fields(request: Request) -> Fields:
    """The map of a request, without its id."""
    name, pack = _PACKERS[type(request)]
    return {"t": name, **pack(request)}


def request_of(fields: Fields, domain: bytes, holder: int) -> Request:
    """The request of a map, about `domain`, by `holder`. Raises WireError, naming the field."""
    name = fields.get("t")
    unpack = _UNPACKERS.get(name) if isinstance(name, str) else None
    if unpack is None:
        raise WireError(f"there is no request {name!r:.40}")
    return unpack(fields, domain, holder)


# -- fields ----------------------------------------------------------------------------------


def _number(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= NONE_U64:
        raise WireError(f"field {name!r} is no number from 0 on")
    return value


def _binary(fields: Fields, name: str) -> bytes:
    value = fields.get(name)
    if not isinstance(value, bytes):
        raise WireError(f"field {name!r} is no binary")
    return value


def _seconds(fields: Fields, name: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise WireError(f"field {name!r} is no duration in seconds")
    return float(value)


def _optional_seconds(fields: Fields, name: str) -> float | None:
    return None if fields.get(name) is None else _seconds(fields, name)


def _wait(fields: Fields) -> float:
    return min(_seconds(fields, "w", 0.0), WAIT_SECONDS_MAX)


def _first_needed(packed: object, keys: Sequence[bytes]) -> list[int] | None:
    if packed is None:
        return None
    needed = list(unpack_numbers(packed))
    ordered = all(a <= b for a, b in pairwise(needed))
    if len(needed) != len(keys) + 1 or not ordered or any(f > n for n, f in enumerate(needed)):
        raise WireError("field 'n' does not say of each length which block is needed first")
    return needed


# -- looking for a prefix --------------------------------------------------------------------


def _pack_lookup(request: MatchRequest | LeaseRequest | ReadRequest) -> Fields:
    fields: Fields = {"k": pack_keys(request.keys), "w": request.wait_seconds}
    if request.first_needed is not None:
        fields["n"] = pack_numbers(request.first_needed)
    if request.more:
        fields["m"] = [
            {"k": pack_keys(keys)}
            if needed is None
            else {"k": pack_keys(keys), "n": pack_numbers(needed)}
            for keys, needed in request.more
        ]
    return fields


def _unpack_lookup(fields: Fields) -> tuple[list[bytes], list[int] | None, list[Column]]:
    keys = unpack_keys(fields.get("k"))
    more = fields.get("m") or []
    if not isinstance(more, list) or not all(isinstance(column, dict) for column in more):
        raise WireError("field 'm' is no list of maps")
    columns = []
    for column in more:
        own = unpack_keys(column.get("k"))
        if len(own) != len(keys):
            raise WireError("the parts of a request have different numbers of keys")
        columns.append(Column(own, _first_needed(column.get("n"), own)))
    return keys, _first_needed(fields.get("n"), keys), columns


def _unpack_match(fields: Fields, domain: bytes, _: int) -> Request:
    keys, needed, more = _unpack_lookup(fields)
    return MatchRequest(domain, keys, _wait(fields), needed, more)


def _unpack_lease(fields: Fields, domain: bytes, holder: int) -> Request:
    keys, needed, more = _unpack_lookup(fields)
    tokens, ttl = _number(fields, "tokens", 0), _seconds(fields, "ttl")
    return LeaseRequest(domain, keys, tokens, ttl, _wait(fields), needed, more, holder)


def _unpack_read(fields: Fields, domain: bytes, _: int) -> Request:
    keys, needed, more = _unpack_lookup(fields)
    return ReadRequest(domain, keys, _number(fields, "tokens", 0), _wait(fields), needed, more)


# -- writing ---------------------------------------------------------------------------------


def _pack_reserve(request: ReserveRequest) -> Fields:
    specs = request.blocks
    wanted = [spec for spec in specs if spec is not None]
    flags = bytes(0 if spec is None else _flags_of(spec) for spec in specs)
    groups: list[Any] = []
    numbers_of: dict[Any, int] = {}
    for spec in wanted:
        if spec.link is not None and spec.link.group not in numbers_of:
            numbers_of[spec.link.group] = len(groups)
            groups.append(list(spec.link.group))
    links = [spec.link for spec in wanted if spec.link is not None]
    fields: Fields = {
        "f": flags,
        "k": pack_keys(spec.key for spec in wanted),
        "p": pack_keys(spec.parent_key or _NO_KEY for spec in wanted),
        "l": pack_numbers([spec.length_bytes for spec in wanted]),
        "c": pack_numbers([spec.token_count for spec in wanted]),
        "start": request.start,
        "ttl": request.ttl_seconds,
        "w": request.wait_seconds,
        "x": request.expire_seconds,
    }
    if request.width != 1:
        fields["width"] = request.width
    if links:
        fields["b"] = pack_keys(link.block for link in links)
        fields["g"] = pack_numbers([numbers_of[link.group] for link in links])
        fields["groups"] = groups
    return fields


def _flags_of(spec: BlockSpec) -> int:
    flags = _WANTED | (_PARTIAL if spec.is_partial else 0)
    if spec.link is not None:
        flags |= _LINKED | (_NEEDED if spec.link.is_always_needed else 0)
    return flags


def _unpack_reserve(fields: Fields, domain: bytes, holder: int) -> Request:
    flags, width = fields.get("f"), _number(fields, "width", 1)
    if not isinstance(flags, bytes) or not width or len(flags) % width or len(flags) > KEYS_MAX:
        raise WireError("field 'f' is no byte for each part of each block")
    wanted = sum(1 for flag in flags if flag & _WANTED)
    keys, parents = unpack_keys(fields.get("k")), unpack_keys(fields.get("p"))
    lengths, counts = unpack_numbers(fields.get("l")), unpack_numbers(fields.get("c"))
    if not len(keys) == len(parents) == len(lengths) == len(counts) == wanted:
        raise WireError("the fields of a reservation have different lengths")
    links = iter(_unpack_links(fields, flags))
    specs: list[BlockSpec | None] = []
    rows = iter(zip(keys, parents, lengths, counts, strict=True))
    for flag in flags:
        if not flag & _WANTED:
            specs.append(None)
            continue
        key, parent, length, count = next(rows)
        link = next(links) if flag & _LINKED else None
        parent_key = None if parent == _NO_KEY else parent
        specs.append(BlockSpec(key, parent_key, length, count, bool(flag & _PARTIAL), link))
    start = _number(fields, "start", 0)
    if start * width > len(specs):
        raise WireError("field 'start' is behind the last block")
    return ReserveRequest(
        domain,
        specs,
        start,
        _seconds(fields, "ttl"),
        _wait(fields),
        _optional_seconds(fields, "x"),
        width,
        holder,
    )


def _unpack_links(fields: Fields, flags: bytes) -> list[PartLink]:
    linked = [flag for flag in flags if flag & _WANTED and flag & _LINKED]
    if not linked:
        return []
    blocks, numbers = unpack_keys(fields.get("b")), unpack_numbers(fields.get("g"))
    groups = fields.get("groups")
    if not isinstance(groups, list) or not len(blocks) == len(numbers) == len(linked):
        raise WireError("the links of a reservation have different lengths")
    known: list[tuple[str | None, int]] = []
    for group in groups:
        match group:
            case [None | str() as companion, int() as index] if not isinstance(index, bool):
                known.append((companion, index))
            case _:
                raise WireError("a cache group is a companion's name, or nil, and a number")
    if any(number >= len(known) for number in numbers):
        raise WireError("a link names a cache group that is not listed")
    return [
        PartLink(block, known[number], bool(flag & _NEEDED))
        for block, number, flag in zip(blocks, numbers, linked, strict=True)
    ]


# -- the table -------------------------------------------------------------------------------


def _pin_kind(fields: Fields) -> PinKind:
    kind = fields.get("kind")
    if kind not in tuple(PinKind):
        raise WireError("field 'kind' is 'soft' or 'hard'")
    return PinKind(kind)


def _lost_outcome(fields: Fields) -> Outcome:
    outcome = unpack_outcome(fields.get("o"))
    if outcome is None:
        raise WireError("field 'o' is missing")
    return outcome


_PACKERS: dict[type, tuple[str, Callable[[Any], Fields]]] = {
    MatchRequest: ("match", _pack_lookup),
    AdoptRequest: (
        "adopt",
        lambda r: {"token": r.token, "k": pack_keys(r.keys), "width": r.width},
    ),
    TokenRequest: ("token", lambda r: {"id": r.lease_id}),
    LeaseRequest: (
        "lease",
        lambda r: {**_pack_lookup(r), "tokens": r.tokens, "ttl": r.ttl_seconds},
    ),
    ReadRequest: ("read", lambda r: {**_pack_lookup(r), "tokens": r.tokens}),
    RenewRequest: ("renew", lambda r: {"id": r.lease_id, "ttl": r.ttl_seconds}),
    ReleaseRequest: ("release", lambda r: {"id": r.lease_id}),
    LostRequest: ("lost", lambda r: {"blocks": r.blocks, "o": pack_outcome(r.outcome)}),
    ReserveRequest: ("reserve", _pack_reserve),
    CommitRequest: (
        "commit",
        lambda r: {"id": r.reservation_id, "blocks": r.blocks, "differing": r.differing_puts},
    ),
    AbortRequest: ("abort", lambda r: {"id": r.reservation_id}),
    DeleteRequest: ("delete", lambda r: {"k": pack_keys(r.keys)}),
    PinRequest: (
        "pin",
        lambda r: {
            "k": pack_keys(r.keys),
            "kind": str(r.kind),
            "ttl": r.ttl_seconds,
            "width": r.width,
        },
    ),
    UnpinRequest: ("unpin", lambda r: {"k": pack_keys(r.keys)}),
    ScrubRequest: ("scrub", lambda r: {"k": pack_keys(r.keys)}),
}

_UNPACKERS: dict[str, Callable[[Fields, bytes, int], Request]] = {
    "match": _unpack_match,
    "lease": _unpack_lease,
    "read": _unpack_read,
    "adopt": lambda f, d, h: AdoptRequest(
        d, _binary(f, "token"), unpack_keys(f.get("k")), max(1, _number(f, "width", 1)), h
    ),
    "token": lambda f, _, h: TokenRequest(_number(f, "id"), h),
    "renew": lambda f, _, h: RenewRequest(_number(f, "id"), _seconds(f, "ttl"), h),
    "release": lambda f, _, h: ReleaseRequest(_number(f, "id"), h),
    "lost": lambda f, _, _h: LostRequest(_number(f, "blocks"), _lost_outcome(f)),
    "reserve": _unpack_reserve,
    "commit": lambda f, _, h: CommitRequest(
        _number(f, "id"), _number(f, "blocks"), _number(f, "differing", 0), h
    ),
    "abort": lambda f, _, h: AbortRequest(_number(f, "id"), h),
    "delete": lambda f, d, _: DeleteRequest(d, unpack_keys(f.get("k"))),
    "pin": lambda f, d, _: PinRequest(
        d,
        unpack_keys(f.get("k")),
        _pin_kind(f),
        _optional_seconds(f, "ttl"),
        max(1, _number(f, "width", 1)),
    ),
    "unpin": lambda f, d, _: UnpinRequest(d, unpack_keys(f.get("k"))),
    "scrub": lambda f, d, _: ScrubRequest(d, unpack_keys(f.get("k"))),
}
