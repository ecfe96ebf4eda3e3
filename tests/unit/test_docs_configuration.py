"""docs/configuration.md and config/kvstore.toml stay true: made from the code, and run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.config.table import ENVIRONMENT_PREFIX, settings_of
from kvstore.config.text import option_table

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/configuration.md"
TEXT = GUIDE.read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a command `kvstore` of this tree in bin/."""
    command = tmp_path / "bin/kvstore"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvstore "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return tmp_path


def test_what_is_made_from_the_settings_is_what_is_committed():
    made = runpy.run_path(str(ROOT / "docs/options.py"))["documents"]()
    assert set(made) == {ROOT / "config/kvstore.toml", GUIDE}
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make options`"


def test_the_table_has_every_setting_with_its_default():
    assert option_table() in TEXT
    rows = re.findall(r"^\| `([\w.]+)` \| \w+ \| `(.+?)` \|", option_table(), re.MULTILINE)
    assert rows == [
        (setting.name, setting.spec.kind.literal(setting.default))
        for setting in settings_of(Config)
    ]


def test_its_commands_print_what_it_says(folder: Path):
    """In the order of the text, in one folder: commands, files, programs."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    environment = {**kept, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def output(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout

    blocks = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"console", "toml", "python"}
    for kind, block in blocks:
        if kind == "toml":
            name = block.partition("\n")[0].removeprefix("# ")
            (folder / name).write_text(block, encoding="utf-8")
        elif kind == "python":
            said = "".join(f"{line}\n" for line in re.findall(r"print\(.*\)  # (.*)", block))
            assert output(sys.executable, "-c", block) == said
        else:
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, said = part.partition("\n")
                assert output("bash", "-c", command) == said, command


def test_every_command_and_variable_in_its_text_exists():
    commands = set(re.findall(r"kvstore (config \w+)", TEXT))
    assert commands == {"config init", "config show"}
    variables = {setting.variable for setting in settings_of(Config)}
    named = set(re.findall(rf"\b{ENVIRONMENT_PREFIX}\w+__\w+", TEXT))
    assert named - variables == {"KVSTORE_CFG_STORE__POLICI"}  # the one that is misspelt on purpose
