"""The models that the simulation's engines run, and what their parts are to each other.

Layouts, keys and links are the store's own. What a prefix needs, and what leaves with what, is said
here once more and in other words: by the tokens that one token sees, and by the names of parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.parts import BlockParts
from kvstore.keys import Namespace
from kvstore.layers import CHUNKED, FULL, OPAQUE, SLIDING
from kvstore.layout import KVLayer, Layout, StateLayer
from kvstore.storage_keys import storage_key

if TYPE_CHECKING:
    from kvstore.parts import Part
    from kvstore.types import BlockKey

BLOCK_TOKENS = 16
_PARTIAL_TOKENS = 5


class Model:
    """A model, and the ranks that share its heads: each has all parts of its own head group."""

    def __init__(self, name: str, layout: Layout, head_groups: int = 1) -> None:
        self.namespace = Namespace(
            model=name, fingerprint="f", layout=layout, block_tokens=BLOCK_TOKENS
        )
        parts = layout.split(head_groups=head_groups)
        self.whole = BlockParts(self.namespace, parts)
        self.ranks = [
            BlockParts(self.namespace, [part for part in parts if part.head_group == rank])
            for rank in range(head_groups)
        ]

    def rule_of(self, part: Part) -> tuple[str, int | None]:
        """Kind of attention, or "state", and window of a part's layers."""
        layout = self.namespace.layout
        if part.companion is not None:
            layout = dict(layout.companions)[part.companion]
        group = layout.groups[part.group]
        return group.attention, group.window_tokens


def _kv(head_dim: int, *, attention: str = FULL, window_tokens: int | None = None) -> KVLayer:
    """Two heads, four bytes a token for each of `head_dim`."""
    return KVLayer(
        kv_heads=2,
        head_dim=head_dim,
        dtype="int8",
        attention=attention,
        window_tokens=window_tokens,
    )


def _latent(bytes_per_token: int) -> Layout:
    return Layout.mla(layers=1, latent_dim=bytes_per_token - 1, rope_dim=1, dtype="int8")


_FULL = _kv(64)  # one slot a block
_SLIDING = _kv(47, attention=SLIDING, window_tokens=24)

#: Of one part: one slot to the byte, then some that are padded. Then of several parts.
MODELS = (
    Model("one slot", _latent(256)),
    Model("padded", _latent(187)),
    Model("two slots", _latent(500)),
    Model("window", Layout.of([_SLIDING, _SLIDING, _FULL])),
    Model("hybrid", Layout.of([_FULL, StateLayer(state_bytes=3_000), _SLIDING])),
    Model(
        "draft",
        Layout.of(
            [_FULL, _kv(33, attention=CHUNKED, window_tokens=40)],
            companions={"draft": Layout.of([_kv(20)])},
        ),
    ),
    Model("two ranks", Layout.of([_FULL, _SLIDING]), head_groups=2),
    Model("windows of two ranks", Layout.of([_SLIDING]), head_groups=2),
)


class KnownPart(NamedTuple):
    """What is stored under one key."""

    rule: tuple[str, int | None]
    group: tuple[str | None, int]  # companion and cache group
    end_tokens: int  # of the prefix whose last block it is of
    block: tuple[bytes, ...]  # the keys of all parts of its block

    @property
    def is_always_needed(self) -> bool:
        """True where no prefix with its block can do without it."""
        return self.rule[0] in (FULL, OPAQUE)


_known: dict[bytes, KnownPart] = {}


@lru_cache(maxsize=4_096)
def block_keys(model: int, tokens: tuple[int, ...], *, is_partial: bool) -> tuple[BlockKey, ...]:
    """Names of a prompt's blocks, one a token of `tokens`; remembers what their keys stand for."""
    token_ids = [token for token in tokens for _ in range(BLOCK_TOKENS)]
    if is_partial:
        del token_ids[_PARTIAL_TOKENS - BLOCK_TOKENS :]
    made = MODELS[model]
    keys = tuple(made.namespace.keys(token_ids, partial=True))
    for position, key in enumerate(keys):
        end_tokens = position * BLOCK_TOKENS + key.token_count
        of_parts = [storage_key(key, part) for part in made.whole.parts]
        for found, part in zip(of_parts, made.whole.parts, strict=True):
            group = (part.companion, part.group)
            _known[found] = KnownPart(made.rule_of(part), group, end_tokens, tuple(of_parts))
    return keys


def part_of(key: bytes) -> KnownPart:
    """What a storage key stands for."""
    return _known[key]


def goes_with(key: bytes) -> list[bytes]:
    """The keys that are worth nothing without this one, itself included.

    The whole block without a part that every prefix needs; a cache group without one of its parts.
    """
    gone = _known[key]
    return [k for k in gone.block if gone.is_always_needed or _known[k].group == gone.group]


def keepers_of(key: bytes) -> list[bytes]:
    """The keys without which this one is worth nothing, itself included."""
    return [k for k in _known[key].block if key in goes_with(k)]


def needed_blocks(rule: tuple[str, int | None], end_tokens: int) -> range:
    """The blocks of which a token at position `end_tokens` sees anything.

    The token after it sees no more of them, and so on.
    """
    attention, window_tokens = rule
    if attention in (FULL, OPAQUE):
        first = 0
    elif attention == SLIDING:
        first = max(0, end_tokens + 1 - (window_tokens or 0))  # it is in its own window
    elif attention == CHUNKED:
        first = max(t for t in range(0, end_tokens + 1, window_tokens or 1))
    else:
        first = end_tokens - 1  # what the recurrence has made of all tokens
    seen = {token // BLOCK_TOKENS for token in range(max(0, first), end_tokens)}
    return range(min(seen), max(seen) + 1) if seen else range(0)
