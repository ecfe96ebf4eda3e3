"""`kvstore bench`: what a tier moves per second here, against a plain copy of the same bytes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvstore.cli.arguments import one_of, whole_number
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    import argparse

DEFAULT_BLOCK_SIZE = "1MiB"
DEFAULT_BATCH_BLOCKS = 32
DEFAULT_ROUNDS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "tier", type=one_of("dram"), metavar="TIER", help="the tier to measure: dram"
    )
    parser.add_argument(
        "--block-size",
        default=DEFAULT_BLOCK_SIZE,
        metavar="SIZE",
        help="bytes of one block, a multiple of 4KiB (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=whole_number(1),
        default=DEFAULT_BATCH_BLOCKS,
        metavar="BLOCKS",
        help="blocks per get or put (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=whole_number(2),
        default=DEFAULT_ROUNDS,
        metavar="N",
        help="repetitions, 2 or more; more give a steadier median (default: %(default)s)",
    )
    parser.add_argument(
        "--pool",
        metavar="SIZE",
        help="bytes of the store's memory; half of it is read and half of it rewritten in each "
        "round (default: so that each half is 4 times the L3 cache)",
    )
    parser.add_argument(
        "--unaligned",
        action="store_true",
        help="start the caller's buffers 16 bytes into a page, where NumPy's own often start, "
        "instead of at one",
    )
    parser.add_argument(
        "--interleaved",
        action="store_true",
        help="fill the pool one block at a time, from all sequences in random order, instead of "
        "one prompt at a time: then neighbours in a sequence are not neighbours in memory",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and fail if a byte that was read is not the one that was put."""
    from kvstore.cli.bench import dram, report
    from kvstore.cli.bench.parameters import plan

    parameters = plan(
        block_bytes=_size("--block-size", arguments.block_size),
        batch_blocks=arguments.batch,
        rounds=arguments.rounds,
        pool_bytes=None if arguments.pool is None else _size("--pool", arguments.pool),
        is_aligned=not arguments.unaligned,
        is_interleaved=arguments.interleaved,
    )
    if sys.stderr.isatty():
        print(f"measuring {parameters.rounds} rounds …", file=sys.stderr)
    outcome = dram.measure(parameters)
    document = report.document(parameters, outcome)
    print(json.dumps(document, indent=2) if arguments.json else report.text(document))
    if outcome.findings:
        print(f"kvstore: {outcome.findings[0]}", file=sys.stderr)
        return 1
    return 0


def _size(option: str, text: str) -> int:
    from kvstore.units import parse_bytes

    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
