"""`kvstore verify`: the daemon counts slots, blocks, leases and owners again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket (default: found)")


def run(arguments: argparse.Namespace) -> int:
    """Ask, print, and fail where something does not add up, which would be a bug."""
    import kvstore
    from kvstore.cli.terminal import escaped

    with kvstore.connect(arguments.socket) as store:
        found = store.verify()
    problems = found["problems"]
    if arguments.json:
        print(json.dumps({"audit": found["audit"], "problems": problems}, indent=2))
    elif problems:
        print("\n".join(escaped(problem) for problem in problems))
    else:
        audit = found["audit"]
        print(
            f"All adds up: {audit['ready_blocks']} blocks, {audit['leases']} leases, "
            f"{audit['reservations']} reservations."
        )
    return 1 if problems else 0
