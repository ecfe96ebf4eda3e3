"""Two clients, two slots: everything they can do to a core, and what must hold after each event.

Memory is one word per slot, and says who wrote there last. Writers are as slow as they may be:
whoever has not said that it is done writes again after every event, also long after its deadline.
"""

from __future__ import annotations

from typing import Any

from kvstore.clock import FakeClock
from kvstore.messages import (
    AbortRequest,
    CommitRequest,
    DeleteRequest,
    LeaseRequest,
    ReleaseRequest,
    ReserveRequest,
)
from kvstore.policy import LruPolicy
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import UNIT_BYTES, chain, keys

RESERVATION_SECONDS = 2.0
LEASE_SECONDS = 2.0
WAIT_SECONDS = 1.0

#: A prefix of two blocks that both want, and a third block that makes room necessary.
SEQUENCES = {"a": chain("a", 2), "x": chain("x", 1)}

Action = tuple[Any, ...]


class Client:
    """One holder: at most one reservation and one lease, and one call in flight."""

    def __init__(self) -> None:
        self.reservation: Any = None
        self.writer = 0
        self.committed = 0
        self.lease: Any = None
        self.read: list[int] = []  # who wrote what the lease is on
        self.waits_for: int | None = None
        self.wanted = ""
        self.reserved = ""


class World:
    """A core, its memory, and the clients. `apply` one action after the other."""

    def __init__(self, units: int = 2) -> None:
        self.clock = FakeClock(0.0)
        self.core = Core(self.clock, Slots(units * UNIT_BYTES), LruPolicy())
        self.core._leases.cap_bytes = units * UNIT_BYTES
        self.memory = [0] * units
        self.clients = [Client(), Client()]
        self.committed: dict[bytes, int] = {}  # key -> writer, of what was not deleted since
        self.writers = 0
        self.requests = 0

    # -- what can be done --------------------------------------------------------------------

    def enabled(self) -> list[Action]:
        """Every action that makes sense now."""
        actions: list[Action] = [("advance",), ("delete", "a", 0), ("delete", "a", 1)]
        for number, client in enumerate(self.clients):
            if client.waits_for is not None:
                actions.append(("cancel", number))
                continue
            if client.reservation is None:
                actions += [
                    ("reserve", number, name, wait) for name in SEQUENCES for wait in (0, 1)
                ]
            else:
                actions += [("commit", number, 1), ("commit", number, 2), ("abort", number)]
            if client.lease is None:
                actions += [("lease", number, 0), ("lease", number, 1)]
            else:
                actions.append(("release", number))
        return actions

    def apply(self, action: Action) -> None:
        """Do it, let slow writers write, and look at everything."""
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)
        for client in self.clients:
            for place in self._writable(client):
                self.memory[place.offset_bytes // UNIT_BYTES] = client.writer

    def check(self) -> None:
        """A recount, and no reader ever sees another's word."""
        self.core.check()
        for client in self.clients:
            if client.lease is None or client.lease.deadline <= self.clock.now():
                continue
            for place, writer in zip(client.lease.places, client.read, strict=True):
                unit = place.offset_bytes // UNIT_BYTES
                assert self.core.slots.generations[unit] == place.generation
                assert self.memory[unit] == writer, "a leased block changed"

    def fingerprint(self) -> object:
        """Equal for states from which the same can happen."""
        now, core = self.clock.now(), self.core
        blocks = core._blocks
        entries = [
            (e.key, e.slot.state, e.slot.offset_bytes, e.users, e.children, e.hits > 0, e.stamp)
            for e in blocks.index
        ]
        rank = {stamp: i for i, stamp in enumerate(sorted({entry[-1] for entry in entries}))}
        return (
            tuple(sorted((*entry[:-1], rank[entry[-1]]) for entry in entries)),
            tuple((s.offset_bytes, s.size_bytes, s.state) for s in blocks.slots.granted()),
            tuple(sorted(blocks.index._history.items())),
            tuple(
                (
                    client.committed,
                    client.wanted if client.waits_for is not None else "",
                    client.lease and (len(client.lease.places), client.lease.deadline - now),
                    client.reservation
                    and (client.reservation.outcomes, client.reservation.deadline - now).__repr__(),
                )
                for client in self.clients
            ),
            tuple(item.deadline - now for item in core._waiting_for_blocks.values()),
            tuple(item.deadline - now for item in core._waiting_for_room.values()),
        )

    # -- actions -----------------------------------------------------------------------------

    def _advance(self) -> None:
        self.clock.advance(1.0)
        self._take(self.core.tick(self.clock.now()))

    def _delete(self, name: str, position: int) -> None:
        key = SEQUENCES[name][position].key
        self._ask(DeleteRequest(SINGLE_DOMAIN, [key]))
        self.committed.pop(key, None)

    def _reserve(self, number: int, name: str, waits: int) -> None:
        request = ReserveRequest(
            SINGLE_DOMAIN, SEQUENCES[name], 0, RESERVATION_SECONDS, waits * WAIT_SECONDS, None
        )
        self.clients[number].wanted = name
        self._call(number, request)

    def _lease(self, number: int, waits: int) -> None:
        request = LeaseRequest(
            SINGLE_DOMAIN, keys(SEQUENCES["a"]), 32, LEASE_SECONDS, waits * WAIT_SECONDS
        )
        self.clients[number].wanted = "lease"
        self._call(number, request)

    def _cancel(self, number: int) -> None:
        own, self.clients[number].waits_for = self.clients[number].waits_for, None
        self._take(self.core.cancel(own or 0))

    def _commit(self, number: int, count: int) -> None:
        client = self.clients[number]
        reservation = client.reservation
        is_late = reservation.deadline <= self.clock.now()
        total = len(reservation.outcomes)
        if not is_late:
            specs = SEQUENCES[client.reserved]
            for position in range(client.committed, min(count, total)):
                if reservation.outcomes[position] is Outcome.GRANTED:
                    self.committed[specs[position].key] = client.writer
            client.committed = max(client.committed, min(count, total))
        answer = self._ask(CommitRequest(reservation.reservation_id, count, 0))
        assert (answer.outcome is Outcome.EXPIRED) == is_late
        if is_late or client.committed == total:
            client.reservation = None

    def _abort(self, number: int) -> None:
        client = self.clients[number]
        self._ask(AbortRequest(client.reservation.reservation_id))
        client.reservation = None

    def _release(self, number: int) -> None:
        client = self.clients[number]
        was_held = client.lease.deadline > self.clock.now()
        answer = self._ask(ReleaseRequest(client.lease.lease_id))
        assert answer.was_held == was_held
        client.lease = None

    # -- inside ------------------------------------------------------------------------------

    def _call(self, number: int, request: Any) -> None:
        """A call that may wait."""
        self.requests += 1
        self.clients[number].waits_for = self.requests
        self._take(self.core.begin(self.requests, request))

    def _ask(self, request: Any) -> Any:
        """A call that is answered at once; others may be answered by it too."""
        self.requests += 1
        own = self.requests
        return self._take(self.core.begin(own, request)).pop(own)

    def _take(self, step: Any) -> dict[int, Any]:
        answers = dict(step.answers)
        assert len(answers) == len(step.answers), "answered twice"
        for client in self.clients:
            if client.waits_for in answers:
                answer = answers.pop(client.waits_for)
                client.waits_for = None
                self._receive(client, answer)
        for transfer in step.transfers:
            answers |= self._take(self.core.complete(transfer, Outcome.OK, 1))
        return answers

    def _receive(self, client: Client, answer: Any) -> None:
        if hasattr(answer, "lease_id"):
            if not answer.places:
                return
            client.lease = answer
            client.read = []
            for place, spec in zip(answer.places, SEQUENCES["a"], strict=False):
                assert place.key == SINGLE_DOMAIN + spec.key
                assert spec.key in self.committed, "leased, and never committed or deleted since"
                unit = place.offset_bytes // UNIT_BYTES
                assert self.memory[unit] == self.committed[spec.key], "a wrong byte"
                client.read.append(self.memory[unit])
            return
        self.writers += 1
        client.writer = self.writers
        client.committed = 0
        client.reservation = answer
        client.reserved = client.wanted
        for outcome, spec in zip(answer.outcomes, SEQUENCES[client.wanted], strict=True):
            assert outcome is not Outcome.PRESENT or spec.key in self.committed

    def _writable(self, client: Client) -> list[Any]:
        """Where a writer that is not done may still write."""
        if client.reservation is None:
            return []
        return [place for place in client.reservation.places[client.committed :] if place]
