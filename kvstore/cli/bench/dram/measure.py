"""The measurement: a plain copy, get and put of the same amount of data, in turns.

    the store's pool  | kept: read by limit and get    | replaced: by each put          |
    callers' buffers  | targets of limit and get       | sources of put                 |

In every round each measurement moves one working set, batch by batch, in a random order. Limit and
get copy the same blocks, at the same places of the same pool, to the same buffers in the same
order, so that only the store's own work tells them apart: the limit has the addresses beforehand.
Before each measurement the caches are overwritten.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

import kvstore
from kvstore.buffers import aligned_buffers
from kvstore.cli.bench.dram.payload import Payload
from kvstore.config import Config, DramConfig
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore._open import EmbeddedStore
    from kvstore.buffers import Bytes
    from kvstore.cli.bench.dram.parameters import Parameters
    from kvstore.client.session import Session
    from kvstore.types import BlockKey

MEASUREMENTS = ("limit", "get", "put")
#: Rounds before the first one that counts.
WARM_UP_ROUNDS = 1
FINDINGS_MAX = 20

_BLOCK_TOKENS = 16
_BYTES_PER_ELEMENT = 2  # bfloat16
_UNALIGNED_BYTES = 16
_SEED = 20_261_130  # of the random order, so that two runs do the same


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement in one round."""

    walls_ns: list[int]  # one per batch
    cpu_ns: int  # of all threads of this process
    checksum_cpu_ns: int

    @property
    def wall_ns(self) -> int:
        """Of all batches."""
        return sum(self.walls_ns)


@dataclass(slots=True)
class Outcomes:
    """All samples by measurement and round, and what was wrong.

    `put` is into a full pool, every block at the cost of another; `put_free` into room that was
    made before. They take turns, so each has every second round.
    """

    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    verified_batches: int = 0

    def found(self, what: str) -> None:
        """Keep a finding; the first ones say enough."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(what)

    def add(self, name: str, round_number: int, sample: Sample) -> None:
        """Keep a sample, unless it is of a warm-up round."""
        if round_number >= 0:
            self.samples.setdefault(name, {})[round_number] = sample


def measure(parameters: Parameters) -> Outcomes:
    """Run it all. Outcomes other than `ok` and wrong bytes are findings, not exceptions."""
    layout = kvstore.Layout.gqa(
        layers=1,
        kv_heads=1,
        head_dim=parameters.block_bytes // (2 * _BLOCK_TOKENS * _BYTES_PER_ELEMENT),
        dtype="bfloat16",
    )
    namespace = kvstore.Namespace(
        model="kvstore-bench", fingerprint="none", layout=layout, block_tokens=_BLOCK_TOKENS
    )
    # A whole configuration, so that the environment's settings do not change what is measured.
    config = Config(dram=DramConfig(capacity_bytes=parameters.pool_bytes))
    with (
        kvstore.open(config) as store,
        store.session(namespace) as session,
    ):
        bench = _Bench(parameters, store, session)
        gc.collect()
        gc.freeze()  # what was made so far shall not be looked through in every collection
        try:
            for round_number in range(-WARM_UP_ROUNDS, parameters.rounds):
                bench.run_round(round_number)
        finally:
            gc.unfreeze()
        return bench.outcomes


class _Bench:
    """The state between rounds."""

    def __init__(self, parameters: Parameters, store: EmbeddedStore, session: Session) -> None:
        self.outcomes = Outcomes()
        self._parameters = parameters
        self._store = store
        self._session = session
        self._random = np.random.default_rng(_SEED)
        self._payload = Payload(parameters.block_bytes)
        self._last_sequence = 0
        self._targets = self._make_buffers()
        self._sources = self._make_buffers()
        self._scratch = np.zeros(2 * parameters.l3_bytes, np.uint8)
        self._kept = [self._new_keys() for _ in range(parameters.batches)]
        self._replaced = [self._new_keys() for _ in range(parameters.batches)]
        self._fill()

    def run_round(self, round_number: int) -> None:
        """Measure each once, in an order that changes, and verify in the first and last round."""
        parameters = self._parameters
        order = self._random.permutation(parameters.batches).tolist()
        is_verified = round_number in (0, parameters.rounds - 1)
        previous, self._replaced = self._replaced, [self._new_keys() for _ in self._kept]
        for keys, sources in zip(self._replaced, self._sources, strict=True):
            for key, source in zip(keys, sources, strict=True):
                self._payload.write(key, source)
        has_room = round_number % 2 == 1
        if has_room:
            for keys in previous:
                self._session.delete(keys)
        for keys in self._kept:  # more recently used than what the next put shall evict
            self._session.lease(keys).release()
        turn = round_number % len(MEASUREMENTS)
        for name in MEASUREMENTS[turn:] + MEASUREMENTS[:turn]:
            if name == "limit":
                self.outcomes.add(name, round_number, self._time_limit(order))
            elif name == "get":
                self.outcomes.add(name, round_number, self._time_get(order, is_verified))
            else:
                name_of_put = "put_free" if has_room else "put"
                self.outcomes.add(name_of_put, round_number, self._time_put(order))
        if is_verified:
            self._verify_put()

    # -- what is measured --------------------------------------------------------------------

    def _time_limit(self, order: Sequence[int]) -> Sample:
        """Copy from the pool with nothing but the copy: leases are taken before, given after."""
        with ExitStack() as held:
            leases = [
                held.enter_context(self._session.lease(self._kept[sequence])) for sequence in order
            ]
            pairs = [
                [
                    (target, np.frombuffer(view, np.uint8))
                    for target, view in zip(targets, lease.views, strict=True)
                ]
                for targets, lease in zip(self._targets, leases, strict=True)
            ]

            def copy(batch: int) -> None:
                for target, source in pairs[batch]:
                    np.copyto(target, source)

            sample = self._time(copy)
            pairs.clear()  # or the leases could not be released
        return sample

    def _time_get(self, order: Sequence[int], is_verified: bool) -> Sample:
        session, targets = self._session, self._targets
        keys = [self._kept[sequence] for sequence in order]
        outcomes: list[list[Outcome]] = []

        def get(batch: int) -> None:
            outcomes.append(session.get_into(keys[batch], targets[batch]))

        if is_verified:
            self._overwrite_targets()
        sample = self._time(get)
        self._expect_ok("get", outcomes)
        if is_verified:
            self._compare("get", keys)
        return sample

    def _time_put(self, order: Sequence[int]) -> Sample:
        session = self._session
        keys = [self._replaced[sequence] for sequence in order]
        sources = [self._sources[sequence] for sequence in order]
        outcomes: list[list[Outcome]] = []

        def put(batch: int) -> None:
            outcomes.append(session.put(keys[batch], sources[batch]))

        sample = self._time(put)
        self._expect_ok("put", outcomes)
        return sample

    def _time(self, move: Callable[[int], None]) -> Sample:
        """Time `move` for each batch, from cold caches."""
        self._scratch += 1
        gc.collect()
        walls_ns = []
        checksum_before = self._checksum_cpu_seconds()
        cpu_before = time.process_time_ns()
        for batch in range(self._parameters.batches):
            started = time.perf_counter_ns()
            move(batch)
            walls_ns.append(time.perf_counter_ns() - started)
        cpu_ns = time.process_time_ns() - cpu_before
        checksum_seconds = self._checksum_cpu_seconds() - checksum_before
        return Sample(walls_ns, cpu_ns, round(checksum_seconds * 1e9))

    # -- what is compared --------------------------------------------------------------------

    def _verify_put(self) -> None:
        """Read back what this round's put stored."""
        self._overwrite_targets()
        outcomes = [
            self._session.get_into(keys, targets)
            for keys, targets in zip(self._replaced, self._targets, strict=True)
        ]
        self._expect_ok("get of what was put", outcomes)
        self._compare("put", self._replaced)

    def _compare(self, what: str, keys_of_batches: list[list[BlockKey]]) -> None:
        for batch, (keys, targets) in enumerate(zip(keys_of_batches, self._targets, strict=True)):
            for position, (key, target) in enumerate(zip(keys, targets, strict=True)):
                if not self._payload.is_in(key, target):
                    self.outcomes.found(f"wrong bytes: block {position} of batch {batch} of {what}")
            self.outcomes.verified_batches += 1

    def _expect_ok(self, what: str, outcomes: list[list[Outcome]]) -> None:
        for batch, found in enumerate(outcomes):
            others = sorted({outcome for outcome in found if outcome is not Outcome.OK})
            if others:
                self.outcomes.found(f"{what}: batch {batch} has {', '.join(others)}")

    def _overwrite_targets(self) -> None:
        for targets in self._targets:
            for target in targets:
                target.fill(0)

    # -- what it is measured on --------------------------------------------------------------

    def _new_keys(self) -> list[BlockKey]:
        """The keys of a sequence that nobody has seen, one batch long."""
        self._last_sequence += 1
        tokens = [self._last_sequence] * (_BLOCK_TOKENS * self._parameters.batch_blocks)
        return self._session.namespace.keys(tokens)

    def _make_buffers(self) -> list[list[Bytes]]:
        """One working set of callers' buffers, by batch."""
        parameters = self._parameters
        skip = 0 if parameters.is_aligned else _UNALIGNED_BYTES
        room = parameters.block_bytes + (0 if parameters.is_aligned else SLOT_ALIGNMENT_BYTES)
        end = skip + parameters.block_bytes
        count = parameters.batches * parameters.batch_blocks
        buffers = [buffer[skip:end] for buffer in aligned_buffers(count, room)]
        for buffer in buffers:
            buffer.fill(0)  # so that no measurement pays for page faults
        size = parameters.batch_blocks
        return [buffers[start : start + size] for start in range(0, count, size)]

    def _fill(self) -> None:
        """Fill the pool prompt by prompt, or block by block as many answers that grow at once."""
        sequences = self._kept + self._replaced
        length = self._parameters.batch_blocks
        step = 1 if self._parameters.is_interleaved else length
        sources = aligned_buffers(step, self._parameters.block_bytes)
        ends = [0] * len(sequences)
        turns = np.repeat(np.arange(len(sequences)), length // step)
        for number in self._random.permutation(turns):
            start, ends[number] = ends[number], ends[number] + step
            keys = sequences[number][: ends[number]]
            for key, source in zip(keys[start:], sources, strict=True):
                self._payload.write(key, source)
            self._expect_ok("fill", [self._session.put(keys, sources, start=start)])

    def _checksum_cpu_seconds(self) -> float:
        return cast("float", self._store.stats()["checksum_cpu_seconds"])
