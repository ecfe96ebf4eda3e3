"""The tree of settings: each with its kind, its default and its meaning, here and nowhere else.

A table of the file is a `Table`, and its fields are the settings. Everything that shows settings
(`kvstore config`, config/kvstore.toml, the table in docs/configuration.md) is made from this.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeVar

import msgspec

from kvstore.config.kinds import (
    AUTO,
    MemoryShare,
    choice,
    count,
    fraction,
    memory_size,
    seconds,
    shown_given,
    socket_path,
)
from kvstore.config.table import Contradiction, Spec, Table
from kvstore.errors import ConfigError
from kvstore.memory_limits import ROOT, available_memory_bytes, memory_limit
from kvstore.paths import default_socket
from kvstore.policy import POLICIES
from kvstore.settings import CoreSettings
from kvstore.units import shown_bytes, shown_fraction

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY_BYTES_MIN = 1024 * 1024

_CORE = CoreSettings()
_POLICY_MEANINGS = {
    name: (inspect.getdoc(policy) or "").partition("\n\n")[0].replace("\n", " ")
    for name, policy in POLICIES.items()
}
_DAY_SECONDS = 86_400.0


class DramConfig(Table, frozen=True, kw_only=True):
    """The tier in host memory."""

    NAME = "dram"

    capacity_bytes: Annotated[
        int | MemoryShare,
        Spec(
            memory_size(CAPACITY_BYTES_MIN),
            "How much memory the blocks take; it is taken and populated when the store opens. "
            "What the store knows of them may take a sixteenth more, and beyond that, with blocks "
            "of less than 20 KiB, counts against it.",
        ),
    ] = MemoryShare(0.10)


class StoreConfig(Table, frozen=True, kw_only=True):
    """What the store does with its blocks. Fractions are of the capacity of the tier."""

    NAME = "store"

    policy: Annotated[
        str,
        Spec(choice(_POLICY_MEANINGS), "Which block leaves first when there is no room."),
    ] = _CORE.policy
    watermark_high: Annotated[
        float,
        Spec(
            fraction(0.01),
            "Above this, blocks are evicted before anybody needs the room; 100% turns that off.",
        ),
    ] = _CORE.watermark_high
    watermark_low: Annotated[
        float,
        Spec(fraction(0.01), "Where that eviction stops; not above `watermark_high`."),
    ] = _CORE.watermark_low
    leased_fraction: Annotated[
        float,
        Spec(
            fraction(0.01),
            "The most that leases may hold at a time; the rest stays open to writers.",
        ),
    ] = _CORE.leased_fraction
    lease_seconds_max: Annotated[
        float,
        Spec(
            seconds(1.0, _DAY_SECONDS),
            "The longest that a lease may last, however often it is renewed.",
        ),
    ] = _CORE.lease_seconds_max
    hard_pin_fraction: Annotated[
        float,
        Spec(
            fraction(0.0),
            "The most that the hard pins of one tenant may hold; 0 allows no hard pins.",
        ),
    ] = _CORE.hard_pin_fraction
    pin_seconds_max: Annotated[
        float,
        Spec(
            seconds(1.0, 366 * _DAY_SECONDS),
            "The longest that a pin with a TTL may last after it was set or renewed.",
        ),
    ] = _CORE.pin_seconds_max
    history_entries: Annotated[
        int,
        Spec(
            count(0, 16_777_216),
            "How many dropped keys are remembered, 200 bytes each, so that a miss has a reason.",
        ),
    ] = _CORE.history_entries

    def check(self) -> None:
        """The low watermark is not above the high one."""
        if self.watermark_low > self.watermark_high:
            raise Contradiction(
                f"{{}} is {shown_fraction(self.watermark_low)}, above {{}}, which is "
                f"{shown_fraction(self.watermark_high)}: lower the first or raise the second",
                "store.watermark_low",
                "store.watermark_high",
            )


class DaemonConfig(Table, frozen=True, kw_only=True):
    """The daemon of a node: `kvstore serve`, and the clients that look for it."""

    NAME = "daemon"

    socket: Annotated[
        str,
        Spec(
            socket_path(),
            'Where clients connect; "auto" is kvstore.sock in /run/kvstore for root, and in the '
            "runtime directory of any other user.",
        ),
    ] = AUTO
    grace_seconds: Annotated[
        float,
        Spec(
            seconds(0.0, 3_600.0),
            "After SIGTERM, how long leases and reservations that run may take to end; new ones "
            "are refused meanwhile.",
        ),
    ] = 10.0


Value = TypeVar("Value")


class Computed(NamedTuple, Generic[Value]):
    """A value on this machine, and what it was computed from; None if it stood as it is."""

    value: Value
    origin: str | None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole tree; each table of the file is a field."""

    dram: DramConfig = DramConfig()
    store: StoreConfig = StoreConfig()
    daemon: DaemonConfig = DaemonConfig()

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            table = getattr(self, field.name)
            if not isinstance(table, field.type):
                raise ConfigError(
                    f"{field.name} is {shown_given(table)}: give a {field.type.__name__}"
                )

    def core_settings(self) -> CoreSettings:
        """What the core is told."""
        return CoreSettings(**msgspec.structs.asdict(self.store))

    def dram_capacity_bytes(self, root: Path = ROOT) -> int:
        """The DRAM tier's size. Raises ConfigError where this machine cannot hold it."""
        capacity, available = self.wanted_dram_capacity(root), available_memory_bytes(root)
        if capacity.value > max(available, CAPACITY_BYTES_MIN):
            origin = f" ({capacity.origin})" if capacity.origin else ""
            raise ConfigError(
                f"dram.capacity_bytes is {shown_bytes(capacity.value)}{origin}, and only "
                f"{shown_bytes(available)} of memory are available here: give less"
            )
        return capacity.value

    def daemon_socket(self) -> Computed[str]:
        """The path of the daemon's socket on this machine."""
        if self.daemon.socket != AUTO:
            return Computed(self.daemon.socket, None)
        return Computed(str(default_socket()), "the runtime directory")

    def wanted_dram_capacity(self, root: Path = ROOT) -> Computed[int]:
        """The DRAM tier's size, whether this machine can hold it or not."""
        asked = self.dram.capacity_bytes
        if isinstance(asked, int):
            return Computed(asked, None)
        limit = memory_limit(root)
        origin = (
            f"{shown_fraction(asked.fraction)} of {shown_bytes(limit.limit_bytes)}, {limit.origin}"
        )
        return Computed(max(CAPACITY_BYTES_MIN, int(limit.limit_bytes * asked.fraction)), origin)
