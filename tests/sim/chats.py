"""Chats: an engine loads what is there of a prompt, computes the rest, and stores it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvstore.client.lease import Lease
from kvstore.messages import (
    AbortRequest,
    CommitRequest,
    DeleteRequest,
    LeaseRequest,
    LostRequest,
    ReadRequest,
    ReserveAnswer,
    ReserveRequest,
)
from kvstore.types import Outcome, Place
from tests.sim.clients import Await, Call, Client, Job, Read, Script, Sleep, Write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from kvstore.client.link import Link
    from kvstore.client.parts import BlockParts
    from kvstore.types import BlockKey
    from tests.sim.runner import SimulationRunner
    from tests.sim.traffic import Conversations

Keys = tuple["BlockKey", ...]


class _Piece(NamedTuple):
    """One part of one block, on its way to its place."""

    block: int
    place: Place
    payload: bytes


class Chat(Client):
    """An engine that has all parts of its models; with `ranks`, it leaves the storing to them."""

    ranks: Sequence[Rank] = ()

    def talk(self, turns: int) -> Script:
        """Load what is there of a prompt, compute the rest, store it; and so on."""
        for _ in range(turns):
            prompt = self.conversations.next_turn()
            parts, keys = prompt.model.whole, prompt.keys
            loaded = yield from self._load(parts, keys)
            if loaded and len(prompt.model.ranks) > 1:
                self._saw("blocks of two ranks were loaded")
            yield Sleep(self.rng.uniform(0.0, 0.2))  # the prefill
            if self.ranks and len(prompt.model.ranks) > 1:
                self._saw("prompt of two ranks")
                for rank in self.ranks:
                    rank.give(Job(prompt, loaded))
            else:
                yield from self._store(parts, keys, loaded)
            yield Sleep(self.rng.uniform(0.0, 0.5))
        self._dismiss()

    def _dismiss(self) -> None:
        for rank in self.ranks:
            rank.give(None)

    def _die(self) -> None:
        super()._die()
        self._dismiss()

    def round_trip(self, parts: BlockParts, keys: Keys, loaded: list[int]) -> Script:
        """Store a prompt without ado and load it; `loaded` gets how many blocks came back."""
        specs = parts.specs(keys, 0, None)
        answer = yield Call(ReserveRequest(self.domain, specs, 0, 60.0, 0.0, None, parts.width))
        payload_of = self.runner.promises.payload_of
        places = [place for place in answer.places if place is not None]
        yield Write([(place, payload_of(place, self.number)) for place in places])
        yield Call(CommitRequest(answer.reservation_id, len(keys), 0))
        loaded.append((yield from self._load_by_copy(parts, keys)))

    # -- loading -----------------------------------------------------------------------------

    def _load(self, parts: BlockParts, keys: Keys) -> Script:
        """How many blocks were loaded."""
        if self.rng.random() < 0.4:
            return (yield from self._load_by_copy(parts, keys))
        return (yield from self._load_by_lease(parts, keys))

    def _load_by_lease(self, parts: BlockParts, keys: Keys) -> Script:
        rng = self.rng
        ttl_seconds = rng.choice([0.02, 0.3, 2.0, 10.0])
        found = parts.lookup(keys)
        request = LeaseRequest(
            self.domain,
            found.keys,
            _tokens(keys),
            ttl_seconds,
            self._wait(),
            found.first_needed,
            found.more,
        )
        answer = yield Call(request, self._patience())
        if answer is None or not answer.lease_id:
            return 0
        lease = Lease(cast("Link", self), answer, [], cast("Any", None))
        places = [place for place in answer.places if place is not None]
        if len(places) < len(answer.places):
            self._saw("prefix that does not need all parts")
        contents = yield Read(places)
        if rng.random() < 0.2:  # and a second time, later
            yield Sleep(rng.uniform(0.0, ttl_seconds))
            if rng.random() < 0.5:
                lease.renew(rng.uniform(0.01, 2.0))
            contents = yield Read(places)
        was_valid = lease.valid()
        right = self._accept(places, contents) if was_valid else 0
        if rng.random() < 0.9:  # else it is forgotten
            lease.release()
            if rng.random() < 0.1:
                lease.release()
        if not was_valid:
            self._saw("read that outlived its lease")
            yield Call(LostRequest(len(contents), Outcome.EXPIRED))
        return (yield from self._loaded(parts, keys, answer, right))

    def _load_by_copy(self, parts: BlockParts, keys: Keys) -> Script:
        found = parts.lookup(keys)
        request = ReadRequest(
            self.domain,
            found.keys,
            _tokens(keys),
            self._wait(),
            found.first_needed,
            found.more,
        )
        answer = yield Call(request, self._patience())
        if answer is None or not answer.blocks:
            return 0
        places = [place for place in answer.places if place is not None]
        contents = yield Read(places)
        right = self.first_stale(places, answer.moves)
        if right < len(places):
            self._saw("copy that an eviction outran")
            if not parts.is_single:
                right = 0  # the prefix needs every piece of it
        right = self._accept(places[:right], contents[:right])
        return (yield from self._loaded(parts, keys, answer, right))

    def _accept(self, places: list[Place], found: list[tuple[Outcome, bytes]]) -> int:
        """Take over the pieces up to the first that did not come; how many those are."""
        for position, (place, (outcome, content)) in enumerate(zip(places, found, strict=True)):
            if outcome is not Outcome.OK:
                self._saw(f"read that was {outcome}")
                return position
            self.runner.promises.accept(place, content)
        return len(places)

    def _loaded(self, parts: BlockParts, keys: Keys, answer: Any, right: int) -> Script:
        """How many blocks came with the first `right` pieces; drops the one that did not.

        So the next put stores it anew: all of the block, or the part that cannot be read.
        """
        positions = [i for i, place in enumerate(answer.places) if place is not None]
        if right == len(positions):
            return answer.blocks
        block = positions[right] // parts.width
        if self.rng.random() < 0.8:
            bad = [answer.places[positions[right]].key[32:]]
            if self.rng.random() < 0.7:
                bad = parts.all_keys(keys[block : block + 1])
            yield Call(DeleteRequest(self.domain, bad))
        return block

    # -- storing -----------------------------------------------------------------------------

    def _store(self, parts: BlockParts, keys: Keys, start: int) -> Script:
        rng = self.rng
        request = ReserveRequest(
            self.domain,
            parts.specs(keys, start, self._wanted(parts, keys, start)),
            start,
            rng.choice([0.05, 0.5, 5.0]),
            self._wait(),
            rng.choice([None, None, None, 0.5, 5.0]),
            parts.width,
        )
        answer = yield Call(request, self._patience())
        if answer is None or not answer.reservation_id:
            return
        payload_of = self.runner.promises.payload_of
        pieces = [
            _Piece(position // parts.width, place, payload_of(place, self.number))
            for position, place in enumerate(answer.places)
            if place is not None
        ]
        if rng.random() < 0.1:
            yield Call(AbortRequest(answer.reservation_id))
            return
        total = len(answer.outcomes)
        layers = [total] if rng.random() < 0.6 else [rng.randint(0, total), total]
        done = 0
        for end in layers:
            good = yield from self._write_all(
                answer, [piece for piece in pieces if done <= piece.block < end], end
            )
            committed = yield Call(CommitRequest(answer.reservation_id, good, 0))
            if committed.outcome is not Outcome.OK:
                return
            if good < end:
                break
            done = end
        if done < total and rng.random() < 0.9:  # else it is left to its deadline
            yield Call(AbortRequest(answer.reservation_id))

    def _wanted(self, parts: BlockParts, keys: Keys, start: int) -> list[list[bool]] | None:
        """The parts of each block that there are: all, those of the last window, or any."""
        if parts.is_single or self.rng.random() < 0.5:
            return None
        found = parts.lookup(keys)
        needed = [found.first_needed, *(column.first_needed for column in found.more)]
        is_any = self.rng.random() < 0.2
        return [
            [
                self.rng.random() < 0.7 if is_any else first is None or block >= first[len(keys)]
                for first in needed
            ]
            for block in range(start, len(keys))
        ]

    def _write_all(self, answer: ReserveAnswer, pieces: list[_Piece], end: int) -> Script:
        """Write, some of it again and late; up to which block all is written."""
        batch = [(piece.place, piece.payload) for piece in pieces]
        outcomes = yield Write(batch)
        if self.rng.random() < 0.2:
            late_by = self.rng.uniform(-0.05, 3.0)
            now = self.clock.now()
            yield Sleep(max(0.0, answer.deadline - now + late_by))
            if self.runner.schedule.clock.now() >= answer.deadline:
                self._saw("write after the deadline")
            outcomes = yield Write(batch)
        for piece, outcome in zip(pieces, outcomes, strict=True):
            if outcome is not Outcome.OK:
                self._saw("write that failed")
                return piece.block
        return end


class Rank(Chat):
    """One of several processes that share the heads of a model; it has its own parts only."""

    def __init__(
        self,
        number: int,
        runner: SimulationRunner,
        conversations: Conversations,
        rng: Random,
        scheduler: Chat,
    ) -> None:
        super().__init__(number, runner, conversations, rng)
        self.domain = scheduler.domain

    def work(self, rank: int) -> Script:
        """Store the own parts of what the scheduler says; load some of it."""
        while (job := (yield Await())) is not None:
            parts, keys = job.prompt.model.ranks[rank], job.prompt.keys
            if self.rng.random() < 0.3:
                yield from self._load(parts, keys)
            yield from self._store(parts, keys, job.found)


def _tokens(keys: Keys) -> int:
    return sum(key.token_count for key in keys)
