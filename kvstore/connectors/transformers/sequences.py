"""The sequences of a batch, as block tables over the blocks that a call has met.

    block_tokens = 4; both rows have loaded the blocks of a prompt, and row 1 leaves it after "e f"

    column     0  1  2  3   4  5  6  7   8  9 10
    row 0      a  b  c  d | e  f  g  h | i  j         physical blocks   0  1  3
    row 1               a   b  c  d | e  f  x  y | z  physical blocks   0  2  4

A physical block is one block's worth of KV, loaded or computed by this call. Rows whose tokens are
equal up to its end share it, so it is loaded once, and stored once, for all of them. A row that
leaves the others in the middle of a block gets one of its own (copy on write). The KV itself lies
in the rows of the model's cache, which generate copies and reorders, so nobody has to carry out a
table's `Copy` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.block_table import BlockPool, BlockTable
from kvstore.key_chain import KeyChain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.connectors.transformers.prompts import Ends, Prompt
    from kvstore.keys import Namespace

    #: Whether a block, (row, logical block), is to be stored.
    IsWanted = Callable[[int, int], bool]


class Row:
    """One sequence of the batch. `table` has its tokens with KV in the cache, `tokens` all."""

    def __init__(self, prompt: Prompt, chain: KeyChain, table: BlockTable) -> None:
        self.padding = prompt.padding
        self.tokens = list(prompt.tokens)
        self.chain = chain
        self.table = table
        self.is_ended = False
        self.named = 0  # how many of its blocks have been looked up by name
        self.offered = 0  # before this one, no block is to be stored any more

    def extend(self, tokens: Sequence[int], ends: Ends) -> None:
        """Add what was generated, up to the end of the text."""
        if not self.is_ended:
            kept, self.is_ended = ends.text(tokens)
            self.tokens += kept

    def text_columns(self, columns: int) -> int:
        """How many of the first `columns` are its text, of which the last may be unknown yet."""
        count = max(0, columns - self.padding)
        return min(count, len(self.tokens)) if self.is_ended else count

    def fork(self) -> Row:
        """Another row of the same tokens."""
        other = Row.__new__(Row)
        other.padding, other.tokens = self.padding, list(self.tokens)
        other.chain, other.table = self.chain.fork(), self.table.fork()
        other.is_ended, other.named, other.offered = self.is_ended, self.named, self.offered
        return other


class Sequences:
    """All rows of a call, and which physical blocks they share.

    Raises InvalidTokens for a prompt that no key can be made of.
    """

    def __init__(self, namespace: Namespace, prompts: Sequence[Prompt], ends: Ends) -> None:
        self.namespace = namespace
        self.ends = ends
        self.rows: list[Row] = []
        self.block_tokens = namespace.block_tokens
        tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.pool = BlockPool(2 * len(prompts) + tokens // self.block_tokens)
        self._named: dict[bytes, int] = {}  # chain hash -> the physical block of these tokens
        self._settled: set[int] = set()  # physical blocks that nobody has to store (any more)
        for prompt in prompts:
            chain = KeyChain(namespace)
            chain.append(prompt.tokens)
            self.rows.append(Row(prompt, chain, BlockTable(self.pool, self.block_tokens)))

    def adopt(self, token_counts: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """Begin each row with the blocks of its first tokens, which are to be loaded.

        Returns where each physical block goes: (row, logical block), once or more. The last block
        of a row may be needed in part.
        """
        owned: list[int] = []
        places: dict[int, list[tuple[int, int]]] = {}
        for index, (row, count) in enumerate(zip(self.rows, token_counts, strict=True)):
            blocks = []
            for key in row.chain.keys[: -(-count // self.block_tokens)]:
                if key.chain_hash not in self._named:
                    self._make_room(1)
                    owned += self.pool.allocate(1)
                    self._named[key.chain_hash] = owned[-1]
                blocks.append(self._named[key.chain_hash])
            for logical, physical in enumerate(blocks):
                places.setdefault(physical, []).append((index, logical))
            row.table.adopt(blocks, count)
            row.named = count // self.block_tokens
        self._settled.update(owned)
        self.pool.release(owned)  # the tables have references of their own
        return places

    def drop_adopted(self) -> None:
        """Let every row begin with nothing after all."""
        for row in self.rows:
            row.table.truncate(0)
            row.named = 0
        self._forget_free()

    def repeat(self, repeats: int) -> None:
        """Make each row `repeats` neighbouring ones."""
        self.rows = [
            row if copy == 0 else row.fork() for row in self.rows for copy in range(repeats)
        ]

    def reorder(self, order: Sequence[int]) -> None:
        """Make row i what row `order[i]` was."""
        before, taken = self.rows, set[int]()
        self.rows = []
        for index in order:
            self.rows.append(before[index].fork() if index in taken else before[index])
            taken.add(index)
        for index, row in enumerate(before):
            if index not in taken:
                row.table.close()
        self._forget_free()

    def gained_blocks(self, columns: int) -> int:
        """How many full blocks the rows have gained since, when `columns` have KV."""
        return sum(
            max(0, row.text_columns(columns) // self.block_tokens - row.table.full_blocks)
            for row in self.rows
        )

    def advance(self, columns: int) -> None:
        """Take notice that `columns` of the cache are filled."""
        for row in self.rows:
            row.chain.append(row.tokens[row.chain.token_count :])
            cached = min(row.text_columns(columns), len(row.tokens))
            more = cached - row.table.token_count
            if more > 0:
                self._make_room(more // self.block_tokens + 2)
                row.table.append(more)
                self._share(row)

    def unstored(self, index: int, is_wanted: IsWanted | None = None) -> list[range]:
        """The full blocks of a row that are to be stored, as runs of neighbours."""
        row, runs = self.rows[index], list[range]()
        self._skip_settled(row)
        blocks, full = row.table.blocks, row.table.full_blocks
        for logical in range(row.offered, full):
            if blocks[logical] in self._settled or (is_wanted and not is_wanted(index, logical)):
                continue
            if runs and runs[-1].stop == logical:
                runs[-1] = range(runs[-1].start, logical + 1)
            else:
                runs.append(range(logical, logical + 1))
        return runs

    def first_needed_column(self) -> int:
        """The first column that has tokens of a block that is still to be stored."""
        columns = []
        for row in self.rows:
            self._skip_settled(row)
            if row.offered < row.table.full_blocks or not row.is_ended:
                columns.append(row.padding + row.offered * self.block_tokens)
        return min(columns, default=0)

    def count_unstored(self) -> int:
        """How many physical blocks are full, and not stored."""
        found = {
            block
            for row in self.rows
            for block in row.table.blocks[row.offered : row.table.full_blocks]
        }
        return len(found - self._settled)

    def settle(self, index: int, logical: int) -> None:
        """Note that a block is in the store, or in another writer's hands."""
        block = self.block_of(self.rows[index], logical)
        if block is not None:
            self._settled.add(block)

    def block_of(self, row: Row, logical: int) -> int | None:
        """The physical block of a full block of a row; None where the row does not have it."""
        if logical >= row.table.full_blocks:
            return None
        return row.table.slot_of(logical * self.block_tokens).physical_block

    def _share(self, row: Row) -> None:
        """Put the physical block that other rows have in the place of an equal one of this row."""
        blocks, full = list(row.table.blocks), row.table.full_blocks
        is_shared = False
        for logical in range(row.named, full):
            chain_hash = row.chain.keys[logical].chain_hash
            known = self._named.setdefault(chain_hash, blocks[logical])
            is_shared |= known != blocks[logical]
            blocks[logical] = known
        row.named = full
        if is_shared:
            table = BlockTable(self.pool, self.block_tokens)
            table.adopt(blocks, row.table.token_count)
            row.table.close()
            row.table = table

    def _skip_settled(self, row: Row) -> None:
        blocks, full = row.table.blocks, row.table.full_blocks
        while row.offered < full and blocks[row.offered] in self._settled:
            row.offered += 1

    def _make_room(self, block_count: int) -> None:
        if self.pool.free_blocks < block_count:
            self.pool.grow(max(block_count, self.pool.capacity_blocks))

    def _forget_free(self) -> None:
        """A block that no row has may be another one tomorrow, so its name must not stay."""
        named = self._named.items()
        self._named = {name: block for name, block in named if self.pool.reference_count(block)}
        self._settled = {block for block in self._settled if self.pool.reference_count(block)}
