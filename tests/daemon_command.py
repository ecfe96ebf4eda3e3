"""A daemon in a process of its own, as `kvstore serve` starts it, and commands that talk to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CAPACITY = "16MiB"


def environment(**more: str) -> dict[str, str]:
    """This process's, without settings of ours that somebody may have set."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_CFG_")}
    return {**own, "COLUMNS": "80", **more}


def kvstore_command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command; its exit code and outputs."""
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**more),
        timeout=30,
    )


class DaemonProcess:
    """A running daemon. `ready` is what it said when it began to serve."""

    def __init__(self, socket_path: Path, *words: str, **more: str) -> None:
        self.socket_path = socket_path
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "serve", "--json", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(
                KVSTORE_CFG_DAEMON__SOCKET=str(socket_path),
                **{"KVSTORE_CFG_DRAM__CAPACITY_BYTES": CAPACITY, **more},
            ),
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.ready: dict[str, Any] = json.loads(line) if line else {}

    @property
    def pid(self) -> int:
        """Of the daemon."""
        return self._process.pid

    def ask(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command on this daemon's socket."""
        return kvstore_command(*words, "--socket", str(self.socket_path), **more)

    def json(self, *words: str) -> Any:
        """What a command prints with --json; it must succeed."""
        done = self.ask(*words, "--json")
        assert (done.returncode, done.stderr) == (0, ""), done
        return json.loads(done.stdout)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float = 30.0) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(seconds)

    def is_running(self) -> bool:
        """Has it not ended?"""
        return self._process.poll() is None

    def close(self) -> None:
        """End it, whatever it is doing."""
        if self.is_running():
            self._process.kill()
        self._process.communicate()


@contextmanager
def a_daemon(socket_path: Path, *words: str, **more: str) -> Iterator[DaemonProcess]:
    """A daemon at a path, for as long as a `with` block."""
    daemon = DaemonProcess(socket_path, *words, **more)
    try:
        yield daemon
    finally:
        daemon.close()
