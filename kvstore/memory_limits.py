"""The memory that this process may use: the machine's, or less if a control group says so.

Control groups of both versions are read, where a system has both (hybrid) the tightest counts.
`root` is the root of the file system; the tests have others.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")


class MemoryLimit(NamedTuple):
    """The most that this process may ever use, and who says so."""

    limit_bytes: int
    origin: str


class _Version(NamedTuple):
    """Where one version of control groups keeps what we ask."""

    group: str  # a pattern of the line in /proc/self/cgroup that names the group
    folder: str
    limit: str
    used: str
    cache: str  # the line of memory.stat with what is given back on demand


# Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
_VERSIONS = (
    _Version(r"^0::(/.*)$", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    _Version(
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def memory_limit(root: Path = ROOT) -> MemoryLimit:
    """The machine's memory, or its control group's limit if that is less."""
    limits = [MemoryLimit(_machine_bytes(root), "this machine's memory")]
    limits += [
        MemoryLimit(limit, f"the limit in {path}") for path, limit, _ in _cgroup_limits(root)
    ]
    return min(limits, key=lambda each: each.limit_bytes)


def available_memory_bytes(root: Path = ROOT) -> int:
    """The memory that this process could still get without swapping."""
    rooms = [limit - used for _, limit, used in _cgroup_limits(root)]
    available = _meminfo_bytes(root, "MemAvailable")
    rooms.append(memory_limit(root).limit_bytes if available is None else available)
    return max(0, min(rooms))


def _cgroup_limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """(path, limit, used) of this process's group and of those above it, where they set one.

    A container sees its own group as the folder itself, whatever path the kernel names.
    """
    groups = _read(root / "proc/self/cgroup")
    for version in _VERSIONS:
        top = root / version.folder
        match = re.search(version.group, groups, re.MULTILINE)
        group = top / match[1].strip("/") if match else top
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            limit, used = _read(folder / version.limit), _read(folder / version.used)
            if limit.strip().isdigit() and used.strip().isdigit():
                # Page cache counts as used and is given back on demand.
                stat = _read(folder / "memory.stat")
                cache = re.search(rf"^{version.cache} (\d+)", stat, re.MULTILINE)
                yield folder / version.limit, int(limit), int(used) - int(cache[1] if cache else 0)


def _machine_bytes(root: Path) -> int:
    total = _meminfo_bytes(root, "MemTotal")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if total is None else total


def _meminfo_bytes(root: Path, name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
