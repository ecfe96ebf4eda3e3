"""A pool of blocks over memory that grows."""

from __future__ import annotations

import pytest

from kvstore.block_table import CAPACITY_BLOCKS_MAX, BlockPool, BlockTable
from kvstore.errors import InvalidBlocks, NoFreeBlocks


def test_new_blocks_are_free_and_come_last():
    pool = BlockPool(2)
    table = BlockTable(pool, block_tokens=4)
    table.append(4)
    with pytest.raises(NoFreeBlocks):
        table.append(8)
    pool.grow(2)
    assert (pool.capacity_blocks, pool.free_blocks) == (4, 3)
    assert table.append(12).new_blocks == (1, 2, 3)
    assert pool.free_blocks == 0
    pool.check([table])


def test_growing_by_none_changes_nothing():
    pool = BlockPool(2)
    pool.grow(0)
    assert (pool.capacity_blocks, pool.free_blocks) == (2, 2)


@pytest.mark.parametrize("block_count", [-1, CAPACITY_BLOCKS_MAX - 1, True, 1.0, None])
def test_what_no_pool_can_have_is_refused(block_count):
    pool = BlockPool(2)
    with pytest.raises(InvalidBlocks, match=r"block_count=.*: expected an integer, 0 to 16777214"):
        pool.grow(block_count)
    assert (pool.capacity_blocks, pool.free_blocks) == (2, 2)
