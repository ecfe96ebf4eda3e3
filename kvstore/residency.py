"""What is resident in a tier, and what protects it.

Joins index, slots and policy, so that the three always agree: every entry that is ready and that
nobody uses is known to the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.index import Entry, Index
from kvstore.plan import choose_victims
from kvstore.slots import Slot, Slots, SlotState, slot_size_bytes
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.messages import BlockSpec
    from kvstore.metrics import Counters
    from kvstore.policy import Policy


class Residency:
    """The blocks of one tier."""

    def __init__(self, slots: Slots, policy: Policy, counters: Counters, tier: str) -> None:
        self.slots = slots
        self.index = Index()
        self.tier = tier
        self.condemned: set[Entry] = set()
        self.changes = 0  # how often a block became visible, or left
        self.reclaimable_bytes = 0  # slots of ready blocks that nobody uses
        self._policy = policy
        self._counters = counters
        self._last_entry_id = 0
        #: Told of each ready entry that is about to leave.
        self.before_drop: Callable[[Entry], None] = _nothing

    # -- finding -----------------------------------------------------------------------------

    def find_prefix(
        self, domain: bytes, keys: Sequence[bytes]
    ) -> tuple[list[Entry], Outcome | None]:
        """The longest prefix that is ready, and why the next block is not (None: all are)."""
        entries = self.index.prefix(domain, keys)
        if len(entries) == len(keys):
            return entries, None
        return entries, self.index.why_missing(domain, keys[len(entries)])

    def find_ready(self, domain: bytes, key: bytes) -> Entry | None:
        """The entry of a key that readers may see."""
        entry = self.index.find(domain, key)
        return entry if entry is not None and entry.is_ready else None

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
                if entry.queued_rank is None:
                    self._policy.add(entry)
            else:
                self.condemned.remove(entry)
                self.slots.free(entry.slot)

    def rerank(self, entry: Entry) -> None:
        """The rank of an entry has changed by other means than its use."""
        # Also while it is in use: its place in the queue is looked at again when it is popped only
        # if that comes early enough.
        if entry.is_ready:
            self._policy.add(entry)

    def hit(self, entries: Sequence[Entry]) -> None:
        """These blocks of one prefix, in prefix order, are read."""
        tokens = 0
        for entry in entries:
            entry.hits += 1
            tokens += entry.token_count
        self._counters.add("hit_blocks", len(entries), self.tier)
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
        entry = Entry(domain, spec, slot)
        self._last_entry_id += 1
        entry.entry_id = self._last_entry_id
        slot.entry = entry
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
        """Hide a ready entry at once; free it now or after its last user. None: deleted."""
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
            if self.slots.capacity_bytes - self.slots.free_bytes <= low_bytes:
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

    def _make_room(self, length_bytes: int) -> Slot | None:
        slot = self.slots.grant(length_bytes)
        size = slot_size_bytes(length_bytes)
        if slot is not None or size > self.obtainable_bytes():
            return slot
        for victim in choose_victims(self.slots, self._policy, size):
            self.drop(victim, Outcome.EVICTED)
        return self.slots.grant(length_bytes)


def _nothing(_: Entry) -> None:
    pass
