"""Where a daemon and its clients meet, and what belongs to nobody else.

A system service uses /run/kvstore; a user, the directory of the session, or one of the user's own
in /tmp where there is none. Directories are 0700.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvstore.errors import ConfigError

SOCKET_NAME = "kvstore.sock"
SYSTEM_DIRECTORY = Path("/run/kvstore")
#: The variable of the setting daemon.socket, here too: a client reads no configuration.
SOCKET_VARIABLE = "KVSTORE_CFG_DAEMON__SOCKET"
_SCHEME = "unix:"
_AUTO = "auto"
_EXAMPLE = SYSTEM_DIRECTORY / SOCKET_NAME
#: sockaddr_un of Linux, less the closing zero.
SOCKET_PATH_BYTES_MAX = 107


def runtime_directory() -> Path:
    """The directory of this user's daemon."""
    if os.geteuid() == 0:
        return SYSTEM_DIRECTORY
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session) / "kvstore" if session else Path(f"/tmp/kvstore-{os.geteuid()}")


def default_socket() -> Path:
    """The socket of this user's daemon."""
    return runtime_directory() / SOCKET_NAME


def find_socket() -> Path:
    """The socket that a client uses: what the environment says, else this user's daemon's if there
    is one, else the system's. Raises ConfigError for a variable that names none.
    """
    named = os.environ.get(SOCKET_VARIABLE, _AUTO)
    if named != _AUTO:
        try:
            return parse_socket(named)
        except ConfigError as error:
            raise ConfigError(f"{SOCKET_VARIABLE}: {error}") from error
    own = default_socket()
    system = SYSTEM_DIRECTORY / SOCKET_NAME
    return system if not _is_there(own) and _is_there(system) else own


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a directory that this user may not look into
        return False


def parse_socket(text: str) -> Path:
    """The path in "/path" or "unix:/path". Raises ConfigError unless a socket can have it."""
    path = Path(text.removeprefix(_SCHEME))
    if not path.is_absolute() or "\0" in text:
        raise ConfigError(f"{text!r:.60} is no absolute path: give one, as in {_EXAMPLE}")
    return check_socket_path(path)


def check_socket_path(path: Path) -> Path:
    """Raise ConfigError for a path that no socket can have."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the socket's path has {len(os.fsencode(path))} bytes: the most is "
            f"{SOCKET_PATH_BYTES_MAX}: {path}"
        )
    return path


def make_private_directory(path: Path) -> None:
    """Make a directory 0700. Raises ConfigError where it is somebody else's, or open to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat(follow_symlinks=False)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is no directory")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & 0o022:
        raise ConfigError(f"{path} can be written by others: chmod 700 {path}")
