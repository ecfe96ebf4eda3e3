"""One daemon: takes its socket, its pool and its signals, and gives all of them back."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import signal
import socket
import stat
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstore import codec
from kvstore.clock import SystemClock
from kvstore.errors import ConfigError
from kvstore.paths import check_socket_path, make_private_directory
from kvstore.policy import POLICIES
from kvstore.residency import ENTRY_BYTES
from kvstore.server.connections import CONNECTIONS_MAX
from kvstore.server.control import Control
from kvstore.server.pool import SharedPool
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from kvstore.config import Config

_BACKLOG = 1_024
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Daemon:
    """A store that the processes of a node share, at `socket_path`.

    Raises ConfigError where the socket is another daemon's, or the machine cannot hold the pool.
    """

    def __init__(self, config: Config, socket_path: Path) -> None:
        self.socket_path = check_socket_path(socket_path)
        self._grace_seconds = config.daemon.grace_seconds
        self._is_draining = False
        self._resources = ExitStack()
        try:
            self._take_socket()
            self._take_pool(config)
        except BaseException:
            self.close()
            raise

    def serve(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGINT, or until SIGTERM and the end of what was granted before it.

        A second signal ends it at once. To be called in the main thread, once.
        """
        _raise_descriptor_limit()
        worker = threading.Thread(target=self._make_checksums, name="kvstore-worker", daemon=True)
        worker.start()
        before = {number: signal.signal(number, self._on_signal) for number in _STOPPING_SIGNALS}
        try:
            self.pool.populate(self.control.populated)
            on_ready()
            self.control.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.control.work.put(None)
            worker.join()
            self.close()

    def stop(self) -> None:
        """Let `serve` return at once. May be called from any thread."""
        self.control.stop()

    def close(self) -> None:
        """Give everything back. Again does nothing."""
        self._resources.close()

    def _take_socket(self) -> None:
        """Lock the path, and listen there.

        The lock dies with its owner, so a socket without one is what a killed daemon left.
        """
        make_private_directory(self.socket_path.parent)
        lock_path = self.socket_path.with_name(self.socket_path.name + ".lock")
        lock_fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._resources.callback(os.close, lock_fd)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip()
            raise ConfigError(
                f"{self.socket_path} is served by process {holder or 'unknown'}: stop it, or give "
                "another --socket"
            ) from None
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        self._clear_socket()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._resources.callback(self._listener.close)
        try:
            self._listener.bind(os.fspath(self.socket_path))
        except OSError as error:
            raise ConfigError(f"{self.socket_path}: {error.strerror}") from error
        self._resources.callback(self.socket_path.unlink, missing_ok=True)
        self.socket_path.chmod(0o600)
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)

    def _clear_socket(self) -> None:
        """Remove what a killed daemon left; not a socket where somebody listens without a lock."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect(os.fspath(self.socket_path))
            except OSError:
                pass
            else:
                raise ConfigError(
                    f"{self.socket_path} is served by somebody else: stop it, or give another "
                    "--socket"
                )
        try:
            if not stat.S_ISSOCK(self.socket_path.lstat().st_mode):
                raise ConfigError(f"{self.socket_path} is there already, and is no socket")
            self.socket_path.unlink()
        except FileNotFoundError:
            pass

    def _take_pool(self, config: Config) -> None:
        self.pool = SharedPool(config.dram_capacity_bytes())
        self._resources.callback(self.pool.close)
        settings = config.core_settings()
        slots = Slots(self.pool.capacity_bytes, self.pool.words)
        self._resources.callback(slots.close)
        slots.restrict(0)  # until the memory is there
        policy = POLICIES[settings.policy]()
        clock = SystemClock()
        core = Core(
            clock,
            slots,
            policy,
            tier=self.pool.name,
            settings=settings,
            entry_bytes=ENTRY_BYTES,
            token_secret=secrets.token_bytes(16),
        )
        incarnation = secrets.token_bytes(16)
        self.control = Control(core, self.pool, self._listener, clock, incarnation)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM and not self._is_draining:
            self._is_draining = True
            self.control.drain(self._grace_seconds)
        else:
            self.stop()

    def _make_checksums(self) -> None:
        """Read what the core wants read: it protects it meanwhile."""
        while (transfer := self.control.work.get()) is not None:
            checksum = codec.checksum(self.pool.view(transfer.place))
            self.control.completed(transfer, Outcome.OK, checksum)


def _raise_descriptor_limit() -> None:
    """A connection takes a descriptor, and its process another; the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * CONNECTIONS_MAX
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
