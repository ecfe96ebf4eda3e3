"""The DRAM tier: one mapping, populated at the start, in huge pages where the system gives them."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvstore import native
from kvstore.errors import ConfigError, TierError
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.buffers import Bytes
    from kvstore.tiers.base import Piece

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
# linux/mman.h; Python 3.11's mmap has no names for them.
_MADV_WIPEONFORK = 18  # since 4.14
_MADV_POPULATE_WRITE = 23  # since 5.14

#: References to an array that only one variable and getrefcount itself refer to.
_LONE_REFERENCES = 2

#: Mappings of closed tiers: addresses without memory.
_retired: list[mmap.mmap] = []


class DramTier:
    """`capacity_bytes` of this process's memory.

    The memory is the tier's; views of it stay valid while they live, also after `close`. A forked
    child finds zeros there: with its contents, copy-on-write would charge the parent for every
    later put; without the mapping, a view in the child would crash it.
    """

    name = "dram"

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES
        try:
            # Room to begin at a huge page, wherever the kernel puts the mapping.
            mapping = mmap.mmap(
                -1, self._capacity_bytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise ConfigError(
                f"no memory for a DRAM tier of {self._capacity_bytes} bytes: {error}"
            ) from error
        whole = np.frombuffer(mapping, np.uint8)
        skip = -whole.ctypes.data % _HUGE_PAGE_BYTES
        self._whole: Bytes | None = whole
        self._memory: Bytes | None = whole[skip : skip + self._capacity_bytes]
        self._mapping = mapping
        self._populate(mapping, self._memory, skip)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all places, a multiple of 4 KiB."""
        return self._capacity_bytes

    def view(self, place: Place) -> Bytes:
        """The memory of a place, without a copy. Whoever writes to it must hold a reservation."""
        return self._open_memory()[place.offset_bytes : place.offset_bytes + place.length_bytes]

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out. Never misses: whether the bytes were still the block's, its reader checks."""
        native.copy_batch([memory for _, memory in batch], self._views(batch))
        return [Outcome.OK] * len(batch)

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy in."""
        native.copy_batch(self._views(batch), [memory for _, memory in batch])
        return [Outcome.OK] * len(batch)

    def delete(self, batch: Sequence[Place]) -> list[Outcome]:
        """Nothing to do: a place is memory, and whoever is granted it next overwrites it."""
        self._open_memory()
        return [Outcome.OK] * len(batch)

    def close(self) -> None:
        """Give the memory back, at once or when the last view is gone.

        The addresses are kept: a tensor over a view that was released, which nobody can see, then
        reads zeros and does not crash.
        """
        whole, self._whole, self._memory = self._whole, None, None
        # Every view refers to the array over the whole mapping.
        if whole is not None and sys.getrefcount(whole) <= _LONE_REFERENCES:
            with suppress(OSError):
                self._mapping.madvise(mmap.MADV_DONTNEED)
            _retired.append(self._mapping)

    def _open_memory(self) -> Bytes:
        memory = self._memory
        if memory is None:
            raise TierError("the DRAM tier is closed")
        return memory

    def _views(self, batch: Sequence[Piece]) -> list[Bytes]:
        memory = self._open_memory()
        return [
            memory[place.offset_bytes : place.offset_bytes + place.length_bytes]
            for place, _ in batch
        ]

    def _populate(self, mapping: mmap.mmap, memory: Bytes, skip: int) -> None:
        """Have every page now, so that no put pays for a page fault."""
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with suppress(OSError):  # a kernel without it works, slower
                mapping.madvise(advice)
        system_page = mmap.PAGESIZE
        start = skip // system_page * system_page
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, self._capacity_bytes)
        except OSError:
            # Before Linux 5.14, or memory is short: touching each page gives the same, or the
            # system's own answer to a lack of memory.
            memory[::system_page] = 0
