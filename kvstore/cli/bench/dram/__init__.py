"""`kvstore bench dram`: what the tier moves here, against a plain copy of the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.cli.arguments import whole_number
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    import argparse

SUMMARY = "what the DRAM tier moves per second, against a plain copy"
DESCRIPTION = """\
Measure what the DRAM tier moves per second through the SDK, against a plain copy of the same bytes.

It takes 10 to 30 s with the default options. It fails (exit 1) if one byte that was read is not the
byte that was put. benchmarks/README.md says what each figure means."""

DEFAULT_BLOCK_SIZE = "1MiB"
DEFAULT_BATCH_BLOCKS = 32
DEFAULT_ROUNDS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
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
    from kvstore.cli.bench import heading
    from kvstore.cli.bench.dram import report
    from kvstore.cli.bench.dram.measure import measure
    from kvstore.cli.bench.dram.parameters import plan

    parameters = plan(
        block_bytes=_size("--block-size", arguments.block_size),
        batch_blocks=arguments.batch,
        rounds=arguments.rounds,
        pool_bytes=None if arguments.pool is None else _size("--pool", arguments.pool),
        is_aligned=not arguments.unaligned,
        is_interleaved=arguments.interleaved,
    )
    heading.announce(f"{parameters.rounds} rounds")
    document = report.document(parameters, measure(parameters))
    return heading.conclude(document, report.text, as_json=arguments.json)


def _size(option: str, text: str) -> int:
    from kvstore.units import parse_bytes

    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
