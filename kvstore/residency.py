"""What is resident in a tier, and what protects it.

Joins index, slots and policy, so that the three always agree: every entry that is ready and that
nobody uses is known to the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.index import Entry, Index
from kvstore.plan import choose_victims
from kvstore.slots import Slot, Slots, SlotState, slot_size_bytes
from kvstore.types import DOMAIN_BYTES, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.messages import BlockSpec
    from kvstore.metrics import Counters
    from kvstore.policy import Policy
    from kvstore.prefix import Prefix


class Residency:
    """The blocks of one tier."""

    def __init__(
        self, slots: Slots, policy: Policy, counters: Counters, tier: str, history_entries: int
    ) -> None:
        self.slots = slots
        self.index = Index(history_entries)
        self.tier = tier
        self.condemned: set[Entry] = set()
        self.changes = 0  # how often a block became visible, or left
        self.reclaimable_bytes = 0  # slots of ready blocks that nobody uses
        self._policy = policy
        self._counters = counters
        self._last_entry_id = 0
        #: Told of each ready entry that is about to leave.
        self.before_drop: Callable[[Entry], None] = _nothing

    # -- protection --------------------------------------------------------------------------

    def add_users(self, entries: Iterable[Entry]) -> None:
        """Protect ready entries, once more each."""
        for entry in entries:
            if not entry.users:
                self.reclaimable_bytes -= entry.size_bytes
            entry.users += 1

    def drop_users(self, entries: Iterable[Entry]) -> None:
        """End one protection of each; what was deleted meanwhile is freed with its last user."""
        for entry in entries:
            entry.users -= 1
            if entry.users:
                continue
            if entry.is_ready:
                self.reclaimable_bytes += entry.size_bytes
                # With it, parts that could not leave because of this one.
                self._add_evictable((entry,) if entry.parts is None else entry.parts)
            else:
                self.condemned.remove(entry)
                self.slots.free(entry.slot)

    def _add_evictable(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.queue_place is None and entry.is_evictable:
                self._policy.add(entry)

    def rerank(self, entry: Entry) -> None:
        """The rank of an entry has changed by other means than its use."""
        # Also while it is in use: its place in the queue is looked at again when it is popped only
        # if that comes early enough.
        if entry.is_ready:
            self._policy.add(entry)

    def hit(self, prefix: Prefix, tokens_of_all: int, blocks_of_all: int) -> None:
        """The entries of a prefix are read: one of a request for so many tokens and blocks."""
        entries, blocks = prefix.entries, prefix.blocks
        for entry in entries:
            entry.hits += 1
        tokens = tokens_of_all
        if blocks < blocks_of_all:  # then no partial block is among them
            tokens = blocks * entries[0].token_count if entries else 0
        self._counters.add("hit_blocks", blocks, self.tier)
        self._counters.add("hit_tokens", tokens, self.tier)
        self._policy.touch(entries)

    def touch(self, entries: Sequence[Entry]) -> None:
        """These blocks of one prefix, in prefix order, were used."""
        self._policy.touch(entries)

    # -- coming and going --------------------------------------------------------------------

    def obtainable_bytes(self) -> int:
        """Bytes that are free, or would be if everything unprotected left."""
        return self.slots.free_bytes + self.reclaimable_bytes

    def reserve(self, domain: bytes, spec: BlockSpec) -> Entry | None:
        """Make an entry for a writer to fill, evicting what must go; None where there is no room.

        Readers do not see it before `publish`.
        """
        slot = self._make_room(spec.length_bytes)
        if slot is None:
            return None
        entry = Entry.of(domain, spec, slot)
        self._last_entry_id += 1
        entry.entry_id = self._last_entry_id
        slot.key = entry.place.key
        self.index.insert(entry)
        return entry

    def publish(self, entry: Entry) -> None:
        """Make a filled entry visible. Its first user is the caller's."""
        entry.users = 1
        entry.is_ready = True
        self.changes += 1
        self.slots.move(entry.slot, SlotState.READY)
        self.index.forget_history(entry)

    def withdraw(self, entry: Entry, *, is_held: bool) -> None:
        """Forget an entry that never became visible; keep its slot if its writer may touch it."""
        self._unlink(entry, None)
        if is_held:
            self.slots.move(entry.slot, SlotState.HELD)
        else:
            self.slots.free(entry.slot)

    def drop(self, entry: Entry, reason: Outcome | None) -> None:
        """Hide a ready entry, and the parts that leave with it, at once; None: deleted.

        Each is freed now, or after its last user.
        """
        others = entry.parts
        for part in entry.leaving():
            self._drop_part(part, reason)
        if others:
            self._add_evictable(others)  # one that stayed because of a part in use that has left

    def _drop_part(self, entry: Entry, reason: Outcome | None) -> None:
        self.before_drop(entry)
        entry.is_ready = False
        self._policy.remove(entry, is_evicted=reason is Outcome.EVICTED)
        self._unlink(entry, reason)
        label = "deleted" if reason is None else reason
        if not entry.hits:
            self._counters.add("evicted_before_first_read", 1, label)
        self._counters.add("dropped_blocks", 1, label)
        self._counters.add("dropped_bytes", entry.length_bytes, label)
        if entry.users:
            self.slots.move(entry.slot, SlotState.CONDEMNED)
            self.condemned.add(entry)
        else:
            self.reclaimable_bytes -= entry.size_bytes
            self.slots.free(entry.slot)

    def trim(self, low_bytes: int, blocks_max: int) -> bool:
        """Evict down to `low_bytes` in use, at most `blocks_max` blocks; True if there are more."""
        for _ in range(blocks_max):
            if self.slots.usable_bytes - self.slots.free_bytes <= low_bytes:
                return False
            victim = self._policy.pop_victim()
            if victim is None:
                return False
            self.drop(victim, Outcome.EVICTED)
        return True

    def _unlink(self, entry: Entry, reason: Outcome | None) -> None:
        self.changes += 1
        self.index.remove(entry, reason)
        parent = self.index.parent_of(entry)
        if parent is not None and not parent.children:
            self.rerank(parent)  # it has become a leaf

    def _entry_at(self, slot: Slot) -> Entry | None:
        """The block that lies in a slot; None where it is hidden."""
        entry = self.index.find(slot.key[:DOMAIN_BYTES], slot.key[DOMAIN_BYTES:])
        return entry if entry is not None and entry.slot is slot else None

    def _make_room(self, length_bytes: int) -> Slot | None:
        slot = self.slots.grant(length_bytes)
        size = slot_size_bytes(length_bytes)
        if slot is not None or size > self.obtainable_bytes():
            return slot
        for victim in choose_victims(self.slots, self._policy, size, self._entry_at):
            if victim.is_ready:  # else it left with another part of its block
                self.drop(victim, Outcome.EVICTED)
        return self.slots.grant(length_bytes)


def _nothing(_: Entry) -> None:
    pass
