"""The block table: logical block i of a sequence -> a physical block of the memory that holds it.

    block_tokens = 4; B was forked from A at 6 tokens, went on to 7, and then A to 9

    logical block         0            1            2
    tokens of A      0  1  2  3 | 4  5  6  7 | 8  .  .  .
    blocks of A     └──── 5 ────┘└──── 2 ────┘└──── 7 ────┘
    blocks of B     └──── 5 ────┘└──── 0 ────┘
    tokens of B      0  1  2  3 | 4  5  6' .

    Physical block 5 is shared, so it has two references. Block 0 began as a copy of the tokens that
    A and B had in block 2 together: 4 and 5.

Nothing here touches the memory: a block that has to be copied is returned as a `Copy`, which the
owner of the memory carries out. Nothing here locks: one thread at a time uses a pool and its
tables.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import InvalidBlocks, InvariantViolated, NoFreeBlocks
from kvstore.keys import BLOCK_TOKENS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: 256 Mi tokens in blocks of 16. The counts of so many take 0.7 GiB: more is a mistake.
CAPACITY_BLOCKS_MAX = 1 << 24


class TokenSlot(NamedTuple):
    """Where one token lies: `offset_tokens` from the start of a physical block."""

    physical_block: int
    offset_tokens: int


class TokenRun(NamedTuple):
    """Tokens that lie side by side in one physical block.

    Token `first_token + i` of the sequence is at `offset_tokens + i`, for i < `token_count`.
    """

    first_token: int
    physical_block: int
    offset_tokens: int
    token_count: int


class Copy(NamedTuple):
    """The first `token_count` tokens of one physical block go to the start of another.

    To be carried out at once: the table that asked for it holds the source no longer. Appends to
    several tables may come first; then all their copies, in order, and after those all writes.
    """

    source_block: int
    target_block: int
    token_count: int


class Appended(NamedTuple):
    """What an append took, and where its tokens go."""

    new_blocks: tuple[int, ...]  # newly allocated, in logical order; a copy's target comes first
    runs: tuple[TokenRun, ...]  # the appended tokens in order, one run for each block they touch
    copy: Copy | None  # first of all, where there is one


class BlockPool:
    """Physical blocks 0 to `capacity_blocks` - 1, each free or with a count of its references.

    A table is one reference to each of its blocks. Others, such as a transfer that reads a block,
    `retain` it: whoever writes through a table meanwhile gets a copy. Raises InvalidBlocks.
    """

    def __init__(self, capacity_blocks: int) -> None:
        _check_integer("capacity_blocks", capacity_blocks, at_least=1, at_most=CAPACITY_BLOCKS_MAX)
        self.capacity_blocks = capacity_blocks
        self._references = [0] * capacity_blocks  # by physical block
        self._free = deque(range(capacity_blocks))  # the one that has been free for longest first

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody refers to."""
        return len(self._free)

    def grow(self, block_count: int) -> None:
        """Add free blocks, numbered from `capacity_blocks` on: for memory that grows as it is used.

        They are taken after those that are free now. Raises InvalidBlocks for a negative count, and
        beyond `CAPACITY_BLOCKS_MAX`.
        """
        room_blocks = CAPACITY_BLOCKS_MAX - self.capacity_blocks
        _check_integer("block_count", block_count, at_least=0, at_most=room_blocks)
        self._references += [0] * block_count
        self._free.extend(range(self.capacity_blocks, self.capacity_blocks + block_count))
        self.capacity_blocks += block_count

    def reference_count(self, block: int) -> int:
        """How many refer to the physical block, 0 where it is free. Raises InvalidBlocks."""
        _check_integer("block", block, at_least=0, at_most=self.capacity_blocks - 1)
        return self._references[block]

    def allocate(self, block_count: int) -> list[int]:
        """Take free blocks, with one reference each; those that have been free for longest.

        Raises NoFreeBlocks where there are fewer, InvalidBlocks for a negative count.
        """
        _check_integer("block_count", block_count, at_least=0)
        if block_count > len(self._free):
            raise NoFreeBlocks(
                f"{block_count} blocks asked for: {len(self._free)} of {self.capacity_blocks} are "
                "free"
            )
        blocks = [self._free.popleft() for _ in range(block_count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block, for each time that it is named.

        Raises InvalidBlocks where one of them is free or not of this pool; then none is retained.
        """
        for block in blocks:
            if self.reference_count(block) == 0:
                raise InvalidBlocks(f"block {block} is free: only one that is in use can be shared")
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block, for each time that it is named; the last frees it.

        Raises InvalidBlocks where a block has fewer references or is not of this pool; then none is
        released.
        """
        for block, times in Counter(blocks).items():
            count = self.reference_count(block)
            if count < times:
                raise InvalidBlocks(
                    f"block {block} is to be released {times} times: it has {count} references"
                )
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check(self, tables: Iterable[BlockTable], retained: Iterable[int] = ()) -> None:
        """Verify that free + used = capacity, and that references and holders agree.

        `tables` are all that are open, `retained` the blocks that others hold, once per reference.
        Raises InvariantViolated, which names everything that does not add up.
        """
        problems: list[str] = []
        free, used = set(self._free), sum(count > 0 for count in self._references)
        if len(free) != len(self._free):
            problems.append("a block is twice in the free list")
        if len(self._free) + used != self.capacity_blocks:
            problems.append(f"{len(self._free)} free + {used} used != {self.capacity_blocks}")
        held = Counter(retained)
        for table in tables:
            problems += table.problems(self)
            held.update(table.blocks)
        for block, count in enumerate(self._references):
            if count != held[block]:
                problems.append(f"block {block}: {count} references booked, {held[block]} held")
            if (block in free) is (count > 0):
                problems.append(f"block {block}: {count} references, free: {block in free}")
        if problems:
            raise InvariantViolated("; ".join(problems))


class BlockTable:
    """The physical blocks of one sequence of `token_count` tokens, `block_tokens` to a block.

    Only the last block can be partial. Starts empty; `close` gives its blocks back. All tables over
    one pool have the same `block_tokens`. Raises InvalidBlocks.
    """

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        _check_integer("block_tokens", block_tokens, at_least=1, at_most=BLOCK_TOKENS_MAX)
        self.block_tokens = block_tokens
        self._pool = pool
        self._blocks: list[int] = []  # physical, by logical block
        self._token_count = 0
        self._is_closed = False

    @property
    def token_count(self) -> int:
        """Tokens of the sequence."""
        return self._token_count

    @property
    def blocks(self) -> tuple[int, ...]:
        """Physical blocks in logical order, the last one perhaps partial."""
        return tuple(self._blocks)

    @property
    def full_blocks(self) -> int:
        """How many blocks are full: logical blocks 0 to `full_blocks` - 1."""
        return self._token_count // self.block_tokens

    def slot_of(self, token_position: int) -> TokenSlot:
        """Where the token at this position of the sequence lies. Raises InvalidBlocks."""
        if not 0 <= token_position < self._token_count:
            raise InvalidBlocks(
                f"token_position={token_position}: expected one of the {self._token_count} tokens "
                "of the table, counted from 0"
            )
        logical_block, offset_tokens = divmod(token_position, self.block_tokens)
        return TokenSlot(self._blocks[logical_block], offset_tokens)

    def append(self, token_count: int) -> Appended:
        """Make room for `token_count` more tokens, and say where they go; 0 takes nothing.

        Where the last block is partial and shared, the table gets another one in its place, and
        `copy` says what has to be copied there first.

        Raises NoFreeBlocks where not all blocks can be had, InvalidBlocks for a negative count or a
        closed table. Nothing is changed then.
        """
        #   block_tokens = 4, 6 tokens, append(5)
        #
        #   logical block      0         1          2
        #   tokens          0 1 2 3 | 4 5 6 7 | 8 9 10 .
        #                             └t┘└─── new ───┘
        #                               start          end
        #   t: the tail, tokens of a partial last block. They move, if block 1 is shared.
        self._check_open()
        _check_integer("token_count", token_count, at_least=0)
        if token_count == 0:
            return Appended((), (), None)
        start, end = self._token_count, self._token_count + token_count
        tail = start % self.block_tokens
        moves = tail > 0 and self._pool.reference_count(self._blocks[-1]) > 1
        missing = _blocks_of(end, self.block_tokens) - len(self._blocks)
        new_blocks = self._pool.allocate(missing + moves)
        copy = None
        if moves:
            copy = Copy(self._blocks.pop(), new_blocks[0], tail)
            self._pool.release([copy.source_block])
        self._blocks += new_blocks
        self._token_count = end
        return Appended(tuple(new_blocks), tuple(self._runs(start, end)), copy)

    def fork(self) -> BlockTable:
        """Another table of the same tokens, which shares all blocks. Raises InvalidBlocks."""
        self._check_open()
        other = BlockTable(self._pool, self.block_tokens)
        other.adopt(self._blocks, self._token_count)
        return other

    def adopt(self, blocks: Sequence[int], token_count: int) -> None:
        """Begin an empty table with blocks that are in use and hold its first `token_count` tokens.

        `blocks` are physical, in logical order, and as many as the tokens take up. The table gets
        references of its own to them. The last one may be partial; it is copied once the table
        goes on, for as long as others refer to it.

        Raises InvalidBlocks where the table is closed or not empty, a block is free or named twice,
        or there are more or fewer blocks than `token_count` needs. Nothing is changed then.
        """
        self._check_open()
        _check_integer("token_count", token_count, at_least=0)
        if self._blocks:
            raise InvalidBlocks(
                f"the table has {self._token_count} tokens: only an empty one adopts blocks"
            )
        expected = _blocks_of(token_count, self.block_tokens)
        if len(blocks) != expected:
            raise InvalidBlocks(
                f"{len(blocks)} blocks for token_count={token_count}: expected {expected} blocks "
                f"of {self.block_tokens} tokens"
            )
        if len(set(blocks)) != len(blocks):
            twice = next(block for block, count in Counter(blocks).items() if count > 1)
            raise InvalidBlocks(f"block {twice} is named twice: expected each block once")
        self._pool.retain(blocks)
        self._blocks = list(blocks)
        self._token_count = token_count

    def truncate(self, token_count: int) -> None:
        """Keep the first `token_count` tokens, and release the blocks that hold none of them.

        A shared block that becomes partial stays shared until the table writes to it. Raises
        InvalidBlocks where `token_count` is negative or more than the table has, or it is closed.
        """
        #   block_tokens = 4, 11 tokens, truncate(6)
        #
        #   logical block      0         1          2
        #   tokens          0 1 2 3 | 4 5 . . | . . . .
        #                   └─── kept_blocks ─┘└ released ┘
        self._check_open()
        _check_integer("token_count", token_count, at_least=0, at_most=self._token_count)
        kept_blocks = _blocks_of(token_count, self.block_tokens)
        released = self._blocks[kept_blocks:]
        self._pool.release(released)
        del self._blocks[kept_blocks:]
        self._token_count = token_count

    def close(self) -> None:
        """Release all blocks. The table is empty then and takes no more; closing twice is fine."""
        if not self._is_closed:
            self.truncate(0)
            self._is_closed = True

    def problems(self, pool: BlockPool) -> list[str]:
        """What does not add up in this table by itself; it should be one of `pool`."""
        found = []
        if self._pool is not pool:
            found.append(f"a table of {len(self._blocks)} blocks is of another pool")
        expected = _blocks_of(self._token_count, self.block_tokens)
        if len(self._blocks) != expected:
            found.append(
                f"{self._token_count} tokens in {len(self._blocks)} blocks, not in {expected}"
            )
        if len(set(self._blocks)) != len(self._blocks):
            found.append(f"a block is twice in one table: {self._blocks}")
        return found

    def _runs(self, start: int, end: int) -> Iterator[TokenRun]:
        """One run for each block that tokens `start` to `end` - 1 touch."""
        #   start = 6, end = 11    . . . . | . . 6 7 | 8 9 10 .    runs of 2 and 3 tokens
        while start < end:
            physical_block, offset_tokens = self.slot_of(start)
            token_count = min(self.block_tokens - offset_tokens, end - start)
            yield TokenRun(start, physical_block, offset_tokens, token_count)
            start += token_count

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidBlocks("the table was closed: expected an open one")


def _blocks_of(token_count: int, block_tokens: int) -> int:
    """Blocks that so many tokens take up: rounded up, 0 for none."""
    return -(-token_count // block_tokens)


def _check_integer(field: str, value: int, *, at_least: int, at_most: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < at_least or (at_most is not None and value > at_most):
        allowed = f"{at_least} or more" if at_most is None else f"{at_least} to {at_most}"
        raise InvalidBlocks(f"{field}={value!r}: expected an integer, {allowed}")
