"""Every policy against its plain description, whatever happens to the blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.policy import POLICIES
from kvstore.testing.residents import Residents, name_of
from tests.policy_reference import REFERENCES

CHAINS = 5
BLOCKS = 6
#: The age of the first victims, in uses, and how much time passes later on, at most.
FIRST_AGE = 2_000
PAUSE = 60


class Mirrored(Residents):
    """Tells the reference what it tells the policy."""

    def __init__(self, name):
        super().__init__(POLICIES[name]())
        self.reference = REFERENCES[name]()

    def commit(self, names, *, partial=False):
        run = super().commit(names, partial=partial)
        self.reference.used(run)
        return run

    def read(self, entries):
        super().read(entries)
        self.reference.used(entries)

    def drop(self, entry, *, is_evicted=False):
        self.reference.gone(entry, is_evicted=is_evicted)
        super().drop(entry, is_evicted=is_evicted)

    def pop(self):
        expected = self.reference.victim(self.blocks.values())
        victim = super().pop()
        assert victim is expected, f"{victim and name_of(victim)} is before {expected}"
        return victim


class PolicyMachine(RuleBasedStateMachine):
    """Chains that share their first two blocks, written, read, leased, pinned and deleted."""

    policy = ""

    def __init__(self):
        super().__init__()
        self.residents = Mirrored(self.policy)
        self.leased = []
        # So that a turnover is there, and a credit of some uses a hit.
        self.residents.store("first", 20)
        self.let_time_pass(FIRST_AGE)
        self.evict(20)

    def names(self, chain, blocks):
        return [f"s{i}" if i < 2 else f"c{chain}-{i}" for i in range(blocks)]

    def resident_prefix(self, chain, blocks):
        run = []
        for name in self.names(chain, blocks):
            if name not in self.residents.blocks:
                break
            run.append(self.residents.blocks[name])
        return run

    @rule(
        chain=st.integers(0, CHAINS - 1),
        blocks=st.integers(1, BLOCKS),
        partial=st.booleans(),
    )
    def commit(self, chain, blocks, partial):
        names = self.names(chain, blocks)
        if partial:  # another block than the full one
            names[-1] += "p"
        self.residents.commit(names, partial=partial)

    @rule(
        chain=st.integers(0, CHAINS - 1),
        blocks=st.integers(1, BLOCKS),
        is_leased=st.booleans(),
    )
    def read(self, chain, blocks, is_leased):
        run = self.resident_prefix(chain, blocks)
        self.residents.read(run)
        if is_leased:
            self.residents.protect(run)
            self.leased.append(run)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data):
        position = data.draw(st.integers(0, len(self.leased) - 1))
        self.residents.release(self.leased.pop(position))

    @precondition(lambda self: self.residents.blocks)
    @rule(data=st.data(), what=st.sampled_from(["read", "pin", "unpin", "delete", "add"]))
    def one_block(self, data, what):
        blocks = self.residents.blocks
        entry = blocks[data.draw(st.sampled_from(sorted(blocks)))]
        match what:
            case "read":
                self.residents.read([entry])
            case "pin":
                self.residents.pin(entry)
            case "unpin":
                self.residents.unpin(entry)
            case "delete":
                self.residents.drop(entry)
            case "add":
                self.residents.policy.add(entry)

    @rule(times=st.integers(1, 8))
    def evict(self, times):
        for _ in range(times):
            self.residents.evict()

    @rule(uses=st.integers(1, PAUSE))
    def let_time_pass(self, uses):
        """Reads that find nothing."""
        for _ in range(uses):
            self.residents.read([])

    @rule()
    def keep(self):
        victim = self.residents.pop()
        if victim is not None:
            self.residents.policy.add(victim)

    @invariant()
    def whoever_may_leave_is_known(self):
        unknown = [e for e in self.residents.evictable() if e.queue_place is None]
        assert not unknown


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_does_what_it_says(policy):
    machine: Any = type(f"Machine of {policy}", (PolicyMachine,), {"policy": policy})
    case = machine.TestCase()
    case.settings = settings(settings.default, stateful_step_count=60)
    case.runTest()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_does_what_it_says_for_long(policy, seed):
    """Long enough that the ghost overflows and the turnover rises and falls."""
    residents, rng = Mirrored(policy), random.Random(seed)
    for step in range(3_000):
        if step % 500 == 250:
            for _ in range(rng.choice([10, 2_000])):
                residents.read([])
        chain = int(40 * rng.random() ** 2)
        run = residents.commit([f"c{chain}-{i}" for i in range(rng.randrange(1, 6))])
        for _ in range(rng.randrange(3)):
            residents.read(run[: rng.randrange(1, 6)])
        if rng.random() < 0.02:
            residents.drop(run[-1])
        while len(residents.blocks) > 50:
            residents.evict()
