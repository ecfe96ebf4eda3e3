"""A daemon of its own for a benchmark or a demo, and the CPU time that it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import kvstore
from kvstore.config.table import ENVIRONMENT_PREFIX
from kvstore.errors import DaemonUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

_CPUCLOCK_SCHED = 2  # linux/posix-timers.h: with a process id, the CPU time of all its threads
_HUGE_PAGES_SECONDS = 20.0
_LOOK_AGAIN_SECONDS = 0.05


class Node(NamedTuple):
    """A running daemon."""

    pid: int
    socket_path: Path
    huge_bytes: int

    def cpu_ns(self) -> int:
        """CPU time of all threads of the daemon since its start."""
        return time.clock_gettime_ns((~self.pid << 3) | _CPUCLOCK_SCHED)


@contextmanager
def running_daemon(capacity_bytes: int) -> Iterator[Node]:
    """A daemon with so much memory, all of it there, for as long as a `with` block.

    Settings of the environment do not reach it, so that they do not change what is measured.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        path = Path(folder) / "kv.sock"
        settings = {
            f"{ENVIRONMENT_PREFIX}DRAM__CAPACITY_BYTES": str(capacity_bytes),
            f"{ENVIRONMENT_PREFIX}DAEMON__GRACE_SECONDS": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "serve", "--json", "--socket", str(path)],
            stdout=subprocess.PIPE,
            env={**kept, **settings},
        )
        try:
            assert process.stdout is not None  # it was asked for
            line = process.stdout.readline()
            if not line:
                raise DaemonUnavailable("the daemon did not start")
            yield Node(json.loads(line)["pid"], path, _wait_for_memory(path))
        finally:
            process.terminate()
            process.communicate()


def _wait_for_memory(path: Path) -> int:
    """Wait until the pool is populated and in huge pages, as far as it will be."""
    from kvstore.clock import SystemClock

    clock, pause = SystemClock(), threading.Event()
    end = clock.now() + _HUGE_PAGES_SECONDS
    with kvstore.connect(path) as store:
        while True:
            tier = store.status()["tiers"]["dram"]
            if tier["huge_bytes"] == tier["capacity_bytes"] or clock.now() > end:
                return int(tier["huge_bytes"])
            pause.wait(_LOOK_AGAIN_SECONDS)
