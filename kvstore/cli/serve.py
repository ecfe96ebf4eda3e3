"""`kvstore serve`: the daemon of this node."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

_READY = "kvstore: serving {capacity} of memory at {socket}, process {pid}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", metavar="FILE", help="read this TOML file")
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="where clients connect (default: kvstore.sock in the runtime directory)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    from kvstore.config.sources import load
    from kvstore.paths import default_socket
    from kvstore.server.daemon import Daemon
    from kvstore.units import shown_bytes

    config = load(arguments.config)
    path = Path(arguments.socket).absolute() if arguments.socket else default_socket()
    daemon = Daemon(config, path)

    def say_ready() -> None:
        fields = {
            "capacity": shown_bytes(daemon.pool.capacity_bytes),
            "socket": str(path),
            "pid": os.getpid(),
        }
        print(json.dumps({"t": "ready", **fields}) if arguments.json else _READY.format(**fields))
        sys.stdout.flush()

    daemon.serve(say_ready)
    return 0
