"""What the store promises whatever goes wrong, checked from outside after every step.

docs/simulation.md has the list in words. What is found must be there, and what leaves must have a
cause: that is `Presence`. Here is what clients are answered, and what they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvstore.messages import (
    AbortRequest,
    CommitAnswer,
    CommitRequest,
    DeleteAnswer,
    DeleteRequest,
    LeaseAnswer,
    LeaseRequest,
    MatchAnswer,
    MatchRequest,
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
    UnpinRequest,
)
from kvstore.slots import slot_size_bytes
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome
from tests.payload import payload
from tests.sim.block_answers import name_of, see_grants, see_pins, see_places, see_prefix
from tests.sim.presence import Presence, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.clock import Clock
    from kvstore.messages import Answer, Request
    from kvstore.store import Core
    from kvstore.types import Place
    from tests.sim.faulty_tier import FaultyTier
    from tests.sim.presence import Name

#: Times are sums of floats.
EPSILON_SECONDS = 1e-6


class Held:
    """A lease, and what lay under it when it was granted."""

    def __init__(self, places: list[Place], contents: list[bytes], deadline: float) -> None:
        self.places = places
        self.contents = contents
        self.deadline = deadline


class Writing:
    """A reservation whose writer has not said that it is done."""

    def __init__(self, request: ReserveRequest, answer: ReserveAnswer, writer: int) -> None:
        self.request = request
        self.answer = answer
        self.writer = writer
        self.committed_blocks = 0

    def places(self, first: int, end: int) -> list[Place]:
        """What its writer was granted of some blocks."""
        width = self.request.width
        return [p for p in self.answer.places[first * width : end * width] if p is not None]

    def uncommitted(self) -> list[Place]:
        return self.places(self.committed_blocks, len(self.answer.outcomes))


class Promises:
    """Knows what was asked and answered, and nothing of how the store works."""

    def __init__(self, core: Core, tier: FaultyTier, clock: Clock) -> None:
        self.presence = Presence(core, tier, clock)
        self.leases: dict[int, Held] = {}
        self.writing: dict[int, Writing] = {}
        self.hard_pins: dict[Name, tuple[int, float | None]] = {}  # generation, and until when
        self.accepted_parts = 0
        self.answers = 0
        self._writers: dict[tuple[bytes, int], int] = {}  # by key and generation
        self._core = core
        self._tier = tier
        self._clock = clock
        self._sights: dict[type, Callable[[Any, Any], None]] = {
            LeaseRequest: self._see_lease,
            ReadRequest: self._see_read,
            MatchRequest: self._see_match,
            RenewRequest: self._see_renewal,
            ReleaseRequest: self._see_release,
            CommitRequest: self._see_commit,
            AbortRequest: self._see_abort,
            DeleteRequest: self._see_delete,
            PinRequest: self._see_pin,
            UnpinRequest: self._see_unpin,
        }

    # -- bytes -------------------------------------------------------------------------------

    def payload_of(self, place: Place, writer: int) -> bytes:
        """What `writer` puts at a place that it was granted."""
        stamp = (place.generation << 8 | writer) & 0xFFFFFFFF
        return payload(place.key, stamp, place.length_bytes).tobytes()

    def accept(self, place: Place, found: bytes) -> None:
        """A reader takes these bytes for its part's."""
        self.accepted_parts += 1
        expected = self.payload_of(place, self._writers[place.key, place.generation])
        if found != expected:
            is_rot = place.generation in self._tier.rotted and not self._tier.keeps_records
            assert is_rot, f"a wrong byte was accepted at {_short(place)}"

    # -- after each step ---------------------------------------------------------------------

    def check(self, *, recounts: bool) -> None:
        """Everything that must hold between two steps. `recounts`: the core's own audit, too."""
        if recounts:
            self._core.check()
        self.check_leased()
        for name, (generation, until) in list(self.hard_pins.items()):
            if self._is_pinned(name, generation, until):
                assert name in self.presence.readable, "a hard-pinned block left"
            else:
                del self.hard_pins[name]
        self.presence.check(self._kept())

    def _kept(self) -> Iterator[tuple[Name, int]]:
        """What may not be evicted."""
        for held in self.leases.values():
            for place in held.places:
                yield name_of(place), place.generation
        for name, (generation, _) in self.hard_pins.items():
            yield name, generation

    def _is_pinned(self, name: Name, generation: int, until: float | None) -> bool:
        """A pin that was given still holds: nothing else has ended the part or the pin."""
        if self.presence.generation_of(name) != generation or not self.presence.is_sound(name):
            return False
        return until is None or until > self._clock.now()

    def check_leased(self) -> None:
        """Leased parts are what they were."""
        now = self._clock.now()
        for lease_id, held in list(self.leases.items()):
            if held.deadline <= now:
                del self.leases[lease_id]
                continue
            for place, content in zip(held.places, held.contents, strict=True):
                self.check_in_place(place, "a leased part")
                if place.generation not in self._tier.rotted:
                    assert self._tier.bytes_at(place) == content, "bytes changed under a lease"

    def check_in_place(self, place: Place, what: str) -> None:
        """The slot at a place is still the one that it was then."""
        generation = self._core.slots.generations[place.offset_bytes // SLOT_ALIGNMENT_BYTES]
        assert generation == place.generation, f"{what} at {_short(place)} gave way"

    # -- answers -----------------------------------------------------------------------------

    def see(self, request: Request, answer: Answer, writer: int) -> None:
        """One answer, at the moment when the core gave it."""
        self.answers += 1
        if isinstance(request, ReserveRequest):
            self._see_reservation(request, cast("ReserveAnswer", answer), writer)
        elif (see := self._sights.get(type(request))) is not None:
            see(request, answer)

    def see_end_of_writing(self, reservation_id: int) -> None:
        """A writer has said that it is done, or its process is gone."""
        self.writing.pop(reservation_id, None)

    def see_corrupt(self, place: Place) -> None:
        """A scrub dropped this part, which must have rotted."""
        assert place.generation in self._tier.rotted, "a sound part was called corrupt"

    def see_scrubbed_rot(self, place: Place) -> None:
        """A scrub has read a part that rotted since its checksum was made."""
        name = name_of(place)
        is_same = self.presence.generation_of(name) == place.generation
        assert not is_same or name not in self._core.resident_keys(), "rot outlived a scrub"

    def _see_lease(self, request: LeaseRequest, answer: LeaseAnswer) -> None:
        see_prefix(self.presence, request, answer.blocks, answer.reason)
        see_places(self.presence, request, answer.blocks, answer.places)
        if answer.lease_id:
            places = [place for place in answer.places if place is not None]
            contents = [self._tier.bytes_at(place) for place in places]
            self.leases[answer.lease_id] = Held(places, contents, answer.deadline)

    def _see_read(self, request: ReadRequest, answer: ReadAnswer) -> None:
        see_prefix(self.presence, request, answer.blocks, answer.reason)
        see_places(self.presence, request, answer.blocks, answer.places)

    def _see_match(self, request: MatchRequest, answer: MatchAnswer) -> None:
        see_prefix(self.presence, request, answer.blocks, answer.reason)

    def _see_release(self, request: ReleaseRequest, answer: ReleaseAnswer) -> None:
        held = self.leases.pop(request.lease_id, None)
        if held is not None:
            is_live = held.deadline > self._clock.now()
            assert answer.was_held == is_live, "a lease ended at another time than said"

    def _see_abort(self, request: AbortRequest, _answer: object) -> None:
        self.see_end_of_writing(request.reservation_id)

    def _see_delete(self, request: DeleteRequest, answer: DeleteAnswer) -> None:
        for key, outcome in zip(request.keys, answer.outcomes, strict=True):
            self.presence.delete((request.domain, key), outcome)

    def _see_unpin(self, request: UnpinRequest, _answer: object) -> None:
        for key in request.keys:
            self.hard_pins.pop((request.domain, key), None)

    def _see_renewal(self, request: RenewRequest, answer: RenewAnswer) -> None:
        held = self.leases.get(request.lease_id)
        if held is None or held.deadline <= self._clock.now():
            assert answer.deadline is None, "a lease was renewed that had ended"
            return
        assert answer.deadline is not None, "a lease could not be renewed in its time"
        assert answer.deadline >= held.deadline, "a renewal made a lease shorter"
        held.deadline = answer.deadline

    def _see_reservation(self, request: ReserveRequest, answer: ReserveAnswer, writer: int) -> None:
        see_grants(self.presence, request, answer)
        for place in answer.places:
            if place is not None:
                self._see_granted(place)
                self._writers[place.key, place.generation] = writer
        if answer.reservation_id:
            self.writing[answer.reservation_id] = Writing(request, answer, writer)

    def _see_granted(self, place: Place) -> None:
        """Nobody may touch what a writer is granted now."""
        others = [p for writing in self.writing.values() for p in writing.uncommitted()]
        now = self._clock.now()
        for held in self.leases.values():
            if held.deadline > now:
                others += held.places
        for other in others:
            assert not _overlap(place, other), f"{_short(place)} is {_short(other)}'s still"

    def _see_commit(self, request: CommitRequest, answer: CommitAnswer) -> None:
        writing = self.writing.get(request.reservation_id)
        if writing is None:
            assert answer.outcome is Outcome.EXPIRED, "a commit of nothing was accepted"
            return
        is_late = writing.answer.deadline <= self._clock.now()
        assert (answer.outcome is Outcome.EXPIRED) == is_late, "a commit, late or not"
        if is_late:
            self.see_end_of_writing(request.reservation_id)
            return
        end = max(writing.committed_blocks, request.blocks)
        expire_seconds = writing.request.expire_seconds
        expires_at = None if expire_seconds is None else self._clock.now() + expire_seconds
        for place in writing.places(writing.committed_blocks, end):
            self.presence.commit(name_of(place), Stored(place.generation, expires_at))
        writing.committed_blocks = end
        if end >= len(writing.answer.outcomes):
            self.see_end_of_writing(request.reservation_id)

    def _see_pin(self, request: PinRequest, answer: PinAnswer) -> None:
        see_pins(self.presence, request, answer)
        for key, outcome in zip(request.keys, answer.outcomes, strict=True):
            if outcome is not Outcome.OK:
                continue
            name = (request.domain, key)
            generation = self.presence.find(name).generation
            if request.kind is PinKind.HARD:
                until = None
                if request.ttl_seconds is not None:
                    until = self._clock.now() + request.ttl_seconds
                if name in self.hard_pins and self.hard_pins[name][0] == generation:
                    known = self.hard_pins[name][1]
                    until = None if None in (known, until) else max(known or 0.0, until or 0.0)
                self.hard_pins[name] = (generation, until)


def _overlap(one: Place, other: Place) -> bool:
    one_end = one.offset_bytes + slot_size_bytes(one.length_bytes)
    other_end = other.offset_bytes + slot_size_bytes(other.length_bytes)
    return one.offset_bytes < other_end and other.offset_bytes < one_end


def _short(place: Place) -> str:
    unit = place.offset_bytes // SLOT_ALIGNMENT_BYTES
    return f"slot {unit}, generation {place.generation}, of {place.key[32:36].hex()}"
