"""README stays true: its example runs, its commands and its links exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.daemon_command import a_daemon, environment

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md"]
)


@pytest.fixture
def beside_a_clone(tmp_path: Path) -> Path:
    """A folder in which a checkout called kvstore lies, as after `git clone`."""
    (tmp_path / "kvstore" / "kvstore").mkdir(parents=True)
    return tmp_path


def test_the_example_runs_and_prints_what_its_comments_say(beside_a_clone: Path):
    example = re.search(r"```python\n(import kvstore.*?)```", README, re.DOTALL)
    assert example, "README has no example that imports kvstore"
    run = subprocess.run(
        [sys.executable, "-c", example[1]],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=beside_a_clone,
    )
    assert run.stdout.splitlines() == ["ok ok ok ok", "4 3 True", "ok ok ok ok"]


def test_every_make_target_that_is_named_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert {"demo", "test", "lint", "bench"} <= named
    missing = [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    assert not missing


def test_every_command_that_is_named_exists():
    named = set(re.findall(r"`kvstore ([a-z]+)", README))
    assert {"demo", "bench", "version"} <= named
    for command in sorted(named):
        run = subprocess.run(
            [sys.executable, "-m", "kvstore", command, "--help"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert run.returncode == 0, (command, run.stderr)
        assert "--json" in run.stdout, command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file(document: Path):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    broken = [target for target in targets if not (document.parent / target).exists()]
    assert not broken


def test_the_example_with_a_daemon_prints_what_its_comments_say():
    first = re.search(r"```python\n(import kvstore.*?)```", README, re.DOTALL)
    second = re.search(r"```python\n(with kvstore\.connect.*?)```", README, re.DOTALL)
    assert first
    assert second
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        path = Path(folder) / "kv.sock"
        with a_daemon(path, KVSTORE_CFG_DRAM__CAPACITY_BYTES="64MiB"):
            run = subprocess.run(
                [sys.executable, "-W", "error", "-c", first[1] + second[1]],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
                env=environment(KVSTORE_CFG_DAEMON__SOCKET=str(path)),
            )
    assert run.stdout.splitlines()[-1] == "4"
    assert run.stderr == ""
