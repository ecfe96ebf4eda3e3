"""A tier of which only the first part is there yet: slots, room and watermarks are of that part."""

from __future__ import annotations

from array import array

import pytest

from kvstore.clock import FakeClock
from kvstore.messages import BlockSpec, ReserveRequest
from kvstore.policy import POLICIES
from kvstore.settings import CoreSettings
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import SINGLE_DOMAIN, Outcome

UNIT = 4096


def a_batch(count, start=0):
    return [BlockSpec(bytes([start + n]) * 32, None, UNIT, 1, False) for n in range(1, count + 1)]


class TestSlots:
    def test_slots_are_granted_of_the_first_bytes_only(self):
        slots = Slots(8 * UNIT)
        slots.restrict(2 * UNIT)
        granted = [slots.grant(UNIT) for _ in range(3)]
        assert [s and s.offset_bytes for s in granted] == [0, UNIT, None]
        assert slots.problems() == []

    def test_nothing_is_granted_of_nothing(self):
        slots = Slots(8 * UNIT)
        slots.restrict(0)
        assert slots.grant(UNIT) is None
        assert (slots.free_bytes, slots.problems()) == (0, [])
        slots.extend(8 * UNIT)
        assert slots.largest_free_bytes == 8 * UNIT

    @pytest.mark.parametrize("freed", [False, True])
    def test_what_comes_is_one_with_the_free_bytes_before_it(self, freed):
        slots = Slots(8 * UNIT)
        slots.restrict(2 * UNIT)
        slot = slots.grant(2 * UNIT)
        assert slot is not None
        if freed:
            slots.free(slot)
        slots.extend(6 * UNIT)
        slots.extend(6 * UNIT)
        slots.extend(3 * UNIT)
        assert slots.largest_free_bytes == (6 if freed else 4) * UNIT
        assert slots.free_bytes == (6 if freed else 4) * UNIT
        assert slots.problems() == []

    def test_words_are_moves_and_then_generations(self):
        words = memoryview(array("Q", bytes(8 * 5)))
        slots = Slots(4 * UNIT, words)
        slots.grant(UNIT)
        slot = slots.grant(UNIT)
        assert slot is not None
        assert list(words) == [2, 1, 2, 0, 0]
        slots.free(slot)
        assert list(words) == [3, 1, 3, 0, 0]
        slots.close()
        words.release()


@pytest.fixture
def core():
    slots = Slots(100 * UNIT)
    slots.restrict(10 * UNIT)
    settings = CoreSettings(watermark_high=0.5, watermark_low=0.4)
    return Core(FakeClock(), slots, POLICIES["lru"](), settings=settings)


def reserve(core, batch, wait_seconds=0.0):
    request = ReserveRequest(SINGLE_DOMAIN, batch, 0, 30.0, wait_seconds, None)
    return core.begin(1, request).answers


def test_memory_that_is_not_there_yet_is_not_in_use(core):
    """Else all that is written while the pool is populated would be evicted at once."""
    ((_, answer),) = reserve(core, a_batch(8))
    assert answer.outcomes == [Outcome.GRANTED] * 8
    assert core.next_deadline() > core._clock.now(), "there is nothing to trim"
    core.check()


def test_who_waits_for_room_gets_what_comes(core):
    ((_, answer),) = reserve(core, a_batch(20), wait_seconds=0.0)
    assert answer.outcomes.count(Outcome.GRANTED) == 10
    assert reserve(core, a_batch(20, start=50), wait_seconds=5.0) == []
    assert core.extend(20 * UNIT).answers == []
    ((_, answer),) = core.extend(40 * UNIT).answers
    assert answer.outcomes == [Outcome.GRANTED] * 20
    core.check()
