"""One run of the simulation: everything in it follows from its seed."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from kvstore.policy import CreditPolicy, LruNPolicy, LruPolicy, LruRPolicy
from kvstore.settings import CoreSettings
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import SLOT_ALIGNMENT_BYTES, Place
from tests.sim.chats import Chat, Rank
from tests.sim.faulty_tier import Faults, FaultyTier, drawn_faults
from tests.sim.models import MODELS
from tests.sim.operators import Operator
from tests.sim.runner import SimulationRunner
from tests.sim.schedule import Schedule
from tests.sim.traffic import Conversations, Prompt

#: A run lasts some simulated minutes at most, where transfers are stuck; most of it is quiet.
ROTS_MAX = 30
#: As many as the models that are shared have ranks.
RANKS = 2
RANK_NUMBERS_FROM = 100


class Result(NamedTuple):
    """What a run was."""

    digest: str  # of its trace
    has_faults: bool
    events: int
    answers: int
    accepted_parts: int
    seen: dict[str, int]  # troubles that came up, and the store's counters


def simulate(seed: int, *, recounts: bool = True) -> Result:
    """Run one seed. Raises whatever broke, with notes on where and how to replay it.

    Without `recounts` the core's own audit is left out, so that only what can be seen from outside
    is checked.
    """
    rng = Random(f"{seed}/setting")
    schedule = Schedule(Random(f"{seed}/schedule"))
    runner = _make_runner(rng, schedule, recounts=recounts)
    has_faults = runner.tier.faults != Faults()
    try:
        _run(seed, rng, runner, recounts=recounts)
    except BaseException as error:
        error.add_note(f"seed {seed}, event {schedule.events}, {schedule.clock.now():.6f} s")
        error.add_note("\n".join(["the last of it:", *schedule.last_lines]))
        error.add_note(f"replay it: pytest tests/sim --sim-seed {seed}")
        raise
    promises = runner.promises
    return Result(
        schedule.digest(),
        has_faults,
        schedule.events,
        promises.answers,
        promises.accepted_parts,
        _seen(runner),
    )


def _seen(runner: SimulationRunner) -> dict[str, int]:
    seen = dict(runner.schedule.seen) | dict(runner.promises.presence.seen)
    counters = runner.core.counters
    for name in (
        "misses",
        "dropped_blocks",
        "ended_leases",
        "ended_reservations",
        "refused_blocks",
    ):
        seen |= {f"{name} {label}": value for label, value in counters.by_label(name).items()}
    return seen


def _make_runner(rng: Random, schedule: Schedule, *, recounts: bool) -> SimulationRunner:
    keeps_records = rng.random() < 0.5
    units = rng.choice([8, 16, 32, 64, 128])
    faults = drawn_faults(rng, keeps_records=keeps_records)
    policy = rng.choice([LruPolicy, CreditPolicy, LruRPolicy, LruNPolicy])()
    settings = rng.choice([CoreSettings(), CoreSettings(watermark_high=0.9, watermark_low=0.6)])
    capacity_bytes = units * SLOT_ALIGNMENT_BYTES
    entry_bytes = rng.choice([0, 500])  # of which some count against the capacity
    core = Core(
        schedule.clock, Slots(capacity_bytes), policy, settings=settings, entry_bytes=entry_bytes
    )
    tier = FaultyTier(
        capacity_bytes, Random(f"{rng.random()}"), faults, keeps_records=keeps_records
    )
    schedule.note(
        "setting",
        f"{units} units, {policy.name}, {settings}, {entry_bytes} {keeps_records} {faults}",
    )
    return SimulationRunner(core, tier, schedule, recounts=recounts)


def _run(seed: int, rng: Random, runner: SimulationRunner, *, recounts: bool) -> None:
    conversations = Conversations(Random(f"{seed}/traffic"))
    operator = Operator(0, runner, conversations, Random(f"{seed}/client 0"))
    operator.start(operator.operate(20))
    for number in range(1, rng.randint(4, 8)):
        chat = Chat(number, runner, conversations, Random(f"{seed}/client {number}"))
        if rng.random() < 0.5:
            chat.ranks = [_start_rank(seed, rank, chat) for rank in range(RANKS)]
        chat.start(chat.talk(rng.randint(4, 12)))
    _let_rot(runner, rng)
    runner.schedule.run()
    _end(runner, recounts=recounts)


def _start_rank(seed: int, rank: int, chat: Chat) -> Rank:
    number = RANK_NUMBERS_FROM + RANKS * chat.number + rank
    rng = Random(f"{seed}/client {number}")
    worker = Rank(number, chat.runner, chat.conversations, rng, chat)
    worker.start(worker.work(rank))
    return worker


def _let_rot(runner: SimulationRunner, rng: Random) -> None:
    """Flip a bit of some part at rest, now and then."""
    interval = runner.tier.faults.rot_interval_seconds
    time = 0.0
    for _ in range(ROTS_MAX if interval else 0):
        time += rng.expovariate(1 / interval)

        def rot() -> None:
            places = [p for p in _resident_places(runner) if p.generation not in runner.tier.rotted]
            if places:
                place = rng.choice(places)
                runner.schedule.note("rot", f"{place.generation}")
                runner.tier.rot(place)

        runner.schedule.after(time, rot)


def _resident_places(runner: SimulationRunner) -> list[Place]:
    """Of the parts that readers can find."""
    return [entry.place for entry in runner.core._blocks.index if entry.is_ready]


def _end(runner: SimulationRunner, *, recounts: bool) -> None:
    """All is quiet and all faults are over: nothing leaked, and the store is of use as before."""
    usage = runner.core.usage()
    at_rest = usage["free_bytes"] + usage["ready_bytes"]
    assert at_rest == usage["capacity_bytes"], f"leaked: {usage}"
    if recounts:
        audit = runner.core.check()
        assert (audit.leases, audit.reservations) == (0, 0), f"left behind: {audit}"
    runner.tier.faults = Faults()
    for number, model in enumerate(MODELS):
        keys = Prompt(number, (1_000_000,), is_partial=False).keys
        client = Chat(99, runner, Conversations(Random("end")), Random("end"))
        loaded: list[int] = []
        client.start(client.round_trip(model.whole, keys, loaded))
        runner.schedule.run()
        assert loaded == [len(keys)], "a put and a get after all faults were over"
