"""The longest prefix that every part of its blocks satisfies.

A part of full attention needs all blocks of a prefix, one of a sliding window the last few, a
recurrent state the last one. `Column.first_needed` says it of each length:

    block                      0    1    2    3    4    5
    full attention             x    x    x    x    x    -     5 blocks at most
    window of two blocks       -    -    x    x    -    -     of 5: no, 4 is missing; of 4: yes
    state at the end           -    -    -    x    -    -     of 4: yes

The prefix found has 4 blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore.messages import Column
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.index import Entry, Index
    from kvstore.messages import LeaseRequest, MatchRequest, ReadRequest


class Prefix(NamedTuple):
    """What is held of a list of blocks, from the first one on."""

    blocks: int
    entries: list[Entry]  # what the prefix needs, block by block, of a block in order of its parts
    positions: list[int] | None  # of each entry, as block * parts + part; None: 0, 1, 2 ...
    reason: Outcome | None  # why it is not one block longer; None where all were found


def find_prefix(index: Index, request: MatchRequest | LeaseRequest | ReadRequest) -> Prefix:
    """The longest prefix of a request's blocks that is ready.

    `pending` is the reason where it would be longer with what other writers are filling.
    """
    domain, keys = request.domain, request.keys
    if request.first_needed is None and not request.more:
        entries = index.prefix(domain, keys)
        blocks = len(entries)
        reason = None if blocks == len(keys) else index.why_missing(domain, keys[blocks])
        return Prefix(blocks, entries, None, reason)
    columns = (Column(keys, request.first_needed), *request.more)
    blocks = _longest(columns, len(keys), lambda key: index.find_ready(domain, key) is not None)
    reason = None
    if blocks < len(keys):
        reason = _why_not_longer(index, domain, columns, blocks)
    held = _needed(index, domain, columns, blocks)
    return Prefix(blocks, [entry for _, entry in held], [place for place, _ in held], reason)


def _longest(columns: Sequence[Column], blocks: int, has: Callable[[bytes], bool]) -> int:
    """The longest length, up to `blocks`, of which `has` every key that it needs."""
    for keys, first_needed in columns:
        if first_needed is None:
            blocks = next((n for n in range(blocks) if not has(keys[n])), blocks)
    windows = [column for column in columns if column.first_needed is not None]
    settled = -1
    while settled != blocks:
        settled = blocks
        for column in windows:
            blocks = _longest_in_window(column, blocks, has)
    return blocks


def _longest_in_window(column: Column, blocks: int, has: Callable[[bytes], bool]) -> int:
    """The longest length, up to `blocks`, whose window is there.

    Looks at every block once at most: a window in which block b is missing, and every shorter one
    that still contains it, ends the search at length b.
    """
    keys, first_needed = column
    assert first_needed is not None  # the caller has sorted them
    while True:
        first = first_needed[blocks]
        missing = next((b for b in range(blocks - 1, first - 1, -1) if not has(keys[b])), None)
        if missing is None:
            return blocks
        blocks = missing


def _why_not_longer(
    index: Index, domain: bytes, columns: Sequence[Column], blocks: int
) -> Outcome | None:
    """Why the prefix does not have one block more than `blocks`, and will not have."""
    total = len(columns[0].keys)
    if _longest(columns, total, lambda key: index.find(domain, key) is not None) > blocks:
        return Outcome.PENDING
    for keys, first_needed in columns:
        first = blocks if first_needed is None else first_needed[blocks + 1]
        for block in range(blocks, first - 1, -1):
            if index.find(domain, keys[block]) is None:
                return index.why_missing(domain, keys[block])
    return None


def _needed(
    index: Index, domain: bytes, columns: Sequence[Column], blocks: int
) -> list[tuple[int, Entry]]:
    """What a prefix of `blocks` needs, with its positions, in order of these."""
    found: list[tuple[int, Entry]] = []
    for part, (keys, first_needed) in enumerate(columns):
        first = 0 if first_needed is None else first_needed[blocks]
        for block in range(first, blocks):
            entry = index.find(domain, keys[block])
            if entry is not None:
                found.append((block * len(columns) + part, entry))
    found.sort(key=lambda item: item[0])
    return found
