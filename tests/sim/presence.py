"""Which parts are there, by what clients were told; and that each one that leaves has a cause."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvstore.types import Outcome
from tests.sim.models import goes_with, keepers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.clock import Clock
    from kvstore.store import Core
    from tests.sim.faulty_tier import FaultyTier

#: Domain and key.
Name = tuple[bytes, bytes]


class Stored(NamedTuple):
    """A part that was committed and that nothing but the store itself has removed since."""

    generation: int
    expires_at: float | None


class Presence:
    """What was committed and deleted, and what was readable after the step before this one."""

    def __init__(self, core: Core, tier: FaultyTier, clock: Clock) -> None:
        self.stored: dict[Name, Stored] = {}
        self.committed_parts = 0
        self.seen: Counter[str] = Counter()
        self.readable: set[Name] = set()
        self._before: set[Name] = set()
        self._committed: set[Name] = set()  # in this step
        self._deleted: set[Name] = set()  # in this step, with what that took along
        self._replaced: dict[Name, Stored] = {}  # in this step: what was stored before it
        self._core = core
        self._tier = tier
        self._clock = clock

    # -- what is said of it ------------------------------------------------------------------

    def look(self) -> None:
        """A step is over; its answers come next, and after them `check`."""
        self.readable = set(self._core.resident_keys())

    def commit(self, name: Name, stored: Stored) -> None:
        """A writer was told that this part is stored."""
        self._forget(name)
        self.stored[name] = stored
        self.committed_parts += 1
        self._committed.add(name)

    def delete(self, name: Name, outcome: Outcome) -> None:
        """Somebody was told that this part is hidden, or that it was not there."""
        if outcome is not Outcome.OK:
            assert name not in self.readable, "not deleted, though it is there"
            return
        assert name in self.stored, "deleted what nobody stored"
        domain, key = name
        for other in goes_with(key):
            self._forget((domain, other))
            self._deleted.add((domain, other))

    def find(self, name: Name) -> Stored:
        """A part that the store says is there has a right to be."""
        stored = self.stored.get(name)
        assert stored is not None, "found, and never committed, or deleted since"
        is_over = stored.expires_at is not None and stored.expires_at <= self._clock.now()
        assert not is_over, "found after its TTL"
        return stored

    def was_there(self, name: Name) -> bool:
        """True where any answer of this step must have known the part."""
        return name in self.readable and (name in self._before or name in self._committed)

    def is_sound(self, name: Name) -> bool:
        """True where neither TTL nor rot can have ended a part: not its own, nor another's."""
        return not any(self._is_over(n) or self._is_rotted(n) for n in _keepers(name))

    def generation_of(self, name: Name) -> int | None:
        """Of what was committed last; None where that was deleted."""
        stored = self.stored.get(name)
        return None if stored is None else stored.generation

    def _forget(self, name: Name) -> None:
        stored = self.stored.pop(name, None)
        if stored is not None:
            self._replaced.setdefault(name, stored)

    def _before_step(self, name: Name) -> Stored | None:
        return self._replaced.get(name) or self.stored.get(name)

    def _is_rotted(self, name: Name) -> bool:
        stored = self._before_step(name)
        return stored is not None and stored.generation in self._tier.rotted

    def _is_over(self, name: Name) -> bool:
        stored = self._before_step(name)
        if stored is None or stored.expires_at is None:
            return False
        return stored.expires_at <= self._clock.now()

    # -- what must hold after each step ------------------------------------------------------

    def check(self, kept: Iterable[tuple[Name, int]]) -> None:
        """`kept`: name and generation of all parts that are leased or hard-pinned."""
        assert self.readable <= self.stored.keys(), "a part is visible that nobody committed"
        left = self._before - self.readable
        if left:
            held = {name for name, generation in kept if self._is_same(name, generation)}
            for name in left:
                self._check_departure(name, held)
        counters = self._core.counters
        stored_parts = sum(counters.by_label("stored_blocks").values())
        assert stored_parts == self.committed_parts, (
            "a commit made other parts visible than it said"
        )
        here = stored_parts - sum(counters.by_label("dropped_blocks").values())
        assert here == len(self.readable), f"{here} parts should be here, {len(self.readable)} are"
        self._before = self.readable
        self._committed.clear()
        self._deleted.clear()
        self._replaced.clear()

    def _check_departure(self, name: Name, held: set[Name]) -> None:
        reason = self._reason(name)
        self._check_cause(name, reason)
        domain, key = name
        together = {(domain, other) for other in goes_with(key)} & self._before
        assert not together & self.readable, "a part stayed that is worth nothing by itself"
        if len(together) > 1:
            self.seen[f"parts that left together, {reason or 'deleted'}"] += 1
        if reason is Outcome.EVICTED:
            lost = {other for other in together if self._reason(other) is Outcome.EVICTED}
            assert not lost & held, "evicted, though a part that needs it is leased or hard-pinned"

    def _check_cause(self, name: Name, reason: Outcome | None) -> None:
        """What is said of why a part left happened to it, or to a part that took it along."""
        keepers = [keeper for keeper in _keepers(name) if keeper in self._before]
        is_right = {
            None: name in self._deleted,
            Outcome.EVICTED: True,
            Outcome.EXPIRED: any(self._is_over(keeper) for keeper in keepers),
            Outcome.CORRUPT: any(self._is_rotted(keeper) for keeper in keepers),
        }
        assert is_right.get(reason), f"a part is gone ({reason or 'deleted'}) without a cause"

    def _reason(self, name: Name) -> Outcome | None:
        """Why a part left in this step; None: it was deleted."""
        return self._core._blocks.index._history.get(b"".join(name))

    def _is_same(self, name: Name, generation: int) -> bool:
        stored = self._before_step(name)
        return stored is not None and stored.generation == generation


def _keepers(name: Name) -> list[Name]:
    domain, key = name
    return [(domain, other) for other in keepers_of(key)]
