"""A daemon, and clients, as processes of their own; and ways to be hard on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from kvstore.clock import SystemClock

ROOT = Path(__file__).resolve().parents[1]
READY_SECONDS = 30.0


def now() -> float:
    return SystemClock().now()


def pause(seconds: float) -> None:
    """Let real time pass."""
    threading.Event().wait(seconds)


def until(condition: Any, seconds: float = 5.0) -> float:
    """Wait until `condition()` is true; how long that took. Fails after `seconds`."""
    started = now()
    while not condition():
        assert now() - started < seconds, f"not within {seconds} s: {condition}"
        pause(0.005)
    return now() - started


class OwnProcess:
    """One process that we started."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        self.process.kill()
        self.wait()

    def stop(self) -> None:
        """Freeze it."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Thaw it."""
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, seconds: float = 20.0) -> int:
        """Wait until it has ended; its exit status."""
        found = self.process.wait(seconds)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.kill()


class DaemonProcess(OwnProcess):
    """`kvstore serve` in a directory of its own."""

    def __init__(self, directory: Path, capacity: str = "16MiB", **settings: str) -> None:
        directory.chmod(0o700)
        self.socket_path = directory / "k.sock"
        self.log_path = directory / "log"
        self.config_path = directory / "c.toml"
        rows = "".join(f"{name} = {value}\n" for name, value in settings.items())
        self.config_path.write_text(f'[dram]\ncapacity_bytes = "{capacity}"\n[store]\n{rows}')
        self.start()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        started = now()
        command = [sys.executable, "-m", "kvstore", "--json", "serve"]
        command += ["--socket", str(self.socket_path), "--config", str(self.config_path)]
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log_path.read_text()
        assert json.loads(line)["t"] == "ready"
        self.ready_seconds = now() - started

    def descriptors(self) -> int:
        """How many it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def private_bytes(self) -> int:
        """Memory of its own, without the shared pool."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")


CLIENT_PRELUDE = """
import os, signal, sys, threading
import numpy as np
import kvstore
from tests.payload import BLOCK_BYTES, a_namespace, empty_buffers, filled, payloads, writers
from tests.daemon_process import now, pause
namespace = a_namespace(BLOCK_BYTES)
store = kvstore.connect(sys.argv[1])
session = store.session(namespace)
def say(*words):
    print(*words, flush=True)
def hear():
    return sys.stdin.readline().strip()
"""


class ClientProcess(OwnProcess):
    """A process with a `session`, that runs `script`; it can `say` and `hear` lines."""

    def __init__(self, socket_path: Path, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT_PRELUDE + script, str(socket_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str = "") -> None:
        """Tell it something."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
