"""The runner of an embedded store: a lock round the core, and the callers' own threads.

There is no thread of ours. Whoever waits for an answer also wakes up for the deadlines of others;
whoever commits also reads its blocks once more for their checksums.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from kvstore import codec
from kvstore.errors import StoreBroken, StoreClosed, StoreForked, StoreReentered
from kvstore.messages import AbortRequest, LeaseAnswer, ReleaseRequest, ReserveAnswer
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.audit import Audit
    from kvstore.buffers import Bytes
    from kvstore.clock import Clock
    from kvstore.messages import Answer, Request, Step, Transfer
    from kvstore.store import Core
    from kvstore.tiers.base import Piece
    from kvstore.tiers.dram import DramTier
    from kvstore.types import Place

_IDLE_WAIT_SECONDS = 1.0
#: References to an array that is in one list only, as `_is_in_use` sees it: the list's, those of
#: the loop over it, of the parameter, and getrefcount's own.
_LONE_REFERENCES = 4

_runners: weakref.WeakSet[EmbeddedRunner] = weakref.WeakSet()


class EmbeddedRunner:
    """One core over one DRAM tier, shared by the threads of this process."""

    def __init__(self, core: Core, tier: DramTier, clock: Clock) -> None:
        self.clock = clock
        self._core = core
        self._tier = tier
        # Reentrant, so that a call from within a call is refused instead of waiting for itself.
        self._lock = threading.RLock()
        self._is_stepping = False
        self._news = threading.Condition(self._lock)
        self._sleepers = 0
        self._wake_at = 0.0  # when the next of them wakes up by itself
        self._slots = core.slots
        self._answers: dict[int, Answer] = {}
        self._last_request_id = 0
        self._checksum_cpu_seconds = 0.0
        # Transfers to run, and what is left here without the lock and worked off by whoever holds
        # it next: their results, and what destructors have to say.
        self._work: deque[Transfer] = deque()
        self._results: deque[tuple[Transfer, Outcome, int | None]] = deque()
        self._later: deque[tuple[Request, Sequence[Bytes | None]]] = deque()
        self._is_closed = False
        self._is_forked = False
        self._is_broken = False
        _runners.add(self)

    # -- what a session needs ----------------------------------------------------------------

    def attached(self) -> EmbeddedRunner:
        """Itself: there is only one."""
        return self

    def call(self, request: Request) -> Answer:
        """Have a request answered, waiting no longer than it says."""
        self.check_usable()
        request_id = 0
        try:
            with self._lock:
                self.check_usable()
                if self._results or self._later:
                    self._settle()
                self._last_request_id = request_id = self._last_request_id + 1
                step = self._step(self._core.begin, request_id, request)
                if len(step.answers) == 1 and not step.transfers:
                    answered, answer = step.answers[0]
                    if answered == request_id:
                        if self._sleepers:
                            self._wake_sleepers(step)
                        return answer
                self._take(step)
            return self._wait(request_id)
        except BaseException:
            self._give_up(request_id)
            raise

    def call_later(self, request: Request, memory: Sequence[Bytes | None]) -> None:
        """Send a request with the next call, once nobody refers to `memory`. Takes no lock."""
        self._later.append((request, memory))

    def check_process(self) -> None:
        """Raise StoreForked in a forked child."""
        if self._is_forked:
            self.check_usable()

    def view(self, place: Place) -> Bytes:
        """The pool's own memory at a place."""
        self.check_usable()
        return self._tier.view(place)

    def read(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy out of the pool, outside the lock."""
        self.check_usable()
        return self._tier.read(batch)

    def write(self, batch: Sequence[Piece]) -> list[Outcome]:
        """Copy into the pool, outside the lock."""
        self.check_usable()
        return self._tier.write(batch)

    def first_stale(self, places: Sequence[Place], moves: int) -> int:
        """The first of `places` whose slot is no longer whose it was; their number if none."""
        if self._is_forked:
            return 0
        if self._slots.moves == moves:
            return len(places)
        generations = self._slots.generations
        for position, place in enumerate(places):
            if generations[place.offset_bytes // SLOT_ALIGNMENT_BYTES] != place.generation:
                return position
        return len(places)

    # -- what the owner of the store needs ---------------------------------------------------

    def check(self) -> Audit:
        """Recount everything; raises InvariantViolated."""
        self.check_usable()
        with self._lock:
            self._bring_up_to_date()
            return self._core.check()

    def snapshot(self) -> dict[str, object]:
        """Counters and the bytes of the tier by state."""
        self.check_usable()
        with self._lock:
            self._bring_up_to_date()
            core = self._core
            return {
                "tiers": {self._tier.name: core.usage()},
                "counters": core.counters.snapshot(),
                "checksum_cpu_seconds": self._checksum_cpu_seconds,
            }

    def resident_keys(self) -> list[tuple[bytes, bytes]]:
        """(domain, key) of every block that a reader could find."""
        self.check_usable()
        with self._lock:
            self._bring_up_to_date()
            return self._core.resident_keys()

    def close(self) -> None:
        """Refuse all further calls and give the memory back; views that live keep theirs."""
        if self._is_forked or self._is_closed:
            return
        with self._lock:
            self._is_closed = True
            self._news.notify_all()
        self._tier.close()

    # -- inside ------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise the typed error of a store that cannot be used: closed, forked, broken, busy."""
        if not (self._is_forked or self._is_closed or self._is_broken or self._is_stepping):
            return
        # The fork first: a child may have inherited the lock in a locked state.
        if self._is_forked:
            raise StoreForked(
                "an embedded store does not cross a fork: open one in the child, "
                "or start the child with the 'spawn' method"
            )
        if self._is_closed:
            raise StoreClosed("the store is closed")
        if self._is_broken:
            raise StoreBroken(
                "an earlier call was interrupted in the middle of a change, so the store's state "
                "cannot be trusted any more: close it and open another one"
            )
        # Another thread that is in mid-step lets go of the lock before this one gets it.
        with self._lock:
            if self._is_stepping:
                raise StoreReentered(
                    "the store was called by a destructor or a signal handler that interrupted "
                    "another call to it: leave that to the deadline, or to another thread"
                )

    def _step(self, event: Callable[..., Step], *arguments: object) -> Step:
        """Let the core take one step. Holds the lock.

        A step that does not come to its end (Ctrl-C is raised anywhere) leaves half a change.
        """
        self._is_stepping = True
        try:
            step = event(*arguments)
        except BaseException:
            self._is_broken = True
            self._news.notify_all()
            raise
        finally:
            self._is_stepping = False
        return step

    def _take(self, step: Step) -> None:
        """Keep a step's answers for their callers, its transfers for `_wait`. Holds the lock."""
        self._answers.update(step.answers)
        self._work.extend(step.transfers)
        if self._sleepers:
            self._wake_sleepers(step)

    def _wake_sleepers(self, step: Step) -> None:
        """Wake those who wait if there is an answer, or a deadline before the one they wait for."""
        deadline = self._core.next_deadline()
        if step.answers or (deadline is not None and deadline < self._wake_at):
            self._news.notify_all()

    def _ask(self, request: Request) -> None:
        """Have a request done that is answered at once, for nobody. Holds the lock."""
        self._last_request_id = request_id = self._last_request_id + 1
        self._take(self._step(self._core.begin, request_id, request))
        self._answers.pop(request_id)

    def _settle(self) -> None:
        """Work off what was left without the lock. Holds the lock."""
        while self._results:
            self._take(self._step(self._core.complete, *self._results.popleft()))
        waiting, self._later = self._later, deque()
        for request, memory in waiting:
            if any(_is_in_use(array) for array in memory if array is not None):
                self._later.append((request, memory))
            else:
                self._ask(request)

    def _bring_up_to_date(self) -> None:
        """End what is due, so that a look at the state does not see it. Holds the lock."""
        self.check_usable()
        self._settle()
        self._take(self._step(self._core.tick, self.clock.now()))

    def _wait(self, request_id: int) -> Answer:
        while True:
            cpu_seconds = self._run()
            with self._lock:
                self._checksum_cpu_seconds += cpu_seconds
                self._settle()
                if self._work:
                    continue
                if request_id in self._answers:
                    return self._answers.pop(request_id)
                self.check_usable()
                self._sleep()

    def _sleep(self) -> None:
        """Wait for news or for the core's next deadline. Holds the lock."""
        deadline = self._core.next_deadline()
        now = self.clock.now()
        self._wake_at = now + _IDLE_WAIT_SECONDS if deadline is None else deadline
        self._sleepers += 1
        try:
            self.clock.wait(self._news, max(0.0, self._wake_at - now))
        finally:
            self._sleepers -= 1
        now = self.clock.now()
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= now:
            self._take(self._step(self._core.tick, now))

    def _run(self) -> float:
        """Read what the core wants read, outside the lock: the core protects it meanwhile.

        Returns the CPU seconds it took. Interrupted, it still reports what it had begun.
        """
        if not self._work:
            return 0.0
        started = time.thread_time()
        while self._work:
            try:
                transfer = self._work.popleft()
            except IndexError:
                break  # another thread was faster
            outcome, found = Outcome.UNAVAILABLE, None
            try:
                found = codec.checksum(self._tier.view(transfer.place))
                outcome = Outcome.OK
            finally:
                self._results.append((transfer, outcome, found))
        return time.thread_time() - started

    def _give_up(self, request_id: int) -> None:
        """A caller was interrupted: forget its request, and give back what it was granted."""
        with self._lock:
            if self._is_forked or self._is_closed or self._is_broken or self._is_stepping:
                return
            self._settle()
            self._take(self._step(self._core.cancel, request_id))
            answer = self._answers.pop(request_id, None)
            if isinstance(answer, LeaseAnswer):
                self._ask(ReleaseRequest(answer.lease_id))
            elif isinstance(answer, ReserveAnswer):
                self._ask(AbortRequest(answer.reservation_id))


def _is_in_use(array: Bytes) -> bool:
    """Does anybody but the one sequence that it came in refer to this array?"""
    return sys.getrefcount(array) > _LONE_REFERENCES


def _mark_forked() -> None:
    for runner in _runners:
        runner._is_forked = True


os.register_at_fork(after_in_child=_mark_forked)
