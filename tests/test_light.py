"""`import kvstore` goes into an engine's process: it brings nothing heavy in, and takes no time.

The strict check runs against poisoned packages, so it also finds an import that would be swallowed
where the package is absent, and holds on machines that have none of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.main import COMMANDS

#: What an engine's process or a user's shell shall never wait for unasked.
HEAVIEST = ("torch", "transformers", "cupy", "redis", "grpc")
#: And what costs a tenth of a second or so, or is our own to load late.
HEAVY = (
    *HEAVIEST, "numpy", "msgspec", "xxhash", "aiofiles", "lz4", "msgpack", "asyncio",
    "multiprocessing",
)  # fmt: skip

#: `import kvstore` takes 0.02 s of CPU, most of it the interpreter's own start; an import of NumPy
#: 0.1 s, one of torch some seconds. So this allows for slow machines, and finds torch.
MAX_CPU_SECONDS = 0.3
ATTEMPTS = 5

IMPORT = "import kvstore"
HELP = "from kvstore.cli.main import main; main(['--help'])"
VERSION = "from kvstore.cli.main import main; main(['version'])"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per heavy package, with a module of that name that ends the process."""
    root = tmp_path_factory.mktemp("poisoned")
    for name in HEAVY:
        (root / name).mkdir()
        text = f"import os\nos.write(2, b'loads {name}')\nos._exit(99)\n"
        (root / name / f"{name}.py").write_text(text, encoding="utf-8")
    return root


def run_poisoned(
    root: Path, code: str, names: tuple[str, ...] = HEAVY
) -> subprocess.CompletedProcess[str]:
    prelude = f"import sys; sys.path[:0] = {[str(root / name) for name in names]}; "
    command = [sys.executable, "-c", prelude + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", [IMPORT, HELP, VERSION], ids=["import", "help", "version"])
def test_loads_nothing_heavy(poisoned: Path, code: str):
    done = run_poisoned(poisoned, code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_loads_nothing_heaviest(poisoned: Path, name: str):
    code = f"from kvstore.cli.main import main; sys.exit(main([{name!r}, '--help']))"
    done = run_poisoned(poisoned, code, HEAVIEST)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--json" in done.stdout


@pytest.mark.parametrize("name", HEAVY)
def test_poison_works(poisoned: Path, name: str):
    done = run_poisoned(poisoned, f"import {name}")
    assert (done.returncode, done.stderr) == (99, f"loads {name}")


def cpu_seconds(code: str) -> float:
    """CPU time of a child that runs `code`, user and system, all its threads."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it again
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("code", [IMPORT, HELP], ids=["import", "help"])
def test_takes_little_time(code: str):
    assert min(cpu_seconds(code) for _ in range(ATTEMPTS)) < MAX_CPU_SECONDS
