"""`kvstore bench control`: what a batch costs between a client and its daemon, without payload.

Every figure is CPU time, of both processes together unless it says otherwise: on a busy machine the
clock tells more about the others.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from kvstore.cli.arguments import whole_number

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from kvstore.cli.node import Node
    from kvstore.client.session import Session
    from kvstore.keys import Namespace
    from kvstore.types import BlockKey

SUMMARY = "what a batch of keys costs between a client and its daemon"
DESCRIPTION = """\
Measure the CPU time that a match, and a lease with its release, take in client and daemon together,
and how many such batches one core of a daemon serves for several clients at a time.

It takes about 10 s with the default options. benchmarks/README.md says what each figure means."""

_BLOCK_TOKENS = 16
_SEQUENCES = 64
_WARM_UP_BATCHES = 200
_CAPACITY_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for name, default, meaning in (
        ("--blocks", 32, "blocks of a batch"),
        ("--batches", 300, "batches of a round"),
        ("--rounds", 15, "rounds of one client"),
        ("--clients", 4, "clients at a time in the second part"),
        ("--seconds", 2, "how long these are measured"),
    ):
        parser.add_argument(
            name,
            type=whole_number(1),
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default})",
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and fail if a batch was not answered in full."""
    from kvstore.cli.bench import heading, host
    from kvstore.cli.node import running_daemon

    heading.announce(f"{arguments.rounds} rounds")
    findings: list[str] = []
    with running_daemon(_CAPACITY_BYTES) as node:
        _fill(node.socket_path, arguments.blocks)
        single = _measure_one(node, arguments, findings)
        together = _measure_several(node, arguments, findings)
    names = ("blocks", "batches", "rounds", "clients", "seconds")
    document = {
        **heading.heading("control"),
        "findings": findings,
        "machine": host.describe(),
        "parameters": {name: getattr(arguments, name) for name in names},
        **single,
        **together,
    }
    return heading.conclude(document, _text, as_json=arguments.json)


def _namespace() -> Namespace:
    import kvstore

    layout = kvstore.Layout.gqa(layers=1, kv_heads=1, head_dim=64, dtype="bfloat16")
    return kvstore.Namespace(
        model="kvstore-bench", fingerprint="none", layout=layout, block_tokens=_BLOCK_TOKENS
    )


def _keys(blocks: int) -> list[list[BlockKey]]:
    namespace = _namespace()
    return [namespace.keys([n] * (_BLOCK_TOKENS * blocks)) for n in range(1, _SEQUENCES + 1)]


def _fill(path: Path, blocks: int) -> None:
    import kvstore

    size = _namespace().layout.bytes_per_block(_BLOCK_TOKENS)
    with kvstore.connect(path) as store, store.session(_namespace()) as session:
        for keys in _keys(blocks):
            session.put(keys, [bytes(size)] * len(keys))


def _match(session: Session, keys: list[BlockKey]) -> int:
    return session.match(keys).blocks


def _lease_release(session: Session, keys: list[BlockKey]) -> int:
    lease = session.lease(keys)
    lease.release()
    return lease.blocks


_BATCHES: dict[str, Callable[[Session, list[BlockKey]], int]] = {
    "match": _match,
    "lease_release": _lease_release,
}


def _measure_one(node: Node, arguments: argparse.Namespace, findings: list[str]) -> dict[str, Any]:
    """CPU time a batch of one client: the median over the rounds, and where it is spent."""
    import kvstore

    figures: dict[str, Any] = {}
    sequences = _keys(arguments.blocks)
    with kvstore.connect(node.socket_path) as store, store.session(_namespace()) as session:
        for name, batch in _BATCHES.items():
            _run_batches(session, batch, sequences, _WARM_UP_BATCHES)
            rounds = []
            for _ in range(arguments.rounds):
                gc.collect()
                daemon, client = node.cpu_ns(), time.process_time_ns()
                started = time.perf_counter_ns()
                short = _run_batches(session, batch, sequences, arguments.batches)
                wall_ns = time.perf_counter_ns() - started
                client = time.process_time_ns() - client
                session.match([])  # the daemon has seen the last release
                daemon = node.cpu_ns() - daemon
                rounds.append([ns / arguments.batches / 1e3 for ns in (client, daemon, wall_ns)])
                if short:
                    findings.append(f"{short} batches of {name} were not answered in full")
            both = [client + daemon for client, daemon, _ in rounds]
            clients, daemons, walls = (median(column) for column in zip(*rounds, strict=True))
            prefix = f"{name}_{arguments.blocks}"
            figures |= {
                f"{prefix}_cpu_us": round(median(both), 1),
                f"{prefix}_cpu_us_min": round(min(both), 1),
                f"{prefix}_cpu_us_max": round(max(both), 1),
                f"{prefix}_client_cpu_us": round(clients, 1),
                f"{prefix}_daemon_cpu_us": round(daemons, 1),
                f"{prefix}_wall_us": round(walls, 1),
            }
    return figures


def _run_batches(
    session: Session,
    batch: Callable[[Session, list[BlockKey]], int],
    sequences: list[list[BlockKey]],
    count: int,
) -> int:
    """How many of `count` batches were answered with less than all blocks."""
    return sum(batch(session, sequences[n % _SEQUENCES]) != len(sequences[0]) for n in range(count))


def _measure_several(
    node: Node, arguments: argparse.Namespace, findings: list[str]
) -> dict[str, Any]:
    """Leases and releases of several client processes at a time."""
    context = multiprocessing.get_context("spawn")  # a fork would share what is ours
    ends: list[Connection] = []
    processes = []
    for _ in range(arguments.clients):
        ours, theirs = context.Pipe()
        options = (theirs, node.socket_path, arguments.blocks, arguments.seconds)
        processes.append(context.Process(target=_run_client, args=options, daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    for end in ends:
        end.recv()  # it is ready
    daemon, started = node.cpu_ns(), time.perf_counter_ns()
    for end in ends:
        end.send("go")
    found = [end.recv() for end in ends]
    wall_ns, daemon = time.perf_counter_ns() - started, node.cpu_ns() - daemon
    for process in processes:
        process.join()
    batches = sum(count for count, _, _ in found)
    clients = sum(cpu for _, cpu, _ in found)
    if short := sum(short for _, _, short in found):
        findings.append(f"{short} batches of {arguments.clients} clients were not answered in full")
    return {
        "batches_per_core_s": round(batches / (daemon / 1e9)),
        "batches_per_core_s_of_all": round(batches / ((daemon + clients) / 1e9)),
        "batches_per_s": round(batches / (wall_ns / 1e9)),
        "several_daemon_cpu_us": round(daemon / batches / 1e3, 1),
        "several_client_cpu_us": round(clients / batches / 1e3, 1),
    }


def _run_client(end: Connection, path: Path, blocks: int, seconds: int) -> None:
    """One client in a process of its own: says that it is ready, waits, and works."""
    import kvstore

    sequences = _keys(blocks)
    with kvstore.connect(path) as store, store.session(_namespace()) as session:
        _run_batches(session, _lease_release, sequences, _WARM_UP_BATCHES)
        end.send("ready")
        end.recv()
        count = short = 0
        cpu, stop = time.process_time_ns(), time.perf_counter_ns() + seconds * 10**9
        while time.perf_counter_ns() < stop:
            short += _run_batches(session, _lease_release, sequences, _SEQUENCES)
            count += _SEQUENCES
        end.send((count, time.process_time_ns() - cpu, short))


def _text(document: dict[str, Any]) -> str:
    from kvstore.cli import terminal
    from kvstore.cli.bench.heading import machine_line
    from kvstore.cli.table import columns

    sizes = document["parameters"]
    rows = [["", "CPU us", "min", "max", "client", "daemon", "wall us"]]
    for name in _BATCHES:
        prefix = f"{name}_{sizes['blocks']}"
        fields = ("cpu_us", "cpu_us_min", "cpu_us_max", "client_cpu_us", "daemon_cpu_us", "wall_us")
        rows.append([name, *(f"{document[f'{prefix}_{field}']:.1f}" for field in fields)])
    texts = [
        f"control: batches of {sizes['blocks']} blocks, {sizes['rounds']} rounds of "
        f"{sizes['batches']} batches",
        machine_line(document),
        "\n".join(columns(rows)),
        f"{sizes['clients']} clients that lease and release: "
        f"{document['batches_per_core_s']:,} batches per CPU second of the daemon "
        f"({document['batches_per_core_s_of_all']:,} with the clients' own counted), "
        f"{document['batches_per_s']:,} per second of the clock",
    ]
    return "\n".join(text if "\n" in text else terminal.fill_line(text) for text in texts)
