"""What is resident in a tier, and what protects it.

Joins index, slots and policy, so that the three always agree: every entry that is ready and that
nobody uses is known to the policy.

What the store knows of a block takes memory, too. Small blocks could take more of it than their
payload, which is all that a capacity speaks of, so a part of it counts:

    |<-------------------- capacity -------------------->|<- share ->|
    |      slots in use      |            free           |   index   |         large blocks
    |      slots in use       | free |         index                 |         small blocks
                                     |<- beyond share -->|
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

#: What one entry takes: its key, its place, its slot, the tables that name them, its place in the
#: policy's queue. Measured over 20,000 to 1,400,000 blocks of one part: 870 to 1,000 bytes asked of
#: Python's allocator, 1,020 to 1,210 of resident memory, as tables are full or have just grown.
#: Not in it: a third more for a part of a block with several, 80 bytes where a block was stored
#: without its parent and names it by an object of its own, TTLs, pins, leases.
ENTRY_BYTES = 1_152
#: The index may take this part of a capacity besides it.
_INDEX_SHARE = 16


def capacity_for(slots: int, size_bytes: int) -> int:
    """The least capacity that holds so many slots of one size, in all so long, and their entries.

    A tier of that capacity holds not one slot more, of any size.
    """
    shared_bytes = (size_bytes + slots * ENTRY_BYTES) * _INDEX_SHARE
    return slot_size_bytes(max(size_bytes, -(-shared_bytes // (_INDEX_SHARE + 1))))


class Residency:
    """The blocks of one tier.

    Each entry counts as `entry_bytes` of memory besides its slot; with 0 the index is free.
    """

    def __init__(
        self,
        slots: Slots,
        policy: Policy,
        counters: Counters,
        tier: str,
        *,
        history_entries: int,
        entry_bytes: int,
    ) -> None:
        self.slots = slots
        self.index = Index(history_entries)
        self.tier = tier
        self.condemned: set[Entry] = set()
        self.changes = 0  # how often a block became visible, or left
        self.reclaimable_bytes = 0  # slots of ready blocks that nobody uses
        self.reclaimable_slots = 0
        self.entry_bytes = entry_bytes
        self._index_share_bytes = slots.capacity_bytes // _INDEX_SHARE
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
                self.reclaimable_slots -= 1
            entry.users += 1

    def drop_users(self, entries: Iterable[Entry]) -> None:
        """End one protection of each; what was deleted meanwhile is freed with its last user."""
        for entry in entries:
            entry.users -= 1
            if entry.users:
                continue
            if entry.is_ready:
                self.reclaimable_bytes += entry.size_bytes
                self.reclaimable_slots += 1
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

    @property
    def index_bytes(self) -> int:
        """What the entries take: one for each slot."""
        return self.slots.granted_slots * self.entry_bytes

    @property
    def used_bytes(self) -> int:
        """What counts against the capacity: slots, and the index beyond its share."""
        slots = self.slots
        return slots.usable_bytes - slots.free_bytes + self._beyond_share(slots.granted_slots)

    def usage(self) -> dict[str, int]:
        """The tier's bytes: capacity, free, largest free, slots by state, and the index.

        What the index takes beyond a sixteenth of the capacity cannot be used for blocks, though
        it is free.
        """
        slots = self.slots
        return {
            "capacity_bytes": slots.capacity_bytes,
            "usable_bytes": slots.usable_bytes,
            "free_bytes": slots.free_bytes,
            "largest_free_bytes": slots.largest_free_bytes,
            **{f"{state}_bytes": slots.bytes_in(state) for state in SlotState},
            "index_bytes": self.index_bytes,
        }

    def can_hold(self, slots: int, size_bytes: int) -> bool:
        """Would so many slots, of so many bytes in all, fit into an empty tier?"""
        return size_bytes + self._beyond_share(slots) <= self.slots.capacity_bytes

    def can_make_room(self, slots: int, size_bytes: int) -> bool:
        """Would they fit if everything unprotected left?"""
        known = self.slots
        protected_bytes = known.usable_bytes - known.free_bytes - self.reclaimable_bytes
        protected_slots = known.granted_slots - self.reclaimable_slots
        needed_bytes = protected_bytes + size_bytes + self._beyond_share(protected_slots + slots)
        return needed_bytes <= known.usable_bytes

    def _beyond_share(self, slots: int) -> int:
        return max(0, slots * self.entry_bytes - self._index_share_bytes)

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
            self.reclaimable_slots -= 1
            self.slots.free(entry.slot)

    def trim(self, low_bytes: int, blocks_max: int) -> bool:
        """Evict down to `low_bytes` in use, at most `blocks_max` blocks; True if there are more."""
        for _ in range(blocks_max):
            if self.used_bytes <= low_bytes:
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
        size = slot_size_bytes(length_bytes)
        if not self.can_make_room(1, size):
            return None
        slot = self.slots.grant(length_bytes)
        if slot is None:
            for victim in choose_victims(self.slots, self._policy, size, self._entry_at):
                if victim.is_ready:  # else it left with another part of its block
                    self.drop(victim, Outcome.EVICTED)
            slot = self.slots.grant(length_bytes)
        # A run of neighbours first, since what makes a piece free makes the index smaller, too.
        while slot is not None and self.used_bytes > self.slots.usable_bytes:
            oldest = self._policy.pop_victim()
            if oldest is None:
                self.slots.free(slot)
                return None
            self.drop(oldest, Outcome.EVICTED)
        return slot


def _nothing(_: Entry) -> None:
    pass
