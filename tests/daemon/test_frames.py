"""Bad frames, and clients that do not behave: theirs is the connection that ends (NE09, SE08)."""

from __future__ import annotations

import random
import resource
import socket
import struct
from typing import Any

import msgspec
import pytest

from kvstore import wire
from kvstore.types import Outcome
from kvstore.wire_requests import request_fields
from tests.daemon_process import now, pause, until
from tests.payload import filled
from tests.wire_samples import REQUESTS

HELLO = {"t": "hello", "v": [1, 0], "name": "bad"}


@pytest.fixture(autouse=True)
def _many_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, before[1]), before[1]))
    yield
    while _opened:
        _opened.pop().close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


_opened: list[socket.socket] = []


def connected(daemon, *, seconds=5.0):
    peer = socket.socket(socket.AF_UNIX)
    _opened.append(peer)
    peer.connect(str(daemon.socket_path))
    peer.settimeout(seconds)
    return peer


def greeted(daemon):
    peer = connected(daemon)
    peer.sendall(wire.frame(HELLO))
    assert answer(peer)["t"] == "welcome"
    return peer


def exactly(peer, count):
    received = b""
    while len(received) < count:
        more = peer.recv(count - len(received))
        if not more:
            raise ConnectionResetError
        received += more
    return received


def answer(peer):
    return wire.fields_of(exactly(peer, wire.body_length(exactly(peer, 4))))


def is_ended(peer):
    """Has the daemon closed it?"""
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff\xff",
        struct.pack("<I", 4097),
        b"\x01\x00\x00\x00\xc1",
        b"\x00\x00\x00\x00",
        wire.frame({"t": "match", "i": 1, "k": b""}),
        wire.frame({"t": "hello"}),
        wire.frame({"t": "hello", "v": [1]}),
        wire.frame({"t": "hello", "v": ["1", "0"]}),
        wire.frame({"t": "hello", "v": [2, 0]}),
        wire.frame({**HELLO, "secret": "text"}),
        wire.frame({"t": ["hello"]}),
    ],
)
def test_a_bad_first_frame_ends_its_connection_only(daemon, session, raw):
    with connected(daemon) as peer:
        peer.sendall(raw)
        assert is_ended(peer)
    filled(session, 1, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"t": "no such request", "i": 1},
        {"t": "match", "k": b""},
        {"t": "match", "i": "1", "k": b""},
        {"t": "match", "i": 1, "k": bytes(31)},
        {"t": "match", "i": 1, "k": bytes(64), "n": bytes(8)},
        {"t": "match", "i": 1, "k": b"", "r": b"1"},
        {"t": ["match"], "i": 1},
        {"t": {"a": 1}, "i": 1},
        {"t": None},
        {"i": 1},
        {"t": "lease", "i": 1, "k": b"", "ttl": -1},
        {"t": "lease", "i": 1, "k": b"", "ttl": float("nan")},
        {"t": "end_holder", "i": 1, "holder": 1},
    ],
)
def test_a_bad_request_ends_its_connection_only(daemon, session, fields):
    with greeted(daemon) as peer:
        raw = msgspec.msgpack.encode(fields)
        peer.sendall(wire.LENGTH.pack(len(raw)) + raw)
        assert is_ended(peer)
    filled(session, 1, 1)


def test_an_unwelcome_version_is_told_ours(daemon):
    with connected(daemon) as peer:
        peer.sendall(wire.frame({**HELLO, "v": [2, 0]}))
        assert answer(peer) == {"t": "incompatible", "v": [1, 0]}
        assert is_ended(peer)


def test_random_bytes_and_changed_frames(daemon, store, session):
    """NE09. Whole requests with single bytes changed get far into the daemon."""
    random_numbers = random.Random(1)
    samples = [wire.frame({"i": 1, **request_fields(r)}) for r in REQUESTS.values()]
    for round_number in range(300):
        with greeted(daemon) as peer:
            if round_number % 3 == 0:
                raw = random_numbers.randbytes(random_numbers.randrange(1, 300))
                raw = wire.LENGTH.pack(len(raw)) + raw
            else:
                changed = bytearray(random_numbers.choice(samples))
                for _ in range(random_numbers.randrange(1, 4)):
                    changed[random_numbers.randrange(4, len(changed))] = random_numbers.randrange(
                        256
                    )
                raw = bytes(changed)
            peer.sendall(raw + samples[0])
            peer.shutdown(socket.SHUT_WR)
            assert is_ended(peer), raw.hex()
    assert store.verify()["problems"] == []
    filled(session, 1, 4)


def test_two_thousand_half_open_connections(daemon, store, session):
    """NE09, SE08: others are served, at once."""
    before_bytes = daemon.private_bytes()
    peers = []
    for _ in range(2_000):
        peers.append(connected(daemon))
        if len(peers) % 2:
            peers[-1].sendall(struct.pack("<I", 4_000))  # a frame that never comes
    started = now()
    filled(session, 1, 4)
    assert now() - started < 1.0
    assert daemon.private_bytes() - before_bytes < 32 << 20
    assert store.status()["connections"] <= 1_024
    until(lambda: store.status()["connections"] <= 2, seconds=8.0)  # HELLO_SECONDS, and one more
    for peer in peers:
        peer.close()


def test_connections_of_one_process_are_bounded(daemon, store, session):
    peers = [connected(daemon) for _ in range(400)]
    for peer in peers:
        peer.sendall(wire.frame(HELLO))
    alive = []
    for peer in peers:
        try:
            assert answer(peer)["t"] == "welcome"
        except ConnectionResetError:
            continue
        alive.append(peer)
    assert len(alive) <= 256
    assert len(alive) > 200
    for peer in peers:
        peer.close()
    until(lambda: store.status()["connections"] <= 2)
    filled(session, 1, 2)


def test_many_begun_frames_take_up_a_bounded_amount(daemon, store, session):
    """SE08: each announces 60 MiB and sends as much of it as it can."""
    peers = [greeted(daemon) for _ in range(12)]
    for peer in peers:
        peer.settimeout(0.05)
        try:
            peer.sendall(struct.pack("<I", 60 << 20))
            for _ in range(50):
                peer.sendall(bytes(1 << 20))
        except OSError:
            continue
    assert daemon.private_bytes() < 600 << 20
    started = now()
    filled(session, 1, 2)
    assert now() - started < 3.0
    for peer in peers:
        peer.close()
    assert store.verify()["problems"] == []


def test_a_client_that_never_reads(daemon, store, session):
    with greeted(daemon) as peer:
        peer.settimeout(0.5)
        request = wire.frame({"t": "status", "i": 1})
        sent = 0
        try:
            while sent < 4 << 20:
                sent += peer.send(request * 1_000)
        except (TimeoutError, OSError):
            pass
        assert daemon.private_bytes() < 200 << 20
        filled(session, 1, 2)
    until(lambda: store.status()["connections"] <= 2)


def test_a_frame_that_comes_byte_by_byte_is_read(daemon):
    with greeted(daemon) as peer:
        for byte in wire.frame({"t": "match", "i": 5, "k": bytes(32)}):
            peer.send(bytes([byte]))
        found = answer(peer)
        assert (found["i"], found["n"]) == (5, 0)


def test_a_thousand_connections_leave_nothing_behind(daemon, store):
    """Item by item: each a session of its own, of one process that lives on."""
    for _ in range(50):
        greeted(daemon).close()
    until(lambda: store.status()["connections"] <= 1)
    descriptors, memory_bytes = daemon.descriptors(), daemon.private_bytes()
    for _ in range(1_000):
        greeted(daemon).close()
    until(lambda: store.status()["connections"] <= 1)
    pause(0.1)
    assert daemon.descriptors() <= descriptors + 2
    assert daemon.private_bytes() - memory_bytes < 2 << 20
    assert len(store.status()["clients"]) == 1


def test_releases_of_leases_of_others_do_nothing(daemon, store, session):
    """CO12 across processes' sessions."""
    keys = filled(session, 1, 2)
    lease = session.lease(keys)
    with greeted(daemon) as peer:
        every = wire.pack_numbers(list(range(50)))
        peer.sendall(wire.frame({"t": "releases", "r": every}))
        asked: list[dict[str, Any]] = [
            {"t": "release"},
            {"t": "renew", "ttl": 5},
            {"t": "token"},
            {"t": "abort"},
        ]
        for number, fields in enumerate(asked):
            peer.sendall(wire.frame({"i": number, "id": 1, **fields}))
        found = [answer(peer) for _ in range(4)]
        peer.sendall(wire.frame({"t": "commit", "i": 9, "id": 1, "blocks": 1}))
        assert answer(peer)["outcome"] == wire.pack_outcome(Outcome.EXPIRED)
    assert [f.get("was", f.get("left", f.get("token"))) for f in found] == [
        False,
        None,
        None,
        False,
    ]
    assert store.verify()["audit"]["leases"] == 1
    assert lease.valid()
    lease.release()
