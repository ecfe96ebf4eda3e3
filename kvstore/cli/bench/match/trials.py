"""One process for each store, so that what an earlier one left behind blurs no figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import kvstore
from kvstore.cli.bench.match.measure import measure
from kvstore.cli.bench.match.parameters import Trial
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Sequence


def measure_apart(trial: Trial) -> dict[str, Any]:
    """`measure` in a process of its own. Raises KVStoreError where that process fails."""
    command = [sys.executable, "-m", __name__, json.dumps(trial)]
    folder = str(Path(kvstore.__file__).parents[1])  # where the child finds the same code
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or "without a word"
        raise KVStoreError(
            f"the process that measured {trial.entries} entries ended with {done.returncode}: "
            f"{reason}"
        )
    return cast("dict[str, Any]", json.loads(done.stdout))


def _main(words: Sequence[str]) -> None:
    print(json.dumps(measure(Trial(*json.loads(words[0])))))


if __name__ == "__main__":
    _main(sys.argv[1:])
