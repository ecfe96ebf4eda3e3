"""The next of many deadlines, against a plain dict."""

from __future__ import annotations

import random

from kvstore.deadlines import Deadlines


def watching():
    owners: dict[int, float] = {}
    return owners, Deadlines(owners.get)


def test_without_owners_there_is_none():
    _, deadlines = watching()
    assert deadlines.next() is None
    assert deadlines.pop_due(1e9) == []


def test_what_is_due_comes_earliest_first_and_once():
    owners, deadlines = watching()
    for owner, deadline in ((1, 30.0), (2, 10.0), (3, 20.0), (4, 40.0)):
        owners[owner] = deadline
        deadlines.add(deadline, owner)
    assert deadlines.next() == 10
    assert deadlines.pop_due(30) == [2, 3, 1]
    assert deadlines.pop_due(30) == []
    assert deadlines.next() == 40


def test_the_deadline_itself_is_due():
    owners, deadlines = watching()
    owners[1] = 5.0
    deadlines.add(5.0, 1)
    assert deadlines.pop_due(5.0 - 1e-9) == []
    assert deadlines.pop_due(5.0) == [1]


def test_a_deadline_that_moved_on_is_due_only_then():
    owners, deadlines = watching()
    owners[1] = 5.0
    deadlines.add(5.0, 1)
    owners[1] = 9.0
    assert deadlines.pop_due(8) == []
    assert deadlines.next() == 9
    assert deadlines.pop_due(9) == [1]


def test_ended_owners_do_not_pile_up():
    owners, deadlines = watching()
    owners[0] = 1e9
    deadlines.add(1e9, 0)
    for owner in range(1, 10_000):
        owners[owner] = float(owner)
        deadlines.add(float(owner), owner)
        del owners[owner]
        deadlines.drop(owner)
    assert len(deadlines._heap) < 200
    assert deadlines.next() == 1e9


def test_any_order_of_events_is_as_a_dict_has_it():
    rng = random.Random(7)
    for _ in range(50):
        owners, deadlines = watching()
        now, last = 0.0, 0
        for _ in range(200):
            match rng.randrange(4):
                case 0 | 1:
                    last += 1
                    owners[last] = now + rng.randrange(1, 20)
                    deadlines.add(owners[last], last)
                case 2 if owners:
                    owner = rng.choice(list(owners))
                    if rng.random() < 0.5:
                        owners[owner] += rng.randrange(10)
                    else:
                        del owners[owner]
                        deadlines.drop(owner)
                case _:
                    now += rng.randrange(6)
                    due = {owner for owner, deadline in owners.items() if deadline <= now}
                    assert set(deadlines.pop_due(now)) == due
                    for owner in due:
                        del owners[owner]
            earliest = min(owners.values(), default=None)
            reported = deadlines.next()
            assert (reported is None) == (earliest is None)
            assert reported is None or earliest is None or reported <= earliest
