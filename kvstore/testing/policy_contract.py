"""The contract of an eviction policy, as tests that anyone can run on a policy of their own.

    class TestMyPolicy(PolicyContract):
        def make_policy(self):
            return MyPolicy()

`Residents` stands for the core and tells the policy what the core would (`kvstore.policy.base`).
The ladder is the same for all policies; the order within a rung is the policy's own.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvstore.policy.base import Rung
from kvstore.testing.residents import WORK, Residents, Watched, long_run, name_of

if TYPE_CHECKING:
    from kvstore.index import Entry
    from kvstore.policy.base import Policy

#: More blocks than a search for a victim may look at.
MANY = 3_000
#: Work on this many times as many blocks may cost at most `SLACK` times as much each.
TIMES = 4
SLACK = 2
#: By how much the memory of a policy may differ, in bytes, between two equal stretches of work.
GROWTH_BYTES_MAX = 40 * 1024


class PolicyContract:
    """Subclass it in a test module, as a class whose name begins with Test."""

    #: Whether a block with resident children waits for them.
    children_first: ClassVar[bool] = True
    #: Whether a final partial block that was never hit leaves before all others.
    partial_first: ClassVar[bool] = True

    def make_policy(self) -> Policy:
        """A new policy that knows nothing yet."""
        raise NotImplementedError

    @pytest.fixture
    def residents(self) -> Residents:
        """A policy, and no block yet."""
        return Residents(self.make_policy())

    def rung(self, entry: Entry) -> Rung:
        """Where the ladder has a block that may leave."""
        if entry.is_soft_pinned:
            return Rung.SOFT_PIN
        if self.partial_first and entry.is_partial and not entry.hits:
            return Rung.UNHIT_PARTIAL
        return Rung.PLAIN

    def stands(self, entry: Entry) -> tuple[Rung, bool]:
        """What comes before the policy's own order: the rung, and whether children are there."""
        return self.rung(entry), self.children_first and entry.children > 0

    def check_victim(self, residents: Residents, victim: Entry | None) -> None:
        """`victim` was popped just now and is not dropped yet: could it be that one?"""
        evictable = residents.evictable()
        if victim is None:
            assert not evictable, f"{name_of(evictable[0])} can leave"
            return
        name = name_of(victim)
        assert residents.blocks.get(name) is victim, f"{name} is gone"
        assert not victim.users, f"{name} is protected"
        lowest = min(evictable, key=self.stands)
        assert self.stands(victim) == self.stands(lowest), f"{name_of(lowest)} is before {name}"

    def evict(self, residents: Residents) -> Entry:
        """Evict a block that there is, and check it."""
        victim = residents.pop()
        self.check_victim(residents, victim)
        assert victim is not None
        residents.drop(victim, is_evicted=True)
        return victim

    # -- each once ---------------------------------------------------------------------------

    def test_without_blocks_there_is_no_victim(self, residents: Residents) -> None:
        """Also after a read that found nothing."""
        assert residents.pop() is None
        residents.read([])
        assert residents.pop() is None

    def test_it_has_a_name(self, residents: Residents) -> None:
        """By which a configuration can choose it."""
        assert residents.policy.name

    def test_every_block_comes_up_once(self, residents: Residents) -> None:
        """And again once it was added again."""
        for i in range(30):
            residents.store(f"c{i}-", i % 7 + 1, partial=i % 3 == 0)
        for _ in range(3):
            victims = residents.drain()
            assert sorted(map(name_of, victims)) == sorted(residents.blocks)
            for victim in victims:
                residents.policy.add(victim)

    def test_adding_again_does_no_harm(self, residents: Residents) -> None:
        """A block that was added five times comes up once."""
        blocks = residents.store("a", 5) + residents.store("b", 5)
        for _ in range(5):
            for entry in blocks:
                residents.policy.add(entry)
                residents.read([entry])
        assert len(residents.drain()) == len(blocks)

    def test_what_is_removed_never_comes_up(self, residents: Residents) -> None:
        """Neither from within a prefix nor from its end, evicted or not, in use or not."""
        for name in "abcd":
            residents.store(name, 6)
        residents.protect([residents.blocks["c3"]])
        for name in ("a5", "b2", "c3", "d0"):
            residents.drop(residents.blocks[name], is_evicted=name == "d0")
        assert sorted(map(name_of, residents.drain())) == sorted(residents.blocks)

    def test_a_block_may_come_back(self, residents: Residents) -> None:
        """The same name and another entry, after an eviction and after a delete."""
        for is_evicted in (True, False):
            for entry in reversed(residents.store("a", 4)):
                residents.drop(entry, is_evicted=is_evicted)
            assert residents.pop() is None
        assert len(residents.store("a", 4)) == len(residents.drain())

    # -- protection --------------------------------------------------------------------------

    def test_what_is_protected_never_comes_up_until_it_is_released(
        self, residents: Residents
    ) -> None:
        """Whether it was passed over meanwhile or not."""
        held = residents.store("a", 4)
        residents.store("b", 4)
        residents.protect(held)
        residents.protect(held[:1])
        for _ in range(4):
            assert name_of(self.evict(residents))[0] == "b"
        assert residents.pop() is None
        residents.release(held)
        assert sorted(map(name_of, residents.drain())) == ["a1", "a2", "a3"]
        residents.release(held[:1])
        assert residents.drain() == held[:1]

    def test_a_parent_leaves_only_where_no_leaf_can(self, residents: Residents) -> None:
        """A tree is taken down from its leaves; only protected ones are left behind."""
        for i in range(4):
            residents.commit(["s0", "s1", f"t{i}", f"u{i}"])
        held = [residents.blocks[name] for name in ("u0", "t3")]
        residents.protect(held)
        order = [name_of(self.evict(residents)) for _ in range(len(residents.blocks) - 2)]
        assert sorted(residents.blocks) == ["t3", "u0"]
        if self.children_first:
            assert sorted(order[-3:]) == ["s0", "s1", "t0"]

    def test_a_block_that_got_children_waits_for_them(self, residents: Residents) -> None:
        """Although it stood in the queue as a leaf before, however often."""
        for i in range(10):
            residents.store(f"c{i}-", 1)
        for length in (2, 3):
            for i in range(10):
                residents.store(f"c{i}-", length)
        while residents.blocks:
            self.evict(residents)

    def test_a_block_whose_children_are_gone_is_a_leaf(self, residents: Residents) -> None:
        """Deleted from within as well, and while the parent is in use."""
        held = residents.store("p", 3)[2:]  # before all others, were its parents not parents
        residents.protect(held)
        residents.store("a", 4)
        residents.store("b", 2)
        residents.protect([residents.blocks["a1"]])
        for name in ("a3", "a2", "b1"):
            residents.drop(residents.blocks[name])
        residents.release([residents.blocks["a1"]])
        while len(residents.blocks) > len(held):
            self.evict(residents)

    # -- the ladder --------------------------------------------------------------------------

    def test_its_rank_is_on_the_ladder(self, residents: Residents) -> None:
        """The planner compares ranks of blocks whose turn it is not."""
        residents.store("a", 3, partial=True)
        residents.read(residents.store("b", 3, partial=True))
        residents.pin(residents.store("c", 3)[2])
        for entry in residents.blocks.values():
            rung, is_parent, stamp = residents.policy.rank(entry)
            assert (rung, is_parent) == self.stands(entry)
            assert isinstance(stamp, float)

    def test_victims_come_in_the_order_of_their_rank(self, residents: Residents) -> None:
        """As it is when they are asked for, not when they were added."""
        rng = random.Random(1)
        for i in range(20):
            residents.store(f"c{i}-", i % 4 + 1, partial=i % 3 == 0)
        for _ in range(100):
            block = rng.choice(list(residents.blocks.values()))
            residents.read([block])
            block.is_soft_pinned = rng.random() < 0.2
            residents.policy.add(block)
        ranks = [residents.policy.rank(victim) for victim in residents.drain()]
        assert ranks == sorted(ranks)

    def test_a_use_never_lets_a_block_leave_sooner(self, residents: Residents) -> None:
        """A rank does not sink by a read or by a commit."""
        rng = random.Random(2)
        for i in range(400):
            residents.store(f"c{i}-", 3)
            used = residents.store(f"c{rng.randrange(max(0, i - 20), i + 1)}-", 3)
            before = [residents.policy.rank(entry) for entry in used]
            residents.read(used)
            assert all(b <= residents.policy.rank(e) for b, e in zip(before, used, strict=True))
            while len(residents.blocks) > 60:
                self.evict(residents)

    @pytest.mark.parametrize("pinned_part", [0, 1])
    def test_soft_pins_come_last_of_many(self, residents: Residents, pinned_part: int) -> None:
        """Also where more blocks were used or pinned than one search looks at."""
        for i in range(MANY):
            residents.store(f"c{i}-", 1)
        blocks = list(residents.blocks.values())
        for entry in blocks:
            residents.read([entry])
        half = len(blocks) // 2
        pinned = blocks[pinned_part * half :][:half]
        for entry in pinned:
            residents.pin(entry)
        for _ in range(len(blocks) - half):
            victim = residents.pop()
            assert victim is not None
            assert not victim.is_soft_pinned, "others are left"
            residents.drop(victim, is_evicted=True)
        assert len(residents.drain()) == half

    def test_a_pin_that_ended_protects_no_more(self, residents: Residents) -> None:
        """Whether the block's turn had come meanwhile or not."""
        pinned = [*residents.store("a", 1), *residents.store("b", 1)]
        for entry in pinned:
            residents.pin(entry)
        for victim in residents.drain():
            residents.policy.add(victim)
        for entry in pinned:
            residents.unpin(entry)
        residents.pin(residents.store("c", 1)[0])
        assert {name_of(self.evict(residents)) for _ in range(2)} == {"a0", "b0"}

    def test_a_partial_block_is_like_others_once_it_was_hit(self, residents: Residents) -> None:
        """Before, it comes first of all, also of many that were used since."""
        for i in range(MANY // 2):
            residents.store(f"c{i}-", 2, partial=i % 2 == 0)
        for i in range(0, MANY // 2, 4):
            residents.read([residents.blocks[f"c{i}-0"], residents.blocks[f"c{i}-1"]])
        unhit = [e for e in residents.blocks.values() if self.rung(e) is Rung.UNHIT_PARTIAL]
        assert bool(unhit) == self.partial_first
        for _ in unhit:
            victim = residents.pop()
            assert victim is not None
            assert victim.is_partial, "unhit partial blocks are left"
            assert not victim.hits, "unhit partial blocks are left"
            residents.drop(victim, is_evicted=True)

    # -- whatever happens --------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(5))
    def test_every_victim_of_a_long_run_is_right(self, seed: int) -> None:
        """Reads, writes, leases, pins and deletes in any order."""
        residents = Residents(self.make_policy())
        for victim in long_run(residents, seed, steps=1_500):
            self.check_victim(residents, victim)

    def test_the_same_events_have_the_same_victims(self) -> None:
        """No victim depends on where an object lies in memory, or on chance."""
        worlds = [Residents(self.make_policy()) for _ in range(2)]
        names = [
            [None if victim is None else name_of(victim) for victim in long_run(world, 7, 1_500)]
            for world in worlds  # both live on, so that no object of one lies where the other's did
        ]
        assert names[0] == names[1]

    # -- what it costs -----------------------------------------------------------------------

    @pytest.mark.parametrize("name", WORK)
    def test_memory_does_not_grow(self, residents: Residents, name: str) -> None:
        """Twice the same work takes no more of it the second time."""
        for i in range(50):
            residents.store(f"base{i}-", 4)
        work = WORK[name]
        peaks = []
        tracemalloc.start()
        try:
            for stretch in range(3):
                peak = 0
                gc.collect()
                for round_ in range(12):
                    work(residents, f"{stretch}-{round_}-")
                    peak = max(peak, tracemalloc.get_traced_memory()[0])
                peaks.append(peak)
        finally:
            tracemalloc.stop()
        assert peaks[2] - peaks[1] <= GROWTH_BYTES_MAX, peaks

    def test_a_search_does_not_look_at_all_blocks(self) -> None:
        """Many blocks were used since anything was evicted, and still one answer comes soon."""
        few, many = (self._reads_of_searches(MANY * times) for times in (1, TIMES))
        assert many <= SLACK * few, f"{few} looks with {MANY} blocks, {many} with {TIMES}x as many"

    @pytest.mark.parametrize("event", ["used", "leased", "extended", "pinned"])
    def test_each_block_costs_the_same_among_many(self, event: str) -> None:
        """What happens to each block once is paid for once."""
        few, many = (self._reads_per_block(MANY // 12 * times, event) for times in (1, TIMES))
        assert many <= SLACK * few, f"{few:.0f} looks a block, {many:.0f} among {TIMES}x as many"

    def _reads_of_searches(self, blocks: int) -> int:
        residents = Residents(self.make_policy(), Watched)
        for i in range(blocks):
            residents.store(f"c{i}-", 1)
        for entry in residents.blocks.values():
            residents.read([entry])
        before = Watched.reads
        for _ in range(3):
            assert residents.pop() is not None
        return Watched.reads - before

    def _reads_per_block(self, blocks: int, event: str) -> float:
        residents = Residents(self.make_policy(), Watched)
        for i in range(blocks):
            residents.store(f"c{i}-", 1)
        # To the older half, which is what comes up first.
        half = list(residents.blocks.values())[: blocks // 2]
        before = Watched.reads
        for i, entry in enumerate(half):
            if event == "used":
                residents.read([entry])
            elif event == "leased":
                residents.protect([entry])
            elif event == "extended":
                residents.store(f"c{i}-", 2)
            else:
                residents.pin(entry)
        for _ in range(blocks // 2):
            assert residents.evict() is not None
        if event == "leased":
            residents.release(half)
        for _ in half:
            assert residents.evict() is not None
        return (Watched.reads - before) / blocks
