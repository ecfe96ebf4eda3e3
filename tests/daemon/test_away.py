"""The daemon away, killed, restarted, frozen: misses with a reason, and the way back."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvstore
from kvstore.client.backoff import BACKOFF_SECONDS_MIN
from kvstore.errors import DaemonUnavailable, ReservationExpired
from kvstore.types import Outcome
from tests.daemon_process import DaemonProcess, now, pause, until
from tests.payload import (
    BLOCK_BYTES,
    a_namespace,
    empty_buffers,
    filled,
    payload,
    payloads,
    writer_of,
    writers,
)

UNAVAILABLE, TIMEOUT, EXPIRED = Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.EXPIRED
#: What no call may take beyond the time that it was given.
BEYOND_SECONDS = 2.5


def every_call(session, keys):
    """Each kind of call; what it answered, and how long it took."""
    calls = {
        "match": lambda: session.match(keys).reason,
        "lease": lambda: session.lease(keys).reason,
        "reserve": lambda: session.reserve(keys).outcomes[0],
        "put": lambda: session.put(keys, payloads(keys))[0],
        "get": lambda: session.get_into(keys, empty_buffers(len(keys)))[0],
        "delete": lambda: session.delete(keys)[0],
        "pin": lambda: session.pin(keys)[0],
        "unpin": lambda: session.unpin(keys)[0],
        "adopt": lambda: session.adopt(b"token", keys).reason,
    }
    found = {}
    for name, call in calls.items():
        started = now()
        found[name] = call()
        assert now() - started < BEYOND_SECONDS, name
    return found


def test_without_a_daemon_every_call_is_a_miss_at_once(directory, namespace):
    with kvstore.connect(directory / "nobody.sock") as store:
        session, keys = store.session(namespace), namespace.keys([1, 2])
        started = now()
        assert set(every_call(session, keys).values()) == {UNAVAILABLE}
        assert now() - started < 0.5
        with pytest.raises(DaemonUnavailable):
            store.status()
        with pytest.raises(DaemonUnavailable):
            store.verify()


def test_a_daemon_that_comes_later_is_found(directory, namespace):
    with kvstore.connect(directory / "k.sock") as store:
        session, keys = store.session(namespace), namespace.keys([1, 2])
        assert session.match(keys).reason is UNAVAILABLE
        with DaemonProcess(directory):
            until(lambda: session.put(keys, payloads(keys)) == ["ok", "ok"])
            assert session.match(keys).blocks == 2


def test_killed_and_restarted_between_two_calls(daemon, store, session, namespace):
    """No call is lost over it, and nothing of the old run counts."""
    keys = filled(session, 1, 4)
    lease = session.lease(keys)
    view = np.frombuffer(lease.views[0], np.uint8)
    reservation = session.reserve(namespace.keys([9, 8]))
    token = lease.token()
    daemon.kill()
    daemon.start()
    assert not lease.valid(), "of a run that has ended"
    assert lease.copy_into(empty_buffers(4)) == [EXPIRED] * 4
    assert not lease.renew(60)
    assert session.match(keys).reason is Outcome.ABSENT, "a miss of the new daemon"
    assert session.adopt(token, keys).reason is EXPIRED
    assert writer_of(view, keys[0]) == 1, "the old memory is kept for its views"
    for memory in reservation.views:
        memory[:] = bytes(BLOCK_BYTES)
    with pytest.raises(ReservationExpired):
        reservation.commit()
    del view
    lease.release()
    other = filled(session, 1, 4, writer=2)
    buffers = empty_buffers(4)
    assert session.get_into(other, buffers) == ["ok"] * 4
    assert writers(buffers, other) == [2] * 4
    audit = store.verify()["audit"]
    assert (audit["leases"], audit["reservations"]) == (0, 0)


def test_ids_of_the_old_run_do_nothing_to_the_new_one(daemon, store, session, namespace):
    keys = filled(session, 1, 2)
    old_lease = session.lease(keys)
    old_reservation = session.reserve(namespace.keys([9]))
    daemon.kill()
    daemon.start()
    filled(session, 1, 2)
    lease = session.lease(keys)
    reservation = session.reserve(namespace.keys([9]))
    assert lease._lease_id == old_lease._lease_id, "the same number, or this test says nothing"
    assert reservation._reservation_id == old_reservation._reservation_id
    old_lease.release()
    old_reservation.abort()
    session.match(keys)
    audit = store.verify()["audit"]
    assert (audit["leases"], audit["reservations"]) == (1, 1)
    assert lease.valid()
    lease.release()
    reservation.abort()


def test_killed_for_good(daemon, session, namespace):
    keys = filled(session, 1, 2)
    lease = session.lease(keys)
    daemon.kill()
    assert set(every_call(session, keys).values()) == {UNAVAILABLE}
    assert not lease.valid()
    lease.release()


def test_killed_in_the_middle_of_a_wait(daemon, session, namespace):
    keys = namespace.keys([1])
    writer = session.reserve(keys)
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(session.match(keys, wait_seconds=20).reason)
    )
    waiting.start()
    pause(0.3)
    started = now()
    daemon.kill()
    waiting.join(10)
    assert found == [UNAVAILABLE]
    assert now() - started < 1.0
    writer.abort()


def test_frozen_and_thawed(daemon, store, session, namespace):
    """Calls end in time, the first of them as `timeout`; what was granted stays granted."""
    keys = filled(session, 1, 2)
    lease = session.lease(keys)
    daemon.stop()
    started = now()
    assert session.match(keys).reason is TIMEOUT
    assert 1.9 < now() - started < BEYOND_SECONDS
    started = now()
    assert session.match(keys).reason is UNAVAILABLE, "no second wait so soon"
    assert now() - started < 0.1
    assert set(every_call(session, keys).values()) <= {UNAVAILABLE, TIMEOUT}
    assert lease.valid(), "the daemon cannot have given its memory away"
    daemon.go_on()
    until(lambda: session.match(keys).blocks == 2, seconds=8)
    assert lease.copy_into(buffers := empty_buffers(2)) == ["ok", "ok"]
    assert writers(buffers, keys) == [1, 1]
    lease.release()


@pytest.mark.parametrize("kind", ["lease", "reserve"])
def test_what_a_frozen_daemon_grants_too_late_is_given_back(daemon, store, session, kind):
    keys = filled(session, 1, 2)
    namespace = session.namespace
    daemon.stop()
    if kind == "lease":
        assert session.lease(keys).reason is TIMEOUT
    else:
        assert session.reserve(namespace.keys([5])).outcomes == [TIMEOUT]
    daemon.go_on()
    until(lambda: session.match(keys).blocks == 2, seconds=8)

    def nothing_is_held():
        session.match(keys)
        audit = store.verify()["audit"]
        return (audit["leases"], audit["reservations"], audit["held_bytes"]) == (0, 0, 0)

    until(nothing_is_held, seconds=3)


def test_a_commit_that_was_not_answered_gives_its_memory_back(daemon, store, session, namespace):
    keys = namespace.keys([1, 2])
    reservation = session.reserve(keys)
    for view, memory in zip(reservation.views, payloads(keys), strict=True):
        view[:] = memory.data
    del view
    daemon.stop()
    with pytest.raises(ReservationExpired, match="timeout"):
        reservation.commit()
    daemon.go_on()
    until(lambda: session.match(keys).reason is not UNAVAILABLE, seconds=8)
    del reservation
    until(lambda: session.match(keys) and not store.verify()["audit"]["reservations"], seconds=3)
    for key, buffer in zip(keys, buffers := empty_buffers(2), strict=True):
        assert session.get_into(keys, buffers)[0] in ("ok", Outcome.ABSENT)
        assert not buffer.any() or writer_of(buffer, key) == 1


def test_threads_that_wait_for_a_frozen_daemon_wait_at_the_same_time(daemon, session):
    keys = filled(session, 1, 1)
    daemon.stop()
    started = now()
    threads = [threading.Thread(target=session.match, args=(keys,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert now() - started < 2 * BEYOND_SECONDS
    daemon.go_on()


def test_the_pause_between_attempts_grows_and_ends(directory, namespace):
    with kvstore.connect(directory / "k.sock") as store:
        session, keys = store.session(namespace), namespace.keys([1])
        link = store._link
        for _ in range(3):
            session.match(keys)
            link._backoff._next_try_at = -1.0
        session.match(keys)
        assert link._backoff._seconds == 16 * BACKOFF_SECONDS_MIN
        with DaemonProcess(directory):
            link._backoff._next_try_at = -1.0
            assert session.match(keys).reason is Outcome.ABSENT
            assert link._backoff._seconds == BACKOFF_SECONDS_MIN


def test_clients_that_work_while_the_daemon_is_killed_again_and_again(directory):
    """No wrong byte, no hang, no exception; and they are served in the end."""
    namespace = a_namespace(BLOCK_BYTES)
    wrong: list[str] = []
    done = threading.Event()
    with DaemonProcess(directory) as daemon, kvstore.connect(daemon.socket_path) as store:

        def work(number: int) -> None:
            session, round_number = store.session(namespace), 0
            while not done.is_set():
                round_number += 1
                keys = namespace.keys([number, round_number % 5, 3, 4])
                started = now()
                session.put(keys, payloads(keys, writer=number))
                buffers = empty_buffers(4)
                outcomes = session.get_into(keys, buffers)
                for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
                    if outcome is Outcome.OK and not np.array_equal(
                        buffer, payload(key, number, BLOCK_BYTES)
                    ):
                        wrong.append("bytes")
                if now() - started > 2 * BEYOND_SECONDS:
                    wrong.append(f"{now() - started} s")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            pause(0.3)
            daemon.kill()
            daemon.start()
        done.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not wrong
        keys = namespace.keys([99])
        until(lambda: store.session(namespace).put(keys, payloads(keys))[0] in ("ok", "present"))
        assert store.verify()["problems"] == []


def test_memory_of_daemons_that_are_gone_is_given_back(directory, namespace):
    """A client keeps none of the pools that it was attached to."""

    def shared_bytes():
        from pathlib import Path

        text = Path("/proc/self/smaps_rollup").read_text()
        found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return int(found["Rss"].split()[0]) * 1024

    with DaemonProcess(directory, "64MiB") as daemon, kvstore.connect(daemon.socket_path) as store:
        session = store.session(namespace)
        filled(session, 1, 400)
        before = shared_bytes()
        for _ in range(3):
            daemon.kill()
            daemon.start()
            until(lambda: session.match(namespace.keys([1])).reason is not UNAVAILABLE)
            filled(session, 1, 400)
        assert shared_bytes() - before < 48 << 20
