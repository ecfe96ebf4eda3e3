"""What a session gives is the same over a daemon: the tests of the embedded one, once more.

Left out are those that move the store's clock, or need a store of a mebibyte: a daemon's pool has
two at least, and its clock is the system's.
"""

from __future__ import annotations

import inspect
import os
import signal
from typing import Any

import msgspec
import pytest

from kvstore.audit import Audit
from kvstore.client.store import NodeStore
from kvstore.config import load
from kvstore.server.daemon import Daemon
from tests.daemon_process import until
from tests.payload import empty_buffers, payloads, writers
from tests.unit import test_session, test_session_holds, test_session_refusals, test_views
from tests.unit.test_views import keys, lease  # noqa: F401

#: Why a test is not for a daemon.
LEFT_OUT = {
    "test_targets": "looks into the core",
    "test_views_are_there_where_granted": "expects the checksum at once; see below",
    "test_the_first_contents_stay_and_others_are_counted": "the same",
    "test_what_was_found_and_evicted_since_is_an_explicit_miss": "fills a mebibyte",
    "test_five_times_its_size_stays_in_the_store": "fills a mebibyte",
    "test_readers_may_hold_half_of_the_store": "fills a mebibyte",
    "test_a_part_of_a_layout_is_as_long_as_it_is": "opens a store of its own",
    "test_a_tensor_that_outlives_its_store_reads_zeros": "opens a store of its own",
    "test_views_outlive_the_store_that_they_are_of": "opens a store of its own",
    "test_a_pool_view_counts_only_references_of_others": "needs no store",
}


class CheckedNodeStore(NodeStore):
    """With the recount under the name that it has in an embedded store."""

    def check(self) -> Audit:
        """Recount, after what is under way has ended."""
        found = self.verify()
        assert found["problems"] == []
        return Audit(**found["audit"])


@pytest.fixture
def store(directory):
    """Of a daemon in a forked child, which is there sooner than one that has to be imported."""
    directory.chmod(0o700)
    path = directory / "k.sock"
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            config = load(None)
            dram = msgspec.structs.replace(config.dram, capacity_bytes="2MiB")
            daemon = Daemon(msgspec.structs.replace(config, dram=dram), path)
            daemon.serve(lambda: _say_ready(writer))
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"r"
    os.close(reader)
    with CheckedNodeStore(path, "contract") as store:
        yield store
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def session(store, namespace):
    session = store.session(namespace)
    yield session
    session.close()


def _say_ready(fd: int) -> None:
    os.write(fd, b"r")


def _is_for_a_daemon(name: str, function: Any) -> bool:
    return name not in LEFT_OUT and "clock" not in inspect.signature(function).parameters


def _of_class(found: type) -> type:
    """The class without the tests that are left out."""
    bases = {
        name: member
        for name, member in vars(found).items()
        if not name.startswith("test_") or _is_for_a_daemon(name, member)
    }
    for name in ("__dict__", "__weakref__"):
        bases.pop(name, None)
    return type(found.__name__, (), bases)


def _take_over() -> None:
    for module in (test_session, test_session_holds, test_session_refusals, test_views):
        stem = module.__name__.rpartition("_")[2]
        for name, member in vars(module).items():
            if inspect.isclass(member) and name.startswith("Test"):
                globals()[f"{name}Of{stem.title()}"] = _of_class(member)
            elif (
                inspect.isfunction(member)
                and name.startswith("test_")
                and _is_for_a_daemon(name, member)
            ):
                globals()[name] = member


_take_over()


def test_checksums_are_known_soon_after_the_commit_and_tell_of_other_contents(
    store, session, namespace
):
    """A worker of the daemon makes them; a put that comes before it is not compared."""
    stored = namespace.keys(range(2))
    session.put(stored, payloads(stored, writer=1))

    def known():
        with session.reserve(stored) as reservation:
            assert reservation.outcomes == ["present", "present"]
            return None not in reservation.checksums

    until(known, seconds=2.0)
    assert session.put(stored, payloads(stored, writer=1)) == ["present", "present"]
    assert store.stats()["counters"]["differing_puts"] == 0
    assert session.put(stored, payloads(stored, writer=2)) == ["present", "present"]
    assert store.stats()["counters"]["differing_puts"] == 2
    buffers = empty_buffers(2)
    assert session.get_into(stored, buffers) == ["ok", "ok"]
    assert writers(buffers, stored) == [1, 1]


def test_nothing_is_left_out_that_is_not_there():
    modules = (test_session, test_session_holds, test_session_refusals, test_views)
    text = "".join(inspect.getsource(module) for module in modules)
    assert [name for name in LEFT_OUT if f"def {name}(" not in text] == []
