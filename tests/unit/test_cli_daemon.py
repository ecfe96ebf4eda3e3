"""The commands that talk to a daemon, each with a real one in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.cli import daemon as asking
from kvstore.config import Config
from kvstore.config.table import settings_of
from kvstore.paths import SOCKET_VARIABLE
from kvstore.types import Outcome
from kvstore.wire import LENGTH, body_length, frame
from tests.daemon_command import DaemonProcess, a_daemon, kvstore_command
from tests.payload import BLOCK_BYTES, a_namespace, filled, payloads, writers

ASKING = ["status", "ls blocks", "stat 00", "verify", "check"]
KIB = 1024


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path: a socket's has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="kvstore-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    with a_daemon(folder / "shared/kv.sock") as running:
        yield running


@pytest.fixture
def session(daemon: DaemonProcess) -> Iterator[Any]:
    namespace = a_namespace(BLOCK_BYTES)
    with (
        kvstore.connect(daemon.socket_path, name="tests\x1b[31m") as store,
        store.session(namespace) as session,
    ):
        yield session


def test_serve_says_what_it_serves(daemon: DaemonProcess):
    ready = daemon.ready
    assert ready["version"] == kvstore.__version__
    assert ready["pid"] == daemon.pid
    assert ready["socket"] == str(daemon.socket_path)
    assert ready["capacity_bytes"] == 16 << 20
    assert ready["capacity_from"] == "KVSTORE_CFG_DRAM__CAPACITY_BYTES"
    assert ready["policy"] == "lru"


def test_serve_as_text_names_the_file_that_set_the_capacity(folder: Path):
    file = folder / "kv.toml"
    path = folder / "text/kv.sock"
    file.write_text(f'[dram]\ncapacity_bytes = "8MiB"\n[daemon]\nsocket = "{path}"\n')
    command = ["serve", "--config", str(file)]
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(kvstore_command(*command)))
    thread.start()
    status = _eventually(lambda: kvstore_command("status", "--json", "--socket", str(path)))
    pid = json.loads(status.stdout)["pid"]
    os.kill(pid, signal.SIGINT)
    thread.join(30)
    assert done[0].returncode == 0
    lines = done[0].stdout.splitlines()
    assert lines[0] == f"kvstore     {kvstore.__version__}, process {pid}: serving"
    assert lines[1] == f"socket      {path}"
    assert lines[2] == f"capacity    8 MiB: {file}:2"
    assert not path.exists()


def _eventually(attempt: Any, seconds: float = 20.0) -> Any:
    end = time.perf_counter() + seconds
    while (done := attempt()).returncode != 0:
        assert time.perf_counter() < end, done
    return done


def test_a_taken_socket_stops_the_start(daemon: DaemonProcess):
    done = daemon.ask("serve", KVSTORE_CFG_DRAM__CAPACITY_BYTES="4MiB")
    assert done.returncode == 2
    assert f"{daemon.socket_path} is served by process {daemon.pid}" in done.stderr
    assert "--socket" in done.stderr
    assert done.stderr.count("\n") == 1
    assert daemon.json("status")["pid"] == daemon.pid


def test_status_counts_what_clients_do(daemon: DaemonProcess, session: Any):
    keys = filled(session, 1, 4)
    with session.lease(keys):
        status = daemon.json("status")
    assert status["version"] == kvstore.__version__
    assert status["tiers"]["dram"]["ready_bytes"] >= 4 * BLOCK_BYTES
    assert status["counters"]["hit_blocks"]["dram"] >= 4
    assert "tests\x1b[31m" in [client["name"] for client in status["clients"]]
    text = daemon.ask("status").stdout
    assert "4 blocks since the start" in text
    assert "in huge pages" in text
    assert "\x1b" not in text


def test_ls_blocks_has_the_newest_or_the_oldest(daemon: DaemonProcess, session: Any):
    keys = filled(session, 2, 6)
    newest = daemon.json("ls", "blocks", "--limit", "6")
    assert len(newest["rows"]) == 6
    assert newest["total"] >= 6
    # The last one written comes first, and names the one before it.
    parents = [row["parent"] for row in newest["rows"]]
    assert parents[:5] == [row["key"] for row in newest["rows"][1:]]
    oldest = daemon.json("ls", "blocks", "--limit", "1", "--oldest")
    assert oldest["rows"][0]["key"] != newest["rows"][0]["key"]
    assert oldest["rows"][0]["parent"] is None
    key = newest["rows"][3]["key"]
    found = daemon.json("ls", "blocks", "--key", key[:12])
    assert [row["key"] for row in found["rows"]] == [key]
    assert session.match(keys).blocks == 6


def test_ls_fits_the_terminal_and_escapes(daemon: DaemonProcess, session: Any):
    keys = filled(session, 3, 3)
    with session.lease(keys), session.reserve(session.namespace.keys([9] * 2)):
        for kind in ("blocks", "leases", "reservations", "clients"):
            for columns in ("40", "80"):
                done = daemon.ask("ls", kind, COLUMNS=columns)
                assert done.returncode == 0
                assert max(map(len, done.stdout.splitlines())) <= int(columns)
                assert "\x1b" not in done.stdout
        leases = daemon.json("ls", "leases")
        reservations = daemon.json("ls", "reservations")
        clients = daemon.json("ls", "clients")
    assert [(row["blocks"], row["bytes"]) for row in leases["rows"]] == [(3, 3 * BLOCK_BYTES)]
    assert 0 < leases["rows"][0]["left_seconds"] <= 30
    assert [row["blocks"] for row in reservations["rows"]] == [2]
    # Sessions of stores that were closed before stay until this process ends.
    (session_number,) = [row["session"] for row in clients["rows"] if row["connections"]]
    assert leases["rows"][0]["holders"] == [session_number]
    assert reservations["rows"][0]["holder"] == session_number
    assert daemon.json("ls", "leases")["rows"] == []


@pytest.mark.parametrize("words", ["ls tape", "ls", "ls blocks --limit 0", "ls blocks --key xyz"])
def test_ls_refuses_what_cannot_be(words: str):
    done = kvstore_command(*words.split())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_stat_tells_a_block_or_why_there_is_none(daemon: DaemonProcess, session: Any):
    keys = filled(session, 4, 2)
    session.pin(keys[:1], kind="soft", ttl_seconds=60)
    key = daemon.json("ls", "blocks", "--limit", "2")["rows"][1]["key"]
    with session.lease(keys):
        block = daemon.json("stat", key)["block"]
        assert daemon.json("stat", key[:16])["block"]["key"] == block["key"] == key
    assert (block["state"], block["bytes"], block["leases"]) == ("ready", BLOCK_BYTES, 1)
    assert 0 < block["soft_pin_seconds"] <= 60
    assert f"key       {key}" in daemon.ask("stat", key).stdout
    session.delete(keys)
    done = daemon.ask("stat", key)
    assert (done.returncode, done.stdout) == (1, f"{key[:16]}: absent\n")


def test_verify_recounts(daemon: DaemonProcess, session: Any):
    filled(session, 5, 2)
    found = daemon.json("verify")
    assert found["problems"] == []
    assert found["audit"]["ready_blocks"] >= 2
    assert "All adds up" in daemon.ask("verify").stdout


def test_check_leaves_nothing_behind(daemon: DaemonProcess):
    before = daemon.json("status")["tiers"]["dram"]["ready_bytes"]
    found = daemon.json("check")
    assert [step["step"] for step in found["steps"]] == ["put", "get", "lease", "delete"]
    assert found["problem"] is None
    assert daemon.json("status")["tiers"]["dram"]["ready_bytes"] == before


def test_check_fails_with_the_reason_where_there_is_no_room(folder: Path):
    path = folder / "full/kv.sock"
    with (
        a_daemon(path, KVSTORE_CFG_DRAM__CAPACITY_BYTES="2MiB") as daemon,
        kvstore.connect(path) as store,
        store.session(a_namespace(256 * KIB)) as session,
    ):
        keys = session.namespace.keys([1] * 8)
        with session.reserve(keys) as reservation:
            assert reservation.outcomes == [Outcome.GRANTED] * 8
            done = daemon.ask("check")
        assert done.returncode == 1
        assert "put  FAILED: block 0 is full, not ok" in done.stdout
        assert daemon.ask("check").returncode == 0


def test_doctor_works_without_a_daemon(folder: Path):
    done = kvstore_command("doctor", "--json", "--socket", str(folder / "none.sock"))
    found = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    assert {"memfd", "SO_PEERPIDFD", "memlock", "huge pages", "capacity", "daemon"} <= found.keys()
    assert found["daemon"]["found"].startswith("none at")
    assert done.returncode == (0 if all(row["is_well"] for row in found.values()) else 1)


def test_doctor_warns_of_what_others_can_write(folder: Path):
    open_folder = folder / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    done = kvstore_command("doctor", "--socket", str(open_folder / "kv.sock"))
    assert done.returncode == 1
    assert f"chmod 700 {open_folder}" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_doctor_sees_the_pool(daemon: DaemonProcess):
    done = daemon.ask("doctor", "--json")
    found = {row["name"]: row["found"] for row in json.loads(done.stdout)["findings"]}
    assert found["daemon"] == f"process {daemon.pid} at {daemon.socket_path}"
    assert "of 16 MiB in huge pages" in found["dram pool"]


@pytest.mark.parametrize("words", ASKING)
def test_no_daemon_is_one_line(folder: Path, words: str):
    path = folder / "nothing.sock"
    done = kvstore_command(*words.split(), "--socket", str(path))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"kvstore: no daemon at {path}: nothing is there; `kvstore serve` starts one\n"
    )


def test_what_is_no_socket_is_said_so(folder: Path):
    done = kvstore_command("status", "--socket", str(folder))
    assert (done.returncode, done.stderr) == (
        3,
        f"kvstore: no daemon at {folder}: that is no socket\n",
    )


def test_a_killed_daemon_is_one_line_and_its_socket_is_taken_over(folder: Path):
    path = folder / "killed/kv.sock"
    with a_daemon(path) as daemon:
        daemon.send(signal.SIGKILL)
        daemon.wait()
        done = daemon.ask("status")
    assert done.returncode == 3
    assert "it has ended and left its socket" in done.stderr
    with a_daemon(path) as daemon:
        assert daemon.json("status")["pid"] == daemon.pid


@pytest.mark.parametrize("words", ASKING)
def test_a_hung_daemon_is_one_line_within_two_seconds(daemon: DaemonProcess, words: str):
    daemon.send(signal.SIGSTOP)
    try:
        started = time.perf_counter()
        done = daemon.ask(*words.split())
        seconds = time.perf_counter() - started
    finally:
        daemon.send(signal.SIGCONT)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"(process {daemon.pid}) does not answer within" in done.stderr
    assert done.stderr.count("\n") == 1
    # A start of Python on a busy machine is not the command's own.
    assert seconds < 2 + 1
    assert 2 * asking.ANSWER_SECONDS < 2


def test_a_daemon_of_another_version_is_one_line(folder: Path):
    path = folder / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(body_length(connection.recv(LENGTH.size)))
                connection.sendall(frame({"t": "incompatible", "v": [7, 3]}))

        thread = threading.Thread(target=answer)
        thread.start()
        done = kvstore_command("status", "--socket", str(path))
        thread.join()
    assert done.returncode == 3
    assert done.stderr == (
        f"kvstore: the daemon at {path} speaks version 7.3 of the wire, this command 1.0\n"
    )


def test_what_is_no_daemon_is_one_line(folder: Path):
    path = folder / "web.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1_024)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        done = kvstore_command("status", "--socket", str(path))
        thread.join()
    assert done.returncode == 3
    assert "is no daemon of kvstore" in done.stderr


def test_sigterm_waits_for_leases_and_refuses_new_ones(folder: Path):
    path = folder / "drain/kv.sock"
    with (
        a_daemon(path) as daemon,
        kvstore.connect(path) as store,
        store.session(a_namespace(BLOCK_BYTES)) as session,
    ):
        keys = filled(session, 1, 2)
        lease = session.lease(keys)
        daemon.send(signal.SIGTERM)
        _eventually_true(lambda: daemon.json("status")["is_draining"])
        assert "grants nothing new" in " ".join(daemon.ask("status").stdout.split())
        refused = session.lease(keys)
        assert (refused.blocks, refused.reason) == (0, Outcome.UNAVAILABLE)
        more = session.namespace.keys([2] * 3)
        assert session.put(more, payloads(more)) == [Outcome.UNAVAILABLE] * 3
        assert session.match(keys).blocks == 2
        assert writers(lease.views, keys) == [1, 1]
        assert lease.valid()
        assert daemon.is_running()
        lease.release()
        assert daemon.wait() == 0
        assert not path.exists()


@pytest.mark.parametrize("how", ["grace", "second signal"])
def test_sigterm_does_not_wait_for_ever(folder: Path, how: str):
    path = folder / f"grace-{how[:5]}/kv.sock"
    grace = "100ms" if how == "grace" else "1h"
    with (
        a_daemon(path, KVSTORE_CFG_DAEMON__GRACE_SECONDS=grace) as daemon,
        kvstore.connect(path) as store,
        store.session(a_namespace(BLOCK_BYTES)) as session,
    ):
        keys = filled(session, 1, 2)
        lease = session.lease(keys)
        daemon.send(signal.SIGTERM)
        if how != "grace":
            _eventually_true(lambda: daemon.json("status")["is_draining"])
            daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0
        assert session.match(keys).reason == Outcome.UNAVAILABLE
        assert not lease.valid()


def _eventually_true(is_so: Any, seconds: float = 20.0) -> None:
    end = time.perf_counter() + seconds
    while not is_so():
        assert time.perf_counter() < end


def test_the_variable_is_that_of_the_setting():
    setting = next(each for each in settings_of(Config) if each.name == "daemon.socket")
    assert setting.variable == SOCKET_VARIABLE


def test_the_environment_names_the_socket(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, folder: Path
):
    variable = "KVSTORE_CFG_DAEMON__SOCKET"
    named = kvstore_command("status", "--json", **{variable: f"unix:{daemon.socket_path}"})
    assert json.loads(named.stdout)["pid"] == daemon.pid
    monkeypatch.setenv(variable, str(daemon.socket_path))
    with kvstore.connect() as store:
        assert store.status()["pid"] == daemon.pid
    with kvstore.connect(folder / "nowhere.sock") as store:  # an argument goes first
        assert store.path == folder / "nowhere.sock"
    monkeypatch.setenv(variable, "run/kv.sock")
    with pytest.raises(kvstore.errors.ConfigError, match=f"{variable}: 'run/kv.sock' is no abso"):
        kvstore.connect()
