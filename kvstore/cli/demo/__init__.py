"""`kvstore demo`: one model, with and without the store. The same tokens, sooner, and why."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from kvstore.cli import terminal
from kvstore.cli.arguments import whole_number

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvstore.cli.demo.display import Display
    from kvstore.cli.demo.parameters import Parameters
    from kvstore.cli.demo.runs import Measurement

#: More than any machine has cores; torch takes any number, and fails to start so many.
THREADS_MAX = 1_024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for option, default, number, meaning in (
        ("--prompt-tokens", 2048, whole_number(32), "tokens of the first prompt"),
        ("--new-tokens", 16, whole_number(1), "tokens of each answer"),
        ("--layers", 12, whole_number(1), "layers of the model"),
        ("--hidden", 768, whole_number(64), "hidden size of the model, a multiple of 64"),
        ("--threads", None, whole_number(1, THREADS_MAX), "CPU threads of the engine"),
    ):
        shown = "torch's own choice" if default is None else str(default)
        parser.add_argument(
            option,
            type=number,
            default=default,
            metavar="N",
            help=f"{meaning} (default: {shown})",
        )
    parser.add_argument(
        "--embedded",
        action="store_true",
        help="only the first part, with the store inside the engine's process",
    )
    parser.epilog = terminal.fill(
        "Then two engine processes do the same over a daemon, the second one warm from the first. "
        "At the default sizes it takes one to two minutes on two cores. It fails (exit 1) "
        "if a token differs, or if a warm first token is not 10 times sooner although the prompt "
        "has 2,048 tokens or more and takes 1 s or more without the store."
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and fail if a token differs, or if the store does not pay where it should."""
    from kvstore.cli.demo.parameters import Parameters, allocation_refused

    parameters = Parameters.plan(
        layers=arguments.layers,
        hidden=arguments.hidden,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
    )
    # Both are read once, at the imports that follow. The hub is not to be asked for anything.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Idle OpenMP threads sleep instead of spinning. Where other work has one of the cores, each
    # small step of the engine otherwise takes ten times as long, spent on waiting for a thread.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    import transformers

    from kvstore.cli.demo.display import Display
    from kvstore.cli.demo.report import document_of
    from kvstore.cli.demo.runs import measure

    be_quiet: Callable[[], None] = transformers.logging.set_verbosity_error
    be_quiet()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    # With --json, standard output is for the document alone.
    display = Display(sys.stderr if arguments.json else sys.stdout)
    display.introduce(parameters)
    try:
        measurement = measure(parameters, display.progress)
    except (MemoryError, RuntimeError) as error:
        if not _is_allocation(error):
            raise
        raise allocation_refused(parameters) from error
    document = document_of(parameters, measurement)
    if not arguments.json:
        display.conclude(document)
    if not arguments.embedded:
        document["processes"] = _run_processes(parameters, measurement, display)
    findings = [*document["findings"], *document.get("processes", {}).get("findings", [])]
    if arguments.json:
        print(json.dumps(document, indent=2))
    for line in [*findings, *document["notes"]] if arguments.json else []:
        print(f"kvstore: {line}", file=sys.stderr)
    return 1 if findings else 0


def _run_processes(
    parameters: Parameters, measurement: Measurement, display: Display
) -> dict[str, Any]:
    """The second part: engines in processes of their own, over a daemon."""
    from kvstore.cli.demo.processes import measure_processes

    display.announce_processes()
    processes = measure_processes(parameters, measurement.runs[0].tokens)
    display.conclude_processes(processes)
    return processes


def _is_allocation(error: Exception) -> bool:
    """Torch has no type of its own for memory that the system refused."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)
