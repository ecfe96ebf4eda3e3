"""Blocks of several parts in the core: granted, held and evicted together where they belong."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.messages import (
    BlockSpec,
    Column,
    CommitRequest,
    LeaseRequest,
    MatchRequest,
    PartLink,
    PinKind,
    PinRequest,
    ReadRequest,
    ReserveRequest,
)
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import UNIT_BYTES, Driver, chain, key_of

FULL_ATTENTION, WINDOW = 0, 1
WINDOW_BLOCKS = 2


def key(name: str, block: int, part: int) -> bytes:
    return key_of(f"{name}{block}.{part}")


def specs(name: str, blocks: int, *, parts: Any = (FULL_ATTENTION, WINDOW)) -> list[Any]:
    """Blocks of a full-attention part and a window's, of one unit each; None for another part."""
    found: list[Any] = []
    for block in range(blocks):
        link = key_of(f"{name}{block}")
        for part in (FULL_ATTENTION, WINDOW):
            parent = key(name, block - 1, part) if block and part == FULL_ATTENTION else None
            spec = BlockSpec(
                key(name, block, part),
                parent,
                UNIT_BYTES,
                16,
                False,
                PartLink(link, (None, part), part == FULL_ATTENTION),
            )
            found.append(spec if part in parts else None)
    return found


def columns(name: str, blocks: int) -> tuple[list[bytes], Column]:
    needed = [max(0, n - WINDOW_BLOCKS) for n in range(blocks + 1)]
    full = [key(name, block, FULL_ATTENTION) for block in range(blocks)]
    return full, Column([key(name, block, WINDOW) for block in range(blocks)], needed)


class PartsDriver(Driver):
    """Requests about blocks of two parts."""

    def put_parts(self, batch: list[Any], start: int = 0) -> list[Outcome]:
        request = ReserveRequest(SINGLE_DOMAIN, batch, start, 30.0, 0.0, None, 2)
        answer = self.ask(request)
        self.ask(CommitRequest(answer.reservation_id, len(answer.outcomes), 0))
        outcomes: list[Outcome] = answer.outcomes
        return outcomes

    def match_parts(self, name: str, blocks: int) -> Any:
        full, window = columns(name, blocks)
        return self.ask(MatchRequest(SINGLE_DOMAIN, full, 0.0, None, [window]))

    def lease_parts(self, name: str, blocks: int) -> Any:
        full, window = columns(name, blocks)
        return self.ask(LeaseRequest(SINGLE_DOMAIN, full, 16 * blocks, 30.0, 0.0, None, [window]))

    def read_parts(self, name: str, blocks: int) -> Any:
        full, window = columns(name, blocks)
        return self.ask(ReadRequest(SINGLE_DOMAIN, full, 16 * blocks, 0.0, None, [window]))

    def resident(self) -> set[str]:
        """Keys that a reader could find, as `name.part`."""
        return {found.decode().rstrip(".") for _, found in self.core.resident_keys()}


@pytest.fixture
def driver():
    return PartsDriver(16)


def test_a_batch_is_granted_part_by_part_and_read_block_by_block(driver):
    assert driver.put_parts(specs("a", 4)) == [Outcome.GRANTED] * 4
    answer = driver.read_parts("a", 4)
    assert (answer.blocks, answer.reason) == (4, None)
    # Of the window, the last two blocks only.
    found = [place and place.key[32:].decode().rstrip(".") for place in answer.places]
    assert found == ["a0.0", None, "a1.0", None, "a2.0", "a2.1", "a3.0", "a3.1"]
    assert driver.core.counters["hit_blocks", "dram"] == 4
    assert driver.core.counters["hit_tokens", "dram"] == 64


def test_what_is_there_already_is_not_granted_again(driver):
    driver.put_parts(specs("a", 3, parts=[FULL_ATTENTION]))
    assert driver.match_parts("a", 3).blocks == 0  # no length has its window
    request = ReserveRequest(SINGLE_DOMAIN, specs("a", 3), 0, 30.0, 0.0, None, 2)
    answer = driver.ask(request)
    assert answer.outcomes == [Outcome.GRANTED] * 3
    assert [place is None for place in answer.places] == [True, False] * 3
    driver.ask(CommitRequest(answer.reservation_id, 3, 0))
    assert driver.match_parts("a", 3).blocks == 3
    assert driver.put_parts(specs("a", 3)) == [Outcome.PRESENT] * 3


def test_a_block_without_anything_to_write_is_absent(driver):
    batch = [None, None, *specs("a", 2)[2:]]
    assert driver.put_parts(batch) == [Outcome.ABSENT, Outcome.GRANTED]
    assert driver.core.counters.by_label("refused_blocks") == {}


def test_without_room_for_all_parts_none_is_granted():
    driver = PartsDriver(5)
    answer = driver.ask(ReserveRequest(SINGLE_DOMAIN, specs("a", 3), 0, 30.0, 0.0, None, 2))
    assert answer.outcomes == [Outcome.GRANTED, Outcome.GRANTED, Outcome.FULL]
    assert [place is None for place in answer.places] == [False] * 4 + [True] * 2
    assert driver.core.slots.free_bytes == UNIT_BYTES


def test_a_part_in_another_writers_hands_makes_the_block_pending(driver):
    early = driver.ask(
        ReserveRequest(SINGLE_DOMAIN, specs("a", 1, parts=[WINDOW]), 0, 30.0, 0.0, None, 2)
    )
    assert early.outcomes == [Outcome.GRANTED]
    late = driver.ask(ReserveRequest(SINGLE_DOMAIN, specs("a", 1), 0, 30.0, 0.0, None, 2))
    assert late.outcomes == [Outcome.PENDING]
    assert late.places == [None, None]


def test_a_prefix_ends_where_its_window_does(driver):
    driver.put_parts(specs("a", 5))
    driver.delete([specs("a", 5)[2 * 3 + WINDOW]])
    found = driver.match_parts("a", 5)
    assert (found.blocks, found.reason) == (3, Outcome.ABSENT)


class TestLeavingTogether:
    def test_a_block_without_full_attention_takes_its_window_along(self, driver):
        driver.put_parts(specs("a", 2))
        driver.delete([specs("a", 2)[2 * 1 + FULL_ATTENTION]])
        assert driver.resident() == {"a0.0", "a0.1"}

    def test_a_window_leaves_alone(self, driver):
        driver.put_parts(specs("a", 2))
        driver.delete([specs("a", 2)[2 * 1 + WINDOW]])
        assert driver.resident() == {"a0.0", "a0.1", "a1.0"}

    def test_old_windows_make_room_first(self, driver):
        driver.put_parts(specs("a", 8))  # all 16 units
        lease = driver.lease_parts("a", 8)
        driver.release(lease)
        driver.put(chain("b", 4))
        # What the prefix of eight blocks does not need, and nothing else, has gone.
        gone = {f"a{block}.1" for block in range(8)} - driver.resident()
        assert gone == {"a5.1", "a4.1", "a3.1", "a2.1"}
        assert driver.match_parts("a", 8).blocks == 8

    def test_the_tail_of_full_attention_leaves_with_its_window(self):
        driver = PartsDriver(4)
        driver.put_parts(specs("a", 2))
        driver.put(chain("b", 1))
        assert len(driver.resident() & {"a0.0", "a0.1", "a1.0", "a1.1"}) < 4
        resident = driver.resident()
        for block in range(2):
            assert f"a{block}.0" in resident or f"a{block}.1" not in resident

    def test_a_part_in_use_keeps_the_parts_it_needs(self):
        driver = PartsDriver(4)
        driver.put_parts(specs("a", 2))
        lease = driver.ask(LeaseRequest(SINGLE_DOMAIN, [key("a", 1, WINDOW)], 16, 30.0, 0.0))
        assert len(lease.places) == 1
        # Only a0 may leave; a1's full attention is what the leased window is of.
        assert driver.put(chain("b", 3)) == [Outcome.GRANTED, Outcome.GRANTED, Outcome.FULL]
        assert driver.resident() >= {"a1.0", "a1.1"}
        driver.release(lease)
        assert driver.put(chain("c", 4)) == [Outcome.GRANTED] * 4
        assert not driver.resident() & {"a1.0", "a1.1"}

    def test_a_deleted_part_in_use_is_freed_after_its_last_user(self, driver):
        driver.put_parts(specs("a", 1))
        lease = driver.lease_parts("a", 1)
        driver.delete([specs("a", 1)[FULL_ATTENTION]])
        assert driver.resident() == set()
        assert driver.core.slots.free_bytes == 14 * UNIT_BYTES
        driver.release(lease)
        assert driver.core.slots.free_bytes == 16 * UNIT_BYTES


class TestPins:
    def test_the_quota_counts_all_parts_of_a_block(self, driver):
        driver.put_parts(specs("a", 3))  # the quota is 4 units of 16
        keys = [spec.key for spec in specs("a", 3)]
        answer = driver.ask(PinRequest(SINGLE_DOMAIN, keys, PinKind.HARD, None, 2))
        assert answer.outcomes == [Outcome.OK] * 4 + [Outcome.QUOTA] * 2
        driver.ask(PinRequest(SINGLE_DOMAIN, keys[1:2], PinKind.HARD, None))
        assert driver.core.check().ready_blocks == 6

    def test_a_pinned_window_keeps_its_block(self):
        driver = PartsDriver(8)
        driver.put_parts(specs("a", 2))
        pin = PinRequest(SINGLE_DOMAIN, [key("a", 0, WINDOW)], PinKind.HARD, None)
        assert driver.ask(pin).outcomes == [Outcome.OK]
        driver.put(chain("b", 8))
        assert driver.resident() >= {"a0.0", "a0.1"}


def test_the_lease_cap_counts_what_a_shorter_prefix_needs(driver):
    driver.put_parts(specs("a", 6))
    driver.core._leases.cap_bytes = 5 * UNIT_BYTES
    lease = driver.lease_parts("a", 6)
    # Three blocks need 3 + 2 parts, four need 4 + 2.
    assert (lease.blocks, lease.reason) == (3, Outcome.BUSY)
    assert sum(place is not None for place in lease.places) == 5
