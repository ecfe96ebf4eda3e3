"""The parts of a session's blocks: their keys, their sizes, and callers' buffers for them.

A block of a layout with one part is a bare buffer to the caller, a bare element to the core. With
more parts each block is a sequence of buffers, and the core gets all parts of a block together:

    caller   blocks[0] = (a0, b0)    blocks[1] = (a1, None)
    core     a0   b0   a1   None                                            width 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvstore.buffers import as_bytes, batch_as_bytes
from kvstore.errors import InvalidBuffer, InvalidLayout, InvalidRequest
from kvstore.layout import Part
from kvstore.messages import BlockSpec, Column, PartLink
from kvstore.storage_keys import KeyMaker
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.buffers import Bytes
    from kvstore.keys import Namespace
    from kvstore.tiers.base import Piece
    from kvstore.types import BlockKey, Place


class Lookup(NamedTuple):
    """What a request that looks for a prefix says of its blocks."""

    keys: list[bytes]
    first_needed: list[int] | None
    more: list[Column]


class BlockParts:
    """The parts of a namespace's blocks that one session reads and writes.

    `part` is one part, several in the order in which buffers come, or None: all of the layout.
    Raises InvalidLayout for a part that the layout cannot have, or one that is named twice.
    """

    def __init__(self, namespace: Namespace, part: Part | Sequence[Part] | None) -> None:
        layout = namespace.layout
        self._layout = layout
        self._block_tokens = namespace.block_tokens
        self.parts = _parts_of(layout.parts if part is None else part)
        self.width = len(self.parts)
        head_groups = max(p.head_groups for p in self.parts)
        self._makers = [KeyMaker(namespace, p, anchor_head_groups=head_groups) for p in self.parts]
        self._needs_all = [layout.needs_all(p) for p in self.parts]
        self._lengths = [layout.part_bytes(p, namespace.block_tokens) for p in self.parts]
        #: One part, of which every block is needed: the short way through all of this.
        self.is_single = self.width == 1 and self._needs_all[0]

    # -- keys ----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[BlockKey]) -> Lookup:
        """What to look for. Raises InvalidKeys where they are no prefix of this namespace."""
        first = self._makers[0].keys(keys, is_prefix=True)
        if self.is_single:
            return Lookup(first, None, [])
        ends, end = [], 0
        for key in keys:
            end += key.token_count
            ends.append(end)
        needed = [self._first_needed(i, ends) for i in range(self.width)]
        more = [
            Column(maker.keys(keys, is_prefix=False), needed[i])
            for i, maker in enumerate(self._makers)
            if i
        ]
        return Lookup(first, needed[0], more)

    def all_keys(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """The keys of all parts, in no order of blocks: those of one block together."""
        if self.is_single:
            return self._makers[0].keys(keys, is_prefix=False)
        columns = [maker.keys(keys, is_prefix=False) for maker in self._makers]
        return [key for block in zip(*columns, strict=True) for key in block]

    def outcomes(self, of_parts: Sequence[Outcome]) -> list[Outcome]:
        """One outcome a block from those of its parts.

        That of the first part that failed; a part that not every prefix needs may be absent, if
        any other is there.
        """
        if self.is_single:
            return list(of_parts)
        found = []
        for start in range(0, len(of_parts), self.width):
            block = of_parts[start : start + self.width]
            failed = [
                outcome
                for outcome, needed in zip(block, self._needs_all, strict=True)
                if outcome is not Outcome.OK and (needed or outcome is Outcome.QUOTA)
            ]
            some = Outcome.OK in block
            found.append(failed[0] if failed else Outcome.OK if some else block[0])
        return found

    def specs(
        self,
        keys: Sequence[BlockKey],
        start: int,
        wanted: Sequence[Sequence[bool]] | None,
    ) -> list[BlockSpec | None]:
        """What the core is told of `keys`, of which those from `start` on are to be written.

        Of the blocks before, only what a prefix of that length needs: the rest may leave.
        """
        columns = []
        ends = [self._block_tokens * (i + 1) for i in range(start)]
        for i, maker in enumerate(self._makers):
            column = self._part_specs(i, maker, keys)
            if not self.is_single:
                needed = self._first_needed(i, ends)
                skipped = 0 if needed is None else needed[start]
                column[:skipped] = [None] * skipped
                if wanted is not None:
                    column[start:] = [
                        spec if block[i] else None
                        for spec, block in zip(column[start:], wanted, strict=True)
                    ]
            columns.append(column)
        if self.width == 1:
            return columns[0]
        return [spec for block in zip(*columns, strict=True) for spec in block]

    def _part_specs(
        self, i: int, maker: KeyMaker, keys: Sequence[BlockKey]
    ) -> list[BlockSpec | None]:
        storage_keys = maker.keys(keys, is_prefix=i == 0)
        # A block of a window does not wait for the next one's eviction: what is outside of every
        # window is of no use, so no parents there.
        parents = maker.parents(keys) if self._needs_all[i] else [None] * len(keys)
        links = maker.block_links(keys)
        part = self.parts[i]
        group = (part.companion, part.group)
        return [
            BlockSpec(
                storage_key,
                parent,
                self._length_bytes(i, key),
                key.token_count,
                key.is_partial,
                None if links is None else PartLink(links[n], group, self._needs_all[i]),
            )
            for n, (key, storage_key, parent) in enumerate(
                zip(keys, storage_keys, parents, strict=True)
            )
        ]

    # -- buffers -------------------------------------------------------------------------------

    def check_wanted(self, wanted: object, blocks: int) -> None:
        """Raise InvalidRequest unless `wanted` has a truth value for each part of each block."""
        rows = wanted if isinstance(wanted, Sequence) else ()
        if len(rows) != blocks or any(
            not isinstance(row, Sequence) or len(row) != self.width for row in rows
        ):
            raise InvalidRequest(
                f"wanted needs {blocks} rows, one a block, of {self.width} truth values, one a part"
            )

    def memories(
        self, keys: Sequence[BlockKey], buffers: Sequence[object], *, is_writable: bool, name: str
    ) -> list[Bytes | None]:
        """The callers' buffers of consecutive blocks as bytes: `width` a block, None where None.

        Raises InvalidBuffer, with `name` and position, for one that is not as long as its part,
        and for a missing one where it is to be stored and every prefix needs it.
        """
        if self.is_single:
            lengths = [self._length_bytes(0, key) for key in keys]
            return list(batch_as_bytes(buffers, lengths, is_writable=is_writable, name=name))
        found: list[Bytes | None] = []
        for n, (key, block) in enumerate(zip(keys, buffers, strict=False)):
            given = self._one_each(block, f"{name}[{n}]")
            for i, buffer in enumerate(given):
                position = f"{name}[{n}]" if self.width == 1 else f"{name}[{n}][{i}]"
                if buffer is None:
                    if not is_writable and self._needs_all[i]:
                        raise InvalidBuffer(f"{position} is None: every prefix needs this part")
                    found.append(None)
                    continue
                length_bytes = self._length_bytes(i, key)
                found.append(_checked(buffer, length_bytes, position, is_writable=is_writable))
        return found

    def _one_each(self, block: object, position: str) -> Sequence[object]:
        if self.width == 1:
            return (block,)
        if not isinstance(block, (list, tuple)):
            raise InvalidBuffer(
                f"{position} is a {type(block).__name__}: a block has {self.width} parts here, so "
                "give a list of as many buffers"
            )
        if len(block) != self.width:
            raise InvalidBuffer(
                f"{position} has {len(block)} buffers, the block {self.width} parts"
            )
        return block

    def _length_bytes(self, i: int, key: BlockKey) -> int:
        if key.token_count == self._block_tokens:
            return self._lengths[i]
        return self._layout.part_bytes(self.parts[i], key.token_count)

    def _first_needed(self, i: int, ends: Sequence[int]) -> list[int] | None:
        return self._layout.first_needed(self.parts[i], ends, self._block_tokens)


class Pieces(NamedTuple):
    """What to copy where, and which block each piece is of."""

    batch: list[Piece]
    blocks: list[int]

    def by_block(self, outcomes: Sequence[Outcome], blocks: int) -> list[Outcome]:
        """One outcome a block from one a piece: `ok`, or the first that was not."""
        found = [Outcome.OK] * blocks
        for block, outcome in zip(self.blocks, outcomes, strict=True):
            if found[block] is Outcome.OK:
                found[block] = outcome
        return found


def pieces_of(
    places: Iterable[Place | None], memories: Iterable[Bytes | None], width: int
) -> Pieces:
    """What to copy: as far as there are both, a place and memory for it."""
    pairs = enumerate(zip(places, memories, strict=False))
    pieces = [
        ((place, memory), position // width)
        for position, (place, memory) in pairs
        if place is not None and memory is not None
    ]
    return Pieces([piece for piece, _ in pieces], [block for _, block in pieces])


def by_block(of_parts: list[Any], width: int) -> list[Any]:
    """One element a block: bare where blocks have one part, else a tuple of one a part."""
    if width == 1:
        return of_parts
    return [tuple(of_parts[i : i + width]) for i in range(0, len(of_parts), width)]


def _parts_of(part: object) -> tuple[Part, ...]:
    given: tuple[object, ...] = (part,)
    if isinstance(part, Sequence) and not isinstance(part, (str, bytes)):
        given = tuple(part)
    if not given or not all(isinstance(p, Part) for p in given):
        raise InvalidLayout(f"part is {part!r}: expected a kvstore.Part, or several")
    if len(set(given)) < len(given):
        raise InvalidLayout("part names a part twice")
    return cast("tuple[Part, ...]", given)


def _checked(buffer: object, length_bytes: int, position: str, *, is_writable: bool) -> Bytes:
    try:
        memory = as_bytes(buffer, is_writable=is_writable)
    except InvalidBuffer as error:
        raise InvalidBuffer(f"{position}: {error}") from error
    if len(memory) != length_bytes:
        raise InvalidBuffer(f"{position} has {len(memory)} bytes, its block {length_bytes}")
    return memory


def check_start(start: int, keys: Sequence[BlockKey]) -> None:
    """Raise InvalidRequest unless `start` is a position of these keys, or behind the last."""
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= len(keys):
        raise InvalidRequest(f"start is {start!r}: allowed are 0 to {len(keys)}, the keys given")


def tokens_of(keys: Sequence[BlockKey]) -> int:
    """Tokens of consecutive blocks, of which only the last one can be partial."""
    return (len(keys) - 1) * keys[0].token_count + keys[-1].token_count if keys else 0
