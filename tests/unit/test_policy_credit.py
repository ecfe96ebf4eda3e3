"""`credit`, rule by rule. tests/model/test_policy_model.py has it against a plain description."""

from __future__ import annotations

import pytest

from kvstore.policy import CreditPolicy, LruPolicy
from kvstore.policy.credit import CREDIT_PER_HIT, HITS_MAX, TURNOVER_WEIGHT
from kvstore.testing.residents import Residents, name_of


@pytest.fixture
def residents():
    return Residents(CreditPolicy())


def let_pass(residents, uses):
    """Requests that find nothing."""
    for _ in range(uses):
        residents.read([])


def turn_over(residents, uses, times=1_000):
    """Let the turnover be `uses`, or very nearly so."""
    for i in range(times):
        entry = residents.store(f"gone{i}-", 1)[0]
        residents.policy._clock += uses
        residents.drop(entry, is_evicted=True)
    assert residents.policy._turnover == pytest.approx(uses, rel=0.001)


def age_that_wins(residents, hits):
    """How much later a block must have been used than one with `hits` hits, to outlive it."""
    for uses in range(1, 100):
        old = residents.store(f"old{uses}-", 1)
        for _ in range(hits):
            residents.policy._clock -= 1.0  # a read is a use of its own
            residents.read(old)
        let_pass(residents, uses - 1)
        young = residents.store(f"young{uses}-", 1)
        first = residents.pop()
        for entry in (*old, *young):
            residents.drop(entry)
        if first is old[0]:
            return uses
    raise AssertionError("no age wins")


def test_without_a_victim_there_is_no_credit(residents):
    assert age_that_wins(residents, 4) == 1


@pytest.mark.parametrize("hits", range(7))
def test_each_hit_is_a_tenth_of_the_turnover_and_four_count(residents, hits):
    turn_over(residents, 100)
    credit = 100 * CREDIT_PER_HIT * min(hits, HITS_MAX)
    assert age_that_wins(residents, hits) == pytest.approx(credit, abs=1.0)


def test_the_turnover_is_a_running_mean_of_the_ages_of_victims(residents):
    turn_over(residents, 100)
    before = residents.policy._turnover
    entry = residents.store("a", 1)[0]
    let_pass(residents, 300)
    residents.drop(entry, is_evicted=True)
    change = TURNOVER_WEIGHT * (300 - before)
    assert residents.policy._turnover == pytest.approx(before + change)


def test_what_is_deleted_is_no_victim_and_leaves_no_ghost(residents):
    turn_over(residents, 100)
    before, ghosts = residents.policy._turnover, len(residents.policy._ghost)
    entry = residents.store("a", 1)[0]
    let_pass(residents, 300)
    residents.drop(entry)
    assert (residents.policy._turnover, len(residents.policy._ghost)) == (before, ghosts)


def test_what_comes_back_has_its_hits_and_one_for_coming_back(residents):
    first = residents.store("a", 2)
    residents.read(first)
    residents.read(first[:1])
    for entry in reversed(first):
        residents.drop(entry, is_evicted=True)
    again = residents.store("a", 2)
    assert [entry.past_hits for entry in again] == [3, 2]
    assert [entry.hits for entry in again] == [0, 0], "a hit of another life is none of this one"


def test_the_ghost_holds_as_many_as_the_cache_held_and_forgets_the_oldest(residents):
    for i in range(5):
        residents.store(f"c{i}-", 1)
    for i in range(5, 20):
        residents.store(f"c{i}-", 1)
        residents.evict()
    ghosts = [key.decode().rstrip(".") for _, key in residents.policy._ghost]
    assert ghosts == [f"c{i}-0" for i in range(9, 15)], "six at a time were held"


def test_of_one_prefix_the_tail_goes_first_whatever_was_hit(residents):
    turn_over(residents, 100)
    run = residents.store("a", 3)
    residents.protect(run[2:])
    for _ in range(4):
        residents.read(run[1:])
    residents.release(run[2:])
    order = [name_of(residents.evict()) for _ in range(3)]
    assert order == ["a2", "a1", "a0"]


def test_a_falling_turnover_takes_nothing_back(residents):
    turn_over(residents, 1_000)
    run = residents.store("a", 1)
    for _ in range(4):
        residents.read(run)
    before = run[0].stamp
    residents.policy._turnover = 1.0
    residents.read(run)
    assert run[0].stamp == before


@pytest.mark.parametrize(("policy", "left"), [(CreditPolicy, 10), (LruPolicy, 0)])
def test_a_short_scan_does_not_drive_out_what_was_read_often(policy, left):
    """Within reason: 40 % of the turnover is the longest that anything is given."""
    residents = Residents(policy())
    hot = [residents.store(f"hot{i}-", 1) for i in range(10)]
    for round_ in range(200):
        for run in hot:
            residents.read(run)
        for i in range(30):
            residents.store(f"cold{round_}-{i}-", 1)
            while len(residents.blocks) > 50:
                residents.evict()
    for i in range(20):
        residents.store(f"scan{i}-", 1)
        residents.evict()
    assert sum(name_of(run[0]) in residents.blocks for run in hot) == left
