"""`kvstore bench shm`: reading out of a daemon's pool, against a plain copy out of the same pool.

    the daemon's pool, mapped  | kept: read by limit and by get, in turns |
    this process's buffers     | targets of both                          |

As in `bench dram`, each round moves the working set once by each way, batch by batch, in a random
order and from cold caches. The CPU time of both processes counts.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from kvstore.cli.arguments import whole_number
from kvstore.types import Outcome

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from kvstore.buffers import Bytes
    from kvstore.cli.bench.dram.parameters import Parameters
    from kvstore.cli.node import Node
    from kvstore.client.session import Session
    from kvstore.types import BlockKey

SUMMARY = "what a client reads out of the daemon's pool per second, against a plain copy"
DESCRIPTION = """\
Measure what get_into moves per second out of a daemon's pool, with client and daemon apart,
against the client's own plain copy of the same bytes out of the same mapping. The CPU time of both
processes counts.

It takes 10 to 30 s with the default options. It fails (exit 1) if one byte that was read is not the
byte that was put. benchmarks/README.md says what each figure means."""

_BLOCK_TOKENS = 16
_BYTES_PER_ELEMENT = 2  # bfloat16
_SEED = 20_261_130
_WARM_UP_ROUNDS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--block-size",
        default="1MiB",
        metavar="SIZE",
        help="bytes of one block, a multiple of 4KiB (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=whole_number(1),
        default=32,
        metavar="BLOCKS",
        help="blocks per get (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=whole_number(2),
        default=60,
        metavar="N",
        help="repetitions, 2 or more; more give a steadier median (default: %(default)s)",
    )
    parser.add_argument(
        "--pool",
        metavar="SIZE",
        help="bytes of the daemon's memory; half of it is read in each round (default: so that "
        "this half is 4 times the L3 cache)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and fail if a byte that was read is not the one that was put."""
    from kvstore.cli.bench import heading, host
    from kvstore.cli.bench.dram.parameters import plan
    from kvstore.cli.node import running_daemon

    parameters = plan(
        block_bytes=_size("--block-size", arguments.block_size),
        batch_blocks=arguments.batch,
        rounds=arguments.rounds,
        pool_bytes=None if arguments.pool is None else _size("--pool", arguments.pool),
    )
    heading.announce(f"{parameters.rounds} rounds")
    with running_daemon(parameters.pool_bytes) as node:
        outcomes = _measure(parameters, node)
    document = {
        **heading.heading("shm"),
        "verified": outcomes.verified_batches > 0 and not outcomes.findings,
        "verified_batches": outcomes.verified_batches,
        "findings": outcomes.findings,
        "cold": parameters.is_cold,
        "machine": host.describe(),
        "parameters": {
            "block_bytes": parameters.block_bytes,
            "batch_blocks": parameters.batch_blocks,
            "batches_per_round": parameters.batches,
            "rounds": parameters.rounds,
            "pool_bytes": parameters.pool_bytes,
            "pool_huge_bytes": node.huge_bytes,
            "working_set_bytes": parameters.working_set_bytes,
        },
        **{name: _figures(name, outcomes, parameters) for name in ("limit", "get")},
    }
    return heading.conclude(document, _text, as_json=arguments.json)


@dataclass(frozen=True, slots=True)
class _Sample:
    """One way in one round."""

    walls_ns: list[int]  # one per batch
    client_cpu_ns: int
    daemon_cpu_ns: int

    @property
    def cpu_ns(self) -> int:
        """Of both processes."""
        return self.client_cpu_ns + self.daemon_cpu_ns


@dataclass(slots=True)
class _Outcomes:
    samples: dict[str, list[_Sample]] = field(default_factory=lambda: {"limit": [], "get": []})
    findings: list[str] = field(default_factory=list)
    verified_batches: int = 0


def _measure(parameters: Parameters, node: Node) -> _Outcomes:
    import kvstore

    layout = kvstore.Layout.gqa(
        layers=1,
        kv_heads=1,
        head_dim=parameters.block_bytes // (2 * _BLOCK_TOKENS * _BYTES_PER_ELEMENT),
        dtype="bfloat16",
    )
    namespace = kvstore.Namespace(
        model="kvstore-bench", fingerprint="none", layout=layout, block_tokens=_BLOCK_TOKENS
    )
    with kvstore.connect(node.socket_path) as store, store.session(namespace) as session:
        bench = _Bench(parameters, node, session)
        gc.collect()
        gc.freeze()
        try:
            for round_number in range(-_WARM_UP_ROUNDS, parameters.rounds):
                bench.run_round(round_number)
        finally:
            gc.unfreeze()
        return bench.outcomes


class _Bench:
    """The state between rounds."""

    def __init__(self, parameters: Parameters, node: Node, session: Session) -> None:
        import numpy as np

        from kvstore.buffers import aligned_buffers
        from kvstore.cli.bench.dram.payload import Payload

        self.outcomes = _Outcomes()
        self._parameters = parameters
        self._node = node
        self._session = session
        self._random = np.random.default_rng(_SEED)
        self._payload = Payload(parameters.block_bytes)
        size = parameters.batch_blocks
        buffers = aligned_buffers(parameters.batches * size, parameters.block_bytes)
        for buffer in buffers:
            buffer.fill(0)  # so that no measurement pays for faults
        self._targets = [buffers[start : start + size] for start in range(0, len(buffers), size)]
        self._scratch = np.zeros(2 * parameters.l3_bytes, np.uint8)
        self._keys = [
            session.namespace.keys([number] * (_BLOCK_TOKENS * size))
            for number in range(1, parameters.batches + 1)
        ]
        for keys in self._keys:
            for key, target in zip(keys, self._targets[0], strict=True):
                self._payload.write(key, target)
            self._expect_ok("fill", [session.put(keys, self._targets[0])])

    def run_round(self, round_number: int) -> None:
        """Measure both ways, the one or the other first; verify in the first and last round."""
        order = self._random.permutation(self._parameters.batches).tolist()
        is_verified = round_number in (0, self._parameters.rounds - 1)
        ways = [("limit", self._time_limit), ("get", self._time_get)]
        for name, way in ways if round_number % 2 else reversed(ways):
            sample = way([self._keys[number] for number in order], is_verified)
            if round_number >= 0:
                self.outcomes.samples[name].append(sample)

    def _time_limit(self, keys: Sequence[list[BlockKey]], _is_verified: bool) -> _Sample:
        import numpy as np

        with ExitStack() as held:
            leases = [held.enter_context(self._session.lease(batch)) for batch in keys]
            pairs = [
                [(t, np.frombuffer(v, np.uint8)) for t, v in zip(targets, lease.views, strict=True)]
                for targets, lease in zip(self._targets, leases, strict=True)
            ]

            def copy(batch: int) -> None:
                for target, source in pairs[batch]:
                    np.copyto(target, source)

            sample = self._time(copy)
            pairs.clear()  # or the leases could not be released
        return sample

    def _time_get(self, keys: Sequence[list[BlockKey]], is_verified: bool) -> _Sample:
        outcomes: list[list[Outcome]] = []

        def get(batch: int) -> None:
            outcomes.append(self._session.get_into(keys[batch], self._targets[batch]))

        if is_verified:
            for target in (each for targets in self._targets for each in targets):
                target.fill(0)
        sample = self._time(get)
        self._expect_ok("get", outcomes)
        if is_verified:
            self._compare(keys)
        return sample

    def _time(self, move: Callable[[int], None]) -> _Sample:
        """Time `move` for each batch, from cold caches."""
        self._scratch += 1
        gc.collect()
        walls_ns = []
        daemon_before, client_before = self._node.cpu_ns(), time.process_time_ns()
        for batch in range(self._parameters.batches):
            started = time.perf_counter_ns()
            move(batch)
            walls_ns.append(time.perf_counter_ns() - started)
        client_ns = time.process_time_ns() - client_before
        return _Sample(walls_ns, client_ns, self._node.cpu_ns() - daemon_before)

    def _compare(self, keys_of_batches: Sequence[list[BlockKey]]) -> None:
        batches: zip[tuple[list[BlockKey], list[Bytes]]] = zip(
            keys_of_batches, self._targets, strict=True
        )
        for number, (keys, targets) in enumerate(batches):
            for position, (key, target) in enumerate(zip(keys, targets, strict=True)):
                if not self._payload.is_in(key, target):
                    self.outcomes.findings.append(
                        f"wrong bytes: block {position} of batch {number} of get"
                    )
            self.outcomes.verified_batches += 1

    def _expect_ok(self, what: str, outcomes: list[list[Outcome]]) -> None:
        others = {outcome for batch in outcomes for outcome in batch} - {Outcome.OK}
        if others:
            self.outcomes.findings.append(f"{what} has {', '.join(sorted(others))}")


def _figures(name: str, outcomes: _Outcomes, parameters: Parameters) -> dict[str, float]:
    """The figures of one way; each round is compared with the limit of that round."""
    import numpy as np

    own, limits = outcomes.samples[name], outcomes.samples["limit"]
    payload = parameters.working_set_bytes
    ratios = [limit.cpu_ns / each.cpu_ns for each, limit in zip(own, limits, strict=True)]
    walls = [
        sum(limit.walls_ns) / sum(each.walls_ns) for each, limit in zip(own, limits, strict=True)
    ]
    p50, p99 = np.percentile([wall / 1e6 for each in own for wall in each.walls_ns], [50, 99])
    figures = {
        "gb_per_s": median(payload / sum(each.walls_ns) for each in own),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "wall_ratio": median(walls),
        "cpu_s_per_gb": median(each.cpu_ns / payload for each in own),
        "client_cpu_s_per_gb": median(each.client_cpu_ns / payload for each in own),
        "daemon_cpu_s_per_gb": median(each.daemon_cpu_ns / payload for each in own),
        "p50_ms": float(p50),
        "p99_ms": float(p99),
    }
    return {key: round(value, 4) for key, value in figures.items()}


_TITLES = {
    "gb_per_s": "GB/s",
    "ratio": "ratio",
    "ratio_min": "min",
    "ratio_max": "max",
    "wall_ratio": "wall",
    "cpu_s_per_gb": "CPU s/GB",
    "daemon_cpu_s_per_gb": "daemon",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
}
_DIGITS = {"gb_per_s": 1, "p50_ms": 2, "p99_ms": 2}


def _text(document: dict[str, Any]) -> str:
    from kvstore.cli import terminal
    from kvstore.cli.bench.heading import machine_line
    from kvstore.cli.table import columns
    from kvstore.units import shown_bytes

    sizes = document["parameters"]
    rows = [
        [name, *(f"{document[name][figure]:.{_DIGITS.get(figure, 3)}f}" for figure in _TITLES)]
        for name in ("limit", "get")
    ]
    verified = f"Verified: {document['verified_batches']} batches had exactly the bytes put."
    if not document["verified"]:
        verified = f"NOT VERIFIED: {(document['findings'] or ['nothing was compared'])[0]}"
    texts = [
        f"shm: blocks of {shown_bytes(sizes['block_bytes'])}, {sizes['batch_blocks']} per batch, "
        f"{sizes['rounds']} rounds of {shown_bytes(sizes['working_set_bytes'])} each, "
        f"{shown_bytes(sizes['pool_huge_bytes'])} of the pool's {shown_bytes(sizes['pool_bytes'])} "
        "in huge pages",
        machine_line(document),
        "\n".join(columns([["", *_TITLES.values()], *rows])),
        "ratio: payload per CPU second of client and daemon, against the limit's in the same "
        "round; median, min and max over the rounds. wall: the same per second of the clock. "
        "daemon: its part of the CPU s/GB.",
        verified,
    ]
    if not document["cold"]:
        texts.append("WARNING: the working set is less than 4 times the L3 cache.")
    return "\n".join(text if "\n" in text else terminal.fill_line(text) for text in texts)


def _size(option: str, text: str) -> int:
    from kvstore.errors import ConfigError
    from kvstore.units import parse_bytes

    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
