"""`kvstore replay`: what a policy makes of a trace, at this and that size of the store."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from kvstore.cli import terminal
from kvstore.cli.arguments import one_of, refusal, whole_number
from kvstore.cli.replay.report import Capacity, Report
from kvstore.errors import InvalidRequest
from kvstore.policy import POLICIES, LruPolicy
from kvstore.replay.driver import replay
from kvstore.replay.generate import KINDS, generate
from kvstore.replay.trace import STANDARD_STREAM, create_trace, read_trace, shown_name, write_trace
from kvstore.replay.workload import BLOCK_TOKENS, Mode, workload

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvstore.replay.trace import TraceRequest
    from kvstore.replay.workload import Workload

T = TypeVar("T")

EVERY_POLICY = "all"
DEFAULT_POLICY = LruPolicy.name
DEFAULT_FRACTIONS = ("0.01", "0.03", "0.1", "0.3")
DEFAULT_SEED = 1
DEFAULT_REQUESTS = 3_000
REQUESTS_MAX = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="requests as JSON lines with input_length and hash_ids, plain or gzip; - is standard "
        "input",
    )
    parser.add_argument(
        "--policy",
        action="append",
        type=_list_of(one_of(*POLICIES, EVERY_POLICY)),
        metavar="NAME",
        help=f"{', '.join(POLICIES)} or {EVERY_POLICY}; several with commas (default: "
        f"{DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--capacity-fraction",
        action="append",
        type=_list_of(_fraction),
        metavar="F",
        help="blocks of the store, as a fraction of those that the trace names: 0.03 or 3%%; "
        f"several with commas (default: {','.join(DEFAULT_FRACTIONS)})",
    )
    parser.add_argument(
        "--capacity-blocks",
        action="append",
        type=_list_of(whole_number(1)),
        metavar="N",
        help="the same as a number; several with commas",
    )
    parser.add_argument(
        "--mode",
        type=one_of(*Mode),
        default=Mode.ALL,
        help="all: every block; full: without the final partial ones (default: %(default)s)",
    )
    parser.add_argument(
        "--block-tokens",
        type=whole_number(1),
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens of one block (default: %(default)s)",
    )
    _add_options_of_making(parser)
    parser.epilog = (
        "examples:\n"
        "  kvstore replay --generate chat                        without any trace\n"
        "  kvstore replay trace.jsonl.gz --policy all            which policy suits it\n"
        "  kvstore replay trace.jsonl.gz --capacity-fraction 3%  one size\n\n"
        + terminal.fill(
            "Nothing is stored: the store's own index and policy run without bytes, one request "
            "after the other. 100,000 blocks asked for take about 3 s for each policy and size."
        )
    )


def _add_options_of_making(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--generate",
        type=one_of(*KINDS),
        metavar="KIND",
        help=f"instead of TRACE, make a workload: {' or '.join(KINDS)}",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0),
        metavar="N",
        help=f"of what is made; the same one makes the same (default: {DEFAULT_SEED})",
    )
    parser.add_argument(
        "--requests",
        type=whole_number(1, REQUESTS_MAX),
        metavar="N",
        help=f"how many are made, for about an hour (default: {DEFAULT_REQUESTS})",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write what is made as a trace, and replay nothing; - is standard output",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make or read a workload; write it, or replay it and print what came of it."""
    _check(arguments)
    if arguments.out is not None:
        return _write(arguments)
    requests = list(_made(arguments)) if arguments.generate else read_trace(arguments.trace)
    prepared = workload(requests, Mode(arguments.mode), arguments.block_tokens)
    capacities = _capacities(arguments, prepared)
    policies = _flat(arguments.policy) or [DEFAULT_POLICY]
    if EVERY_POLICY in policies:
        policies = list(POLICIES)
    report = Report(_source(arguments), prepared)
    if not arguments.json:
        report.print_head()
    if sys.stderr.isatty():
        count = len(policies) * len(capacities)
        print(f"replaying {len(requests):,} requests, {count} times …", file=sys.stderr)
    for capacity in capacities:
        for name in policies:
            outcome = replay(prepared, POLICIES[name](), capacity.blocks)
            report.add(capacity, outcome)
            if not arguments.json:
                report.print_row(capacity, outcome)
    if arguments.json:
        print(json.dumps(report.document(), indent=2))
    else:
        report.print_foot()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if arguments.generate is None:
        if arguments.trace is None:
            raise InvalidRequest(
                "TRACE is missing: give a file, or make a workload with --generate chat "
                "(see kvstore replay --help)"
            )
        for option in ("seed", "requests", "out"):
            if getattr(arguments, option) is not None:
                raise InvalidRequest(f"--{option} goes with --generate only")
    elif arguments.trace is not None:
        raise InvalidRequest("--generate makes a workload: leave out TRACE")
    if arguments.out is not None:
        for option in ("policy", "capacity_fraction", "capacity_blocks"):
            if getattr(arguments, option) is not None:
                name = option.replace("_", "-")
                raise InvalidRequest(f"--out replays nothing: leave out --{name}")
        if arguments.json and arguments.out == STANDARD_STREAM:
            raise InvalidRequest("--out - writes the trace where --json would write: give a file")


def _made(arguments: argparse.Namespace) -> Iterator[TraceRequest]:
    seed = DEFAULT_SEED if arguments.seed is None else arguments.seed
    requests = arguments.requests or DEFAULT_REQUESTS
    return generate(arguments.generate, seed, requests, arguments.block_tokens)


def _write(arguments: argparse.Namespace) -> int:
    if arguments.out == STANDARD_STREAM:
        write_trace(_made(arguments), sys.stdout)
        return 0
    try:
        with create_trace(arguments.out) as file:
            count = write_trace(_made(arguments), file)
    except OSError as error:
        raise InvalidRequest(f"--out {arguments.out}: {error.strerror or error}") from error
    if arguments.json:
        print(json.dumps({"trace": arguments.out, "requests": count}, indent=2))
    else:
        print(f"{arguments.out}: {count:,} requests")
    return 0


def _source(arguments: argparse.Namespace) -> str:
    if arguments.generate is None:
        return shown_name(arguments.trace)
    seed = DEFAULT_SEED if arguments.seed is None else arguments.seed
    return f"{arguments.generate}, seed {seed}"


def _capacities(arguments: argparse.Namespace, prepared: Workload) -> list[Capacity]:
    """The sizes to try, in the order in which they were given."""
    footprint = prepared.footprint_blocks
    if not footprint:
        raise InvalidRequest(
            f"there is no block in {_source(arguments)} with --mode {prepared.mode} and blocks of "
            f"{prepared.block_tokens} tokens"
        )
    fractions = _flat(arguments.capacity_fraction)
    numbers = _flat(arguments.capacity_blocks)
    if not fractions and not numbers:
        # Those of them that come to a block at all.
        fractions = [f for f in map(Fraction, DEFAULT_FRACTIONS) if f * footprint >= 1]
        fractions = fractions or [Fraction(1)]
    for blocks in numbers:
        if blocks > footprint:
            raise InvalidRequest(
                f"--capacity-blocks is {blocks}: the trace names {footprint} blocks, and more of "
                f"them make no difference: give 1 to {footprint}"
            )
    for fraction in fractions:
        if fraction * footprint < 1:
            raise InvalidRequest(
                f"--capacity-fraction is {float(fraction):g}: of {footprint} blocks that is less "
                f"than one: give at least {-(-10_000 // footprint) / 10_000:g}"
            )
    return [Capacity(blocks, blocks / footprint) for blocks in numbers] + [
        Capacity(prepared.capacity_blocks(fraction), float(fraction)) for fraction in fractions
    ]


def _list_of(element: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An option's `type`: one value, or several with commas between them."""
    return lambda text: [element(each.strip()) for each in text.split(",")]


def _flat(lists: list[list[T]] | None) -> list[T]:
    """What an option was given, each time that it was given; nothing twice."""
    return list(dict.fromkeys(each for several in lists or () for each in several))


def _fraction(text: str) -> Fraction:
    """`0.03`, `3%` or `1/30`."""
    number, percent, rest = text.partition("%")
    try:
        value = Fraction(number) / (100 if percent else 1)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if rest or not 0 < value <= 1:
        raise refusal(repr(text[:40]), "give a fraction above 0 and up to 1, such as 0.03 or 3%")
    return value
