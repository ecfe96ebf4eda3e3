"""A plain file as a tier, for the tests: it claims to notice damage, and has to.

    offset 0                       units * 128                             end
    | record of each 4 KiB unit  | unit 0 | unit 1 | ...                   |

The record of the unit where a place starts says which key's bytes lie there, how many, and their
checksum. It is written after them, so that a write that was cut short reads as a miss.
"""

from __future__ import annotations

import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore import codec
from kvstore.errors import TierError
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome, Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.buffers import Bytes
    from kvstore.tiers.base import Piece

RECORD_BYTES = 128
#: Key, length, generation, checksum; 0 and no key where nothing lies.
_RECORD = struct.Struct("<64sQQQ")


@contextmanager
def _as_tier_errors(path: Path) -> Iterator[None]:
    """The one place where the system's errors become ours."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: the file was closed
        raise TierError(f"{path}: {error}") from error


class FileTier:
    """`capacity_bytes` in one file, read and written by position from any thread."""

    name = "file"

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self._units = capacity_bytes // SLOT_ALIGNMENT_BYTES
        with _as_tier_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, self.data_offset(0) + self.capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all places, a multiple of 4 KiB."""
        return self._units * SLOT_ALIGNMENT_BYTES

    def data_offset(self, offset_bytes: int) -> int:
        """Where a place's bytes lie in the file."""
        return self._units * RECORD_BYTES + offset_bytes

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out what its record vouches for; everything else is a miss."""
        with self._open():
            return [self._read_one(place, memory) for place, memory in batch]

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy in: no record while the bytes change, then the new one."""
        with self._open():
            for place, memory in batch:
                self._write_record(place, None)
                os.pwrite(self._fd, memory.data, self.data_offset(place.offset_bytes))
                self._write_record(place, codec.checksum(memory))
        return [Outcome.OK] * len(batch)

    def delete(self, batch: Sequence[Place]) -> list[Outcome]:
        """Forget the records of these places, where they are still theirs."""
        with self._open():
            for place in batch:
                key, _, generation, _ = self._record(place)
                if (key, generation) == (place.key, place.generation):
                    self._write_record(place, None)
        return [Outcome.OK] * len(batch)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def _open(self) -> Iterator[None]:
        if self._fd < 0:
            raise TierError(f"{self.path} is closed")
        with _as_tier_errors(self.path):
            yield

    def _read_one(self, place: Place, memory: Bytes) -> Outcome:
        key, length_bytes, generation, checksum = self._record(place)
        if not length_bytes:
            return Outcome.ABSENT
        if (key, length_bytes, generation) != (place.key, place.length_bytes, place.generation):
            return Outcome.ABSENT
        if os.preadv(self._fd, [memory.data], self.data_offset(place.offset_bytes)) != len(memory):
            return Outcome.CORRUPT
        return Outcome.OK if codec.checksum(memory) == checksum else Outcome.CORRUPT

    def _record(self, place: Place) -> tuple[bytes, int, int, int]:
        found = os.pread(self._fd, _RECORD.size, self._record_offset(place))
        if len(found) < _RECORD.size:
            return b"", 0, 0, 0
        key, length_bytes, generation, checksum = _RECORD.unpack(found)
        return key, length_bytes, generation, checksum

    def _write_record(self, place: Place, checksum: int | None) -> None:
        fields = (b"", 0, 0, 0)
        if checksum is not None:
            fields = (place.key, place.length_bytes, place.generation, checksum)
        os.pwrite(self._fd, _RECORD.pack(*fields), self._record_offset(place))

    def _record_offset(self, place: Place) -> int:
        return place.offset_bytes // SLOT_ALIGNMENT_BYTES * RECORD_BYTES
