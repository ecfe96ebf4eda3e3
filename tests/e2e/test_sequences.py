"""Block tables of a batch: who shares what, through loading, growing, forking and reordering."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore import Layout, Namespace
from kvstore.connectors.transformers.prompts import Ends, Prompt
from kvstore.connectors.transformers.sequences import Sequences
from kvstore.errors import InvalidTokens

SIZE = 4
LAYOUT = Layout.mqa(layers=1, head_dim=8, dtype="float16")
NAMESPACE = Namespace(model="m", fingerprint="f", layout=LAYOUT, block_tokens=SIZE)
NO_ENDS = Ends(frozenset(), None)


def prompts_of(*rows: list[int]) -> list[Prompt]:
    columns = max(map(len, rows))
    return [Prompt(columns - len(row), row) for row in rows]


def sequences_of(*rows: list[int], ends: Ends = NO_ENDS) -> Sequences:
    return Sequences(NAMESPACE, prompts_of(*rows), ends)


def blocks(sequences: Sequences) -> list[tuple[int, ...]]:
    return [row.table.blocks[: row.table.full_blocks] for row in sequences.rows]


def extend(sequences: Sequences, *tokens: int) -> None:
    for row, token in zip(sequences.rows, tokens, strict=True):
        row.extend([token], sequences.ends)


class TestSharing:
    def test_equal_beginnings_are_the_same_blocks(self):
        sequences = sequences_of([*range(8), 50, 51, 52], [*range(8), 60, 61, 62], list(range(9)))
        sequences.advance(11)
        one, two, three = blocks(sequences)
        assert one == two == three
        assert len(one) == 2
        assert sequences.count_unstored() == 2

    def test_blocks_that_are_loaded_are_where_the_rows_have_them(self):
        sequences = sequences_of([*range(8), 50], [*range(4), 60, 61, 62, 63, 64])
        places = sequences.adopt([8, 6])
        assert sorted(places.values()) == [[(0, 0), (1, 0)], [(0, 1)], [(1, 1)]]
        sequences.pool.check([row.table for row in sequences.rows])
        sequences.advance(9)
        # Nothing is to be stored: what was loaded is, also the block that was loaded in part.
        assert sequences.count_unstored() == 0

    def test_a_block_cut_short_is_copied_on_write_and_found_again(self):
        sequences = sequences_of(list(range(9)), list(range(11)))
        places = sequences.adopt([6, 8])  # up to column 8: row 0 has half of block 1
        assert sorted(places.values()) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
        sequences.advance(9)
        half, whole = (row.table.blocks[1] for row in sequences.rows)
        assert half != whole
        sequences.advance(11)
        assert blocks(sequences)[0] == blocks(sequences)[1]
        assert sequences.count_unstored() == 0
        sequences.pool.check([row.table for row in sequences.rows])

    def test_what_was_adopted_can_be_dropped(self):
        sequences = sequences_of(list(range(9)))
        sequences.adopt([8])
        sequences.drop_adopted()
        assert sequences.pool.free_blocks == sequences.pool.capacity_blocks
        sequences.advance(9)
        assert sequences.unstored(0) == [range(2)]

    def test_answers_part_where_their_tokens_do(self):
        sequences = sequences_of(list(range(6)))
        sequences.repeat(3)
        sequences.advance(6)
        for tokens in ((10, 10, 20), (11, 11, 21), (12, 13, 22)):
            extend(sequences, *tokens)
        sequences.advance(9)
        one, two, three = blocks(sequences)
        assert one == two  # 0 1 2 3 | 4 5 10 11
        assert one[0] == three[0]
        assert one[1] != three[1]

    def test_each_block_is_settled_once_for_all(self):
        sequences = sequences_of(list(range(8)), list(range(8)))
        sequences.advance(8)
        assert sequences.unstored(0) == sequences.unstored(1) == [range(2)]
        sequences.settle(0, 0)
        assert sequences.unstored(1) == [range(1, 2)]
        sequences.settle(1, 1)
        assert sequences.unstored(0) == sequences.unstored(1) == []

    def test_runs_are_of_what_is_wanted(self):
        sequences = sequences_of(list(range(20)))
        sequences.advance(20)
        assert sequences.unstored(0, lambda _, block: block != 2) == [range(2), range(3, 5)]


class TestEnds:
    @pytest.mark.parametrize(
        ("tokens", "text", "ended"),
        [
            ([5, 6], [5, 6], False),
            ([5, 9, 6], [5, 9], True),
            ([5, 8, 6], [5, 8], True),
            ([5, 0, 6], [5], True),
            ([5, -1], [5], True),
        ],
    )
    def test_text_is_what_comes_before_the_end(self, tokens, text, ended):
        assert Ends(frozenset({8, 9}), 0).text(tokens) == (text, ended)

    def test_a_pad_token_that_ends_is_text(self):
        assert Ends(frozenset({9}), 9).text([5, 9, 9]) == ([5, 9], True)

    def test_without_an_end_a_pad_token_is_text(self):
        assert Ends(frozenset(), 0).text([5, 0]) == ([5, 0], False)

    def test_an_ended_row_gains_no_more(self):
        sequences = sequences_of(
            list(range(6)), list(range(100, 106)), ends=Ends(frozenset({9}), 0)
        )
        for tokens in ((9, 30), (0, 31), (0, 32), (0, 33)):
            extend(sequences, *tokens)
        assert sequences.gained_blocks(10) == 1 + 2
        sequences.advance(10)
        assert list(map(len, blocks(sequences))) == [1, 2]
        assert sequences.rows[0].tokens == [*range(6), 9]


class TestReordering:
    def test_rows_are_forked_and_dropped(self):
        sequences = sequences_of(list(range(4)))
        sequences.repeat(3)
        for token in (10, 11, 12, 13):
            extend(sequences, token, token + 10, token + 20)
        sequences.advance(8)
        before = blocks(sequences)
        sequences.reorder([1, 1, 0])
        assert blocks(sequences) == [before[1], before[1], before[0]]
        assert [row.tokens[4] for row in sequences.rows] == [20, 20, 10]
        # The block of the row that was dropped is free, and its name is, too.
        assert sequences.pool.reference_count(before[2][1]) == 0
        sequences.pool.check([row.table for row in sequences.rows])

    def test_the_first_column_that_is_needed(self):
        sequences = sequences_of(list(range(9)), [5, 6, 7], ends=Ends(frozenset({99}), None))
        sequences.advance(9)
        assert sequences.first_needed_column() == 0
        for block in range(2):
            sequences.settle(0, block)
        assert sequences.first_needed_column() == 6  # the padding of row 1
        extend(sequences, 50, 99)
        sequences.advance(10)
        assert sequences.first_needed_column() == 6  # its one block is full now
        sequences.settle(1, 0)
        assert sequences.first_needed_column() == 8


def test_tokens_that_are_none_are_refused():
    with pytest.raises(InvalidTokens):
        sequences_of([1, -1])


@settings(max_examples=60)
@given(data=st.data())
def test_rows_share_a_block_exactly_where_their_tokens_are_equal(data):
    """Against the plain definition: blocks named by the tokens up to their end."""
    token = st.integers(0, 2)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=1, max_size=3))
    sequences = sequences_of(*prompts)
    limit = min(row.padding + (len(row.tokens) - 1) // SIZE * SIZE for row in sequences.rows)
    end = data.draw(st.integers(0, limit))
    sequences.adopt([max(0, end - row.padding) for row in sequences.rows])
    sequences.repeat(data.draw(st.integers(1, 3)))
    columns = max(map(len, prompts))
    check_tables(sequences, columns)
    for _ in range(data.draw(st.integers(0, 14))):
        if data.draw(st.booleans()):
            index = st.integers(0, len(sequences.rows) - 1)
            order = data.draw(
                st.lists(index, min_size=len(sequences.rows), max_size=len(sequences.rows))
            )
            expected = [list(sequences.rows[index].tokens) for index in order]
            sequences.reorder(order)
            assert [row.tokens for row in sequences.rows] == expected
        extend(sequences, *(data.draw(token) for _ in sequences.rows))
        columns += 1
        if data.draw(st.booleans()):
            check_tables(sequences, columns - 1)  # the newest token has no KV yet


def check_tables(sequences: Sequences, columns: int) -> None:
    sequences.advance(columns)
    sequences.pool.check([row.table for row in sequences.rows])
    names: dict[int, set[tuple[int, ...]]] = {}
    found: dict[tuple[int, ...], set[int]] = {}
    for row in sequences.rows:
        assert row.table.token_count == max(0, columns - row.padding)
        for logical, block in enumerate(row.table.blocks[: row.table.full_blocks]):
            name = tuple(row.tokens[: (logical + 1) * SIZE])
            names.setdefault(block, set()).add(name)
            found.setdefault(name, set()).add(block)
    assert all(len(of_block) == 1 for of_block in names.values())
    assert all(len(of_name) == 1 for of_name in found.values())
    offered: list[tuple[int, ...]] = []
    for index, row in enumerate(sequences.rows):
        for run in sequences.unstored(index):
            for logical in run:
                offered.append(tuple(row.tokens[: (logical + 1) * SIZE]))
                sequences.settle(index, logical)
    assert len(set(offered)) == len(offered)
    assert sequences.count_unstored() == 0
