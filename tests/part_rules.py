"""What a prefix needs of its parts, and what leaves with what, said without the store's formulas.

By the tokens that one token sees, and by the names of parts: tests compare the store with this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.layers import CHUNKED, FULL, OPAQUE, SLIDING

if TYPE_CHECKING:
    from kvstore.layout import Layout
    from kvstore.parts import Part

#: Kind of attention, or "state", and the window of those that have one.
Rule = tuple[str, int | None]


def rule_of(layout: Layout, part: Part) -> Rule:
    """The rule of a part's layers."""
    if part.companion is not None:
        layout = dict(layout.companions)[part.companion]
    group = layout.groups[part.group]
    return group.attention, group.window_tokens


def is_always_needed(rule: Rule) -> bool:
    """True where no prefix can do without any block of such a part."""
    return rule[0] in (FULL, OPAQUE)


def takes_along(rule: Rule, group: object, other_group: object) -> bool:
    """True where a part of that rule and group takes along one of another group of its block.

    All of them, if no prefix can do without it; else those of its own group, companion and number.
    """
    return is_always_needed(rule) or group == other_group


def needed_blocks(rule: Rule, end_tokens: int, block_tokens: int) -> range:
    """The blocks of which a token at position `end_tokens` sees anything.

    The token after it sees no more of them, and so on.
    """
    attention, window_tokens = rule
    if is_always_needed(rule):
        first = 0
    elif attention == SLIDING:
        first = max(0, end_tokens + 1 - (window_tokens or 0))  # it is in its own window
    elif attention == CHUNKED:
        first = max(t for t in range(0, end_tokens + 1, window_tokens or 1))
    else:
        first = end_tokens - 1  # what the recurrence has made of all tokens
    seen = {token // block_tokens for token in range(max(0, first), end_tokens)}
    return range(min(seen), max(seen) + 1) if seen else range(0)
