"""The longest prefix over several parts, against the definition taken literally."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.index import Entry, Index
from kvstore.messages import BlockSpec, Column, MatchRequest
from kvstore.prefix import find_prefix
from kvstore.slots import Slot
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import key_of

MISSING, WRITTEN, READY = range(3)

#: What a prefix of n blocks needs of a part: all of them, those of a window, the last one, or, in
#: spans of so many blocks, those of the span that goes on.
RULES = {
    "all": lambda _: 0,
    "window of 1": lambda n: max(0, n - 1),
    "window of 3": lambda n: max(0, n - 3),
    "spans of 2": lambda n: n // 2 * 2,
}


@st.composite
def held(draw: st.DrawFn) -> tuple[list[str], list[list[int]]]:
    """Rules of some parts, and what is held of each block's part."""
    blocks = draw(st.integers(0, 7))
    rules = draw(st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3))
    states = st.lists(
        st.sampled_from([MISSING, WRITTEN, READY, READY, READY]), min_size=blocks, max_size=blocks
    )
    return rules, [draw(states) for _ in rules]


def _longest(rules: list[str], states: list[list[int]], at_least: int) -> int:
    """Try every length, and look at every block that it needs."""
    blocks = len(states[0])
    lengths = [
        n
        for n in range(blocks + 1)
        if all(
            state[block] >= at_least
            for rule, state in zip(rules, states, strict=True)
            for block in range(RULES[rule](n), n)
        )
    ]
    return max(lengths)


@given(held())
def test_it_is_the_longest_that_satisfies_every_part(case):
    rules, states = case
    blocks = len(states[0])
    index, columns = Index(16), []
    for part, (rule, state) in enumerate(zip(rules, states, strict=True)):
        keys = [key_of(f"{part}-{block}") for block in range(blocks)]
        needed = None if rule == "all" else [RULES[rule](n) for n in range(blocks + 1)]
        columns.append(Column(keys, needed))
        for block, found in enumerate(state):
            if found != MISSING:
                entry = Entry.of(
                    SINGLE_DOMAIN, BlockSpec(keys[block], None, 1, 16, False), Slot(0, 4096, 1)
                )
                entry.is_ready = found == READY
                index.insert(entry)
    request = MatchRequest(
        SINGLE_DOMAIN, columns[0].keys, 0.0, columns[0].first_needed, columns[1:]
    )

    prefix = find_prefix(index, request)

    longest = _longest(rules, states, READY)
    assert prefix.blocks == longest
    needed_keys = [
        columns[part].keys[block]
        for block in range(longest)
        for part, rule in enumerate(rules)
        if block >= RULES[rule](longest)
    ]
    assert [entry.key for entry in prefix.entries] == needed_keys
    assert all(entry.is_ready for entry in prefix.entries)
    if prefix.positions is not None:
        width = len(rules)
        assert [
            columns[position % width].keys[position // width] for position in prefix.positions
        ] == needed_keys
    # Waiting helps exactly where what is being written would make the prefix longer.
    assert (prefix.reason is None) == (longest == blocks)
    assert (prefix.reason is Outcome.PENDING) == (_longest(rules, states, WRITTEN) > longest)
