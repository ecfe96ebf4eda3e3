"""Rounds of bad luck: clients and the daemon are killed, stopped, woken and restarted at random.

Everything follows from a seed, save the moments at which the system runs whom. After each round all
must add up, nothing may be held for a process that is gone, and every byte that a client read must
be what somebody stored under that key.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import kvstore
from tests.daemon_process import ClientProcess, DaemonProcess, now, pause, until

if TYPE_CHECKING:
    from pathlib import Path

CLIENTS = 3
#: A client puts, reads under leases and without, adopts, reserves and leaves things open.
WORK = """
import random
from kvstore.errors import LeaseExpired, ReservationExpired
numbers = random.Random(int(hear()))
say("ready")
held, slowest = [], 0.0
while True:
    started = now()
    keys = namespace.keys([numbers.randrange(12), numbers.randrange(3), 1])
    action = numbers.randrange(6)
    try:
        if action == 0:
            session.put(keys, payloads(keys, writer=numbers.randrange(1, 9)))
        elif action == 1:
            buffers = empty_buffers(3)
            outcomes = session.get_into(keys, buffers)
            writers([b for b, o in zip(buffers, outcomes) if o == "ok"], keys)
        elif action == 2:
            with session.lease(keys, ttl_seconds=numbers.choice([0.05, 5])) as lease:
                buffers = empty_buffers(3)
                outcomes = lease.copy_into(buffers)
                writers([b for b, o in zip(buffers, outcomes) if o == "ok"], keys)
                if lease.blocks and numbers.randrange(2):
                    held.append(session.adopt(lease.token(), keys))
        elif action == 3:
            held.append(session.reserve(keys, ttl_seconds=numbers.choice([0.05, 5])))
        elif action == 4:
            with session.reserve(keys, ttl_seconds=numbers.choice([0.05, 5])) as reservation:
                for view, memory in zip(reservation.views, payloads(keys, writer=9)):
                    if view is not None:
                        view[:] = memory.data
                del view
                reservation.commit(numbers.randrange(1, 4))
        else:
            session.delete(keys[numbers.randrange(3):])
    except (LeaseExpired, ReservationExpired):
        pass
    except BaseException as error:
        say("wrong", type(error).__name__, error)
        raise
    del held[:-4]
    view = reservation = None
"""


class Rounds:
    """A daemon with some clients. Run `one` as often as you like."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self.daemon = DaemonProcess(directory, "8MiB")
        self._clients: list[ClientProcess] = []
        self._stopped: list[ClientProcess] = []

    def one(self) -> None:
        """Some events, and then a look at everything."""
        while len(self._clients) < CLIENTS:
            self._add_client()
        for _ in range(self._random.randrange(1, 4)):
            pause(self._random.uniform(0.0, 0.06))
            self._event()
        self._settle()

    def close(self) -> None:
        """End all processes."""
        for process in (*self._clients, self.daemon):
            process.kill()

    def _add_client(self) -> None:
        client = ClientProcess(self.daemon.socket_path, WORK)
        client.say(str(self._random.randrange(1 << 30)))
        assert client.hear() == "ready"
        self._clients.append(client)

    def _event(self) -> None:
        what = self._random.choices(
            ["kill", "stop", "go on", "restart", "freeze"], [4, 4, 4, 2, 1]
        )[0]
        client = self._random.choice(self._clients) if self._clients else None
        if what == "kill" and client is not None:
            self._clients.remove(client)
            if client in self._stopped:
                self._stopped.remove(client)
            client.kill()
        elif what == "stop" and client is not None and client not in self._stopped:
            client.stop()
            self._stopped.append(client)
        elif what == "go on" and self._stopped:
            self._stopped.pop(0).go_on()
        elif what == "restart":
            self.daemon.kill()
            self.daemon.start()
        elif what == "freeze":
            self.daemon.stop()
            pause(self._random.uniform(0.0, 0.1))
            self.daemon.go_on()

    def _settle(self) -> None:
        for client in self._clients:
            assert client.process.poll() is None, f"a client has ended: {client.hear()}"
        with kvstore.connect(self.daemon.socket_path) as store:
            found = store.verify()
            assert found["problems"] == []
            alive = {client.pid for client in self._clients}

            def only_the_living() -> bool:
                known = {c["pid"] for c in store.status()["clients"] if c["pid"] != os.getpid()}
                return known <= alive

            until(only_the_living, seconds=1.0)


def run_rounds(directory: Path, seed: int, rounds: int) -> float:
    """So many rounds; how long they took. Fails at the first thing that does not add up."""
    started = now()
    run = Rounds(directory, seed)
    try:
        for number in range(rounds):
            try:
                run.one()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, round {number}: {error}") from error
        _end_all(run)
    finally:
        run.close()
    return now() - started


def _end_all(run: Rounds) -> None:
    """With the clients gone, nothing is held any more."""
    for client in run._clients:
        client.kill()
    run._clients = []
    with kvstore.connect(run.daemon.socket_path) as store:

        def nothing_is_held() -> bool:
            audit = store.verify()["audit"]
            names = ("leases", "reservations", "reserved_bytes", "held_bytes", "condemned_bytes")
            return not any(audit[name] for name in names)

        until(nothing_is_held, seconds=1.0)
