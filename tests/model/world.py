"""Two clients, two slots: everything they can do to a core, and what must hold after each event.

Memory is one word per slot, and says who wrote there last. Writers are as slow as they may be:
whoever has not said that it is done writes again after every event, also long after its deadline.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstore.clock import FakeClock
from kvstore.messages import (
    AbortRequest,
    BlockSpec,
    Column,
    CommitRequest,
    DeleteRequest,
    LeaseRequest,
    PartLink,
    ReleaseRequest,
    ReserveRequest,
)
from kvstore.policy import LruPolicy
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import UNIT_BYTES, chain, key_of, keys

RESERVATION_SECONDS = 2.0
LEASE_SECONDS = 2.0
WAIT_SECONDS = 1.0


class Batch(NamedTuple):
    """What a writer wants to store: `width` parts of each block."""

    specs: list[BlockSpec]
    width: int = 1


class Setting(NamedTuple):
    """What there is to write, to look for and to delete; and which keys leave with which."""

    batches: dict[str, Batch]
    lookups: dict[str, list[Column]]
    deletable: list[bytes]
    goes_with: dict[bytes, set[bytes]]  # of each key that takes others along


_PREFIX, _OTHER = chain("a", 2), chain("x", 1)
#: A prefix of two blocks that both want, and a third block that makes room necessary.
ONE_PART = Setting(
    {"a": Batch(_PREFIX), "x": Batch(_OTHER)},
    {"a": [Column(keys(_PREFIX), None)]},
    keys(_PREFIX),
    {},
)


def _two_parts(*, is_window: bool) -> Setting:
    """One block of two parts, which are also written and read one by one, and a third part."""
    link = key_of("a0")
    first, second = (
        BlockSpec(key_of(f"a0.{i}"), None, UNIT_BYTES, 16, False, PartLink(link, *rule))
        for i, rule in enumerate([((None, 0), True), ((None, int(is_window)), not is_window)])
    )
    columns = [Column([first.key], None), Column([second.key], [0, 0] if is_window else None)]
    both = {first.key, second.key}
    return Setting(
        {
            "both": Batch([first, second], 2),
            "first": Batch([first]),
            "second": Batch([second]),
            "x": Batch(_OTHER),
        },
        {"both": columns, "second": columns[1:]},
        [first.key, second.key],
        {first.key: both} if is_window else dict.fromkeys(both, both),
    )


#: Full attention and a window's part of one block; the two halves of one, of two ranks.
SETTINGS = {
    "one part": ONE_PART,
    "window": _two_parts(is_window=True),
    "two ranks": _two_parts(is_window=False),
}

Action = tuple[Any, ...]


class Client:
    """One holder: at most one reservation and one lease, and one call in flight."""

    def __init__(self) -> None:
        self.reservation: Any = None
        self.writer = 0
        self.committed = 0  # blocks
        self.lease: Any = None
        self.read: list[int] = []  # who wrote what the lease is on
        # What the lease is on and was not deleted, with what that is worth nothing without.
        self.kept: dict[bytes, set[bytes]] = {}
        self.waits_for: int | None = None
        self.wanted = ""
        self.reserved = ""  # the name of its batch


class World:
    """A core, its memory, and the clients. `apply` one action after the other."""

    def __init__(self, units: int = 2, setting: Setting = ONE_PART) -> None:
        self.clock = FakeClock(0.0)
        self.core = Core(self.clock, Slots(units * UNIT_BYTES), LruPolicy())
        self.core._leases.cap_bytes = units * UNIT_BYTES
        self.setting = setting
        self.memory = [0] * units
        self.clients = [Client(), Client()]
        self.committed: dict[bytes, int] = {}  # key -> writer, of what was not deleted since
        self.readable: set[bytes] = set()
        self.writers = 0
        self.requests = 0

    # -- what can be done --------------------------------------------------------------------

    def enabled(self) -> list[Action]:
        """Every action that makes sense now."""
        batches, lookups = self.setting.batches, self.setting.lookups
        actions: list[Action] = [("advance",)]
        actions += [("delete", position) for position in range(len(self.setting.deletable))]
        for number, client in enumerate(self.clients):
            if client.waits_for is not None:
                actions.append(("cancel", number))
                continue
            if client.reservation is None:
                actions += [("reserve", number, name, wait) for name in batches for wait in (0, 1)]
            else:
                blocks = len(batches[client.reserved].specs) // batches[client.reserved].width
                actions += [("commit", number, count + 1) for count in range(blocks)]
                actions.append(("abort", number))
            if client.lease is None:
                actions += [("lease", number, name, wait) for name in lookups for wait in (0, 1)]
            else:
                actions.append(("release", number))
        return actions

    def apply(self, action: Action) -> None:
        """Do it, let slow writers write, and look at what has left."""
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)
        for client in self.clients:
            for place in self._writable(client):
                self.memory[place.offset_bytes // UNIT_BYTES] = client.writer
        before = self.readable
        self.readable = {key for _, key in self.core.resident_keys()}
        for key in before - self.readable:
            together = self.setting.goes_with.get(key, {key})
            assert not together & before & self.readable, "a part stayed without its block"

    def check(self) -> None:
        """A recount, and no reader ever sees another's word or loses what it needs."""
        self.core.check()
        assert self.readable <= self.committed.keys()
        for client in self.clients:
            if client.lease is None or client.lease.deadline <= self.clock.now():
                continue
            for needed in client.kept.values():
                assert needed <= self.readable, "evicted, and needed under a lease"
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
            tuple(_fingerprint_of(client, now) for client in self.clients),
            tuple(item.deadline - now for item in core._waiting_for_blocks.values()),
            tuple(item.deadline - now for item in core._waiting_for_room.values()),
        )

    # -- actions -----------------------------------------------------------------------------

    def _advance(self) -> None:
        self.clock.advance(1.0)
        self._take(self.core.tick(self.clock.now()))

    def _delete(self, position: int) -> None:
        key = self.setting.deletable[position]
        answer = self._ask(DeleteRequest(SINGLE_DOMAIN, [key]))
        if answer.outcomes == [Outcome.OK]:
            gone = self.setting.goes_with.get(key, {key})
            for other in gone:
                self.committed.pop(other, None)
            for client in self.clients:
                client.kept = {k: kept - gone for k, kept in client.kept.items() if k not in gone}

    def _reserve(self, number: int, name: str, waits: int) -> None:
        specs, width = self.setting.batches[name]
        request = ReserveRequest(
            SINGLE_DOMAIN, specs, 0, RESERVATION_SECONDS, waits * WAIT_SECONDS, None, width
        )
        self.clients[number].wanted = name
        self._call(number, request)

    def _lease(self, number: int, name: str, waits: int) -> None:
        first, *more = self.setting.lookups[name]
        request = LeaseRequest(
            SINGLE_DOMAIN,
            first.keys,
            16 * len(first.keys),
            LEASE_SECONDS,
            waits * WAIT_SECONDS,
            first.first_needed,
            more,
        )
        self.clients[number].wanted = f"lease {name}"
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
            width = self.setting.batches[client.reserved].width
            for place in reservation.places[client.committed * width : count * width]:
                if place is not None:
                    self.committed[place.key[32:]] = client.writer
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
        client.kept = {}

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
            if answer.places:
                self._receive_lease(client, answer)
            return
        self.writers += 1
        client.writer = self.writers
        client.committed = 0
        client.reservation = answer
        client.reserved = client.wanted
        specs, width = self.setting.batches[client.reserved]
        for position, (spec, place) in enumerate(zip(specs, answer.places, strict=True)):
            outcome, is_there = answer.outcomes[position // width], spec.key in self.committed
            assert outcome is not Outcome.PRESENT or is_there
            assert outcome is not Outcome.GRANTED or is_there or place is not None

    def _receive_lease(self, client: Client, answer: Any) -> None:
        client.lease = answer
        client.read = []
        columns = self.setting.lookups[client.wanted.removeprefix("lease ")]
        expected = [key for block in zip(*(c.keys for c in columns), strict=True) for key in block]
        readable = {key for _, key in self.core.resident_keys()}
        for place, key in zip(answer.places, expected, strict=False):
            assert place.key == SINGLE_DOMAIN + key
            assert key in self.committed, "leased, and never committed or deleted since"
            unit = place.offset_bytes // UNIT_BYTES
            assert self.memory[unit] == self.committed[key], "a wrong byte"
            client.read.append(self.memory[unit])
            takers = {k for k, gone in self.setting.goes_with.items() if key in gone}
            client.kept[key] = (takers | {key}) & readable

    def _writable(self, client: Client) -> list[Any]:
        """Where a writer that is not done may still write."""
        if client.reservation is None:
            return []
        first = client.committed * self.setting.batches[client.reserved].width
        return [place for place in client.reservation.places[first:] if place is not None]


def _fingerprint_of(client: Client, now: float) -> object:
    lease, reservation = client.lease, client.reservation
    return (
        client.committed,
        client.wanted if client.waits_for is not None else "",
        client.reserved if reservation else "",
        lease and (tuple(place.key for place in lease.places), lease.deadline - now),
        tuple((key, tuple(sorted(kept))) for key, kept in sorted(client.kept.items())),
        reservation and (reservation.outcomes, reservation.deadline - now).__repr__(),
    )
