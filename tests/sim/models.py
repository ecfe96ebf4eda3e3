"""The models that the simulation's engines run, and what their parts are to each other.

Layouts, keys and links are the store's own. What a prefix needs, and what leaves with what, is not
asked of them, but of `tests.part_rules`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.parts import BlockParts
from kvstore.keys import Namespace
from kvstore.layers import CHUNKED, FULL, SLIDING
from kvstore.layout import KVLayer, Layout, StateLayer
from kvstore.storage_keys import storage_key
from tests import part_rules

if TYPE_CHECKING:
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

    rule: part_rules.Rule
    group: tuple[str | None, int]  # companion and cache group
    end_tokens: int  # of the prefix whose last block it is of
    block: tuple[bytes, ...]  # the keys of all parts of its block


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
            rule = part_rules.rule_of(made.namespace.layout, part)
            _known[found] = KnownPart(rule, group, end_tokens, tuple(of_parts))
    return keys


def part_of(key: bytes) -> KnownPart:
    """What a storage key stands for."""
    return _known[key]


def goes_with(key: bytes) -> list[bytes]:
    """The keys that are worth nothing without this one, itself included."""
    gone = _known[key]
    return [k for k in gone.block if part_rules.takes_along(gone.rule, gone.group, _known[k].group)]


def keepers_of(key: bytes) -> list[bytes]:
    """The keys without which this one is worth nothing, itself included."""
    return [k for k in _known[key].block if key in goes_with(k)]


def needed_blocks(known: KnownPart) -> range:
    """The blocks that a prefix needs of a part, whose last block it is of."""
    return part_rules.needed_blocks(known.rule, known.end_tokens, BLOCK_TOKENS)
