"""Reads of stored bytes that the core asks its runner for: checksums, now and later."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore.messages import ScrubAnswer, Transfer, TransferKind
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.index import Entry
    from kvstore.messages import ScrubRequest
    from kvstore.residency import Residency


class _Running(NamedTuple):
    """A transfer under way; its entry counts it as a user."""

    kind: TransferKind
    entry: Entry
    request_id: int


class _Scrub:
    """A scrub request whose transfers are under way."""

    __slots__ = ("checked", "corrupt", "is_wanted", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.is_wanted = True
        self.checked = 0
        self.corrupt: list[bytes] = []


class Transfers:
    """The transfers under way. Their entries stay where they are until they are completed."""

    def __init__(self, blocks: Residency) -> None:
        self._blocks = blocks
        self._running: dict[int, _Running] = {}
        self._scrubs: dict[int, _Scrub] = {}
        self._last_id = 0

    def entries(self) -> list[Entry]:
        """What is being read, once for each transfer."""
        return [running.entry for running in self._running.values()]

    def start_checksums(self, entries: Iterable[Entry], request_id: int) -> list[Transfer]:
        """Have entries read that were committed just now, each with one user for this."""
        return [self._start(TransferKind.CHECKSUM, entry, request_id) for entry in entries]

    def start_scrub(self, request_id: int, request: ScrubRequest) -> list[Transfer]:
        """Have blocks read again; [] where none of them is there.

        One whose checksum was never made, because its writer was interrupted, gets it now.
        """
        found = (self._blocks.index.find_ready(request.domain, key) for key in request.keys)
        entries = [e for e in found if e is not None]
        if entries:
            self._scrubs[request_id] = _Scrub(len(entries))
            self._blocks.add_users(entries)
        return [self._start(TransferKind.SCRUB, entry, request_id) for entry in entries]

    def cancel(self, request_id: int) -> None:
        """Nobody waits for that scrub's answer any more; what it began is ended all the same."""
        scrub = self._scrubs.get(request_id)
        if scrub is not None:
            scrub.is_wanted = False

    def complete(
        self, transfer: Transfer, outcome: Outcome, checksum: int | None
    ) -> tuple[int, ScrubAnswer] | None:
        """End a transfer; the answer of its scrub and whose it is, if this was the last of it.

        Ending one twice does nothing: a runner that was interrupted cannot know.
        """
        running = self._running.pop(transfer.transfer_id, None)
        if running is None:
            return None
        if running.kind is TransferKind.SCRUB:
            return self._complete_scrub(running, outcome, checksum)
        running.entry.checksum = checksum
        self._blocks.drop_users((running.entry,))
        return None

    def _start(self, kind: TransferKind, entry: Entry, request_id: int) -> Transfer:
        self._last_id += 1
        self._running[self._last_id] = _Running(kind, entry, request_id)
        return Transfer(self._last_id, kind, entry.place)

    def _complete_scrub(
        self, running: _Running, outcome: Outcome, checksum: int | None
    ) -> tuple[int, ScrubAnswer] | None:
        entry, scrub = running.entry, self._scrubs[running.request_id]
        scrub.left -= 1
        is_read = outcome is Outcome.OK
        scrub.checked += is_read or outcome is Outcome.CORRUPT
        if is_read and entry.checksum is None:
            entry.checksum = checksum
        is_wrong = outcome is Outcome.CORRUPT or (is_read and checksum != entry.checksum)
        if is_wrong and entry.is_ready:  # else it has left meanwhile
            scrub.corrupt.append(entry.key)
            self._blocks.drop(entry, Outcome.CORRUPT)
        self._blocks.drop_users((entry,))
        if scrub.left:
            return None
        del self._scrubs[running.request_id]
        if not scrub.is_wanted:
            return None
        return running.request_id, ScrubAnswer(scrub.checked, scrub.corrupt)
