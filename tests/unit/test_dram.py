"""The DRAM tier beyond the contract: its mapping, and views that outlive it."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import ConfigError, TierError
from kvstore.tiers.dram import DramTier
from kvstore.types import Outcome, Place

MIB = 1024 * 1024


@pytest.fixture
def tier():
    tier = DramTier(3 * MIB)
    yield tier
    tier.close()


def place(offset_bytes=0, length_bytes=4096):
    return Place(b"k" * 64, offset_bytes, length_bytes, 1)


def test_capacity_is_cut_to_whole_slots():
    tier = DramTier(MIB + 4095)
    assert tier.capacity_bytes == MIB
    tier.close()


def test_places_are_page_aligned_and_begin_at_a_huge_page(tier):
    assert tier.view(place()).ctypes.data % (2 * MIB) == 0
    assert tier.view(place(8192)).ctypes.data % 4096 == 0


def test_a_view_is_the_memory_and_no_copy(tier):
    tier.view(place(4096, 5_000))[:] = 7
    found = np.zeros(5_000, np.uint8)
    assert tier.read([(place(4096, 5_000), found)]) == [Outcome.OK]
    assert (found == 7).all()
    assert not tier.view(place(0)).any()
    assert not tier.view(place(4096 + 8192)).any()


def test_views_live_on_after_the_close_and_no_new_ones_are_made(tier):
    view = tier.view(place())
    view[:] = 9
    tier.close()
    assert (view == 9).all()
    with pytest.raises(TierError, match="is closed"):
        tier.view(place())


def test_memory_that_nobody_can_give_is_a_config_error():
    with pytest.raises(ConfigError, match="no memory for a DRAM tier"):
        DramTier(1 << 60)


def test_the_last_byte_can_be_written(tier):
    last = place(3 * MIB - 4096, 4096)
    assert tier.write([(last, np.full(4096, 5, np.uint8))]) == [Outcome.OK]
    assert tier.view(last)[-1] == 5
