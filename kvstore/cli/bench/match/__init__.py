"""`kvstore bench match`: what a lookup costs, and the memory of an entry, up to a million."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.cli.arguments import whole_number

if TYPE_CHECKING:
    import argparse

SUMMARY = "what a lookup costs and an entry takes, up to a million entries"
DESCRIPTION = """\
Measure what it costs to look up a prefix in a store of a thousand entries, of ten thousand, and so
on up to --entries, against a plain dict of the same keys; and how much memory an entry takes and
how long the garbage collector stops the process. The index is the real one; no payload is made.

It takes about a minute with the default options. It fails (exit 1) if a lookup found another
number of blocks than there are. benchmarks/README.md says what each figure means."""

DEFAULT_ENTRIES = 1_000_000
DEFAULT_KEYS = 1_024
DEFAULT_ROUNDS = 200
SEQUENCE_BLOCKS = 1_024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--entries",
        type=whole_number(1),
        default=DEFAULT_ENTRIES,
        metavar="N",
        help="blocks of the largest store; the others have 1000, 10000 and so on "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--keys",
        type=whole_number(1),
        default=DEFAULT_KEYS,
        metavar="N",
        help="blocks that one lookup asks for, all of which are there (default: %(default)s)",
    )
    parser.add_argument(
        "--sequence-blocks",
        type=whole_number(1),
        metavar="N",
        help=f"blocks of each sequence in the store (default: {SEQUENCE_BLOCKS}, or --keys if that "
        "is more)",
    )
    parser.add_argument(
        "--rounds",
        type=whole_number(2),
        default=DEFAULT_ROUNDS,
        metavar="N",
        help="lookups of each kind in each store, 2 or more (default: %(default)s)",
    )
    parser.add_argument(
        "--interleaved",
        action="store_true",
        help="fill the stores one block at a time, from all sequences in random order, instead of "
        "one prompt at a time: then neighbours in a sequence are not neighbours in memory",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and fail if a lookup found something else than what is there."""
    from kvstore.cli.bench import heading
    from kvstore.cli.bench.match import report, trials
    from kvstore.cli.bench.match.parameters import plan

    sequence_blocks = arguments.sequence_blocks
    if sequence_blocks is None:
        sequence_blocks = max(SEQUENCE_BLOCKS, arguments.keys)
    parameters = plan(
        entries=arguments.entries,
        keys=arguments.keys,
        sequence_blocks=sequence_blocks,
        rounds=arguments.rounds,
        is_interleaved=arguments.interleaved,
    )
    results = []
    for trial in parameters.trials():
        heading.announce(f"{trial.entries} entries")
        results.append(trials.measure_apart(trial))
    document = report.document(parameters, results)
    return heading.conclude(document, report.text, as_json=arguments.json)
