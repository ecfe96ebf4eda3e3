"""The measurement of one store: memory, collections, and lookups in turns with a plain dict's.

    limit           for each key: one look into a dict of the same keys, and a number from it
    match           the core's answer to how long a prefix of these keys is held
    lease_release   the same, and the blocks are held until a second request
    miss            match of a sequence that nobody has stored

Each is timed `rounds` times in each of two states. Warm: one after another, each of a random
sequence. Cold: before each, the caches are overwritten, as an engine does that computes between two
lookups.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from kvstore.cli.bench.match.pauses import (
    Collections,
    full_collection_ms,
    without_what_was_before,
)
from kvstore.cli.bench.match.residents import BLOCK_TOKENS, OTHER_SEED, Residents, Sequences
from kvstore.messages import LeaseRequest, MatchRequest, ReleaseRequest
from kvstore.types import SINGLE_DOMAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.cli.bench.match.parameters import Trial
    from kvstore.messages import LeaseAnswer, MatchAnswer

MEASUREMENTS = ("limit", "match", "lease_release", "miss")
STATES = ("cold", "warm")
FINDINGS_MAX = 20
#: Fewer, and what the process needs besides makes too large a part of its memory.
ENTRIES_FOR_MEMORY_MIN = 10_000

_WARM_UP_ROUNDS = 1
_LEASE_SECONDS = 30.0
_STATM = Path("/proc/self/statm")


class Sample(NamedTuple):
    """One lookup."""

    wall_ns: int
    cpu_ns: int  # of this thread


def measure(trial: Trial) -> dict[str, Any]:
    """All figures of one store, as plain values. Run it in a process that has done nothing else."""
    sequences = Sequences(trial.entries, trial.sequence_blocks, is_interleaved=trial.is_interleaved)
    scratch = np.zeros(2 * trial.l3_bytes, np.uint8)
    collections = Collections()
    with without_what_was_before():
        full_before_ms = full_collection_ms()
        resident_before = _resident_bytes()
        with collections:
            residents = Residents(trial.entries)
            started = time.process_time()
            residents.fill(sequences)
            fill_seconds = time.process_time() - started
        full_ms = full_collection_ms()
        resident_after = _resident_bytes()
        lookups = _Lookups(trial, sequences, residents, scratch)
        with collections:
            samples = {state: lookups.run(is_cold=state == "cold") for state in STATES}
    counted = lookups.count()
    bytes_per_entry = None
    if resident_before and trial.entries >= ENTRIES_FOR_MEMORY_MIN:
        bytes_per_entry = round((resident_after - resident_before) / trial.entries)
    return {
        "entries": trial.entries,
        "bytes_per_entry": bytes_per_entry,
        **counted,
        "fill_cpu_us_per_block": round(1e6 * fill_seconds / trial.entries, 2),
        "gc_full_ms": round(full_ms - full_before_ms, 3),
        "gc_longest_ms": round(max(collections.longest_ms), 3),
        "gc_longest_ms_by_generation": [round(ms, 3) for ms in collections.longest_ms],
        "gc_collections_by_generation": collections.counts,
        **{
            state: {name: _figures(name, of_state, trial.keys) for name in MEASUREMENTS}
            for state, of_state in samples.items()
        },
        "lookups": lookups.checked,
        "findings": lookups.findings,
    }


class CountingKey(bytes):
    """A key that counts how often tables are asked for it, and how often they compare it."""

    probes = 0
    comparisons = 0

    def __hash__(self) -> int:
        CountingKey.probes += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountingKey.comparisons += 1
        return super().__eq__(other)


class _Lookups:
    """Lookups in one store, and what was wrong with them."""

    def __init__(
        self, trial: Trial, sequences: Sequences, residents: Residents, scratch: np.ndarray
    ) -> None:
        self.findings: list[str] = []
        self.checked = 0
        self._trial = trial
        self._sequences = sequences
        self._residents = residents
        self._scratch = scratch
        self._random = np.random.default_rng(OTHER_SEED)
        self._long_enough = [n for n, each in enumerate(sequences.lengths) if each >= trial.keys]
        # Of keys of its own, made in the same order as those in the store.
        keys = (key for turn in sequences.turns() for key in sequences.keys(*turn))
        self._table = {key: number for number, key in enumerate(keys)}

    def run(self, *, is_cold: bool) -> dict[str, list[Sample]]:
        """The samples of each measurement, by round."""
        samples: dict[str, list[Sample]] = {name: [] for name in MEASUREMENTS}
        for round_number in range(-_WARM_UP_ROUNDS, self._trial.rounds):
            turn = round_number % len(MEASUREMENTS)
            for name in MEASUREMENTS[turn:] + MEASUREMENTS[:turn]:
                if is_cold:
                    self._scratch += 1
                keys = self._keys(is_stored=name != "miss")
                sample, found = _timed(getattr(self, f"_{name}"), keys)
                self._check(name, found, 0 if name == "miss" else len(keys))
                if round_number >= 0:
                    samples[name].append(sample)
        return samples

    def count(self) -> dict[str, float]:
        """How often a lookup asks a table for a key, and compares it with one that is there."""
        keys: list[bytes] = [CountingKey(key) for key in self._keys(is_stored=True)]
        CountingKey.probes = CountingKey.comparisons = 0
        self._check("match", self._match(keys), len(keys))
        return {
            "probes_per_key": CountingKey.probes / len(keys),
            "comparisons_per_key": CountingKey.comparisons / len(keys),
        }

    def _keys(self, *, is_stored: bool) -> list[bytes]:
        count = self._trial.keys
        if is_stored:
            return self._sequences.keys(int(self._random.choice(self._long_enough)), 0, count)
        others = Sequences(count, count, seed=int(self._random.integers(1 << 32)))
        return others.keys(0, 0, count)

    def _check(self, name: str, found: int, expected: int) -> None:
        self.checked += 1
        if found != expected and len(self.findings) < FINDINGS_MAX:
            self.findings.append(
                f"{name} in {self._trial.entries} entries found {found} blocks of {expected}"
            )

    # -- what is measured --------------------------------------------------------------------

    def _limit(self, keys: list[bytes]) -> int:
        get, numbers = self._table.get, []
        for key in keys:
            number = get(key)
            if number is None:
                break
            numbers.append(number)
        return len(numbers)

    def _match(self, keys: list[bytes]) -> int:
        answer = self._residents.ask(MatchRequest(SINGLE_DOMAIN, keys, 0.0))
        return cast("MatchAnswer", answer).blocks

    def _lease_release(self, keys: list[bytes]) -> int:
        tokens = BLOCK_TOKENS * len(keys)
        request = LeaseRequest(SINGLE_DOMAIN, keys, tokens, _LEASE_SECONDS, 0.0)
        lease = cast("LeaseAnswer", self._residents.ask(request))
        self._residents.ask(ReleaseRequest(lease.lease_id))
        return lease.blocks

    _miss = _match


def _timed(look_up: Callable[[list[bytes]], int], keys: list[bytes]) -> tuple[Sample, int]:
    cpu_before = time.thread_time_ns()
    started = time.perf_counter_ns()
    found = look_up(keys)
    wall_ns = time.perf_counter_ns() - started
    return Sample(wall_ns, time.thread_time_ns() - cpu_before), found


def _figures(name: str, samples: dict[str, list[Sample]], keys: int) -> dict[str, float]:
    """The figures of one measurement. Each round is compared with the limit of that round."""
    own = samples[name]
    p50_us, p99_us = np.percentile([sample.wall_ns / 1e3 for sample in own], [50, 99])
    cpu_p50_us, cpu_p99_us = np.percentile([sample.cpu_ns / 1e3 for sample in own], [50, 99])
    figures = {
        "p50_us": p50_us,
        "p99_us": p99_us,
        "cpu_p50_us": cpu_p50_us,
        "cpu_p99_us": cpu_p99_us,
    }
    if name != "miss":  # which ends at its first key
        figures["ns_per_key"] = 1e3 * p50_us / keys
        figures["ratio"] = np.median(
            [
                limit.cpu_ns / sample.cpu_ns
                for limit, sample in zip(samples["limit"], own, strict=True)
            ]
        )
    return {field: round(float(value), 3) for field, value in figures.items()}


def _resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        resident = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return resident * os.sysconf("SC_PAGE_SIZE")
