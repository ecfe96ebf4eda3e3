"""`kvstore bench`: what this machine does with the store, against the least that it could take."""

from __future__ import annotations

import argparse
from typing import Protocol

from kvstore.cli import terminal
from kvstore.cli.bench import control, dram, match, shm


class Benchmark(Protocol):
    """What a benchmark's module offers."""

    SUMMARY: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its options."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print, and return the exit code."""
        ...


BENCHMARKS: dict[str, Benchmark] = {"dram": dram, "match": match, "shm": shm, "control": control}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One benchmark each, with options and a help of its own."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        own = benchmarks.add_parser(
            name,
            prog=f"kvstore bench {name}",
            description=terminal.fill(benchmark.DESCRIPTION),
            help=benchmark.SUMMARY,
        )
        benchmark.add_arguments(own)
        # Not False by default, or it would undo `kvstore bench --json dram`.
        own.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="one JSON document as the output",
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and fail if the store did not do what it was measured at."""
    return BENCHMARKS[arguments.benchmark].run(arguments)
