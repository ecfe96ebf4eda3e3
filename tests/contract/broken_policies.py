"""Policies with one fault each, run through the contract by test_policy_contract.py.

Not collected by itself: its name does not begin with test_. Each fault is a mistake that is easily
made, and two are ours: the store's own policies had them once.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvstore.index import Entry
from kvstore.policy import LruPolicy, Rung
from kvstore.testing.policy_contract import PolicyContract


class Plain(LruPolicy):
    """All that are known in one dict, and every search looks at every one: right, and slow."""

    name = "plain"

    def __init__(self):
        super().__init__()
        self.known = {}

    def add(self, entry):
        self.known[entry] = None
        entry.queue_place = self.rank(entry)

    def remove(self, entry, *, is_evicted):
        self.known.pop(entry, None)
        entry.queue_place = None

    def may_leave(self, entry):
        return entry.is_evictable

    def pop_victim(self):
        victim = min(filter(self.may_leave, self.known), key=self.rank, default=None)
        if victim is not None:
            self.remove(victim, is_evicted=False)
        return victim


class LooksAtAll(Plain):
    pass


class YieldsWhatIsProtected(Plain):
    def may_leave(self, entry):
        return True


class YieldsTwice(Plain):
    def remove(self, entry, *, is_evicted):
        if not entry.is_ready:
            super().remove(entry, is_evicted=is_evicted)


class GivesUp(Plain):
    """Looks at some, and says that there is none."""

    def pop_victim(self):
        for entry in list(self.known)[:3]:
            if entry.is_evictable:
                return super().pop_victim()
        return None


class RemovesNothing(Plain):
    def may_leave(self, entry):
        return not entry.users

    def remove(self, entry, *, is_evicted):
        if entry.is_ready:
            super().remove(entry, is_evicted=is_evicted)


class TakesParentsAtTheirAge(Plain):
    def pop_victim(self):
        victim = min(
            filter(self.may_leave, self.known),
            key=lambda entry: (self.rank(entry)[0], entry.stamp),
            default=None,
        )
        if victim is not None:
            self.remove(victim, is_evicted=False)
        return victim


class IgnoresPins(LruPolicy):
    def rank(self, entry):
        rung, *rest = super().rank(entry)
        return min(rung, Rung.PLAIN), *rest


class HasNoRuleForPartials(LruPolicy):
    partial_first = False


class SaysAnotherRank(Plain):
    """The rung is right when it matters, and not where the planner asks."""

    def rank(self, entry):
        return (Rung.PLAIN, *super().rank(entry)[1:])

    def pop_victim(self):
        victim = min(filter(self.may_leave, self.known), key=super().rank, default=None)
        if victim is not None:
            self.remove(victim, is_evicted=False)
        return victim


class GrowsOlderByUse(Plain):
    def touch(self, entries):
        for entry in entries:
            self._clock += 1.0
            entry.stamp = -self._clock


class NeedsABlock(Plain):
    def touch(self, entries):
        entries[0].stamp = self._clock
        super().touch(entries)


class TakesAnyOfASet(Plain):
    """Of one rung, whatever comes first."""

    def pop_victim(self):
        may_leave = {entry for entry in self.known if entry.is_evictable}
        victim = min(may_leave, key=lambda entry: self.rank(entry)[:2], default=None)
        if victim is not None:
            self.remove(victim, is_evicted=False)
        return victim


class RemembersAll(LruPolicy):
    def __init__(self):
        super().__init__()
        self.ghost = {}

    def remove(self, entry, *, is_evicted):
        super().remove(entry, is_evicted=is_evicted)
        self.ghost[entry.key] = entry.hits


class QueuesEachUse(LruPolicy):
    def __init__(self):
        super().__init__()
        self.uses = []

    def touch(self, entries):
        super().touch(entries)
        self.uses += [(entry.stamp, entry.key) for entry in entries]


class Heap(LruPolicy):
    """One heap of (rank when queued, entry), put right as it is popped."""

    def __init__(self):
        super().__init__()
        self.heap = []
        self.pushes = 0

    def add(self, entry):
        rank = self.rank(entry)
        if entry.queue_place is None or rank < entry.queue_place:
            self.push(entry, rank)

    def push(self, entry, rank):
        self.pushes += 1
        entry.queue_place = rank
        heappush(self.heap, (rank, self.pushes, entry))

    def remove(self, entry, *, is_evicted):
        entry.queue_place = None

    def take(self):
        """The first one that is where it stands, without a look at what it is worth now."""
        while self.heap:
            rank, _, entry = heappop(self.heap)
            if rank is entry.queue_place:
                entry.queue_place = None
                return rank, entry
        return None

    def pop_victim(self):
        while found := self.take():
            queued, entry = found
            rank = self.rank(entry)
            if not entry.is_evictable:
                continue
            if rank == queued:
                return entry
            self.push(entry, rank)
        return None


class LeavesOldPlacesBehind(Heap):
    """Ours once: a parent that became a leaf left its place as a parent in the heap for ever."""


class StopsBeforeTheLadder(Heap):
    """Ours once: after so many looks the best of those will do, on whichever rung they are."""

    def pop_victim(self):
        seen: list[Entry] = []
        while len(seen) < 1_024 and (found := self.take()):
            queued, entry = found
            if entry.is_evictable:
                rank = self.rank(entry)
                if rank == queued:
                    return entry
                seen.append(entry)
                self.push(entry, rank)
        best = min(seen, key=self.rank, default=None)
        if best is not None:
            best.queue_place = None
        return best


class BelievesWhatItQueued(Heap):
    """Does not look whether the block was used, pinned or extended since."""

    def pop_victim(self):
        while found := self.take():
            if found[1].is_evictable:
                return found[1]
        return None


class PassesOverTheSameAgain(Heap):
    """Keeps what is protected in the queue, and meets it at each search."""

    def pop_victim(self):
        passed = []
        victim = None
        while victim is None and (found := self.take()):
            queued, entry = found
            if not entry.is_evictable:
                passed.append(entry)
            elif self.rank(entry) == queued:
                victim = entry
            else:
                self.push(entry, self.rank(entry))
        for entry in passed:
            self.push(entry, self.rank(entry))
        return victim


class NeverALeafAgain(Heap):
    """A block that is known is left where it stands, also where its rank has sunk."""

    def add(self, entry):
        if entry.queue_place is None:
            self.push(entry, self.rank(entry))


#: Each fault, and the test that has to find it.
FAULTS = {
    LooksAtAll: "test_a_search_does_not_look_at_all_blocks",
    YieldsWhatIsProtected: "test_what_is_protected_never_comes_up_until_it_is_released",
    YieldsTwice: "test_every_block_comes_up_once",
    GivesUp: "test_what_is_protected_never_comes_up_until_it_is_released",
    RemovesNothing: "test_what_is_removed_never_comes_up",
    TakesParentsAtTheirAge: "test_every_victim_of_a_long_run_is_right[0]",
    IgnoresPins: "test_soft_pins_come_last_of_many[0]",
    HasNoRuleForPartials: "test_a_partial_block_is_like_others_once_it_was_hit",
    SaysAnotherRank: "test_its_rank_is_on_the_ladder",
    GrowsOlderByUse: "test_a_use_never_lets_a_block_leave_sooner",
    NeedsABlock: "test_without_blocks_there_is_no_victim",
    TakesAnyOfASet: "test_the_same_events_have_the_same_victims",
    RemembersAll: "test_memory_does_not_grow[deletes]",
    QueuesEachUse: "test_memory_does_not_grow[reads]",
    LeavesOldPlacesBehind: "test_memory_does_not_grow[evictions]",
    StopsBeforeTheLadder: "test_soft_pins_come_last_of_many[0]",
    BelievesWhatItQueued: "test_a_block_that_got_children_waits_for_them",
    PassesOverTheSameAgain: "test_each_block_costs_the_same_among_many[leased]",
    NeverALeafAgain: "test_a_block_whose_children_are_gone_is_a_leaf",
}


def case_of(policy):
    """The contract on one policy, under the policy's name."""
    return type(f"Test{policy.__name__}", (PolicyContract,), {"make_policy": lambda self: policy()})


for fault in (*FAULTS, Plain):
    globals()[f"Test{fault.__name__}"] = case_of(fault)
