"""Settings: one typed tree, from a TOML file and from the environment over it.

    config = load("kvstore.toml")       # under KVSTORE_CFG_… of the environment
    config = Config(dram=DramConfig(capacity_bytes=3 * 2**20))   # and nothing else

Each setting has its kind, its default and its meaning at its field in `tree`. A value that is
unknown, of the wrong kind or out of range is a ConfigError, with one line for each of them.
"""

from __future__ import annotations

from kvstore.config.kinds import MemoryShare
from kvstore.config.sources import load
from kvstore.config.tree import CAPACITY_BYTES_MIN, Config, DaemonConfig, DramConfig, StoreConfig

__all__ = [
    "CAPACITY_BYTES_MIN",
    "Config",
    "DaemonConfig",
    "DramConfig",
    "MemoryShare",
    "StoreConfig",
    "load",
]
