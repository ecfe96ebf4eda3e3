"""Settings: one typed tree, read from a TOML file or given as arguments.

Unknown keys are errors. Sizes are written with a unit ("8GiB") or as a number of bytes.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        raise ConfigError(
            f'{text!r} is no size: write a number of bytes, or one with a unit, as in "512MiB" or '
            '"1.5GB"'
        )
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def is_size(text: str) -> bool:
    """Could this be meant as a size?"""
    match = _SIZE.fullmatch(text)
    return match is not None and match[2].lower() in _UNITS


def shown_bytes(count: int) -> str:
    """A size for people: "23.4 GiB"."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} bytes"


class DramConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The DRAM tier. Without a capacity: a tenth of the memory that the process may use."""

    capacity_bytes: str | int | None = None


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the store does with its blocks."""

    policy: Literal["lru", "lru-r", "lru-n", "credit"] = "lru"


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
                f"dram.capacity_bytes is {asked} ({shown_bytes(capacity)}), and only "
                f"{shown_bytes(available)} of memory are available here"
            )
        return capacity


def load(path: str | os.PathLike[str]) -> Config:
    """Read a TOML file.

    Raises ConfigError with the file, the setting that is wrong, and what is allowed in its place.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        config = _convert(tree)
        if config.dram.capacity_bytes is not None:
            _checked_capacity_bytes(config.dram.capacity_bytes)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)} is no TOML: {error}") from error
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    return config


def _convert(tree: dict[str, Any]) -> Config:
    """The typed tree; names, tables and choices are checked here, so that messages say it all."""
    tables = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for table, settings in tree.items():
        if table not in tables:
            raise ConfigError(f"there is no table [{table}]{_nearest(table, tables)}")
        if not isinstance(settings, dict):
            raise ConfigError(f"{table} is {settings!r}: it is a table, [{table}]")
        fields = {field.name: field.type for field in msgspec.structs.fields(tables[table])}
        for name, value in settings.items():
            if name not in fields:
                raise ConfigError(f"[{table}] has no setting {name!r}{_nearest(name, fields)}")
            choices = get_args(fields[name]) if get_origin(fields[name]) is Literal else ()
            if choices and value not in choices:
                raise ConfigError(
                    f"{table}.{name} is {value!r}: allowed are {', '.join(map(repr, choices))}"
                )
    return msgspec.convert(tree, Config)


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _checked_capacity_bytes(asked: str | int) -> int:
    capacity = parse_bytes(asked)
    if capacity < CAPACITY_BYTES_MIN:
        raise ConfigError(f"dram.capacity_bytes is {asked}: the smallest is 1MiB")
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
