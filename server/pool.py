"""The node's pool: memory that clients map, and the words by which they see that it changed hands.

    pool    | slots ................................................ |   mapped by clients
    words   | moves | generation of slot 0 | of slot 1 | ........... |   which can only read them

The pool is populated in the background, and slots are granted from the part that is.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore import native, shared_memory
from kvstore.errors import TierError
from kvstore.shared_memory import HUGE_PAGE_BYTES, SharedMapping
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.buffers import Bytes
    from kvstore.tiers.base import Piece
    from kvstore.types import Place

_log = logging.getLogger("kvstore.server")

#: Populated in one go, and then told to the core.
_POPULATED_BYTES = 64 << 20


class SharedPool:
    """The DRAM tier of a daemon. `capacity_bytes` is rounded down to huge pages, 2 MiB at least."""

    name = "dram"

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = max(1, capacity_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        units = self.capacity_bytes // SLOT_ALIGNMENT_BYTES
        words_bytes = -(-8 * (1 + units) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        self.words_bytes = words_bytes
        self.fd = shared_memory.create("kvstore-pool", self.capacity_bytes)
        self.words_fd = shared_memory.create("kvstore-words", words_bytes, is_sealed=False)
        self.read_only_fd = shared_memory.read_only(self.fd)
        self.read_only_words_fd = shared_memory.read_only(self.words_fd)
        self._mapping = SharedMapping(self.fd, self.capacity_bytes, is_writable=True)
        self._words_mapping = SharedMapping(self.words_fd, words_bytes, is_writable=True)
        shared_memory.forbid_writers(self.words_fd)
        #: For `Slots`: how often slots changed hands, then their generations.
        self.words: memoryview[int] = self._words_mapping.memory.data.cast("Q")
        self.populated_bytes = 0
        self.huge_bytes = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def view(self, place: Place) -> Bytes:
        """The memory of a place."""
        start = place.offset_bytes
        return self._mapping.memory[start : start + place.length_bytes]

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out, for clients that do not map the pool."""
        native.copy_batch([memory for _, memory in batch], [self.view(p) for p, _ in batch])
        return [Outcome.OK] * len(batch)

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy in, for clients that do not map the pool."""
        native.copy_batch([self.view(p) for p, _ in batch], [memory for _, memory in batch])
        return [Outcome.OK] * len(batch)

    def delete(self, batch: Sequence[Place]) -> list[Outcome]:
        """Nothing to do: whoever is granted a place next overwrites it."""
        return [Outcome.OK] * len(batch)

    def populate(self, on_populated: Callable[[int], None]) -> None:
        """Begin to have the memory, in a thread of its own; `on_populated` hears how far it is.

        Raises TierError for the first part at once, since without any there is no pool.
        """
        first = min(_POPULATED_BYTES, self.capacity_bytes)
        self._mapping.populate(0, first)
        self.populated_bytes = first
        on_populated(first)
        self._thread = threading.Thread(
            target=self._populate_rest, args=(on_populated,), name="kvstore-populate", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Give the memory back, as far as no client has it mapped."""
        self._is_closing = True
        if self._thread is not None:
            self._thread.join()
        self.words.release()
        for mapping in (self._mapping, self._words_mapping):
            mapping.close()
        for fd in (self.fd, self.words_fd, self.read_only_fd, self.read_only_words_fd):
            with suppress(OSError):
                os.close(fd)

    def _populate_rest(self, on_populated: Callable[[int], None]) -> None:
        end = self.populated_bytes
        while end < self.capacity_bytes and not self._is_closing:
            start, end = end, min(end + _POPULATED_BYTES, self.capacity_bytes)
            try:
                self._mapping.populate(start, end)
            except TierError as error:
                _log.warning(
                    "the pool has %d of %d bytes, and stays so: %s",
                    start,
                    self.capacity_bytes,
                    error,
                )
                break
            self.populated_bytes = end
            on_populated(end)
        self._collapse()

    def _collapse(self) -> None:
        """Huge pages, one piece after the other, until the kernel has no more."""
        for start in range(0, self.populated_bytes, _POPULATED_BYTES):
            end = min(start + _POPULATED_BYTES, self.populated_bytes)
            if self._is_closing or not self._mapping.collapse(start, end):
                return
            self.huge_bytes = end
