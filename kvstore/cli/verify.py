"""`kvstore verify`: the daemon counts slots, blocks, leases and owners again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvstore.cli.daemon import add_socket_argument, ask, socket_of

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_socket_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, print, and fail where something does not add up, which would be a bug."""
    from kvstore.cli.terminal import escaped
    from kvstore.units import shown_bytes

    found = ask(socket_of(arguments), {"t": "verify"})
    audit, problems = found["audit"], found["problems"]
    if arguments.json:
        print(json.dumps({"audit": audit, "problems": problems}, indent=2))
    elif problems:
        print("\n".join(escaped(problem) for problem in problems))
    else:
        print(
            f"All adds up: {audit['ready_blocks']} blocks in {shown_bytes(audit['ready_bytes'])}, "
            f"{audit['leases']} leases, {audit['reservations']} reservations."
        )
    return 1 if problems else 0
