"""Clients that are killed, stopped, forked; and what they held."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest, LeaseExpired, ReservationExpired
from kvstore.types import Outcome
from tests.daemon_process import ClientProcess, pause, until
from tests.payload import BLOCK_BYTES, empty_buffers, filled, writers

GIVEN_BACK_SECONDS = 1.0


def held(store):
    audit = store.verify()["audit"]
    return audit["leases"] + audit["reservations"] + audit["reserved_bytes"] + audit["held_bytes"]


KILLED_AT = {
    "holding leases": """
keys = filled(session, 1, 4)
leases = [session.lease(keys) for _ in range(3)]
say("ready"); hear()
""",
    "in the middle of filling": """
reservation = session.reserve(namespace.keys([1] * 4))
view = reservation.views[0]
view[:100] = bytes(100)
say("ready"); hear()
""",
    "after half a commit": """
keys = namespace.keys([1] * 4)
reservation = session.reserve(keys)
for view, memory in zip(reservation.views, payloads(keys)):
    view[:] = memory.data
reservation.commit(2)
say("ready"); hear()
""",
    "past the deadline of its reservation": """
reservation = session.reserve(namespace.keys([1] * 4), ttl_seconds=0.05)
pause(0.2)
say("ready"); hear()
""",
    "waiting for a block": """
keys = namespace.keys([1])
reservation = session.reserve(keys)
threading.Thread(target=lambda: session.lease(keys, wait_seconds=60)).start()
pause(0.2)
say("ready"); hear()
""",
    "waiting for room": """
for n in range(32):
    leases = [session.lease(filled(session, n, 4))]
others = [session.reserve(namespace.keys([n] * 64)) for n in range(100, 104)]
threading.Thread(target=lambda: session.reserve(namespace.keys([7] * 64), wait_seconds=60)).start()
pause(0.2)
say("ready"); hear()
""",
    "in the middle of a frame": """
lease = session.lease(filled(session, 1, 2))
store._link._attachment._idle[0]._socket.send(b"\\x00\\x10\\x00\\x00half")
say("ready"); hear()
""",
    "with many connections": """
keys = filled(session, 1, 2)
threads = [threading.Thread(target=lambda: [session.lease(keys) for _ in range(20)])
           for _ in range(10)]
[t.start() for t in threads]; [t.join() for t in threads]
say("ready"); hear()
""",
}


@pytest.mark.parametrize("where", KILLED_AT)
def test_a_killed_client_gives_everything_back(daemon, store, where):
    """CC01 and its kin: within a second of its death."""
    with ClientProcess(daemon.socket_path, KILLED_AT[where]) as client:
        assert client.hear() == "ready"
        assert held(store), "or this test says nothing"
        client.kill()
        assert until(lambda: not held(store)) < GIVEN_BACK_SECONDS
        until(lambda: len(store.status()["clients"]) == 1)
        assert store.status()["connections"] == 1


def test_a_client_killed_at_any_moment(daemon, store):
    script = """
say("ready")
n = 0
while True:
    n += 1
    keys = filled(session, n % 9, 3)
    with session.lease(keys) as lease:
        assert lease.copy_into(empty_buffers(3))
    with session.reserve(namespace.keys([n, n])) as reservation:
        pass
"""
    for round_number in range(8):
        with ClientProcess(daemon.socket_path, script) as client:
            assert client.hear() == "ready"
            pause(0.01 + 0.013 * round_number)
            client.kill()
        assert until(lambda: not held(store)) < GIVEN_BACK_SECONDS
    assert store.verify()["problems"] == []


def test_a_writer_stopped_past_its_deadline_keeps_its_memory_and_cannot_commit(
    daemon, store, session, namespace
):
    script = """
keys = namespace.keys([1] * 4)
reservation = session.reserve(keys, ttl_seconds=0.5)
views = reservation.views
say("ready"); hear()
for view, memory in zip(views, payloads(keys, writer=7)):
    view[:] = memory.data
try:
    reservation.commit()
    say("committed")
except Exception as error:
    say(type(error).__name__)
del view, views
hear()
"""
    with ClientProcess(daemon.socket_path, script) as client:
        assert client.hear() == "ready"
        client.stop()
        until(lambda: store.verify()["audit"]["held_bytes"] == 4 * BLOCK_BYTES)
        # Others fill the pool meanwhile: none of them gets that memory.
        for name in range(2, 80):
            filled(session, name, 4)
        keys = session.namespace.keys([79] * 4)
        client.go_on()
        client.say("write")
        assert client.hear() == "ReservationExpired"
        buffers = empty_buffers(4)
        assert session.get_into(keys, buffers) == ["ok"] * 4
        assert writers(buffers, keys) == [1] * 4
        assert store.verify()["audit"]["held_bytes"] == 0, "it has said that it writes no more"
        assert session.match(namespace.keys([1] * 4)).blocks == 0
        client.say("end")


def test_a_closed_socket_is_no_dead_process(daemon, store):
    script = """
reservation = session.reserve(namespace.keys([1] * 4), ttl_seconds=0.2)
views = reservation.views
for channel in store._link._attachment._idle:
    channel._socket.close()
say("ready"); hear()
"""
    with ClientProcess(daemon.socket_path, script) as client:
        assert client.hear() == "ready"
        until(lambda: store.verify()["audit"]["held_bytes"] == 4 * BLOCK_BYTES)
        pause(1.5)
        assert store.verify()["audit"]["held_bytes"] == 4 * BLOCK_BYTES
        assert store.status()["connections"] == 1
        client.kill()
        assert until(lambda: not held(store)) < GIVEN_BACK_SECONDS


def test_a_reader_stopped_past_its_deadline_is_told(daemon, store, session):
    script = """
keys = namespace.keys([1] * 4)
lease = session.lease(keys, ttl_seconds=0.5)
views = lease.views
say(lease.blocks, lease.valid()); hear()
bytes(views[0])
say(lease.valid(), *lease.copy_into(empty_buffers(4)))
del views
"""
    filled(session, 1, 4)
    with ClientProcess(daemon.socket_path, script) as client:
        assert client.hear() == "4 True"
        client.stop()
        until(lambda: not store.verify()["audit"]["leases"])
        for name in range(2, 80):
            filled(session, name, 4)
        client.go_on()
        client.say("look")
        assert client.hear() == "False expired expired expired expired"


class TestEnds:
    def test_twice_and_late(self, store, session, namespace):
        """CO12."""
        keys = filled(session, 1, 2)
        lease, other = session.lease(keys), session.lease(keys)
        lease.release()
        lease.release()
        assert store.verify()["audit"]["leases"] == 1
        assert other.valid()
        late = session.lease(keys, ttl_seconds=0.05)
        pause(0.1)
        assert not late.valid()
        assert not late.renew(5)
        late.release()
        reservation = session.reserve(namespace.keys([5, 6]))
        reservation.abort()
        reservation.abort()
        with pytest.raises(ReservationExpired):
            reservation.commit()
        expired = session.reserve(namespace.keys([5, 6]), ttl_seconds=0.05)
        pause(0.1)
        with pytest.raises(ReservationExpired):
            expired.commit()
        assert held(store) == 1
        other.release()

    def test_a_closed_store_holds_nothing(self, daemon, store, namespace):
        import kvstore

        with kvstore.connect(daemon.socket_path) as second:
            session = second.session(namespace)
            lease = session.lease(filled(session, 1, 2))
            reservation = session.reserve(namespace.keys([9]))
            assert held(store)
        until(lambda: not held(store), seconds=2)
        del lease, reservation


class TestAdoption:
    SCRIPT = """
token = bytes.fromhex(hear())
keys = namespace.keys([1] * 4)
lease = session.adopt(token, keys)
say(lease.blocks, lease.reason, writers(lease.views, keys) if lease.blocks else "")
hear()
lease.release()
say("released"); hear()
"""

    def test_a_lease_outlives_its_first_holder(self, daemon, store, session):
        first = """
keys = filled(session, 1, 4)
lease = session.lease(keys)
say(lease.token().hex()); hear()
"""
        with (
            ClientProcess(daemon.socket_path, first) as holder,
            ClientProcess(daemon.socket_path, self.SCRIPT) as adopter,
        ):
            adopter.say(holder.hear())
            assert adopter.hear() == "4 None [1, 1, 1, 1]"
            holder.kill()
            until(lambda: len(store.status()["clients"]) == 2)
            pause(0.1)
            assert store.verify()["audit"]["leases"] == 1
            adopter.say()
            assert adopter.hear() == "released"
            assert until(lambda: not held(store)) < GIVEN_BACK_SECONDS
            adopter.say()

    def test_it_ends_with_the_adopters_process_too(self, daemon, store, session):
        lease = session.lease(filled(session, 1, 4))
        with ClientProcess(daemon.socket_path, self.SCRIPT) as adopter:
            adopter.say(lease.token().hex())
            adopter.hear()
            lease.release()
            session.match(session.namespace.keys([1]))
            assert store.verify()["audit"]["leases"] == 1
            adopter.kill()
            assert until(lambda: not held(store)) < GIVEN_BACK_SECONDS

    def test_one_process_may_hold_it_more_than_once(self, store, session):
        keys = filled(session, 1, 4)
        lease = session.lease(keys)
        token = lease.token()
        adopted = [session.adopt(token, keys) for _ in range(2)]
        lease.release()
        adopted[0].release()
        assert store.verify()["audit"]["leases"] == 1
        assert adopted[1].valid()
        assert writers(adopted[1].views, keys) == [1] * 4
        adopted[1].release()
        assert store.verify()["audit"]["leases"] == 0
        assert session.adopt(token, keys).reason is Outcome.EXPIRED

    def test_no_token_can_be_made_up(self, session):
        keys = filled(session, 1, 4)
        lease = session.lease(keys)
        token = lease.token()
        for n in range(len(token)):
            forged = bytearray(token)
            forged[n] ^= 1
            assert session.adopt(bytes(forged), keys).blocks == 0
        for other in (b"", token[:8], token + b"0"):
            assert session.adopt(other, keys).reason is Outcome.EXPIRED
        lease.release()
        with pytest.raises(LeaseExpired):
            lease.token()

    def test_only_for_the_blocks_that_it_is_on(self, session, namespace):
        keys = filled(session, 1, 4)
        other = filled(session, 2, 4)
        lease = session.lease(keys)
        token = lease.token()
        assert session.adopt(token, other).reason is Outcome.ABSENT
        assert session.adopt(token, keys[:3]).reason is Outcome.ABSENT
        longer = namespace.keys([1] * 5)
        assert session.adopt(token, longer).blocks == 4
        with pytest.raises(InvalidRequest, match="token is a str"):
            session.adopt("token", keys)
        with pytest.raises(InvalidRequest, match="no blocks"):
            session.lease(namespace.keys([99])).token()


class TestFork:
    def test_a_child_has_a_connection_of_its_own(self, daemon, store):
        script = """
keys = filled(session, 1, 4)
lease = session.lease(keys)
views = lease.views
array = np.frombuffer(views[0], np.uint8)
reservation = session.reserve(namespace.keys([7] * 2))
written = reservation.views
def kind(call):
    try:
        return call()
    except BaseException as error:
        return type(error).__name__
say("ready"); hear()
pid = os.fork()
if not pid:
    say(session.match(keys).blocks)
    own = session.lease(keys)
    say(own.blocks, writers(own.views, keys), own.valid())
    say(kind(lambda: lease.views), kind(lambda: lease.renew(5)), kind(lambda: lease.token()),
        kind(lambda: lease.copy_into(empty_buffers(4))), kind(lambda: reservation.views),
        kind(lambda: reservation.commit()), lease.valid())
    say(int(array.sum()), bytes(written[0][:4]))
    array = None
    written[0][:4] = b"oops"
    say(kind(lambda: lease.release()), kind(lambda: reservation.abort()))
    say(session.put(namespace.keys([5]), payloads(namespace.keys([5])))[0])
    hear()
    os._exit(0)
say(os.waitpid(pid, 0)[1])
say(lease.valid(), writers(lease.views, keys), bytes(written[0][:4]) != b"oops")
hear()
"""
        with ClientProcess(daemon.socket_path, script) as client:
            assert client.hear() == "ready"
            client.say()
            assert client.hear() == "4"
            assert client.hear() == "4 [1, 1, 1, 1] True"
            assert client.hear() == " ".join(["StoreForked"] * 6 + ["False"])
            assert client.hear() == "0 b'\\x00\\x00\\x00\\x00'", "zeros, and no crash"
            assert client.hear() == "StoreForked StoreForked"
            assert client.hear() == "ok"
            assert len({c["pid"] for c in store.status()["clients"]}) == 3
            client.say()
            assert client.hear() == "0"
            assert client.hear() == "True [1, 1, 1, 1] True"
            assert store.verify()["audit"]["leases"] == 1, "the child's ended with the child"
            client.kill()
            assert until(lambda: not held(store)) < GIVEN_BACK_SECONDS

    def test_a_fork_while_other_threads_are_in_calls(self, daemon):
        script = """
keys = filled(session, 1, 4)
done = threading.Event()
def work():
    while not done.is_set():
        session.get_into(keys, empty_buffers(4))
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
for _ in range(10):
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        os._exit(0 if session.match(keys).blocks == 4 else 1)
    say(os.waitpid(pid, 0)[1])
done.set()
"""
        with ClientProcess(daemon.socket_path, script) as client:
            assert [client.hear() for _ in range(10)] == ["0"] * 10
