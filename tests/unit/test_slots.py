"""Slots: extents tile the tier, sums agree, generations tell one owner from the next."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvariantViolated
from kvstore.slots import Slot, Slots, SlotState, slot_size_bytes

UNIT = 4096


def granted(slots: Slots, length_bytes: int) -> Slot:
    """A slot that must be there."""
    slot = slots.grant(length_bytes)
    assert slot is not None
    return slot


@pytest.mark.parametrize(
    ("length_bytes", "expected"),
    [(0, UNIT), (1, UNIT), (4095, UNIT), (4096, UNIT), (4097, 2 * UNIT), (3 * UNIT, 3 * UNIT)],
)
def test_a_slot_is_the_payload_rounded_up_and_never_nothing(length_bytes, expected):
    assert slot_size_bytes(length_bytes) == expected


@pytest.mark.parametrize("capacity", [-1, 0, 4095])
def test_a_tier_has_room_for_one_slot(capacity):
    with pytest.raises(ValueError, match="less than one slot"):
        Slots(capacity)


def test_capacity_is_rounded_down():
    assert Slots(3 * UNIT + 4095).capacity_bytes == 3 * UNIT


def test_slots_fill_the_tier_to_its_last_byte_and_not_beyond():
    slots = Slots(8 * UNIT)
    granted = [slots.grant(UNIT) for _ in range(8)]
    assert sorted(slot.offset_bytes for slot in granted if slot) == list(range(0, 8 * UNIT, UNIT))
    assert slots.grant(1) is None
    assert (slots.free_bytes, slots.largest_free_bytes) == (0, 0)


def test_the_smallest_extent_that_fits_is_taken():
    slots = Slots(24 * UNIT)
    parts = [granted(slots, size * UNIT) for size in (4, 1, 1, 2, 1, 8)]
    for slot in (parts[0], parts[3], parts[5]):
        slots.free(slot)
    assert granted(slots, 2 * UNIT).offset_bytes == parts[3].offset_bytes
    assert granted(slots, 3 * UNIT).offset_bytes == parts[0].offset_bytes


@pytest.mark.parametrize(("units", "offset_units"), [(2, 2), (3, 1), (4, 4), (6, 1), (7, 1)])
def test_in_its_extent_a_slot_begins_at_a_multiple_of_its_size_where_it_can(units, offset_units):
    slots = Slots(8 * UNIT)
    granted(slots, UNIT)
    slot = granted(slots, units * UNIT)
    assert slot.offset_bytes == offset_units * UNIT
    slots.free(slot)
    assert slots.largest_free_bytes == 7 * UNIT
    assert slots.problems() == []


def test_of_equal_extents_the_one_that_has_been_free_for_longest_is_taken():
    slots = Slots(6 * UNIT)
    parts = [granted(slots, UNIT) for _ in range(6)]
    for position in (4, 0, 2):
        slots.free(parts[position])
    offsets = [granted(slots, UNIT).offset_bytes // UNIT for _ in range(3)]
    assert offsets == [4, 0, 2]


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)]
)
def test_neighbours_merge_in_whatever_order_they_are_freed(order):
    slots = Slots(3 * UNIT)
    parts = [granted(slots, UNIT) for _ in range(3)]
    for position in order:
        slots.free(parts[position])
    assert slots.largest_free_bytes == 3 * UNIT
    assert slots.problems() == []


def test_a_slot_is_freed_once():
    slots = Slots(2 * UNIT)
    slot = granted(slots, UNIT)
    slots.free(slot)
    with pytest.raises(InvariantViolated, match="freed twice"):
        slots.free(slot)
    assert slots.problems() == []


def test_freeing_a_former_slot_leaves_the_one_that_lies_there_now():
    slots = Slots(2 * UNIT)
    slot = granted(slots, UNIT)
    slots.free(slot)
    again = granted(slots, 2 * UNIT)
    assert again.offset_bytes == slot.offset_bytes
    with pytest.raises(InvariantViolated, match="freed twice"):
        slots.free(slot)
    assert slots.problems() == []


def test_a_generation_changes_at_grant_and_at_free():
    slots = Slots(4 * UNIT)
    first = granted(slots, UNIT)
    assert slots.generations[0] == first.generation
    slots.free(first)
    assert slots.generations[0] != first.generation
    second = granted(slots, 2 * UNIT)
    assert second.generation not in (0, first.generation)


def test_whoever_was_inside_a_larger_later_slot_is_no_longer_current():
    """A slot that covers an older one without starting there leaves no old generation behind."""
    slots = Slots(4 * UNIT)
    parts = [granted(slots, UNIT) for _ in range(4)]
    for slot in parts:
        slots.free(slot)
    granted(slots, 4 * UNIT)
    for slot in parts:
        assert slots.generations[slot.offset_bytes // UNIT] != slot.generation


def test_states_are_booked_in_bytes():
    slots = Slots(8 * UNIT)
    slot = granted(slots, 3 * UNIT - 1)
    for state in (SlotState.READY, SlotState.CONDEMNED, SlotState.HELD):
        slots.move(slot, state)
        assert slots.bytes_in(state) == 3 * UNIT
        assert sum(slots.bytes_in(s) for s in SlotState) == 3 * UNIT
        assert slots.free_bytes == 5 * UNIT
    assert "held" in repr(slot)


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_extents_tile_the_tier_whatever_happens(units, seed):
    rng = random.Random(seed)
    slots, held = Slots(units * UNIT), list[Slot]()
    seen = set()
    for _ in range(80):
        if held and rng.random() < 0.45:
            slots.free(held.pop(rng.randrange(len(held))))
        else:
            length = rng.randrange(1, 6 * UNIT)
            largest = slots.largest_free_bytes
            slot = slots.grant(length)
            assert (slot is None) == (slot_size_bytes(length) > largest)
            if slot is not None:
                assert slot.generation not in seen
                seen.add(slot.generation)
                slots.move(slot, rng.choice(list(SlotState)))
                held.append(slot)
        assert slots.problems() == []
        assert slots.free_bytes == units * UNIT - sum(slot.size_bytes for slot in held)
    for slot in held:
        slots.free(slot)
    assert slots.largest_free_bytes == units * UNIT
    assert slots.granted() == []


@pytest.mark.parametrize("units", [(5, 7), (3, 64), (17, 31, 8), (16, 24), (96, 256)])
def test_parts_of_odd_sizes_leave_no_gaps(units):
    """The parts of one block come in turns; a tier that is filled with them is full."""
    slots = Slots(4096 * 8192)
    for size in itertools.cycle(units):
        if slots.grant(size * 4096) is None:
            break
    assert slots.free_bytes < 0.05 * slots.capacity_bytes
