"""The way to the daemon of this node, found again whenever it was lost."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from kvstore.client.attachment import Attachment
from kvstore.client.away import AwayLink
from kvstore.client.backoff import Backoff
from kvstore.client.greeting import ANSWER_SECONDS, Caller, Incompatible
from kvstore.errors import DaemonUnavailable, StoreClosed, WireError
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.buffers import Bytes
    from kvstore.client.link import Link
    from kvstore.clock import Clock
    from kvstore.messages import Answer, Request
    from kvstore.tiers.base import Piece
    from kvstore.types import Place

_log = logging.getLogger("kvstore.client")


class DaemonLink:
    """A link that outlives daemons. While there is none, every call is a miss."""

    def __init__(self, path: Path, clock: Clock, name: str) -> None:
        self.clock = clock
        self._path = path
        self._caller = Caller(path, clock, name)
        self._backoff = Backoff()
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._away = AwayLink(clock, Outcome.UNAVAILABLE)
        self._pid = os.getpid()
        self._is_closed = False
        self._is_warned = False

    def attached(self) -> Link:
        """The link to the daemon that is there now, or to nowhere."""
        attachment = self._attachment
        if attachment is not None and self._pid == os.getpid() and _is_well(attachment):
            return attachment
        try:
            return self.attach()
        except DaemonUnavailable as error:
            if not self._is_warned:
                self._is_warned = True
                _log.warning("%s: every lookup is a miss meanwhile", error)
            return self._away

    def attach(self) -> Attachment:
        """The same, but raises DaemonUnavailable; during the back-off the one of last time."""
        with self._lock_of_this_process():
            if self._is_closed:
                raise StoreClosed("the store is closed")
            attachment = self._attachment
            if attachment is not None and _is_well(attachment):
                return attachment
            self._backoff.check(self.clock.now())
            try:
                self._attachment = attachment = self._attach_again(attachment)
            except DaemonUnavailable as error:
                self._fail(error)
                raise
            if self._is_warned:
                self._is_warned = False
                _log.warning("attached to the daemon at %s again", self._path)
            self._backoff.succeed()
            return attachment

    def _attach_again(self, before: Attachment | None) -> Attachment:
        if before is not None and not before.is_gone():
            try:
                before.resume(self.clock.now() + ANSWER_SECONDS)
            except DaemonUnavailable:
                if not before.is_over:
                    raise
            else:
                return before
        return Attachment(self._caller, self._backoff)

    def close(self) -> None:
        """End it; every later call is StoreClosed."""
        with self._lock_of_this_process():
            self._is_closed = True
            attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.settle_and_end()

    def inquire(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Ask what only a daemon knows. Raises DaemonUnavailable."""
        attachment = self.attach()
        try:
            return attachment.ask(fields, self.clock.now() + ANSWER_SECONDS)
        except (OSError, WireError) as error:
            raise DaemonUnavailable(f"the daemon at {self._path} does not answer") from error

    # A link itself, for whoever needs the daemon of the moment only.

    def call(self, request: Request) -> Answer:
        """Have a request answered."""
        return self.attached().call(request)

    def call_later(self, request: Request, memory: Sequence[Bytes | None]) -> None:
        """Send a request with the next call."""
        self.attached().call_later(request, memory)

    def check_process(self) -> None:
        """Nothing: a forked child gets an attachment of its own."""

    def view(self, place: Place) -> Bytes:
        """The pool's memory at a place."""
        return self.attached().view(place)

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out of the pool."""
        return self.attached().read(batch)

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy into the pool."""
        return self.attached().write(batch)

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        """The first of `places` that is another's now."""
        return self.attached().first_stale(places, moves)

    def _lock_of_this_process(self) -> threading.Lock:
        if self._pid != os.getpid():
            # A forked child: the parent's sockets and mappings are not its own, and a thread that
            # held the lock does not exist here.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            attachment, self._attachment = self._attachment, None
            self._backoff = Backoff()
            if attachment is not None:
                attachment.leave_to_parent()
        return self._lock

    def _fail(self, error: DaemonUnavailable) -> None:
        reason = Outcome.INCOMPATIBLE if isinstance(error, Incompatible) else Outcome.UNAVAILABLE
        self._away = AwayLink(self.clock, reason)
        self._backoff.fail(self.clock.now())


def _is_well(attachment: Attachment) -> bool:
    return not (attachment.is_silent or attachment.is_gone())
