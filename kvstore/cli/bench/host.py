"""The machine that a result is from."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import numpy as np

from kvstore.units import parse_bytes

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Assumed where the system does not say.
_L3_BYTES = 32 * 1024 * 1024


def l3_bytes() -> int:
    """Bytes of the last cache before memory, as the first processor sees it."""
    found: list[tuple[int, int]] = []
    for folder in _CACHES.glob("index*"):
        level, size = _read(folder / "level"), _read(folder / "size")
        if level.isdigit() and re.fullmatch(r"\d+[KMG]?", size):
            found.append((int(level), parse_bytes(f"{size}iB" if size[-1].isalpha() else size)))
    return max(found)[1] if found else _L3_BYTES


def describe() -> dict[str, object]:
    """What a reader needs to know to compare two results; absent things are None."""
    model = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    huge_pages = re.search(r"\[(\w+)\]", _read(_HUGE_PAGES))
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "l3_bytes": l3_bytes(),
        "transparent_huge_pages": huge_pages[1] if huge_pages else None,
        "load_average": round(os.getloadavg()[0], 2),  # of the minute that has just passed
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
