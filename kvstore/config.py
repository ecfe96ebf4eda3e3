"""Settings: one typed tree, read from a TOML file or given as arguments.

Unknown keys are errors. Sizes are written with a unit ("8GiB") or as a number of bytes.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvstore.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000 ** (n + 1) for n, prefix in enumerate("kmgt")},
    **{f"{prefix}ib": 1024 ** (n + 1) for n, prefix in enumerate("kmgt")},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")

CAPACITY_BYTES_MIN = 1024 * 1024
#: Of the memory that this process may use, what the DRAM tier takes unless told otherwise.
DEFAULT_DRAM_FRACTION = 0.10


def parse_bytes(text: str | int) -> int:
    """The number of bytes in "512MiB", "1.5 GB" or 4096. Raises ConfigError for anything else."""
    match = None if isinstance(text, bool) else _SIZE.fullmatch(str(text))
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f'{text!r} is no size: write bytes, or a unit as in "512MiB" or "8GiB"')
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


class DramConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The DRAM tier. Without a capacity: a tenth of the memory that the process may use."""

    capacity_bytes: str | int | None = None


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the store does with its blocks."""

    policy: Literal["lru"] = "lru"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole tree; each table of the file is a field."""

    dram: DramConfig = DramConfig()
    store: StoreConfig = StoreConfig()

    def dram_capacity_bytes(self) -> int:
        """The DRAM tier's size. Raises ConfigError where this machine cannot hold it."""
        asked = self.dram.capacity_bytes
        available = available_memory_bytes()
        if asked is None:
            return max(CAPACITY_BYTES_MIN, int(memory_limit_bytes() * DEFAULT_DRAM_FRACTION))
        capacity = _checked_capacity_bytes(asked)
        if capacity > available:
            raise ConfigError(
                f"dram.capacity_bytes is {asked}, {capacity} bytes, "
                f"and only {available} bytes of memory are available here"
            )
        return capacity


def load(path: str | os.PathLike[str]) -> Config:
    """Read a TOML file. Raises ConfigError with the file and the key that is wrong."""
    try:
        tree: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    try:
        config = msgspec.convert(tree, Config)
        if config.dram.capacity_bytes is not None:
            _checked_capacity_bytes(config.dram.capacity_bytes)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    return config


def _checked_capacity_bytes(asked: str | int) -> int:
    capacity = parse_bytes(asked)
    if capacity < CAPACITY_BYTES_MIN:
        raise ConfigError(
            f"dram.capacity_bytes is {asked}: the smallest is {CAPACITY_BYTES_MIN} (1MiB)"
        )
    return capacity


def memory_limit_bytes() -> int:
    """The memory that this process may ever use: the machine's, or its cgroup's if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limits += [limit for limit, _ in _cgroup_limits()]
    return min(limits)


def available_memory_bytes() -> int:
    """The memory that this process could still get without swapping."""
    rooms = [limit - used for limit, used in _cgroup_limits()]
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    rooms.append(int(match[1]) * 1024 if match else memory_limit_bytes())
    return max(0, min(rooms))


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) of this process's cgroup and of those above it, where they set a limit."""
    root = Path("/sys/fs/cgroup")
    match = re.search(r"^0::/(.*)$", _read("/proc/self/cgroup"), re.MULTILINE)
    group = root / match[1].strip("/") if match else root
    found = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        # Page cache counts as used and is given back on demand.
        cache = re.search(r"^inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
        if limit.strip().isdigit() and used.strip().isdigit():
            found.append((int(limit), int(used) - (int(cache[1]) if cache else 0)))
    return found


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
