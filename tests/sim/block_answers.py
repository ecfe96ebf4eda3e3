"""What an answer may say of blocks and of their parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.messages import PinKind
from kvstore.types import Outcome
from tests.sim.models import needed_blocks, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.messages import (
        LeaseRequest,
        MatchRequest,
        PinAnswer,
        PinRequest,
        ReadRequest,
        ReserveAnswer,
        ReserveRequest,
    )
    from kvstore.types import Place
    from tests.sim.presence import Name, Presence

    Lookup = MatchRequest | LeaseRequest | ReadRequest


def name_of(place: Place) -> Name:
    """Domain and key of what lies at a place."""
    return place.key[:32], place.key[32:]


def _columns(request: Lookup) -> list[Sequence[bytes]]:
    """The keys of each part."""
    return [request.keys, *(column.keys for column in request.more)]


def _needed(request: Lookup, blocks: int) -> Iterator[tuple[int, Name]]:
    """What a prefix of so many blocks needs: position, as block * parts + part, and name."""
    columns = _columns(request)
    for part, keys in enumerate(columns if blocks else ()):
        for block in needed_blocks(part_of(keys[blocks - 1])):
            yield block * len(columns) + part, (request.domain, keys[block])


def see_prefix(presence: Presence, request: Lookup, blocks: int, reason: Outcome | None) -> None:
    """A prefix was found: all that it needs is there, and no longer one was."""
    total = len(request.keys)
    assert (reason is None) == (blocks == total), "a miss without a reason"
    for _, name in _needed(request, blocks):
        presence.find(name)
    if reason is Outcome.BUSY:
        return  # as long as the cap on leases allows
    for longer in range(blocks + 1, total + 1):
        is_there = all(presence.was_there(name) for _, name in _needed(request, longer))
        assert not is_there, f"a prefix of {blocks} blocks was found, and {longer} were there"


def see_places(
    presence: Presence, request: Lookup, blocks: int, places: Sequence[Place | None]
) -> None:
    """Each part that the prefix needs has its place, and no other part has one."""
    needed = dict(_needed(request, blocks))
    found = {i: name_of(place) for i, place in enumerate(places) if place is not None}
    assert needed.keys() == found.keys(), "a place is missing, or is not needed"
    assert needed == found, "another part than was asked for"
    for place in places:
        if place is not None:
            stored = presence.find(name_of(place))
            assert stored.generation == place.generation, "a part that is not the one committed"


def see_grants(presence: Presence, request: ReserveRequest, answer: ReserveAnswer) -> None:
    """Of each block all parts are granted that are wanted and missing, or none."""
    width = request.width
    specs = request.blocks[request.start * width :]
    assert len(answer.outcomes) * width == len(specs) == len(answer.places)
    for block, outcome in enumerate(answer.outcomes):
        pairs = [(specs[i], answer.places[i]) for i in range(block * width, (block + 1) * width)]
        wanted = [(spec, place) for spec, place in pairs if spec is not None]
        granted = [place for _, place in pairs if place is not None]
        assert bool(wanted) == (outcome is not Outcome.ABSENT), "a miss of what nobody wanted"
        assert bool(granted) == (outcome is Outcome.GRANTED), "places that are not granted"
        assert len(granted) == sum(place is not None for _, place in wanted), "a place too many"
        if outcome in (Outcome.GRANTED, Outcome.PRESENT):
            for spec, place in wanted:
                _see_part(presence, (request.domain, spec.key), place)
        if 0 < len(granted) < len(wanted):
            presence.seen["block granted beside parts that are there"] += 1


def _see_part(presence: Presence, name: Name, place: Place | None) -> None:
    """A part of a block that is granted or present: it has its place, or is there."""
    if place is not None:
        assert name_of(place) == name, "a place for another part"
        return
    assert name in presence.stored, "a block was granted in part"
    presence.find(name)


def see_pins(presence: Presence, request: PinRequest, answer: PinAnswer) -> None:
    """A hard pin takes all parts of a block that are there, or none."""
    for first in range(0, len(answer.outcomes), request.width):
        outcomes = answer.outcomes[first : first + request.width]
        is_split = Outcome.OK in outcomes and Outcome.QUOTA in outcomes
        assert request.kind is not PinKind.HARD or not is_split, "a block was pinned in part"
        for outcome in set(outcomes):
            presence.seen[f"{request.kind} pin {outcome}"] += 1
