"""Asking the daemon of this node, as the commands do: over a connection that maps no memory.

Whatever is wrong with the daemon is one DaemonUnavailable that says so, in less than two seconds.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, DaemonUnavailable, WireError
from kvstore.paths import check_socket_path, find_socket, parse_socket
from kvstore.wire import LENGTH, WIRE_VERSION, body_length, fields_of, frame

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

#: For each of its two answers. A healthy daemon needs a thousandth of it.
ANSWER_SECONDS = 0.7
_REASONS = {
    FileNotFoundError: "nothing is there; `kvstore serve` starts one",
    ConnectionRefusedError: "it has ended and left its socket; `kvstore serve` starts another",
    PermissionError: "this user may not connect to it",
    ConnectionResetError: "it has closed the connection",
    BrokenPipeError: "it has closed the connection",
}


def add_socket_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --socket."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="the daemon's socket (default: KVSTORE_CFG_DAEMON__SOCKET, else as `kvstore serve` "
        "has it)",
    )


def socket_of(arguments: argparse.Namespace) -> Path:
    """The path that --socket names, or the one that clients find. Raises ConfigError."""
    if arguments.socket is None:
        return check_socket_path(find_socket())
    try:
        return parse_socket(os.path.abspath(arguments.socket.removeprefix("unix:")))  # noqa: PTH100
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"--socket: {error}") from error


def ask(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Send one inquiry; its answer. Raises DaemonUnavailable, which says what is wrong."""
    from kvstore.cli.terminal import escaped

    shown = escaped(str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(os.fspath(path))
            # The descriptors of a welcome are not received, so the kernel closes them.
            welcome = _exchange(
                connection, {"t": "hello", "v": list(WIRE_VERSION), "name": "kvstore command"}
            )
            if welcome.get("t") == "incompatible":
                raise DaemonUnavailable(_other_version(shown, welcome))
            return _exchange(connection, {"i": 1, **fields})
        except TimeoutError as error:
            raise DaemonUnavailable(
                f"the daemon at {shown} ({_peer(connection)}) does not answer within "
                f"{ANSWER_SECONDS:g} s: it is stopped, or overloaded"
            ) from error
        except OSError as error:
            reason = _REASONS.get(type(error), error.strerror or str(error))
            if isinstance(error, ConnectionRefusedError) and not path.is_socket():
                reason = "that is no socket"
            raise DaemonUnavailable(f"no daemon at {shown}: {reason}") from error
        except WireError as error:
            raise DaemonUnavailable(
                f"what listens at {shown} is no daemon of kvstore: {error}"
            ) from error


def clients_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The clients in a daemon's status, less this process, which is no news to whoever typed it."""
    return [client for client in status["clients"] if client["pid"] != os.getpid()]


def _exchange(connection: socket.socket, fields: dict[str, Any]) -> dict[str, Any]:
    connection.sendall(frame(fields))
    length = body_length(_exactly(connection, LENGTH.size))
    return fields_of(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            raise ConnectionResetError
        received += more
    return received


def _peer(connection: socket.socket) -> str:
    try:
        form = struct.Struct("3i")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    except OSError:
        return "process unknown"
    return f"process {form.unpack(raw)[0]}"


def _other_version(shown: str, welcome: dict[str, Any]) -> str:
    other = ".".join(str(part) for part in welcome.get("v") or ["?"])
    own = ".".join(str(part) for part in WIRE_VERSION)
    return f"the daemon at {shown} speaks version {other} of the wire, this command {own}"
