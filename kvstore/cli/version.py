"""`kvstore version`: what is installed, without importing any of it."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstore

if TYPE_CHECKING:
    import argparse

DISTRIBUTION = "tiered-kvstore"

#: What kvstore runs on, and what its connector needs. A bug report wants them all.
PACKAGES = ("numpy", "msgspec", "xxhash", "torch", "transformers")
#: Those that somebody at a terminal may want to know about.
SHOWN_PACKAGES = ("numpy", "torch", "transformers")

_SHORT_REVISION = 12
_DIRTY = "-dirty"
_GIT_TIMEOUT_SECONDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Print the versions."""
    report = collect()
    if arguments.json:
        print(json.dumps(report, indent=2))
        return 0
    revision = report["git_revision"]
    print(f"kvstore {report['version']}" + (f" ({_short(revision)})" if revision else ""))
    print(f"python {report['python']} on {report['platform']}")
    for name in SHOWN_PACKAGES:
        print(f"{name} {report['packages'].get(name) or 'not installed'}")
    print(f"native copy {'yes' if report['native'] else 'no: copies go through NumPy'}")
    return 0


def collect() -> dict[str, Any]:
    """The report as a value; absent things are None."""
    return {
        "version": kvstore.__version__,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "native": has_native_copy(),
        "packages": {name: _installed_version(name) for name in PACKAGES},
    }


def has_native_copy() -> bool:
    """Is there a compiled copy? To ask `kvstore.native` itself would import NumPy."""
    folder = Path(kvstore.__file__).parent / "native"
    return any(path.name.endswith(tuple(EXTENSION_SUFFIXES)) for path in folder.iterdir())


def git_revision() -> str | None:
    """The commit that this code is from, `-dirty` where files differ from it; None if unknown."""
    root = Path(kvstore.__file__).parent.parent
    # Both, because kvstore may lie in a site-packages that somebody else keeps under git.
    if (root / ".git").exists() and (root / "pyproject.toml").exists():
        return _describe_checkout(root)
    return _installed_commit()


def _short(revision: str) -> str:
    """The beginning of a commit, for people; the whole of it is in the JSON."""
    commit = revision.removesuffix(_DIRTY)
    return commit[:_SHORT_REVISION] + revision[len(commit) :]


def _describe_checkout(root: Path) -> str | None:
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    command += ["--exclude=*"]  # tags are for people; a report wants the commit
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):  # no git, no commit yet, not our checkout
        return None
    return done.stdout.strip() or None


def _installed_commit() -> str | None:
    """The commit that pip noted when it installed from a repository (PEP 610)."""
    try:
        note = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    origin: dict[str, dict[str, str]] = json.loads(note) if note else {}
    return origin.get("vcs_info", {}).get("commit_id")


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
