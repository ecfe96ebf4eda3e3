"""What an embedded store must answer where blocks have several parts, as dicts.

A name stands for one part of one block. Who wrote it is what readers must find there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.keys import Namespace
from kvstore.layout import KVLayer, Layout, StateLayer
from kvstore.slots import slot_size_bytes
from kvstore.storage_keys import storage_key
from kvstore.types import Outcome
from tests import part_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.parts import Part
    from kvstore.types import BlockKey


class Name(NamedTuple):
    """One part of one block."""

    key: BlockKey
    part: Part


class View:
    """What one session sees: a namespace, and some of the parts of its blocks."""

    def __init__(self, namespace: Namespace, parts: Sequence[Part], all_parts: Sequence[Part]):
        self.namespace = namespace
        self.parts = tuple(parts)
        self.all_parts = tuple(all_parts)  # of the block, whoever sees them
        self.rules = [self.rule_of(part) for part in parts]

    def rule_of(self, part: Part) -> part_rules.Rule:
        return part_rules.rule_of(self.namespace.layout, part)

    def is_always_needed(self, name: Name) -> bool:
        return part_rules.is_always_needed(self.rule_of(name.part))

    def names(self, keys: Iterable[BlockKey]) -> list[Name]:
        """All parts of some blocks, block by block."""
        return [Name(key, part) for key in keys for part in self.parts]

    def needed(self, keys: Sequence[BlockKey], blocks: int) -> list[Name]:
        """What a prefix of so many blocks needs, block by block."""
        end_tokens = sum(key.token_count for key in keys[:blocks])
        found = []
        for position in range(blocks):
            for part, rule in zip(self.parts, self.rules, strict=True):
                tokens = self.namespace.block_tokens
                if position in part_rules.needed_blocks(rule, end_tokens, tokens):
                    found.append(Name(keys[position], part))
        return found

    def together(self, name: Name) -> list[Name]:
        """What leaves with one part, itself included."""
        gone = (name.part.companion, name.part.group)
        return [
            Name(name.key, part)
            for part in self.all_parts
            if part_rules.takes_along(self.rule_of(name.part), gone, (part.companion, part.group))
        ]

    def length_of(self, name: Name) -> int:
        return self.namespace.layout.part_bytes(name.part, name.key.token_count)

    def size_of(self, name: Name) -> int:
        return slot_size_bytes(self.length_of(name))


_BLOCK_TOKENS = 4


def _kv(head_dim: int, **attention: Any) -> KVLayer:
    """Eight bytes a token and element: two heads, keys and values, of two bytes."""
    return KVLayer(kv_heads=2, head_dim=head_dim, dtype="bfloat16", **attention)


_SLIDING = {"attention": "sliding", "window_tokens": 7}
_HYBRID = Namespace(
    model="hybrid",
    fingerprint="f",
    block_tokens=_BLOCK_TOKENS,
    layout=Layout.of([_kv(1_500, **_SLIDING), _kv(1_900), StateLayer(state_bytes=27_000)]),
)
_SHARED = Namespace(
    model="two ranks",
    fingerprint="f",
    block_tokens=_BLOCK_TOKENS,
    layout=Layout.of([_kv(2_100), _kv(900, **_SLIDING)]),
)
_HYBRID_PARTS = _HYBRID.layout.parts
_SHARED_PARTS = _SHARED.layout.split(head_groups=2)
#: One that has all parts of its model; a scheduler, and the two ranks behind it.
VIEWS = [
    View(_HYBRID, _HYBRID_PARTS, _HYBRID_PARTS),
    View(_SHARED, _SHARED_PARTS, _SHARED_PARTS),
    *(
        View(_SHARED, [part for part in _SHARED_PARTS if part.head_group == rank], _SHARED_PARTS)
        for rank in range(2)
    ),
]


def tag_of(name: Name) -> bytes:
    """What contents are made of, with their writer."""
    return storage_key(name.key, name.part)


class Stored(NamedTuple):
    """What lies under a name; whoever stores it anew is another writer."""

    writer: int
    expires_at: float


class LeaseRecord:
    """A lease as its holder knows it, with the views that it must keep whole."""

    def __init__(self, lease: Any, held: dict[Name, Stored], deadline: float) -> None:
        self.lease = lease
        self.held = held
        self.deadline = deadline
        self.views = lease.views


class ReservationRecord:
    """A reservation as its holder knows it."""

    def __init__(
        self, reservation: Any, granted: list[list[Name]], writer: int, expire_seconds: float | None
    ) -> None:
        self.reservation = reservation
        self.granted = granted  # by block
        self.writer = writer
        self.expire_seconds = expire_seconds
        self.committed = 0
        self.deadline = reservation.deadline


class PartsModel:
    """Everything but which blocks the store chose to evict."""

    def __init__(self) -> None:
        self.stored: dict[Name, Stored] = {}
        self.gone: dict[Name, Outcome] = {}  # why, of what left by itself
        self.pending: dict[Name, ReservationRecord] = {}
        self.hard_pins: dict[Name, float] = {}  # until when
        self.soft_pins: dict[Name, float] = {}
        self.leases: list[LeaseRecord] = []
        self.reservations: list[ReservationRecord] = []
        self.views: dict[bytes, View] = {}  # of all parts, by namespace digest

    def together(self, name: Name) -> list[Name]:
        """What of that is there leaves with one part, itself included."""
        view = self.views[name.key.namespace_digest]
        return [other for other in view.together(name) if other in self.stored]

    def expires(self, name: Name) -> bool:
        """True where a part may leave by itself, with one of its block that has a TTL."""
        view = self.views[name.key.namespace_digest]
        others = (self.stored.get(Name(name.key, part)) for part in view.all_parts)
        return any(other is not None and other.expires_at < math.inf for other in others)

    def size_of(self, name: Name) -> int:
        return self.views[name.key.namespace_digest].size_of(name)

    # -- time --------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Let the deadlines pass that have come."""
        for record in self.reservations:
            if record.deadline <= now:
                self.forget(record)
        for name, stored in list(self.stored.items()):
            if name in self.stored and stored.expires_at <= now:
                self.leave(self.together(name), Outcome.EXPIRED)
        for pins in (self.hard_pins, self.soft_pins):
            for name in [name for name, until in pins.items() if until <= now]:
                del pins[name]

    def forget(self, record: ReservationRecord) -> None:
        """What a reservation did not commit is not being written any more."""
        for name in [name for name, writer in self.pending.items() if writer is record]:
            del self.pending[name]

    def leave(self, names: Iterable[Name], reason: Outcome | None) -> None:
        """These are not there any more; None: they were deleted."""
        for name in names:
            del self.stored[name]
            self.hard_pins.pop(name, None)
            self.soft_pins.pop(name, None)
            if reason is not None:
                self.gone[name] = reason

    # -- lookups -----------------------------------------------------------------------------

    def longest(self, view: View, keys: Sequence[BlockKey], *, with_pending: bool = False) -> int:
        """Blocks of the longest prefix of which everything is there that it needs."""
        for blocks in range(len(keys), 0, -1):
            if all(
                name in self.stored or (with_pending and name in self.pending)
                for name in view.needed(keys, blocks)
            ):
                return blocks
        return 0

    def check_reason(
        self, view: View, keys: Sequence[BlockKey], blocks: int, reason: Outcome | None
    ) -> None:
        """Why a prefix is not longer: something is being written, or a part of the next is gone."""
        if blocks == len(keys):
            assert reason is None
            return
        is_pending = self.longest(view, keys, with_pending=True) > blocks
        assert (reason is Outcome.PENDING) == is_pending
        if not is_pending:
            missing = [n for n in view.needed(keys, blocks + 1) if n not in self.stored]
            assert reason in {self.why_missing(name) for name in missing}

    def leased(self, now: float) -> set[tuple[Name, Stored]]:
        """What is leased now: a part may be deleted and stored anew, so with what it was."""
        return {
            item for record in self.leases if record.deadline > now for item in record.held.items()
        }

    def fits(self, names: Iterable[Name], now: float, cap_bytes: int) -> bool:
        """May these be leased, with what is leased already?"""
        leased = self.leased(now)
        room_bytes = cap_bytes - sum(self.size_of(name) for name, _ in leased)
        new = [name for name in names if (name, self.stored[name]) not in leased]
        return sum(self.size_of(name) for name in new) <= room_bytes

    # -- writes ------------------------------------------------------------------------------

    def expect_batch(
        self, wanted: list[list[Name]], outcomes: list[Outcome], granted: Outcome
    ) -> list[list[Name]]:
        """What a writer may be told of each block; gives back the parts that it was granted."""
        is_full = False
        found: list[list[Name]] = []
        for names, outcome in zip(wanted, outcomes, strict=True):
            missing = [name for name in names if name not in self.stored]
            found.append([])
            if not names:
                assert outcome is Outcome.ABSENT
            elif any(name in self.pending for name in names):
                assert outcome is Outcome.PENDING
            elif not missing:
                assert outcome is Outcome.PRESENT
            else:
                assert outcome is Outcome.FULL or (outcome is granted and not is_full)
                is_full = is_full or outcome is Outcome.FULL
                found[-1] = missing if outcome is granted else []
        return found

    def publish(
        self, names: Iterable[Name], writer: int, now: float, expire_seconds: float | None
    ) -> None:
        """Readers find these from now on."""
        expires_at = math.inf if expire_seconds is None else now + expire_seconds
        for name in names:
            assert name not in self.stored
            self.stored[name] = Stored(writer, expires_at)
            self.pending.pop(name, None)
            self.gone.pop(name, None)

    def delete(self, view: View, keys: Sequence[BlockKey]) -> list[Outcome]:
        """What a delete answers: a block is hidden once, with what leaves with its parts."""
        outcomes = []
        for key in keys:
            found = [name for name in view.names([key]) if name in self.stored]
            outcomes.append(Outcome.OK if found else Outcome.ABSENT)
            for name in found:
                if name in self.stored:
                    self.leave(self.together(name), None)
        return outcomes

    def evict(self, names: set[Name], now: float) -> None:
        """The store chose these: whole blocks or groups, and nothing that anybody holds."""
        leased = self.leased(now)
        for name in names:
            assert (name, self.stored[name]) not in leased, f"{name} was leased"
            assert name not in self.hard_pins, f"{name} was pinned"
            assert set(self.together(name)) <= names, f"{name} left without its block"
        self.leave(names, Outcome.EVICTED)

    # -- pins --------------------------------------------------------------------------------

    def pin(
        self, view: View, key: BlockKey, until: float, quota_bytes: int | None, outcome: Outcome
    ) -> None:
        """Pin the parts of a block that are there, hard where there is a quota; all or none."""
        names = view.names([key])
        there = [name for name in names if name in self.stored]
        pins = self.soft_pins if quota_bytes is None else self.hard_pins
        new = [name for name in there if name not in pins]
        taken_bytes = sum(self.size_of(name) for name in [*pins, *new])
        is_over = quota_bytes is not None and bool(new) and taken_bytes > quota_bytes
        if not is_over:
            pins.update({name: max(pins.get(name, 0.0), until) for name in there})
        missing = [name for name in names if name not in there]
        is_whole = bool(there) and not any(view.is_always_needed(name) for name in missing)
        assert (outcome is Outcome.OK) == (is_whole and not is_over)
        if outcome is not Outcome.OK:
            possible = {self.why_missing(name) for name in missing}
            assert outcome in possible | ({Outcome.QUOTA} if is_over else set())

    def unpin(self, view: View, key: BlockKey, outcome: Outcome) -> None:
        """End all pins of a block."""
        names = view.names([key])
        pinned = [name for name in names if name in self.hard_pins or name in self.soft_pins]
        unpinned = [name for name in names if name not in pinned]
        is_whole = bool(pinned) and not any(view.is_always_needed(name) for name in unpinned)
        assert outcome is (Outcome.OK if is_whole else Outcome.ABSENT)
        for name in pinned:
            self.hard_pins.pop(name, None)
            self.soft_pins.pop(name, None)

    def why_missing(self, name: Name) -> Outcome:
        return Outcome.PENDING if name in self.pending else self.gone.get(name, Outcome.ABSENT)
