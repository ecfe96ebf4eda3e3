"""`kvstore status`: what the daemon of this node holds, for whom, and what it has done."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket (default: found)")


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print."""
    import kvstore

    with kvstore.connect(arguments.socket) as store:
        status = store.status()
        path = store.path
    if arguments.json:
        print(json.dumps({"socket": str(path), **status}, indent=2))
        return 0
    print("\n".join(_lines(str(path), status)))
    return 0


def _lines(path: str, status: dict[str, Any]) -> list[str]:
    from kvstore.cli.terminal import escaped
    from kvstore.units import shown_bytes

    counters = status["counters"]
    lines = [
        f"daemon     process {status['pid']}, up {_shown_duration(status['uptime_seconds'])}, "
        f"at {escaped(path)}",
    ]
    for name, tier in status["tiers"].items():
        usable = tier["usable_bytes"]
        growing = "" if usable == tier["capacity_bytes"] else f" ({shown_bytes(usable)} so far)"
        lines += [
            f"{escaped(name):10} {shown_bytes(tier['capacity_bytes'])}{growing}: "
            f"{shown_bytes(tier['ready_bytes'])} of blocks, {shown_bytes(tier['free_bytes'])} "
            f"free, {shown_bytes(tier['reserved_bytes'])} being written, "
            f"{shown_bytes(tier['held_bytes'] + tier['condemned_bytes'])} held",
        ]
    looked_up, hit = counters["lookup_tokens"], sum(counters["hit_tokens"].values())
    share = f" ({hit / looked_up:.1%})" if looked_up else ""
    lines += [
        f"hits       {hit} of {looked_up} tokens{share}",
        f"misses     {_shown_counts(counters['misses'])}",
        f"stored     {sum(counters['stored_blocks'].values())} blocks; "
        f"left: {_shown_counts(counters['dropped_blocks'])}",
        f"clients    {len(status['clients'])}",
    ]
    lines += [
        f"           process {client['pid']}, {escaped(client['name'])}"
        + ("" if client["writes"] else ", may only read")
        for client in status["clients"]
    ]
    return lines


def _shown_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _shown_duration(seconds: float) -> str:
    for unit, factor in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.0f} s"
