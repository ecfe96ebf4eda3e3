"""What every result says of itself: which code, which machine, and what was found wrong."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore import native
from kvstore.cli.version import git_revision
from kvstore.units import shown_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_DIRTY = "-dirty"


def heading(benchmark: str) -> dict[str, Any]:
    """The first fields of a document."""
    described = git_revision()
    return {
        "benchmark": benchmark,
        "kvstore": kvstore.__version__,
        "revision": described.removesuffix(_DIRTY) if described else None,
        "dirty": described.endswith(_DIRTY) if described else None,
        "native": native.IS_COMPILED,
    }


def machine_line(document: dict[str, Any]) -> str:
    """The machine and what ran on it, for people."""
    machine = document["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, L3 {shown_bytes(machine['l3_bytes'])}, "
        f"Python {machine['python']}, NumPy {machine['numpy']}, "
        f"native {'yes' if document['native'] else 'no'}"
    )


def announce(what: str) -> None:
    """Say what is under way, to somebody who waits at a terminal."""
    if sys.stderr.isatty():
        print(f"measuring {what} …", file=sys.stderr)


def conclude(
    document: dict[str, Any], text: Callable[[dict[str, Any]], str], *, as_json: bool
) -> int:
    """Print a document and return the exit code: 1 where it has findings."""
    print(json.dumps(document, indent=2) if as_json else text(document))
    if document["findings"]:
        print(f"kvstore: {document['findings'][0]}", file=sys.stderr)
        return 1
    return 0
