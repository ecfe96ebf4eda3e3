"""Tiers with one fault each, run through the contract by test_contract.py: each must fail there.

Not collected by itself: its name does not begin with test_.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kvstore.errors import TierError
from kvstore.testing.tier_contract import TierContract
from kvstore.tiers.base import Piece
from kvstore.types import Outcome, Place


class Sound:
    """Right in every respect, and noticing: the control."""

    name = "sound"

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.memory = np.zeros(capacity_bytes, np.uint8)
        self.records: dict[int, tuple[Place, int]] = {}
        self.is_closed = False

    def span(self, place):
        return self.memory[place.offset_bytes : place.offset_bytes + place.length_bytes]

    def check_open(self):
        if self.is_closed:
            raise TierError("closed")

    def read(self, batch):
        self.check_open()
        return [self.read_one(place, memory) for place, memory in batch]

    def read_one(self, place, memory):
        span = self.span(place)
        if self.records.get(place.offset_bytes) != (place, hash(span.tobytes())):
            return Outcome.CORRUPT
        memory[:] = span
        return Outcome.OK

    def write(self, batch):
        self.check_open()
        return [self.write_one(place, memory) for place, memory in batch]

    def write_one(self, place, memory):
        self.span(place)[:] = memory
        self.records[place.offset_bytes] = place, hash(memory.tobytes())
        return Outcome.OK

    def delete(self, batch):
        self.check_open()
        for place in batch:
            self.records.pop(place.offset_bytes, None)
        return [Outcome.OK] * len(batch)

    def close(self):
        self.is_closed = True


class PadsReads(Sound):
    def read_one(self, place, memory):
        whole = memory.base
        start = (memory.ctypes.data - whole.ctypes.data) + len(memory)
        whole[start : start + 1] = 0  # as if a whole sector were read into it
        return super().read_one(place, memory)


class PadsWrites(Sound):
    def write_one(self, place, memory):
        end = place.offset_bytes + place.length_bytes
        self.memory[end : end + 1] = 0
        return super().write_one(place, memory)


class CutsTheEnd(Sound):
    def write_one(self, place, memory):
        span = self.span(place)
        span[:] = memory
        span[4096 * (len(span) // 4096) :] = 0
        self.records[place.offset_bytes] = place, hash(span.tobytes())
        return Outcome.OK


class SwapsTwoPieces(Sound):
    def read(self, batch):
        outcomes = super().read(batch)
        if len(batch) > 1 and len(batch[0].memory) == len(batch[1].memory):
            swapped = batch[0].memory.copy()
            batch[0].memory[:] = batch[1].memory
            batch[1].memory[:] = swapped
        return outcomes


class SortsOutcomes(Sound):
    def read(self, batch):
        return sorted(super().read(batch), key=str)


class IgnoresTheLastPiece(Sound):
    def write(self, batch):
        super().write(batch[:-1] if len(batch) > 1 else batch)
        return [Outcome.OK] * len(batch)


class OneOutcomeForAll(Sound):
    def read(self, batch):
        return super().read(batch)[:1]


class SaysOkToDamage(Sound):
    def read_one(self, place, memory):
        memory[:] = self.span(place)
        return Outcome.OK


class FailsTheWholeBatch(Sound):
    def read(self, batch):
        outcomes = super().read(batch)
        return [max(outcomes, key=lambda o: o.is_miss)] * len(outcomes)


class ForgetsTheKey(Sound):
    def read_one(self, place, memory):
        kept, checksum = self.records.get(place.offset_bytes, (place, 0))
        if kept.length_bytes != place.length_bytes or hash(self.span(place).tobytes()) != checksum:
            return Outcome.CORRUPT
        memory[:] = self.span(place)
        return Outcome.OK


class KeepsTheSource(Sound):
    records: dict[int, Any]

    def write_one(self, place, memory):
        super().write_one(place, memory)
        self.records[place.offset_bytes] = place, memory
        return Outcome.OK

    def read_one(self, place, memory):
        kept, source = self.records.get(place.offset_bytes, (None, None))
        if kept != place or self.span(place).tobytes() != source.tobytes():
            return Outcome.CORRUPT
        memory[:] = source
        return Outcome.OK


class CachesWrites(Sound):
    """Answers from a cache, and never reaches its medium."""

    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self.cache = self.memory
        self.memory = np.zeros(capacity_bytes, np.uint8)

    def span(self, place):
        return self.cache[place.offset_bytes : place.offset_bytes + place.length_bytes]


class DeletesTheNeighbour(Sound):
    def delete(self, batch):
        for place in batch:
            super().delete([place, structs.replace(place, offset_bytes=place.offset_bytes + 8192)])
        return [Outcome.OK] * len(batch)


class DeletesOnlyOnce(Sound):
    def delete(self, batch):
        was = [place.offset_bytes in self.records for place in batch]
        super().delete(batch)
        return [Outcome.OK if there else Outcome.ABSENT for there in was]


class ReadsAfterClose(Sound):
    def check_open(self):
        pass


class ClosesOnce(Sound):
    def close(self):
        self.check_open()
        super().close()


class LosesTheLastSlot(Sound):
    def write_one(self, place, memory):
        if place.offset_bytes + 4096 >= self.capacity_bytes:
            return Outcome.FULL
        return super().write_one(place, memory)


class WritesToItsSource(Sound):
    def write_one(self, place, memory):
        memory.setflags(write=True)
        memory[-1:] ^= 1
        outcome = super().write_one(place, memory)
        memory[-1:] ^= 1
        return outcome


class SharesABuffer(Sound):
    """One bounce buffer for all threads."""

    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self.bounce = np.zeros(2 << 20, np.uint8)

    def write_one(self, place, memory):
        self.bounce[: len(memory)] = memory
        sum(range(20_000))  # long enough for another thread to come in
        outcome = super().write_one(place, self.bounce[: len(memory)])
        self.records[place.offset_bytes] = place, hash(self.span(place).tobytes())
        return outcome


class _Contract(TierContract):
    notices_damage = True
    kind: type[Sound] = Sound

    @pytest.fixture
    def tier(self):
        return self.kind(self.capacity_bytes)

    def read_raw(self, tier, place):
        return tier.memory[place.offset_bytes :][: place.length_bytes].tobytes()

    def flip_raw(self, tier, place, position):
        tier.memory[place.offset_bytes + position] ^= 1


FAULTS: list[type[Sound]] = [
    value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, Sound) and value is not Sound
]

TestSound = type("TestSound", (_Contract,), {})
for _fault in FAULTS:
    globals()[f"Test{_fault.__name__}"] = type(
        f"Test{_fault.__name__}", (_Contract,), {"kind": _fault}
    )

__all__ = ["FAULTS", "Piece", "Sound"]
