"""Which block leaves first, seen through the core; and how the queue of victims keeps itself."""

from __future__ import annotations

from kvstore.messages import BlockSpec, PinKind, PinRequest, UnpinRequest
from kvstore.policy import POLICIES, LruPolicy
from kvstore.policy.victims import PARENTS_SEARCHED_MAX, SEARCHED_MAX
from kvstore.testing.residents import Residents
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import Driver, chain, key_of, keys


def evicted_order(driver, blocks):
    """Take away one block after the other; the names of the victims in their order."""
    victims = []
    held = {block.key for block in blocks}
    for i in range(len(blocks)):
        driver.put(chain(f"push{i}-", 1))
        driver.lease(chain(f"push{i}-", 1))
        now = {key for _, key in driver.core.resident_keys()}
        gone = sorted(held - now)
        assert len(gone) == 1, f"one block for one block, not {gone}"
        victims.append(gone[0].rstrip(b".").decode())
        held -= set(gone)
    return victims


class TestOrder:
    def test_a_prefix_goes_from_its_tail(self):
        driver = Driver(5)
        driver.put(chain("a", 5))
        assert evicted_order(driver, chain("a", 5)) == ["a4", "a3", "a2", "a1", "a0"]

    def test_what_was_used_longest_ago_goes_first(self):
        driver = Driver(6)
        for name in "abc":
            driver.put(chain(name, 2))
        driver.release(driver.lease(chain("a", 2)))
        all_blocks = chain("a", 2) + chain("b", 2) + chain("c", 2)
        assert evicted_order(driver, all_blocks) == ["b1", "b0", "c1", "c0", "a1", "a0"]

    def test_a_use_of_the_beginning_does_not_save_the_tail(self):
        driver = Driver(6)
        driver.put(chain("a", 3))
        driver.put(chain("b", 3))
        driver.release(driver.lease(chain("a", 1)))
        assert evicted_order(driver, chain("a", 3) + chain("b", 3))[:5] == [
            *["a2", "a1"],
            *["b2", "b1", "b0"],
        ]

    def test_a_commit_of_a_tail_keeps_its_beginning_longer(self):
        driver = Driver(6)
        driver.put(chain("a", 2))
        driver.put(chain("b", 2))
        driver.put(chain("a", 4), start=2)
        everything = chain("a", 4) + chain("b", 2)
        assert evicted_order(driver, everything) == ["b1", "b0", "a3", "a2", "a1", "a0"]

    def test_a_question_is_no_use(self):
        driver = Driver(4)
        driver.put(chain("a", 2))
        driver.put(chain("b", 2))
        driver.match(chain("a", 2))
        assert evicted_order(driver, chain("a", 2) + chain("b", 2))[:2] == ["a1", "a0"]

    def test_a_shared_beginning_outlives_both_its_tails(self):
        driver = Driver(4)
        shared = chain("s", 2)
        tails = [BlockSpec(key_of(f"t{i}"), shared[1].key, 4096, 16, False) for i in range(2)]
        for tail in tails:
            driver.put([*shared, tail])
        assert evicted_order(driver, [*shared, *tails]) == ["t0", "t1", "s1", "s0"]


class TestPartial:
    def test_a_final_partial_block_that_was_never_hit_goes_first_of_all(self):
        driver = Driver(7)
        driver.put(chain("a", 3))
        driver.put(chain("b", 2, partial=True))
        driver.put(chain("c", 2, partial=True))
        everything = chain("a", 3) + chain("b", 2) + chain("c", 2)
        order = evicted_order(driver, everything)
        assert order == ["b1", "c1", "a2", "a1", "a0", "b0", "c0"]

    def test_a_hit_makes_it_a_block_like_others(self):
        driver = Driver(5)
        driver.put(chain("b", 2, partial=True))
        driver.put(chain("a", 3))
        driver.release(driver.lease(chain("b", 2)))
        order = evicted_order(driver, chain("a", 3) + chain("b", 2))
        assert order == ["a2", "a1", "a0", "b1", "b0"]

    def test_putting_it_again_is_no_hit(self):
        driver = Driver(4)
        driver.put(chain("b", 2, partial=True))
        driver.put(chain("a", 2))
        driver.put(chain("b", 2, partial=True))
        assert evicted_order(driver, chain("a", 2) + chain("b", 2))[0] == "b1"


class TestParents:
    def test_a_parent_goes_before_children_only_where_these_are_leased(self):
        driver, blocks = Driver(4), chain("a", 3)
        driver.put(blocks)
        driver.put(chain("x", 1))
        lease = driver.lease(blocks[2:])
        assert driver.reserve(chain("n", 1)).outcomes == [Outcome.GRANTED]
        assert driver.held(blocks + chain("x", 1)) == "1110"
        assert driver.reserve(chain("m", 1)).outcomes == [Outcome.GRANTED]
        assert driver.held(blocks).count("1") == 2
        assert driver.held(blocks[2:]) == "1", "a lease protects its own blocks"
        assert driver.release(lease)

    def test_of_several_parents_the_last_goes_first(self):
        driver, blocks = Driver(3), chain("a", 3)
        driver.put(blocks)
        driver.lease(blocks[2:])
        driver.reserve(chain("n", 1))
        assert driver.held(blocks) == "101", "a0 without a1 is of use, a1 without a0 is not"

    def test_pressure_during_a_write_of_a_tail_takes_the_prefix_from_its_end(self):
        driver, blocks = Driver(3), chain("a", 3)
        driver.put(blocks[:2])
        driver.reserve(blocks, start=2)
        driver.reserve(chain("n", 1))
        assert driver.match(blocks[:2]).blocks == 1

    def test_a_parent_that_was_stored_anew_waits_for_its_children_again(self):
        driver, blocks = Driver(3), chain("a", 3)
        driver.put(blocks)
        driver.delete(blocks[:1])
        driver.put(blocks[:1])
        driver.release(driver.lease(blocks[1:]))  # the tail is more recent than its beginning
        assert evicted_order(driver, blocks) == ["a2", "a1", "a0"]

    def test_a_parent_that_was_stored_after_its_child_waits_for_it(self):
        driver, blocks = Driver(2), chain("a", 2)
        driver.put(blocks[1:])
        driver.put(blocks[:1])
        driver.release(driver.lease(blocks[1:]))
        assert evicted_order(driver, blocks) == ["a1", "a0"]

    def test_an_entry_whose_children_are_gone_is_a_leaf_again(self):
        driver, blocks = Driver(3), chain("a", 3)
        driver.put(blocks)
        lease = driver.lease(blocks[1:])
        driver.delete(blocks[1:])
        assert driver.release(lease)
        driver.put(chain("b", 2))
        assert evicted_order(driver, blocks[:1] + chain("b", 2))[0] == "a0"

    def test_a_parent_that_became_a_leaf_while_it_was_read_is_a_leaf(self):
        driver, blocks = Driver(3), chain("a", 3)
        driver.put(blocks)
        lease = driver.lease(blocks)
        driver.delete(blocks[1:])
        driver.release(lease)
        driver.put(chain("b", 2))
        assert evicted_order(driver, blocks[:1] + chain("b", 2)) == ["a0", "b1", "b0"]

    def test_a_block_that_was_unpinned_while_it_was_read_is_a_block_like_others(self):
        driver, pinned = Driver(3), chain("x", 1)
        driver.put(pinned)
        driver.ask(PinRequest(SINGLE_DOMAIN, keys(pinned), PinKind.SOFT, None))
        for name in "fgh":  # one of them evicts, and finds the pin
            driver.put(chain(name, 1))
        lease = driver.lease(pinned)
        driver.ask(UnpinRequest(SINGLE_DOMAIN, keys(pinned)))
        driver.release(lease)
        for name in "ijk":
            driver.put(chain(name, 1))
        assert driver.held(pinned) == "0"

    def test_a_writer_that_gave_up_leaves_its_parent_a_leaf(self):
        driver, blocks = Driver(3), chain("a", 2)
        driver.put(blocks[:1])
        reservation = driver.reserve(blocks)
        driver.put(chain("b", 1))
        driver.abort(reservation)
        driver.put(chain("c", 1))
        assert evicted_order(driver, blocks[:1] + chain("b", 1) + chain("c", 1))[0] == "a0"


class TestQueue:
    """What the contract of policies does not look at: how the queue keeps itself."""

    def test_removed_entries_do_not_pile_up(self):
        policy = LruPolicy()
        residents = Residents(policy)
        for i in range(5_000):
            residents.drop(residents.store(f"c{i}-", 1)[0])
        assert len(policy._victims) < 500

    def test_moved_parents_leave_nothing_behind(self):
        policy = LruPolicy()
        residents = Residents(policy)
        for i in range(500):
            residents.store(f"c{i}-", 8)
            while len(residents.blocks) > 100:
                residents.evict()
        assert len(policy._victims) == len(residents.blocks)

    def test_making_the_heap_anew_keeps_those_that_may_leave(self):
        residents = Residents(LruPolicy())
        kept = [residents.store(f"k{i}-", 1)[0] for i in range(50)]
        for i in range(5_000):
            residents.drop(residents.store(f"c{i}-", 1)[0])
        assert residents.drain() == kept

    def test_one_search_looks_at_so_many_and_takes_the_oldest_of_those(self):
        residents = Residents(LruPolicy())
        blocks = [residents.store(f"c{i}-", 1)[0] for i in range(SEARCHED_MAX + 10)]
        for entry in blocks:
            residents.read([entry])
        assert residents.pop() is blocks[0]
        assert residents.pop() is blocks[1]

    def test_of_more_parents_than_one_search_looks_at_an_old_one_goes(self):
        residents = Residents(LruPolicy())
        chains = [residents.store(f"c{i}-", 2) for i in range(PARENTS_SEARCHED_MAX * 2)]
        residents.protect(tail for _, tail in chains)
        assert residents.pop() is chains[0][0]
        assert len(residents.drain()) == len(chains) - 1


def test_a_policy_is_found_by_its_name():
    assert list(POLICIES) == ["lru", "lru-r", "lru-n", "credit"]
    assert all(policy.name == name for name, policy in POLICIES.items())
