"""`kvstore doctor`: what of this machine a daemon would run into, with or without one."""

from __future__ import annotations

import json
import os
import resource
import stat
from typing import TYPE_CHECKING, NamedTuple

from kvstore.cli import kernel, terminal
from kvstore.cli.daemon import add_socket_argument, ask, socket_of
from kvstore.errors import ConfigError, DaemonUnavailable
from kvstore.units import shown_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.config import Config

#: A pool with less of it in huge pages pays for it in every copy.
_HUGE_SHARE_MIN = 0.9
#: A connection takes two descriptors of the daemon: its socket, and its process.
_DESCRIPTORS_PER_CLIENT, _DESCRIPTORS_BASE = 2, 32
_CLIENTS_WANTED = 64


class Finding(NamedTuple):
    """One line: what was looked at, what it is, and what to do where that is not well."""

    name: str
    found: str
    remedy: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = terminal.fill("It exits with 1 where a line is a warning.")
    parser.add_argument("--config", metavar="FILE", help="read this TOML file")
    add_socket_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Look, and print; 1 where there is a warning."""
    from kvstore.config.sources import load

    config = load(arguments.config)
    path = socket_of(arguments)
    findings = [
        *_versions(),
        *_kernel(),
        *_memory(config),
        *_limits(),
        _directory(path.parent),
        *_daemon(path),
    ]
    if arguments.json:
        rows = [{**each._asdict(), "is_well": each.remedy is None} for each in findings]
        print(json.dumps({"socket": str(path), "findings": rows}, indent=2))
    else:
        print("\n".join(_lines(findings)))
    return 1 if any(each.remedy for each in findings) else 0


def _lines(findings: list[Finding]) -> list[str]:
    size = max(len(each.name) for each in findings)
    lines = []
    for name, found, remedy in findings:
        text = found if remedy is None else f"{found}: {remedy}"
        mark = "ok  " if remedy is None else "warn"
        indent = " " * (size + 8)
        lines.append(
            terminal.fill_line(f"{mark}  {name:{size}}  {terminal.escaped(text)}", indent=indent)
        )
    return lines


def _versions() -> Iterator[Finding]:
    import platform

    from kvstore.cli import version

    report = version.collect()
    packages = ", ".join(f"{name} {report['packages'][name]}" for name in ("numpy", "msgspec"))
    yield Finding("version", f"kvstore {report['version']}, Python {report['python']}, {packages}")
    yield Finding("kernel", f"Linux {platform.release()}, {platform.machine()}")
    yield Finding("copy", "compiled" if report["native"] else "NumPy's: no compiled copy is there")


def _kernel() -> Iterator[Finding]:
    problem = kernel.shared_memory_problem()
    yield Finding(
        "memfd",
        "sealed shared memory works" if problem is None else problem,
        None if problem is None else "no daemon can run here without it; ask what forbids it",
    )
    yield _feature(
        "SO_PEERPIDFD",
        kernel.has_peer_pidfd(),
        "without it (Linux 6.5) clients may only read; what one writes cannot be taken back safely",
    )
    yield _feature(
        "POPULATE",
        kernel.has_populate_write(),
        "without MADV_POPULATE_WRITE (Linux 5.14) a daemon out of memory is killed, not told",
    )
    yield _feature(
        "COLLAPSE",
        kernel.can_collapse(),
        "without MADV_COLLAPSE (Linux 6.1, transparent huge pages in the kernel) the pool lies in "
        "small pages; set shmem_enabled to advise, or expect slower copies",
    )
    enabled, shmem = (kernel.huge_page_setting(name) for name in ("enabled", "shmem_enabled"))
    is_off = enabled == "never"
    yield Finding(
        "huge pages",
        f"enabled {enabled or 'unknown'}, shmem_enabled {shmem or 'unknown'}",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" if is_off else None,
    )


def _feature(name: str, is_there: bool, remedy: str) -> Finding:
    return Finding(name, "works", None) if is_there else Finding(name, "missing", remedy)


def _memory(config: Config) -> Iterator[Finding]:
    from kvstore.memory_limits import available_memory_bytes, memory_limit

    limit = memory_limit()
    yield Finding("memory", f"{shown_bytes(limit.limit_bytes)}, {limit.origin}")
    wanted, available = config.wanted_dram_capacity(), available_memory_bytes()
    too_much = wanted.value > available
    yield Finding(
        "capacity",
        f"{shown_bytes(wanted.value)} wanted, {shown_bytes(available)} available",
        "no daemon would start: lower dram.capacity_bytes" if too_much else None,
    )


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else shown_bytes(soft)
    yield Finding("memlock", f"{shown}; nothing is locked today, so any will do")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = (soft - _DESCRIPTORS_BASE) // _DESCRIPTORS_PER_CLIENT
    yield Finding(
        "open files",
        f"{soft}, enough for {clients} connections",
        None if clients >= _CLIENTS_WANTED else "raise it: ulimit -n 4096",
    )


def _directory(folder: Path) -> Finding:
    name = "directory"
    try:
        status = folder.stat(follow_symlinks=False)
    except FileNotFoundError:
        return Finding(name, f"{folder} is not there yet: `kvstore serve` makes it")
    except OSError as error:
        return Finding(name, str(folder), f"{error.strerror}: give another --socket")
    mode = stat.S_IMODE(status.st_mode)
    found = f"{folder}, mode {mode:04o}, of user {status.st_uid}"
    if not stat.S_ISDIR(status.st_mode):
        return Finding(name, found, "it is no directory: give another --socket")
    if status.st_uid != os.geteuid():
        return Finding(name, found, f"it is another user's than {os.geteuid()}, who may only read")
    return Finding(
        name, found, f"others can write there: chmod 700 {folder}" if mode & 0o022 else None
    )


def _daemon(path: Path) -> Iterator[Finding]:
    if not path.exists():
        yield Finding("daemon", f"none at {path}; `kvstore serve` starts one")
        return
    try:
        status = ask(path, {"t": "status"})
    except (DaemonUnavailable, ConfigError) as error:
        yield Finding("daemon", "does not answer", str(error))
        return
    yield Finding("daemon", f"process {status['pid']} at {path}")
    for name, tier in status["tiers"].items():
        usable, huge = tier["usable_bytes"], tier["huge_bytes"]
        share = huge / usable if usable else 0.0
        is_done = usable == tier["capacity_bytes"]
        remedy = None
        if not is_done:
            remedy = "it is still being populated; ask again later"
        elif share < _HUGE_SHARE_MIN:
            remedy = "memory is fragmented, or just populated: start it earlier after boot"
        yield Finding(f"{name} pool", f"{share:.0%} of {shown_bytes(usable)} in huge pages", remedy)
