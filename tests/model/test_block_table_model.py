"""Block tables over one pool and a memory of tokens, against plain lists of tokens.

The machine is the owner of the memory: it carries out copies and writes tokens where the runs say.
The model knows neither block numbers nor reference counts. It gives each block an identity of its
own, from the rules of sharing alone, and so tells how many blocks there must be and who holds them.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.block_table import Appended, BlockPool, BlockTable
from kvstore.errors import NoFreeBlocks

CAPACITY_BLOCKS = 9
TABLES_MAX = 6
HELD_MAX = 3

picks = st.integers(0, 99)


class Sequence(NamedTuple):
    """A table, and what must be in it."""

    table: BlockTable
    tokens: list[int]
    identities: list[int]  # of its blocks, equal where the model says that they are shared


class Held(NamedTuple):
    """A block that somebody reads: it must stay what it was."""

    block: int
    identity: int
    content: list[int]


class BlockTableMachine(RuleBasedStateMachine):
    """Several sequences begin, share, part, shrink and end in one small pool."""

    block_tokens = 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(CAPACITY_BLOCKS)
        self.memory = [[-1] * self.block_tokens for _ in range(CAPACITY_BLOCKS)]
        self.sequences: list[Sequence] = []
        self.held: list[Held] = []
        self.new_tokens = count(1)  # no two are equal: a token in the wrong place is seen
        self.new_identities = count()

    # -- sequences ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < TABLES_MAX)
    @rule(token_count=st.integers(0, 14))
    def begin(self, token_count: int) -> None:
        self.sequences.append(Sequence(BlockTable(self.pool, self.block_tokens), [], []))
        self.append_to([self.sequences[-1]], token_count)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, token_count=st.integers(0, 14))
    def append(self, pick: int, token_count: int) -> None:
        self.append_to([self.pick(pick)], token_count)

    @precondition(lambda self: len(self.sequences) > 1)
    @rule(token_count=st.integers(0, 3))
    def append_to_all(self, token_count: int) -> None:
        """One step of a batch: all appends, then all copies, then all writes."""
        self.append_to(self.sequences, token_count)

    @precondition(lambda self: 0 < len(self.sequences) < TABLES_MAX)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        table, tokens, identities = self.pick(pick)
        self.sequences.append(Sequence(table.fork(), tokens.copy(), identities.copy()))

    @precondition(lambda self: 0 < len(self.sequences) < TABLES_MAX)
    @rule(pick=picks, rest=st.integers(0, 20), whole=st.booleans())
    def adopt(self, pick: int, rest: int, whole: bool) -> None:
        """A hit on a prefix of another sequence, of whole blocks or of all tokens up to one."""
        table, tokens, identities = self.pick(pick)
        size = self.block_tokens
        token_count = min(rest, len(tokens))
        if whole:
            token_count = token_count // size * size
        blocks = (token_count + size - 1) // size
        other = BlockTable(self.pool, size)
        other.adopt(table.blocks[:blocks], token_count)
        self.sequences.append(Sequence(other, tokens[:token_count], identities[:blocks]))

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, rest=st.integers(0, 20))
    def truncate(self, pick: int, rest: int) -> None:
        table, tokens, identities = self.pick(pick)
        token_count = min(rest, len(tokens))
        table.truncate(token_count)
        del tokens[token_count:]
        del identities[-(-token_count // self.block_tokens) :]

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def close(self, pick: int) -> None:
        sequence = self.sequences.pop(pick % len(self.sequences))
        sequence.table.close()

    # -- readers -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.held) < HELD_MAX and any(s.tokens for s in self.sequences))
    @rule(pick=picks, position=picks)
    def retain(self, pick: int, position: int) -> None:
        candidates = [sequence for sequence in self.sequences if sequence.tokens]
        table, _, identities = candidates[pick % len(candidates)]
        logical_block = position % len(identities)
        block = table.blocks[logical_block]
        self.pool.retain([block])
        self.held.append(Held(block, identities[logical_block], self.memory[block].copy()))

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        held = self.held.pop(pick % len(self.held))
        self.pool.release([held.block])

    # -- what must be true after each --------------------------------------------------------

    @invariant()
    def every_token_is_where_its_table_says(self) -> None:
        for table, tokens, _ in self.sequences:
            assert table.token_count == len(tokens)
            assert table.full_blocks == len(tokens) // self.block_tokens
            slots = [table.slot_of(position) for position in range(len(tokens))]
            assert [self.memory[block][offset] for block, offset in slots] == tokens
            in_order = [token for block in table.blocks for token in self.memory[block]]
            assert in_order[: len(tokens)] == tokens

    @invariant()
    def blocks_are_shared_as_the_model_says(self) -> None:
        pairs = {(held.block, held.identity) for held in self.held}
        for table, _, identities in self.sequences:
            pairs.update(zip(table.blocks, identities, strict=True))
        assert len(pairs) == len({block for block, _ in pairs})
        assert len(pairs) == len({identity for _, identity in pairs})
        holders = self.holders()
        assert self.pool.free_blocks == CAPACITY_BLOCKS - len(holders)
        for block, identity in pairs:
            assert self.pool.reference_count(block) == holders[identity]

    @invariant()
    def what_is_read_stays_as_it_was(self) -> None:
        for held in self.held:
            assert self.memory[held.block] == held.content

    @invariant()
    def the_recount_is_clean(self) -> None:
        tables = [sequence.table for sequence in self.sequences]
        self.pool.check(tables, retained=[held.block for held in self.held])

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.table.close()
        self.pool.release([held.block for held in self.held])
        assert self.pool.free_blocks == CAPACITY_BLOCKS
        self.pool.check([])

    # -- the model, and the owner of the memory ----------------------------------------------

    def pick(self, number: int) -> Sequence:
        return self.sequences[number % len(self.sequences)]

    def append_to(self, sequences: list[Sequence], token_count: int) -> None:
        appended: list[tuple[Sequence, Appended]] = []
        for sequence in sequences:
            moves, new_blocks = self.needed(sequence, token_count)
            before = (sequence.table.blocks, sequence.table.token_count, self.pool.free_blocks)
            if new_blocks > self.pool.free_blocks:
                with pytest.raises(NoFreeBlocks):
                    sequence.table.append(token_count)
                table = sequence.table
                assert (table.blocks, table.token_count, self.pool.free_blocks) == before
                continue
            answer = sequence.table.append(token_count)
            assert len(answer.new_blocks) == new_blocks
            assert (answer.copy is not None) is moves
            appended.append((sequence, answer))
            if moves:
                sequence.identities.pop()
            sequence.identities.extend(next(self.new_identities) for _ in range(new_blocks))
        for _, answer in appended:
            self.carry_out_copy(answer)
        for sequence, answer in appended:
            self.write(sequence, answer, [next(self.new_tokens) for _ in range(token_count)])

    def needed(self, sequence: Sequence, token_count: int) -> tuple[bool, int]:
        """Whether an append must copy the last block, and how many blocks it takes."""
        tail = len(sequence.tokens) % self.block_tokens
        is_shared = bool(tail) and self.holders()[sequence.identities[-1]] > 1
        moves = is_shared and token_count > 0
        room = -len(sequence.tokens) % self.block_tokens
        return moves, moves + -(-max(0, token_count - room) // self.block_tokens)

    def holders(self) -> Counter[int]:
        """How many hold each block, by the model's identity."""
        holders = Counter(held.identity for held in self.held)
        for sequence in self.sequences:
            holders.update(sequence.identities)
        return holders

    def carry_out_copy(self, answer: Appended) -> None:
        if answer.copy is None:
            return
        source, target, token_count = answer.copy
        assert target == answer.new_blocks[0]
        assert 0 < token_count < self.block_tokens
        # What was in the target before is gone, and no more is copied than was asked for.
        rest = [-1] * (self.block_tokens - token_count)
        self.memory[target] = self.memory[source][:token_count] + rest

    def write(self, sequence: Sequence, answer: Appended, tokens: list[int]) -> None:
        written = 0
        for first_token, block, offset, token_count in answer.runs:
            assert first_token == len(sequence.tokens) + written
            assert 0 < token_count <= self.block_tokens - offset
            assert self.pool.reference_count(block) == 1  # never through a shared block
            for other in self.sequences:
                assert other is sequence or block not in other.table.blocks
            run = tokens[written : written + token_count]
            self.memory[block][offset : offset + token_count] = run
            written += token_count
        assert written == len(tokens)
        sequence.tokens.extend(tokens)


class OneTokenBlockMachine(BlockTableMachine):
    """Blocks of one token: none is ever partial, so none is ever copied."""

    block_tokens = 1


TestBlockTable = BlockTableMachine.TestCase
TestOneTokenBlocks = OneTokenBlockMachine.TestCase
