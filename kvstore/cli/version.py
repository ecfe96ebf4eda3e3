"""`kvstore version`: what is installed, without importing any of it."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstore

if TYPE_CHECKING:
    import argparse

DISTRIBUTION = "tiered-kvstore"

#: What kvstore runs on, then what its extras bring. A bug report wants them all.
PACKAGES = (
    "numpy",
    "msgspec",
    "xxhash",
    "torch",
    "transformers",
    "cupy-cuda13x",
    "lz4",
    "redis",
    "grpcio",
)

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
    print(f"kvstore {report['version']}" + (f" ({revision})" if revision else ""))
    print(f"python {report['python']} on {report['platform']}")
    for name, version in report["packages"].items():
        print(f"{name} {version or 'not installed'}")
    return 0


def collect() -> dict[str, Any]:
    """The report as a value; absent things are None."""
    return {
        "version": kvstore.__version__,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "packages": {name: _installed_version(name) for name in PACKAGES},
    }


def git_revision() -> str | None:
    """The commit that this code is from, `-dirty` where files differ from it; None if unknown."""
    root = Path(kvstore.__file__).parent.parent
    # Both, because kvstore may lie in a site-packages that somebody else keeps under git.
    if (root / ".git").exists() and (root / "pyproject.toml").exists():
        return _describe_checkout(root)
    return _installed_commit()


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
