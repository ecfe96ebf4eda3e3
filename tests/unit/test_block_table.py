"""Block tables: where tokens go, who shares a block, what is refused and how that is said."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from kvstore.block_table import (
    CAPACITY_BLOCKS_MAX,
    Appended,
    BlockPool,
    BlockTable,
    Copy,
    TokenRun,
    TokenSlot,
)
from kvstore.errors import InvalidBlocks, InvariantViolated, NoFreeBlocks
from kvstore.keys import BLOCK_TOKENS_MAX

BLOCK_TOKENS = 4
CAPACITY_BLOCKS = 8
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/block_table.md"


@pytest.fixture
def pool():
    return BlockPool(CAPACITY_BLOCKS)


@pytest.fixture
def table(pool):
    return BlockTable(pool, BLOCK_TOKENS)


def state(pool: BlockPool, *tables: BlockTable) -> object:
    """Everything that a refused call must leave as it was."""
    references = [pool.reference_count(block) for block in range(pool.capacity_blocks)]
    return references, pool.free_blocks, [(table.blocks, table.token_count) for table in tables]


# -- append, slot_of -----------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_tokens_take_up_whole_blocks(pool, table, blocks, more):
    token_count = blocks * BLOCK_TOKENS + more
    expected = blocks + (more > 0)
    appended = table.append(token_count)
    assert appended.new_blocks == table.blocks == tuple(range(expected))
    assert appended.copy is None
    assert table.token_count == token_count
    assert table.full_blocks == blocks - (more < 0)
    assert pool.free_blocks == CAPACITY_BLOCKS - expected
    pool.check([table])


@pytest.mark.parametrize("block_tokens", [1, 3, 4, 16])
def test_a_token_lies_where_its_run_says(block_tokens):
    table = BlockTable(BlockPool(40), block_tokens)
    position = 0
    for token_count in (1, 2, block_tokens, 0, 7, 2 * block_tokens + 1):
        for run in table.append(token_count).runs:
            assert run.first_token == position
            for i in range(run.token_count):
                slot = TokenSlot(run.physical_block, run.offset_tokens + i)
                assert table.slot_of(position) == slot
                position += 1
    assert position == table.token_count


def test_an_append_fills_the_last_block_first(table):
    table.append(6)
    runs = (TokenRun(6, 1, 2, 2), TokenRun(8, 2, 0, 3))
    assert table.append(5) == Appended((2,), runs, None)


def test_an_append_within_the_last_block_takes_none(pool, table):
    table.append(1)
    assert table.append(3) == Appended((), (TokenRun(1, 0, 1, 3),), None)
    assert pool.free_blocks == CAPACITY_BLOCKS - 1


def test_no_tokens_take_nothing(pool, table):
    assert table.append(0) == Appended((), (), None)
    assert (table.blocks, table.token_count, table.full_blocks) == ((), 0, 0)
    table.append(2)
    other = table.fork()
    assert other.append(0) == Appended((), (), None)  # nor is a shared block copied for them
    assert other.blocks == table.blocks
    pool.check([table, other])


def test_blocks_that_were_free_for_longest_are_taken_first(pool):
    blocks = pool.allocate(CAPACITY_BLOCKS)
    for block in (5, 2, 7):
        pool.release([block])
    assert blocks == list(range(CAPACITY_BLOCKS))
    assert pool.allocate(3) == [5, 2, 7]


# -- sharing -------------------------------------------------------------------------------------


def test_a_fork_shares_all_blocks(pool, table):
    table.append(6)
    fork = table.fork()
    assert (fork.blocks, fork.token_count) == (table.blocks, table.token_count)
    assert fork.block_tokens == table.block_tokens
    assert [pool.reference_count(block) for block in (0, 1)] == [2, 2]
    assert pool.free_blocks == CAPACITY_BLOCKS - 2
    pool.check([table, fork])


def test_the_first_of_two_forks_that_goes_on_gets_a_copy_and_the_other_none(pool, table):
    table.append(6)
    fork = table.fork()
    appended = fork.append(1)
    assert appended == Appended((2,), (TokenRun(6, 2, 2, 1),), Copy(1, 2, 2))
    assert (table.blocks, fork.blocks) == ((0, 1), (0, 2))
    assert table.append(3) == Appended((3,), (TokenRun(6, 1, 2, 2), TokenRun(8, 3, 0, 1)), None)
    pool.check([table, fork])


def test_a_copy_and_further_blocks_are_taken_in_one_append(pool, table):
    table.append(6)
    fork = table.fork()
    appended = fork.append(7)
    assert (appended.new_blocks, appended.copy) == ((2, 3, 4), Copy(1, 2, 2))
    assert fork.blocks == (0, 2, 3, 4)
    pool.check([table, fork])


def test_full_shared_blocks_are_never_copied(pool, table):
    table.append(2 * BLOCK_TOKENS)
    fork = table.fork()
    assert fork.append(1).copy is None
    assert table.append(1).copy is None
    assert (table.blocks, fork.blocks) == ((0, 1, 3), (0, 1, 2))
    pool.check([table, fork])


def test_a_block_that_is_no_longer_shared_is_written_in_place(table):
    table.append(6)
    fork = table.fork()
    table.close()
    assert fork.append(1) == Appended((), (TokenRun(6, 1, 2, 1),), None)


def test_a_block_that_somebody_else_retains_is_copied(pool, table):
    table.append(6)
    pool.retain([1])
    assert table.append(1).copy == Copy(1, 2, 2)
    pool.check([table], retained=[1])
    pool.release([1])
    assert pool.allocate(CAPACITY_BLOCKS - 2)[-1] == 1
    assert pool.free_blocks == 0


def test_a_hit_shares_the_full_blocks_of_a_prefix(pool, table):
    table.append(10)
    other = BlockTable(pool, BLOCK_TOKENS)
    other.adopt(table.blocks[:2], 2 * BLOCK_TOKENS)
    assert other.append(3) == Appended((3,), (TokenRun(8, 3, 0, 3),), None)
    assert other.blocks == (0, 1, 3)
    table.close()
    assert [pool.reference_count(block) for block in (0, 1, 2, 3)] == [1, 1, 0, 1]
    pool.check([other])


def test_a_partial_block_can_be_adopted_and_is_then_copied_before_a_write(pool, table):
    table.append(6)
    other = BlockTable(pool, BLOCK_TOKENS)
    other.adopt(table.blocks, 5)
    assert other.append(1) == Appended((2,), (TokenRun(5, 2, 1, 1),), Copy(1, 2, 1))


def test_an_empty_table_adopts_nothing_and_forks(pool, table):
    table.adopt([], 0)
    assert (table.fork().blocks, pool.free_blocks) == ((), CAPACITY_BLOCKS)


def test_loaded_blocks_become_a_table_of_their_own(pool, table):
    loaded = pool.allocate(2)
    table.adopt(loaded, 8)
    pool.check([table], retained=loaded)
    pool.release(loaded)
    pool.check([table])


# -- truncate, close -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_count", "kept"), [(11, 3), (9, 3), (8, 2), (7, 2), (5, 2), (4, 1), (1, 1), (0, 0)]
)
def test_truncate_releases_the_blocks_without_tokens(pool, table, token_count, kept):
    table.append(11)
    table.truncate(token_count)
    assert (table.blocks, table.token_count) == (tuple(range(kept)), token_count)
    assert pool.free_blocks == CAPACITY_BLOCKS - kept
    pool.check([table])


def test_a_truncated_shared_block_stays_shared_until_it_is_written(pool, table):
    table.append(8)
    fork = table.fork()
    fork.truncate(6)
    assert fork.blocks == table.blocks
    assert pool.reference_count(1) == 2
    assert fork.append(1) == Appended((2,), (TokenRun(6, 2, 2, 1),), Copy(1, 2, 2))
    assert table.append(1).copy is None
    pool.check([table, fork])


def test_a_table_that_is_truncated_to_whole_blocks_needs_no_copy(pool, table):
    table.append(8)
    fork = table.fork()
    fork.truncate(4)
    assert fork.append(1) == Appended((2,), (TokenRun(4, 2, 0, 1),), None)
    assert pool.reference_count(1) == 1


def test_closing_frees_what_nobody_shares(pool, table):
    table.append(10)
    fork = table.fork()
    fork.append(8)
    table.close()
    table.close()
    assert (table.blocks, table.token_count, table.full_blocks) == ((), 0, 0)
    assert pool.free_blocks == CAPACITY_BLOCKS - len(fork.blocks)
    fork.close()
    assert pool.free_blocks == CAPACITY_BLOCKS
    pool.check([table, fork])


# -- what is refused -----------------------------------------------------------------------------


def test_without_enough_free_blocks_an_append_changes_nothing(pool, table):
    table.append(6)
    before = state(pool, table)
    with pytest.raises(NoFreeBlocks, match="7 blocks asked for: 6 of 8 are free"):
        table.append(27)
    assert state(pool, table) == before
    assert len(table.append(26).new_blocks) == 6
    pool.check([table])


def test_without_a_free_block_for_the_copy_an_append_changes_nothing(pool, table):
    table.append(CAPACITY_BLOCKS * BLOCK_TOKENS - 2)
    fork = table.fork()
    before = state(pool, table, fork)
    with pytest.raises(NoFreeBlocks, match="1 blocks asked for: 0 of 8 are free"):
        fork.append(1)
    assert state(pool, table, fork) == before
    table.close()
    assert fork.append(2).copy is None  # the block is its own now
    pool.check([fork])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.append(-1), "token_count=-1: expected an integer, 0 or more"),
        (lambda t: t.append(1.0), "token_count=1.0: expected an integer"),
        (lambda t: t.append(True), "token_count=True: expected an integer"),
        (lambda t: t.truncate(7), "token_count=7: expected an integer, 0 to 6"),
        (lambda t: t.truncate(-1), "token_count=-1: expected an integer, 0 to 6"),
        (lambda t: t.slot_of(6), "token_position=6: expected one of the 6 tokens"),
        (lambda t: t.slot_of(-1), "token_position=-1: expected one of the 6 tokens"),
        (lambda t: t.adopt([0], 4), "the table has 6 tokens: only an empty one adopts"),
    ],
)
def test_a_wrong_call_says_what_is_allowed_and_changes_nothing(pool, table, call, message):
    table.append(6)
    before = state(pool, table)
    with pytest.raises(InvalidBlocks, match=message):
        call(table)
    assert state(pool, table) == before


@pytest.mark.parametrize(
    ("blocks", "token_count", "message"),
    [
        ([0], 8, "1 blocks for token_count=8: expected 2 blocks of 4 tokens"),
        ([0, 1], 4, "2 blocks for token_count=4: expected 1 blocks"),
        ([], 1, "0 blocks for token_count=1: expected 1 blocks"),
        ([0], -1, "token_count=-1: expected an integer, 0 or more"),
        ([1, 1], 8, "block 1 is named twice"),
        ([1, 2], 8, "block 2 is free"),
        ([1, 8], 8, "block=8: expected an integer, 0 to 7"),
        ([1, -1], 8, "block=-1: expected an integer, 0 to 7"),
    ],
)
def test_blocks_that_do_not_fit_are_not_adopted(pool, table, blocks, token_count, message):
    held = pool.allocate(2)
    before = state(pool, table)
    with pytest.raises(InvalidBlocks, match=message):
        table.adopt(blocks, token_count)
    assert state(pool, table) == before
    pool.check([table], retained=held)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.append(0),
        lambda t: t.fork(),
        lambda t: t.adopt([], 0),
        lambda t: t.truncate(0),
    ],
)
def test_a_closed_table_takes_no_more(table, call):
    table.close()
    with pytest.raises(InvalidBlocks, match="the table was closed"):
        call(table)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.allocate(-1), "block_count=-1: expected an integer, 0 or more"),
        (lambda p: p.retain([0, 3]), "block 3 is free: only one that is in use can be shared"),
        (lambda p: p.retain([0, 8]), "block=8: expected an integer, 0 to 7"),
        (lambda p: p.release([0, 3]), "block 3 is to be released 1 times: it has 0 references"),
        (lambda p: p.release([0, 0]), "block 0 is to be released 2 times: it has 1 references"),
        (lambda p: p.release([0, -1]), "block=-1: expected an integer, 0 to 7"),
        (lambda p: p.reference_count(8), "block=8: expected an integer, 0 to 7"),
    ],
)
def test_the_pool_refuses_blocks_that_nobody_holds(pool, call, message):
    held = pool.allocate(2)
    before = state(pool)
    with pytest.raises(InvalidBlocks, match=message):
        call(pool)
    assert state(pool) == before
    pool.check([], retained=held)


@pytest.mark.parametrize("capacity", [0, -1, CAPACITY_BLOCKS_MAX + 1, 2.0, True])
def test_a_pool_has_a_block(capacity):
    with pytest.raises(InvalidBlocks, match=r"capacity_blocks=.*: expected an integer, 1 to 16777"):
        BlockPool(capacity)


@pytest.mark.parametrize("block_tokens", [0, -1, BLOCK_TOKENS_MAX + 1, 1.0])
def test_a_block_has_a_token(pool, block_tokens):
    with pytest.raises(InvalidBlocks, match=r"block_tokens=.*: expected an integer, 1 to 1048576"):
        BlockTable(pool, block_tokens)


# -- check ---------------------------------------------------------------------------------------


def test_check_finds_a_table_that_it_was_not_given(pool, table):
    table.append(6)
    with pytest.raises(InvariantViolated, match="block 0: 1 references booked, 0 held"):
        pool.check([])


def test_check_finds_a_table_of_another_pool(table):
    table.append(6)
    with pytest.raises(InvariantViolated, match="a table of 2 blocks is of another pool"):
        BlockPool(CAPACITY_BLOCKS).check([table])


def test_check_finds_a_reference_that_leaked(pool, table):
    table.append(6)
    pool.retain([1])
    with pytest.raises(InvariantViolated, match="block 1: 2 references booked, 1 held"):
        pool.check([table])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p, t: p._free.append(7), "a block is twice in the free list"),
        (lambda p, t: p._free.pop(), "5 free \\+ 2 used != 8.*block 7: 0 references, free: False"),
        (lambda p, t: p._free.append(0), "7 free \\+ 2 used != 8.*block 0: 1 references, free: Tr"),
        (lambda p, t: t._blocks.append(1), "a block is twice in one table: \\[0, 1, 1\\]"),
        (lambda p, t: t._blocks.pop(), "6 tokens in 1 blocks, not in 2"),
    ],
)
def test_check_finds_damage(pool, table, damage, message):
    table.append(6)
    damage(pool, table)
    with pytest.raises(InvariantViolated, match=message):
        pool.check([table])


def test_the_example_of_the_documentation_says_what_happens():
    failed, attempted = doctest.testfile(str(DOCUMENT), module_relative=False, encoding="utf-8")
    assert failed == 0
    assert attempted > 5
