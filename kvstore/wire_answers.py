"""Answers as maps of a frame, and back. docs/wire.md has the same as a table.

A deadline travels as the time that is left; whoever receives it counts from when it asked, so that
no two clocks need to agree and the time on the way is on the safe side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.errors import WireError
from kvstore.messages import (
    AbortAnswer,
    CommitAnswer,
    DeleteAnswer,
    LeaseAnswer,
    LostAnswer,
    MatchAnswer,
    PinAnswer,
    ReadAnswer,
    ReleaseAnswer,
    RenewAnswer,
    ReserveAnswer,
    ScrubAnswer,
    TokenAnswer,
    UnpinAnswer,
)
from kvstore.types import Outcome, Place
from kvstore.wire import (
    NONE_U64,
    pack_keys,
    pack_numbers,
    pack_outcome,
    pack_outcomes,
    unpack_keys,
    unpack_numbers,
    unpack_outcome,
    unpack_outcomes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.messages import Answer

    Fields = dict[str, Any]


def answer_fields(answer: Answer, now: float) -> Fields:
    """The map of an answer, without its request's id. `now` is the core's clock."""
    name, pack = _PACKERS[type(answer)]
    return {"t": name, **pack(answer, now)}


def answer_of(fields: Fields, asked_at: float) -> Answer:
    """The answer of a map, to a request that was sent at `asked_at` of the reader's clock.

    Raises WireError. Places have no keys: those are the daemon's.
    """
    name = fields.get("t")
    unpack = _UNPACKERS.get(name) if isinstance(name, str) else None
    if unpack is None:
        raise WireError(f"there is no answer {name!r:.40}")
    try:
        return unpack(fields, asked_at)
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"an answer {name!r} lacks a field: {error}") from error


# -- places ----------------------------------------------------------------------------------


def _pack_places(places: Sequence[Place | None]) -> Fields:
    return {
        "o": pack_numbers([NONE_U64 if p is None else p.offset_bytes for p in places]),
        "l": pack_numbers([0 if p is None else p.length_bytes for p in places]),
        "g": pack_numbers([0 if p is None else p.generation for p in places]),
    }


def _unpack_places(fields: Fields) -> list[Place | None]:
    columns = [unpack_numbers(fields[name]) for name in ("o", "l", "g")]
    return [
        None if offset == NONE_U64 else Place(b"", offset, length, generation)
        for offset, length, generation in zip(*columns, strict=True)
    ]


def _pack_optional_numbers(numbers: Sequence[int | None]) -> tuple[bytes, bytes]:
    """The numbers, and a byte each: 1 where there is one. Any u64 is a checksum."""
    return (
        pack_numbers([0 if number is None else number for number in numbers]),
        bytes(number is not None for number in numbers),
    )


def _left(deadline: float, now: float) -> float:
    return max(0.0, deadline - now)


# -- the table -------------------------------------------------------------------------------


def _pack_lease(answer: LeaseAnswer, now: float) -> Fields:
    return {
        "id": answer.lease_id,
        "n": answer.blocks,
        **_pack_places(answer.places),
        "left": _left(answer.deadline, now),
        "by": answer.by_tier,
        "why": pack_outcome(answer.reason),
        "moves": answer.moves,
    }


def _unpack_lease(f: Fields, asked_at: float) -> Answer:
    places = _unpack_places(f)
    why = unpack_outcome(f["why"])
    return LeaseAnswer(f["id"], f["n"], places, asked_at + f["left"], f["by"], why, f["moves"])


def _pack_reserve(answer: ReserveAnswer, now: float) -> Fields:
    checksums, known = _pack_optional_numbers(answer.checksums)
    return {
        "id": answer.reservation_id,
        "outcomes": pack_outcomes(answer.outcomes),
        **_pack_places(answer.places),
        "s": checksums,
        "known": known,
        "left": _left(answer.deadline, now),
    }


def _unpack_reserve(f: Fields, asked_at: float) -> Answer:
    checksums = [
        number if is_known else None
        for number, is_known in zip(unpack_numbers(f["s"]), f["known"], strict=True)
    ]
    outcomes = unpack_outcomes(f["outcomes"])
    return ReserveAnswer(f["id"], outcomes, _unpack_places(f), checksums, asked_at + f["left"])


def _outcome(f: Fields, name: str) -> Outcome:
    return unpack_outcome(f[name]) or Outcome.INCOMPATIBLE


_PACKERS: dict[type, tuple[str, Callable[[Any, float], Fields]]] = {
    MatchAnswer: (
        "matched",
        lambda a, _: {"n": a.blocks, "by": a.by_tier, "why": pack_outcome(a.reason)},
    ),
    LeaseAnswer: ("leased", _pack_lease),
    TokenAnswer: ("token", lambda a, _: {"token": a.token}),
    ReadAnswer: (
        "readable",
        lambda a, _: {
            "n": a.blocks,
            **_pack_places(a.places),
            "why": pack_outcome(a.reason),
            "moves": a.moves,
        },
    ),
    RenewAnswer: (
        "renewed",
        lambda a, now: {"left": None if a.deadline is None else _left(a.deadline, now)},
    ),
    ReleaseAnswer: ("released", lambda a, _: {"was": a.was_held}),
    LostAnswer: ("counted", lambda _a, _: {}),
    ReserveAnswer: ("reserved", _pack_reserve),
    CommitAnswer: ("committed", lambda a, _: {"outcome": pack_outcome(a.outcome)}),
    AbortAnswer: ("aborted", lambda a, _: {"was": a.was_open}),
    DeleteAnswer: ("deleted", lambda a, _: {"outcomes": pack_outcomes(a.outcomes)}),
    PinAnswer: ("pinned", lambda a, _: {"outcomes": pack_outcomes(a.outcomes)}),
    UnpinAnswer: ("unpinned", lambda a, _: {"outcomes": pack_outcomes(a.outcomes)}),
    ScrubAnswer: ("scrubbed", lambda a, _: {"n": a.checked, "k": pack_keys(a.corrupt)}),
}

_UNPACKERS: dict[str, Callable[[Fields, float], Answer]] = {
    "matched": lambda f, _: MatchAnswer(f["n"], f["by"], unpack_outcome(f["why"])),
    "leased": _unpack_lease,
    "token": lambda f, _: TokenAnswer(f["token"]),
    "readable": lambda f, _: ReadAnswer(
        f["n"], _unpack_places(f), unpack_outcome(f["why"]), f["moves"]
    ),
    "renewed": lambda f, asked_at: RenewAnswer(None if f["left"] is None else asked_at + f["left"]),
    "released": lambda f, _: ReleaseAnswer(f["was"]),
    "counted": lambda _f, _: LostAnswer(),
    "reserved": _unpack_reserve,
    "committed": lambda f, _: CommitAnswer(_outcome(f, "outcome")),
    "aborted": lambda f, _: AbortAnswer(f["was"]),
    "deleted": lambda f, _: DeleteAnswer(unpack_outcomes(f["outcomes"])),
    "pinned": lambda f, _: PinAnswer(unpack_outcomes(f["outcomes"])),
    "unpinned": lambda f, _: UnpinAnswer(unpack_outcomes(f["outcomes"])),
    "scrubbed": lambda f, _: ScrubAnswer(f["n"], unpack_keys(f["k"])),
}
