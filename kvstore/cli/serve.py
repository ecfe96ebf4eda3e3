"""`kvstore serve`: the daemon of this node."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from kvstore.cli import terminal

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from kvstore.config.sources import Resolved
    from kvstore.config.tree import Config
    from kvstore.server.daemon import Daemon

_RULES = """\
It serves until SIGINT (Ctrl-C), or until SIGTERM: then it grants nothing new, lets leases and
reservations end for up to daemon.grace_seconds, and exits with 0. A second signal ends it at once.

With --json it prints one line, a JSON document, as soon as it serves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = terminal.fill(_RULES)
    parser.add_argument("--config", metavar="FILE", help="read this TOML file")
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="where clients connect (default: the setting daemon.socket, which is kvstore.sock in "
        "the runtime directory)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    from pathlib import Path

    from kvstore.cli.daemon import socket_of
    from kvstore.config.sources import resolve
    from kvstore.config.tree import Config
    from kvstore.server.daemon import Daemon

    resolved = resolve(Config, arguments.config)
    config = resolved.config
    named = arguments.socket is not None
    path = socket_of(arguments) if named else Path(config.daemon_socket().value)
    daemon = Daemon(config, path)

    def say_ready() -> None:
        described = _described(resolved, daemon, path)
        print(json.dumps(described) if arguments.json else "\n".join(_lines(described)))
        sys.stdout.flush()

    daemon.serve(say_ready)
    return 0


def _described(resolved: Resolved[Config], daemon: Daemon, path: Path) -> dict[str, Any]:
    import kvstore
    from kvstore.cli.kernel import huge_page_setting

    config, source = resolved.config, resolved.sources["dram.capacity_bytes"]
    origin = config.wanted_dram_capacity().origin
    return {
        "t": "ready",
        "version": kvstore.__version__,
        "pid": os.getpid(),
        "socket": str(path),
        "capacity_bytes": daemon.pool.capacity_bytes,
        "capacity_from": ", ".join(filter(None, (origin, source.place))) or "the default",
        "policy": config.store.policy,
        "shmem_huge_pages": huge_page_setting("shmem_enabled"),
        "grace_seconds": config.daemon.grace_seconds,
    }


def _lines(described: dict[str, Any]) -> list[str]:
    from kvstore.cli.table import facts
    from kvstore.units import shown_bytes

    return facts(
        [
            ("kvstore", f"{described['version']}, process {described['pid']}: serving"),
            ("socket", described["socket"]),
            (
                "capacity",
                f"{shown_bytes(described['capacity_bytes'])}: {described['capacity_from']}",
            ),
            ("policy", described["policy"]),
            ("huge pages", "made while it serves; `kvstore status` says how much is in them"),
        ]
    )
