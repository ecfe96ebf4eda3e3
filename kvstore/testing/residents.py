"""Blocks without a store, to put an eviction policy through whatever a core might do to it."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, ClassVar

from kvstore.index import Entry
from kvstore.messages import BlockSpec
from kvstore.slots import Slot
from kvstore.types import SINGLE_DOMAIN, SLOT_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.policy.base import Policy


class Watched(Entry):
    """An entry that counts, in `reads`, how often anything of any such entry is read."""

    reads: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> object:
        Watched.reads += 1
        return super().__getattribute__(name)


class Residents:
    """Blocks that are resident, and a policy that is told of them what the core would tell it.

    A block is called by a name, which is its key. Everything is as `kvstore.policy.base` says.
    """

    def __init__(self, policy: Policy, entry_type: type[Entry] = Entry) -> None:
        self.policy = policy
        self.blocks: dict[str, Entry] = {}
        self._children: Counter[str] = Counter()  # also of parents that are not resident
        self._entry_type = entry_type
        self._numbers = count()

    # -- what clients do ---------------------------------------------------------------------

    def store(self, name: str, blocks: int, *, partial: bool = False) -> list[Entry]:
        """Commit the prefix name0, name1, … of so many blocks; some may be resident already."""
        return self.commit([f"{name}{i}" for i in range(blocks)], partial=partial)

    def commit(self, names: Sequence[str], *, partial: bool = False) -> list[Entry]:
        """Make the blocks of one prefix resident, each after the one before it."""
        new = []
        for position, name in enumerate(names):
            if name not in self.blocks:
                parent = names[position - 1] if position else None
                is_last = position == len(names) - 1
                new.append(self._insert(name, parent, is_partial=partial and is_last))
        run = [self.blocks[name] for name in names]
        self.policy.touch(run)
        self.release(new)
        return run

    def read(self, entries: Sequence[Entry]) -> None:
        """Read a run of one prefix."""
        for entry in entries:
            entry.hits += 1
        self.policy.touch(entries)

    def protect(self, entries: Iterable[Entry]) -> None:
        """Lease blocks, which reads them elsewhere."""
        for entry in entries:
            entry.users += 1

    def release(self, entries: Iterable[Entry]) -> None:
        """End a lease."""
        for entry in entries:
            entry.users -= 1
            if not entry.users and entry.is_ready and entry.queue_place is None:
                self.policy.add(entry)

    def pin(self, entry: Entry) -> None:
        """Soft-pin a block."""
        entry.is_soft_pinned = True

    def unpin(self, entry: Entry) -> None:
        """End a soft pin."""
        entry.is_soft_pinned = False
        self.policy.add(entry)

    # -- what the core does ------------------------------------------------------------------

    def pop(self) -> Entry | None:
        """Ask for a victim. It is neither dropped nor added again yet."""
        return self.policy.pop_victim()

    def drop(self, entry: Entry, *, is_evicted: bool = False) -> None:
        """A block leaves: evicted, or deleted and the like, maybe while somebody reads it."""
        del self.blocks[name_of(entry)]
        entry.is_ready = False
        self.policy.remove(entry, is_evicted=is_evicted)
        parent = self._count_child(entry, -1)
        if parent is not None and not parent.children:
            self.policy.add(parent)

    def evict(self) -> Entry | None:
        """Make room of one block, and say which left."""
        victim = self.pop()
        if victim is not None:
            self.drop(victim, is_evicted=True)
        return victim

    def drain(self) -> list[Entry]:
        """Ask for victims until there is none. Nothing is dropped."""
        victims: list[Entry] = []
        while (victim := self.pop()) is not None:
            victims.append(victim)
            assert len(victims) <= len(self.blocks), f"{name_of(victim)} came once too often"
        return victims

    def evictable(self) -> list[Entry]:
        """Every block that may leave."""
        return [entry for entry in self.blocks.values() if entry.is_evictable]

    def _insert(self, name: str, parent: str | None, *, is_partial: bool) -> Entry:
        offset_bytes = next(self._numbers) * SLOT_ALIGNMENT_BYTES
        parent_key = None if parent is None else _key(parent)
        tokens = 5 if is_partial else 16
        spec = BlockSpec(_key(name), parent_key, SLOT_ALIGNMENT_BYTES, tokens, is_partial)
        slot = Slot(offset_bytes, SLOT_ALIGNMENT_BYTES, 1)
        entry = self._entry_type.of(SINGLE_DOMAIN, spec, slot)
        entry.children = self._children[name]
        self._count_child(entry, 1)
        entry.users = 1
        entry.is_ready = True
        self.blocks[name] = entry
        return entry

    def _count_child(self, entry: Entry, change: int) -> Entry | None:
        """Count one child more or less of an entry's parent; the parent, if it is resident."""
        if entry.parent_key is None:
            return None
        name = _text(entry.parent_key)
        self._children[name] += change
        if not self._children[name]:
            del self._children[name]
        parent = self.blocks.get(name)
        if parent is not None:
            parent.children += change
        return parent


def long_run(residents: Residents, seed: int, steps: int) -> Iterator[Entry | None]:
    """Anything that may happen to some 60 blocks, in an order that the seed decides.

    Yields every victim before it is dropped.
    """
    rng = random.Random(seed)
    leased: list[list[Entry]] = []
    for step in range(steps):
        event = rng.choice(_EVENTS)
        if event is _begin or residents.blocks:
            event(residents, rng, step, leased)
        while leased and (len(leased) > 6 or rng.random() < 0.2):
            residents.release(leased.pop(rng.randrange(len(leased))))
        if rng.random() < 0.1:
            _try_several(residents, rng.randrange(1, 6))
        while len(residents.blocks) > 60:
            victim = residents.pop()
            yield victim
            if victim is None:
                break
            residents.drop(victim, is_evicted=True)


def _begin(residents: Residents, rng: random.Random, step: int, _: list[list[Entry]]) -> None:
    residents.store(f"c{step}-", rng.randrange(1, 6), partial=rng.random() < 0.5)


def _go_on(residents: Residents, rng: random.Random, _: int, __: list[list[Entry]]) -> None:
    name = rng.choice(list(residents.blocks)).partition("-")[0]
    residents.store(f"{name}-", rng.randrange(1, 9), partial=rng.random() < 0.5)


def _read(residents: Residents, rng: random.Random, _: int, __: list[list[Entry]]) -> None:
    residents.read(_prefix(residents, rng.choice(list(residents.blocks))))


def _lease(residents: Residents, rng: random.Random, _: int, leased: list[list[Entry]]) -> None:
    run = _prefix(residents, rng.choice(list(residents.blocks)))
    residents.read(run)
    residents.protect(run)
    leased.append(run)


def _pin_or_unpin(residents: Residents, rng: random.Random, _: int, __: list[list[Entry]]) -> None:
    block = rng.choice(list(residents.blocks.values()))
    (residents.unpin if block.is_soft_pinned else residents.pin)(block)


def _delete(residents: Residents, rng: random.Random, _: int, __: list[list[Entry]]) -> None:
    if rng.random() < 0.3:
        residents.drop(rng.choice(list(residents.blocks.values())))


_EVENTS = (_begin, _begin, _go_on, _read, _read, _lease, _pin_or_unpin, _delete)


def _try_several(residents: Residents, times: int) -> None:
    """Ask for victims and keep them, as the planner does with those that make no room."""
    tried = []
    for _ in range(times):
        victim = residents.pop()
        if victim is not None:
            tried.append(victim)
    for entry in tried:
        residents.policy.add(entry)


def _prefix(residents: Residents, name: str) -> list[Entry]:
    """The run of resident blocks that ends with `name`."""
    run = [residents.blocks[name]]
    while run[0].parent_key is not None:
        parent = residents.blocks.get(_text(run[0].parent_key))
        if parent is None:
            break
        run.insert(0, parent)
    return run


def _read_all(residents: Residents, _: str) -> None:
    for i in range(50):
        residents.read([residents.blocks[f"base{i}-{j}"] for j in range(4)])


def _lease_all(residents: Residents, _: str) -> None:
    blocks = list(residents.blocks.values())
    residents.protect(blocks)
    residents.read(blocks[:4])
    assert residents.pop() is None  # all of them are passed over
    residents.release(blocks)


def _replace(residents: Residents, name: str) -> None:
    for i in range(50):
        residents.store(f"{name}{i}-", 4, partial=i % 2 == 0)
        for _ in range(4):
            residents.evict()


def _store_and_delete(residents: Residents, name: str) -> None:
    for i in range(50):
        for entry in residents.store(f"{name}{i}-", 4):
            residents.drop(entry)


def _add_turns(residents: Residents, name: str) -> None:
    """Each prefix gets a block more, which is deleted."""
    for i in range(50):
        names = [*(f"base{i}-{j}" for j in range(4)), f"{name}{i}"]
        for _ in range(4):
            residents.drop(residents.commit(names)[-1])


def _pin_all(residents: Residents, _: str) -> None:
    blocks = list(residents.blocks.values())
    for entry in blocks:
        residents.pin(entry)
    victim = residents.pop()
    assert victim is not None
    residents.policy.add(victim)
    for entry in blocks:
        residents.unpin(entry)


#: Work that leaves as many blocks behind as it found, on the prefixes base0 to base49 of 4 blocks.
WORK: dict[str, Callable[[Residents, str], None]] = {
    "reads": _read_all,
    "leases": _lease_all,
    "evictions": _replace,
    "deletes": _store_and_delete,
    "turns": _add_turns,
    "pins": _pin_all,
}


def name_of(entry: Entry) -> str:
    """What a block is called."""
    return _text(entry.key)


def _key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def _text(key: bytes) -> str:
    return key.decode().rstrip(".")
