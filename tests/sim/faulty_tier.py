"""The tier of the simulation: bytes, and everything that may go wrong with them.

docs/simulation.md says in words what that is. Of the two media, `memory` keeps bytes and nothing
else, `records` a record beside those of each part, against which every read is verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import codec
from kvstore.types import Outcome

if TYPE_CHECKING:
    from random import Random

    from kvstore.types import Place


class Faults(NamedTuple):
    """How hostile a run is: probabilities, and the longest that things take."""

    slow: float = 0.0  # a batch takes up to `slow_seconds_max`
    slow_seconds_max: float = 4.0
    stuck: float = 0.0  # a transfer takes up to `stuck_seconds_max`
    stuck_seconds_max: float = 120.0
    failed_transfer: float = 0.0
    repeated_completion: float = 0.0
    late_tick_seconds_max: float = 0.0
    clock_lag_seconds_max: float = 0.0
    death: float = 0.0  # of a client, at each of its actions
    rot_interval_seconds: float = 0.0  # between two flipped bits, on average; 0: none
    # Medium `records` only.
    failed_write: float = 0.0
    lost_write: float = 0.0
    torn_write: float = 0.0
    failed_read: float = 0.0


def drawn_faults(rng: Random, *, keeps_records: bool) -> Faults:
    """The faults of one seed; one in five has none."""
    if rng.random() < 0.2:
        return Faults()
    faults = Faults(
        slow=rng.choice([0.0, 0.1, 0.3]),
        stuck=rng.choice([0.0, 0.1, 0.5]),
        failed_transfer=rng.choice([0.0, 0.1]),
        repeated_completion=rng.choice([0.0, 0.2]),
        late_tick_seconds_max=rng.choice([0.0, 0.05]),
        clock_lag_seconds_max=rng.choice([0.0, 0.009]),
        death=rng.choice([0.0, 0.02]),
        rot_interval_seconds=rng.choice([0.0, 2.0]),
    )
    if not keeps_records:
        return faults
    return faults._replace(
        failed_write=rng.choice([0.0, 0.1]),
        lost_write=rng.choice([0.0, 0.1]),
        torn_write=rng.choice([0.0, 0.1]),
        failed_read=rng.choice([0.0, 0.1]),
    )


class _Record(NamedTuple):
    """What the medium `records` remembers of a part."""

    key: bytes
    length_bytes: int
    generation: int
    checksum: int


class FaultyTier:
    """`capacity_bytes` of bytes. Each batch is moved by two calls, half of every part in each."""

    def __init__(
        self, capacity_bytes: int, rng: Random, faults: Faults, *, keeps_records: bool
    ) -> None:
        self.memory = bytearray(capacity_bytes)
        self.keeps_records = keeps_records
        self.faults = faults
        self.rotted: set[int] = set()  # generations of parts in which a bit was flipped
        self._rng = rng
        self._records: dict[int, _Record] = {}  # by offset

    # -- how long things take ----------------------------------------------------------------

    def batch_seconds(self) -> float:
        """Until the last byte of a batch has moved."""
        if self._rng.random() < self.faults.slow:
            return self._rng.uniform(0.0, self.faults.slow_seconds_max)
        return self._rng.uniform(0.0001, 0.02)

    def transfer_seconds(self) -> float:
        """Until a transfer of the core is over."""
        if self._rng.random() < self.faults.stuck:
            return self._rng.uniform(0.0, self.faults.stuck_seconds_max)
        return self._rng.uniform(0.0001, 0.02)

    def happens(self, probability: float) -> bool:
        """Draw whether a fault strikes."""
        return probability > 0.0 and self._rng.random() < probability

    def draw(self) -> float:
        """A number from 0 to 1."""
        return self._rng.random()

    # -- writing -----------------------------------------------------------------------------

    def write_first(self, batch: list[tuple[Place, bytes]]) -> None:
        """The first half of each part lands; no record vouches for it meanwhile."""
        for place, payload in batch:
            self._records.pop(place.offset_bytes, None)
            half = place.length_bytes // 2
            self.memory[place.offset_bytes : place.offset_bytes + half] = payload[:half]

    def write_second(self, batch: list[tuple[Place, bytes]]) -> list[Outcome]:
        """The rest lands, or not; one outcome a part."""
        return [self._write_rest(place, payload) for place, payload in batch]

    def _write_rest(self, place: Place, payload: bytes) -> Outcome:
        if self.keeps_records:
            if self.happens(self.faults.failed_write):
                return Outcome.UNAVAILABLE
            if self.happens(self.faults.lost_write):
                return Outcome.OK
            self._records[place.offset_bytes] = _Record(
                place.key, place.length_bytes, place.generation, _checksum(payload)
            )
            if self.happens(self.faults.torn_write):
                return Outcome.OK
        half = place.length_bytes // 2
        start = place.offset_bytes
        self.memory[start + half : start + place.length_bytes] = payload[half:]
        return Outcome.OK

    # -- reading -----------------------------------------------------------------------------

    def read_first(self, places: list[Place]) -> list[tuple[_Record | None, bytes]]:
        """The record and the first half of each part, as they are now."""
        return [
            (
                self._records.get(place.offset_bytes),
                bytes(
                    self.memory[place.offset_bytes : place.offset_bytes + place.length_bytes // 2]
                ),
            )
            for place in places
        ]

    def read_second(
        self, places: list[Place], first: list[tuple[_Record | None, bytes]]
    ) -> list[tuple[Outcome, bytes]]:
        """The rest of each part, and what its read came to."""
        found = []
        for place, (record, half) in zip(places, first, strict=True):
            start = place.offset_bytes + len(half)
            whole = half + bytes(self.memory[start : place.offset_bytes + place.length_bytes])
            found.append((self._verified(place, record, whole), whole))
        return found

    def _verified(self, place: Place, record: _Record | None, whole: bytes) -> Outcome:
        if not self.keeps_records:
            return Outcome.OK
        if self.happens(self.faults.failed_read):
            return Outcome.TIMEOUT
        if record is None:
            return Outcome.ABSENT
        if record[:3] != (place.key, place.length_bytes, place.generation):
            return Outcome.ABSENT
        return Outcome.OK if record.checksum == _checksum(whole) else Outcome.CORRUPT

    def bytes_at(self, place: Place) -> bytes:
        """What lies there now, sound or not."""
        return bytes(self.memory[place.offset_bytes : place.offset_bytes + place.length_bytes])

    def checksum(self, place: Place) -> int:
        """Of what lies there now: what a runner reports of a transfer."""
        return _checksum(self.bytes_at(place))

    # -- rot ---------------------------------------------------------------------------------

    def rot(self, place: Place) -> None:
        """Flip one bit of a part at rest."""
        self.memory[place.offset_bytes + self._rng.randrange(place.length_bytes)] ^= (
            1 << self._rng.randrange(8)
        )
        self.rotted.add(place.generation)


def _checksum(whole: bytes) -> int:
    return codec.checksum(np.frombuffer(whole, np.uint8))
