"""A daemon's own life: its socket, its start, its pool, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore.config import Config, load
from kvstore.errors import ConfigError, TierError
from kvstore.paths import make_private_directory
from kvstore.server.daemon import Daemon
from kvstore.server.pool import SharedPool
from kvstore.shared_memory import SharedMapping
from tests.daemon_process import ROOT, ClientProcess, DaemonProcess, now, until
from tests.payload import filled

MIB = 1 << 20


def serve(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def available_bytes():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def test_two_daemons_never_share_a_socket(daemon, session):
    done = serve("--socket", str(daemon.socket_path))
    assert done.returncode != 0
    assert f"is served by process {daemon.pid}" in done.stderr
    filled(session, 1, 1)


def test_nor_where_the_lock_was_removed(daemon, session):
    daemon.socket_path.with_name("k.sock.lock").unlink()
    done = serve("--socket", str(daemon.socket_path))
    assert done.returncode != 0
    assert "is served by somebody else" in done.stderr
    filled(session, 1, 1)


def test_what_is_no_socket_is_left_alone(directory):
    path = directory / "k.sock"
    path.write_text("mine")
    done = serve("--socket", str(path))
    assert done.returncode != 0
    assert "is no socket" in done.stderr
    assert path.read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order(daemon, session, number):
    filled(session, 1, 4)
    lease = session.lease(session.namespace.keys([1] * 4))
    os.kill(daemon.pid, number)
    assert daemon.wait() == 0
    assert not daemon.socket_path.exists()
    assert not lease.valid()
    assert daemon.log_path.read_text() == ""


def test_a_crash_loop_with_attached_clients(directory):
    """Twenty starts, each after a kill; the clients use every one of them."""
    script = """
say("ready")
while hear():
    keys = namespace.keys([1])
    while session.put(keys, payloads(keys))[0] not in ("ok", "present"):
        pause(0.01)
    say("stored")
"""
    with DaemonProcess(directory) as daemon:
        clients = [ClientProcess(daemon.socket_path, script) for _ in range(2)]
        for client in clients:
            assert client.hear() == "ready"
        for _ in range(20):
            for client in clients:
                client.say("go")
            for client in clients:
                assert client.hear() == "stored"
            daemon.kill()
            daemon.start()
        for client in clients:
            client.kill()


def test_ready_long_before_a_large_pool_is_populated(directory, namespace):
    """8 GiB where the machine has twice that, else what it has a third of."""
    gib = min(8, available_bytes() // 3 >> 30)
    if gib < 1:
        pytest.skip("less than 3 GiB of memory are free")
    with DaemonProcess(directory, f"{gib}GiB") as daemon:
        assert daemon.ready_seconds < 2.0
        with kvstore.connect(daemon.socket_path) as store:
            session = store.session(namespace)
            started = now()
            filled(session, 1, 4)
            tier = store.status()["tiers"]["dram"]
            assert now() - started < 1.0
            assert tier["usable_bytes"] < tier["capacity_bytes"], "or this test says nothing"
            assert store.verify()["problems"] == []
            os.kill(daemon.pid, signal.SIGTERM)
            assert daemon.wait() == 0


def test_watermarks_and_slots_are_of_what_is_populated(directory, namespace):
    """A pool of which little is there yet is not one that is nearly full."""
    with (
        DaemonProcess(directory, "1GiB", watermark_high="0.9", watermark_low="0.8") as daemon,
        kvstore.connect(daemon.socket_path) as store,
    ):
        session = store.session(namespace)
        filled(session, 1, 8)
        for name in range(2, 6):
            filled(session, name, 8)
        assert store.status()["counters"]["dropped_blocks"] == {}
        until(lambda: store.status()["tiers"]["dram"]["usable_bytes"] == 1 << 30, seconds=20)
        assert store.verify()["problems"] == []


def test_a_pool_that_cannot_be_populated_stays_smaller_and_says_so(monkeypatch, caplog):
    populate, done = SharedMapping.populate, []

    def fails_in_the_end(self, start_bytes, end_bytes):
        done.append(end_bytes)
        if len(done) == 3:
            raise TierError("no memory for 67108864 bytes: Cannot allocate memory")
        populate(self, start_bytes, end_bytes)

    monkeypatch.setattr(SharedMapping, "populate", fails_in_the_end)
    pool = SharedPool(256 * MIB)
    told: list[int] = []
    pool.populate(told.append)
    assert pool._thread is not None
    pool._thread.join()
    assert told == [64 * MIB, 128 * MIB]
    assert "the pool has 134217728 of 268435456 bytes, and stays so" in caplog.text
    assert pool.huge_bytes <= 128 * MIB
    pool.close()


def test_a_pool_of_which_nothing_can_be_had_is_an_error(monkeypatch):
    def fails(*_):
        raise TierError("no memory")

    monkeypatch.setattr(SharedMapping, "populate", fails)
    pool = SharedPool(4 * MIB)
    with pytest.raises(TierError, match="no memory"):
        pool.populate(lambda _: None)
    pool.close()


def test_directories_that_others_could_write_to_are_refused(directory):
    directory.chmod(0o777)
    done = serve("--socket", str(directory / "k.sock"))
    assert done.returncode != 0
    assert "can be written by others: chmod 700" in done.stderr
    assert not (directory / "k.sock").exists()


def test_a_directory_of_another_user_is_refused(directory, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        make_private_directory(directory)


def test_a_socket_is_its_owners_only(daemon):
    assert daemon.socket_path.stat().st_mode & 0o777 == 0o600


def test_a_daemon_that_cannot_start_leaves_nothing(directory):
    directory.chmod(0o700)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    config: Config = load(None)
    path = directory / "k.sock"
    (directory / "k.sock").mkdir()
    with pytest.raises(ConfigError):
        Daemon(config, path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
