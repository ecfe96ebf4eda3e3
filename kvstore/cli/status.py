"""`kvstore status`: what the daemon of this node holds, for whom, and what it has done."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvstore.cli.daemon import add_socket_argument, ask, clients_of, socket_of

if TYPE_CHECKING:
    import argparse

_CLIENTS_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_socket_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print."""
    path = socket_of(arguments)
    status = ask(path, {"t": "status"})
    status["clients"] = clients_of(status)
    if arguments.json:
        print(json.dumps({"socket": str(path), **status}, indent=2))
    else:
        print("\n".join(_lines(str(path), status)))
    return 0


def _lines(path: str, status: dict[str, Any]) -> list[str]:
    from kvstore.cli.table import facts, shown_duration

    counters = status["counters"]
    draining = ", ends: grants nothing new" if status.get("is_draining") else ""
    rows = [
        (
            "daemon",
            f"kvstore {status.get('version', '?')}, process {status['pid']}, "
            f"up {shown_duration(status['uptime_seconds'])}{draining}",
        ),
        ("socket", path),
        *((name, _shown_tier(tier)) for name, tier in status["tiers"].items()),
    ]
    looked_up, hit = counters["lookup_tokens"], sum(counters["hit_tokens"].values())
    share = f" ({hit / looked_up:.1%})" if looked_up else ""
    stored, left = sum(counters["stored_blocks"].values()), counters["dropped_blocks"]
    rows += [
        ("hits", f"{hit:,} of {looked_up:,} tokens looked up{share}"),
        ("misses", f"{_shown_counts(counters['misses'])} (blocks, by why they were missing)"),
        ("stored", f"{stored:,} blocks since the start, of which left: {_shown_counts(left)}"),
        ("clients", _shown_clients(status["clients"])),
    ]
    return facts(rows)


def _shown_tier(tier: dict[str, Any]) -> str:
    from kvstore.units import shown_bytes

    capacity, usable = tier["capacity_bytes"], tier["usable_bytes"]
    growing = "" if usable == capacity else f" ({shown_bytes(usable)} of it there so far)"
    return (
        f"{shown_bytes(capacity)}{growing}, {shown_bytes(tier['huge_bytes'])} in huge pages: "
        f"{shown_bytes(tier['ready_bytes'])} of blocks, "
        f"{shown_bytes(tier['reserved_bytes'])} being written, "
        f"{shown_bytes(tier['held_bytes'] + tier['condemned_bytes'])} held back, "
        f"{shown_bytes(tier['free_bytes'])} free"
    )


def _shown_clients(clients: list[dict[str, Any]]) -> str:
    shown = [
        f"process {client['pid']}"
        + (f" {client['name']!r}" if client["name"] != f"pid {client['pid']}" else "")
        + ("" if client["writes"] else " (may only read)")
        for client in clients[:_CLIENTS_SHOWN]
    ]
    more = len(clients) - len(shown)
    shown += [f"and {more} more: kvstore ls clients"] if more else []
    return f"{len(clients)}: {', '.join(shown)}" if clients else "none"


def _shown_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"
