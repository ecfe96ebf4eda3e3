"""`kvstore demo`: one model, with and without the store. The same tokens, sooner, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for option, default, least, meaning in (
        ("--prompt-tokens", 2048, 32, "tokens of the first prompt"),
        ("--new-tokens", 16, 1, "tokens of each answer"),
        ("--layers", 12, 1, "layers of the model"),
        ("--hidden", 768, 64, "hidden size of the model, a multiple of 64"),
        ("--threads", None, 1, "CPU threads of the engine"),
    ):
        shown = "torch's own choice" if default is None else str(default)
        parser.add_argument(
            option,
            type=_at_least(least),
            default=default,
            metavar="N",
            help=f"{meaning} (default: {shown})",
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and fail if a token differs or the store does not pay."""
    # Both are read once, at the imports that follow. The hub is not to be asked for anything.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Idle OpenMP threads sleep instead of spinning. Where other work has one of the cores, each
    # small step of the engine otherwise takes ten times as long, spent on waiting for a thread.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    import transformers

    from kvstore.cli.demo import report
    from kvstore.cli.demo.runs import Parameters, measure

    be_quiet: Callable[[], None] = transformers.logging.set_verbosity_error
    be_quiet()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    parameters = Parameters.plan(
        layers=arguments.layers,
        hidden=arguments.hidden,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
    )
    # With --json, standard output is for the document alone.
    display = report.Display(sys.stderr if arguments.json else sys.stdout)
    display.introduce(parameters)
    document = report.document(parameters, measure(parameters, display.progress))
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        display.conclude(document)
    for finding in document["findings"] if arguments.json else []:
        print(f"kvstore: {finding}", file=sys.stderr)
    return 1 if document["findings"] else 0


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: give {least} or more")
        return value

    return count
