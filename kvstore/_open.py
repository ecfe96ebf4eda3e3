"""`kvstore.open`: a store inside this process, without a daemon."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Self, cast

import msgspec

from kvstore.client.session import Session
from kvstore.clock import SystemClock
from kvstore.config import Config, load
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.keys import Namespace
from kvstore.messages import ScrubAnswer, ScrubRequest
from kvstore.policy import POLICIES
from kvstore.residency import ENTRY_BYTES
from kvstore.runners.embedded import EmbeddedRunner
from kvstore.slots import Slots
from kvstore.store import Core
from kvstore.tiers.dram import DramTier
from kvstore.types import SINGLE_DOMAIN
from kvstore.units import is_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.audit import Audit
    from kvstore.clock import Clock
    from kvstore.layout import Part

_SCRUB_BLOCKS = 64  # so that no more than these are kept from eviction at a time


class EmbeddedStore:
    """A store in this process: its memory, its blocks, and sessions on them.

    Threads may share it. It lives until `close`, or the end of its `with` block, and does not
    cross a fork (StoreForked).
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        settings = config.core_settings()
        tier = DramTier(config.dram_capacity_bytes())
        core = Core(
            clock,
            Slots(tier.capacity_bytes),
            POLICIES[settings.policy](),
            tier=tier.name,
            settings=settings,
            entry_bytes=ENTRY_BYTES,
            token_secret=secrets.token_bytes(16),
        )
        self._runner = EmbeddedRunner(core, tier, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def session(
        self, namespace: Namespace, *, part: Part | Sequence[Part] | None = None
    ) -> Session:
        """Read and write the blocks of one namespace.

        `part` is for a rank that handles one part of the layout, or several of a `Layout.split`;
        without it, buffers come in the order of `Layout.parts`.
        """
        if not isinstance(namespace, Namespace):
            raise InvalidRequest(
                f"a session needs a kvstore.Namespace, not {type(namespace).__name__}"
            )
        self._runner.check_usable()
        return Session(self._runner, SINGLE_DOMAIN, namespace, part)

    def stats(self) -> dict[str, object]:
        """Counters since the start, and each tier's bytes by state: plain values."""
        return self._runner.snapshot()

    def check(self) -> Audit:
        """Recount every slot, entry and lease. Raises InvariantViolated, which would be a bug."""
        return self._runner.check()

    def scrub(self) -> ScrubAnswer:
        """Read every block again and compare its checksum; drop what does not match.

        Says how many blocks were read and which storage keys were dropped.
        """
        checked, corrupt = 0, []
        by_domain: dict[bytes, list[bytes]] = {}
        for domain, key in self._runner.resident_keys():
            by_domain.setdefault(domain, []).append(key)
        for domain, keys in by_domain.items():
            for start in range(0, len(keys), _SCRUB_BLOCKS):
                request = ScrubRequest(domain, keys[start : start + _SCRUB_BLOCKS])
                answer = cast("ScrubAnswer", self._runner.call(request))
                checked += answer.checked
                corrupt += answer.corrupt
        return ScrubAnswer(checked, corrupt)

    def close(self) -> None:
        """End the store and give its memory back. Views that are alive keep theirs."""
        self._runner.close()


def open(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    dram_capacity_bytes: int | str | None = None,
    clock: Clock | None = None,
) -> EmbeddedStore:
    """Open a store in this process.

    `config` is a TOML file, or a `Config`, which holds as it is. With a file, and with nothing, the
    variables `KVSTORE_CFG_TABLE__NAME` of the environment go before the file and the defaults; no
    place is searched for a file. `dram_capacity_bytes`, a number, a size such as "8GiB" or a share
    of the memory such as "10%", goes before all of them. `clock` is for tests. Raises ConfigError
    for a setting that is wrong or does not fit this machine.
    """
    if isinstance(config, str) and is_size(config):
        raise ConfigError(
            f"{config!r} is a size, and the first argument is a configuration file: "
            f"write kvstore.open(dram_capacity_bytes={config!r})"
        )
    if config is None or isinstance(config, (str, os.PathLike)):
        config = load(config)
    elif not isinstance(config, Config):
        raise ConfigError(
            f"config is of type {type(config).__name__}: give a path or a Config; "
            "a size goes to dram_capacity_bytes"
        )
    if dram_capacity_bytes is not None:
        dram = msgspec.structs.replace(config.dram, capacity_bytes=dram_capacity_bytes)
        config = msgspec.structs.replace(config, dram=dram)
    return EmbeddedStore(config, clock or SystemClock())
