"""The first two frames of a connection: a hello, and what the daemon says to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvstore.client.channel import Channel
from kvstore.errors import DaemonUnavailable, WireError
from kvstore.wire import WIRE_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.clock import Clock

#: A daemon that has not answered so long after it should have is as good as gone.
ANSWER_SECONDS = 2.0


class Incompatible(DaemonUnavailable):
    """A daemon of another version."""


class Welcome(NamedTuple):
    """What a daemon says of itself to a new connection."""

    incarnation: bytes
    session: int
    secret: bytes
    can_write: bool
    pool_bytes: int
    words_bytes: int

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """From a map. Raises WireError."""
        try:
            found = cls(
                fields["incarnation"],
                fields["session"],
                fields["secret"],
                fields["writes"],
                fields["pool_bytes"],
                fields["words_bytes"],
            )
        except KeyError as error:
            raise WireError(f"a welcome without {error}") from error
        kinds = (bytes, int, bytes, bool, int, int)
        for name, value, kind in zip(cls._fields, found, kinds, strict=True):
            if not isinstance(value, kind):
                raise WireError(f"a welcome with {name} = {value!r:.40}")
        return found


class Caller(NamedTuple):
    """Who connects where."""

    path: Path
    clock: Clock
    name: str

    def connect(self, deadline: float, joined: Welcome | None) -> tuple[Channel, Welcome]:
        """A channel that has said hello, as one more of the session of `joined` if that lives.

        Two descriptors are with it: of the pool, and of its words. Raises DaemonUnavailable.
        """
        try:
            channel = Channel(self.path, self.clock, deadline)
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            hello: dict[str, Any] = {"t": "hello", "v": list(WIRE_VERSION), "name": self.name}
            if joined is not None:
                hello |= {"session": joined.session, "secret": joined.secret}
            channel.send(hello, deadline)
            welcome = self._welcome(channel, deadline)
        except (OSError, WireError) as error:
            channel.close()
            raise self._unavailable(error) from error
        except BaseException:
            channel.close()
            raise
        return channel, welcome

    def _welcome(self, channel: Channel, deadline: float) -> Welcome:
        fields = channel.receive(deadline)
        if fields.get("t") == "incompatible":
            other = ".".join(map(str, fields.get("v") or ["?"]))
            own = ".".join(map(str, WIRE_VERSION))
            raise Incompatible(f"the daemon speaks version {other}, this client {own}")
        welcome = Welcome.of(fields)
        if len(channel.descriptors) != 2:
            raise WireError(f"{len(channel.descriptors)} descriptors came with it, not 2")
        return welcome

    def _unavailable(self, error: Exception) -> DaemonUnavailable:
        if isinstance(error, TimeoutError):
            return DaemonUnavailable(
                f"the daemon at {self.path} does not answer within {ANSWER_SECONDS:g} s"
            )
        reason = getattr(error, "strerror", None) or str(error)
        return DaemonUnavailable(f"no daemon at {self.path}: {reason}")
