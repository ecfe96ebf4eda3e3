"""The runner of an embedded store: a lock round the core, and the callers' own threads.

There is no thread of ours. Whoever waits for an answer also wakes up for the deadlines of others;
whoever commits also reads its blocks once more for their checksums.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from kvstore import codec
from kvstore.errors import StoreClosed, StoreForked
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.audit import Audit
    from kvstore.buffers import Bytes
    from kvstore.clock import Clock
    from kvstore.messages import Answer, Request, Step, Transfer
    from kvstore.store import Core
    from kvstore.tiers.base import Piece
    from kvstore.tiers.dram import DramTier
    from kvstore.types import Place

_IDLE_WAIT_SECONDS = 1.0

_runners: weakref.WeakSet[EmbeddedRunner] = weakref.WeakSet()


class EmbeddedRunner:
    """One core over one DRAM tier, shared by the threads of this process."""

    def __init__(self, core: Core, tier: DramTier, clock: Clock) -> None:
        self.clock = clock
        self.checksum_cpu_seconds = 0.0
        self._core = core
        self._tier = tier
        self._condition = threading.Condition()
        self._answers: dict[int, Answer] = {}
        self._last_request_id = 0
        self._is_closed = False
        self._is_forked = False
        _runners.add(self)

    # -- what a session needs ----------------------------------------------------------------

    def call(self, request: Request) -> Answer:
        """Have a request answered, waiting no longer than it says."""
        self._check_usable()
        with self._condition:
            self._check_usable()
            self._last_request_id += 1
            request_id = self._last_request_id
            transfers = self._take(self._core.begin(request_id, request))
            if not transfers and request_id in self._answers:
                return self._answers.pop(request_id)
        try:
            return self._wait(request_id, transfers)
        except BaseException:
            # Interrupted: whatever was granted meanwhile ends at its deadline.
            with self._condition:
                self._core.cancel(request_id)
                self._answers.pop(request_id, None)
            raise

    def view(self, place: Place) -> Bytes:
        """The pool's own memory at a place."""
        return self._tier.view(place)

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out of the pool, outside the lock."""
        return self._tier.read(batch)

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy into the pool, outside the lock."""
        return self._tier.write(batch)

    def is_current(self, place: Place) -> bool:
        """Does the slot still belong to whom it belonged when `place` was handed out?"""
        unit = place.offset_bytes // SLOT_ALIGNMENT_BYTES
        return self._core.generations[unit] == place.generation

    # -- what the owner of the store needs ---------------------------------------------------

    def check(self) -> Audit:
        """Recount everything; raises InvariantViolated."""
        self._check_usable()
        with self._condition:
            self._check_usable()
            return self._core.check()

    def snapshot(self) -> dict[str, object]:
        """Counters and the bytes of the tier by state."""
        self._check_usable()
        with self._condition:
            self._check_usable()
            core = self._core
            return {
                "tiers": {self._tier.name: core.usage()},
                "counters": core.counters.snapshot(),
                "checksum_cpu_seconds": self.checksum_cpu_seconds,
            }

    def resident_keys(self) -> list[tuple[bytes, bytes]]:
        """(domain, key) of every block that a reader could find."""
        with self._condition:
            self._check_usable()
            return self._core.resident_keys()

    def close(self) -> None:
        """Refuse all further calls and give the memory back; views that live keep theirs."""
        if self._is_forked or self._is_closed:
            return
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._tier.close()

    # -- inside ------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        # The fork first: a child may have inherited the lock in a locked state.
        if self._is_forked:
            raise StoreForked(
                "an embedded store does not cross a fork: open one in the child, "
                "or start the child with the 'spawn' method"
            )
        if self._is_closed:
            raise StoreClosed("the store is closed")

    def _take(self, step: Step) -> list[Transfer]:
        """Keep a step's answers for their callers; return its transfers. Holds the lock."""
        self._answers.update(step.answers)
        self._condition.notify_all()
        return step.transfers

    def _wait(self, request_id: int, transfers: list[Transfer]) -> Answer:
        while True:
            results = self._run(transfers)
            with self._condition:
                transfers = []
                for transfer, outcome, checksum in results:
                    transfers += self._take(self._core.complete(transfer, outcome, checksum))
                if transfers:
                    continue
                if request_id in self._answers:
                    return self._answers.pop(request_id)
                self._check_usable()
                transfers = self._sleep()

    def _sleep(self) -> list[Transfer]:
        """Wait for news or for the core's next deadline. Holds the lock."""
        deadline = self._core.next_deadline()
        seconds = _IDLE_WAIT_SECONDS if deadline is None else deadline - self.clock.now()
        self.clock.wait(self._condition, max(0.0, seconds))
        return self._take(self._core.tick(self.clock.now()))

    def _run(self, transfers: list[Transfer]) -> list[tuple[Transfer, Outcome, int | None]]:
        """Read what the core wants read, outside the lock: the core protects it meanwhile."""
        if not transfers:
            return []
        results: list[tuple[Transfer, Outcome, int | None]] = []
        started = time.thread_time()
        try:
            for transfer in transfers:
                found = codec.checksum(self._tier.view(transfer.place))
                results.append((transfer, Outcome.OK, found))
        finally:
            cpu_seconds = time.thread_time() - started
            with self._condition:
                self.checksum_cpu_seconds += cpu_seconds
                # Interrupted: the core must not wait for the rest.
                if len(results) < len(transfers):
                    for transfer, outcome, checksum in results:
                        self._take(self._core.complete(transfer, outcome, checksum))
                    for transfer in transfers[len(results) :]:
                        self._take(self._core.complete(transfer, Outcome.UNAVAILABLE, None))
        return results


def _mark_forked() -> None:
    for runner in _runners:
        runner._is_forked = True


os.register_at_fork(after_in_child=_mark_forked)
