"""`kvstore config`: which settings hold and why, and a file to begin with."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli import terminal
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.config.text import Shown
    from kvstore.config.tree import Computed

_EXAMPLES = """\
examples:
  kvstore config init kvstore.toml            a file with every setting, to edit
  kvstore config show --config kvstore.toml   check it, and show what would hold
  kvstore config show                         the same without a file
  KVSTORE_CFG_DRAM__CAPACITY_BYTES=8GiB kvstore config show

"""

_RULES = """\
Where a value comes from, the first that has it: an argument in the program, the environment
variable KVSTORE_CFG_TABLE__NAME, the file, the default. A file is read only where it is named, here
with --config and in a program with kvstore.open("kvstore.toml"); no place is searched for one."""

_SHOW = """\
Show every setting with its value and where that comes from, as kvstore.open would take it here.

What is wrong is told line by line, with the place and what is allowed."""

_INIT = """\
Write a configuration file that has every setting with its default, its unit and its meaning, all
commented out. Without PATH, or with -, it goes to the standard output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two actions, each with a help of its own."""
    parser.epilog = _EXAMPLES + terminal.fill(_RULES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        prog="kvstore config show",
        description=terminal.fill(_SHOW),
        help="every setting, its value, and where that comes from",
    )
    show.add_argument("--config", metavar="FILE", help="read this TOML file")
    init = actions.add_parser(
        "init",
        prog="kvstore config init",
        description=terminal.fill(_INIT),
        help="write a commented file with every setting",
    )
    init.add_argument("path", metavar="PATH", nargs="?", default="-", help="the file to write")
    init.add_argument("--force", action="store_true", help="replace PATH if it is there")
    for action in (show, init):
        # Not False by default, or it would undo `kvstore config --json show`.
        action.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="one JSON document as the output",
        )


def run(arguments: argparse.Namespace) -> int:
    """Do the action."""
    if arguments.action == "init":
        return _init(arguments.path, force=arguments.force, as_json=arguments.json)
    return _show(arguments.config, as_json=arguments.json)


def _show(path: str | None, *, as_json: bool) -> int:
    from kvstore.config.sources import resolve
    from kvstore.config.text import shown_settings
    from kvstore.config.tree import Config

    resolved = resolve(Config, path)
    capacity = resolved.config.wanted_dram_capacity()
    computed: dict[str, Computed[Any]] = {
        "dram.capacity_bytes": capacity,
        "daemon.socket": resolved.config.daemon_socket(),
    }
    rows = shown_settings(resolved, computed)
    findings = []
    try:
        resolved.config.dram_capacity_bytes()
    except ConfigError as error:
        findings.append(str(error))
    if as_json:
        settings = {row.name: row._asdict() for row in rows}
        print(json.dumps({"file": path, "settings": settings, "findings": findings}, indent=2))
    else:
        print(_as_text(path, rows))
    for finding in findings:
        print(f"kvstore: {finding}", file=sys.stderr)
    return 1 if findings else 0


def _as_text(path: str | None, rows: list[Shown]) -> str:
    """What was read, and the settings in three columns; the last one has the room it needs."""
    from kvstore.config.kinds import printable

    counts = Counter(row.source for row in rows)
    cells = [("setting", "value", "from")]
    for row in rows:
        origin = f": {row.computed_from}" if row.computed_from else ""
        cells.append((row.name, row.shown, (row.place or row.source) + origin))
    names, values, _ = (max(map(len, column)) for column in zip(*cells, strict=True))
    file = "none named (--config FILE)"
    if path is not None:
        file = f"{printable(path)}, sets {counts['file'] or 'nothing'}"
    lines = [f"file         {file}", f"environment  sets {counts['environment'] or 'nothing'}", ""]
    lines += [f"{name:{names}}  {shown:{values}}  {origin}" for name, shown, origin in cells]
    return "\n".join(lines)


def _init(path: str, *, force: bool, as_json: bool) -> int:
    from kvstore.config.kinds import printable
    from kvstore.config.text import commented_file

    text = commented_file()
    if path == "-":
        print(json.dumps({"path": None, "text": text}, indent=2) if as_json else text.rstrip("\n"))
        return 0
    file, shown = Path(path), printable(path)
    if not path or file.is_dir():
        raise ConfigError(f"{shown or 'PATH'} is a directory: name a file in it")
    try:
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{shown} is there already: --force replaces it") from error
    except OSError as error:
        reason = error.strerror
        if not file.parent.is_dir():
            reason = f"{printable(str(file.parent))} is no directory"
        print(f"kvstore: cannot write {shown}: {reason}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps({"path": path, "text": text}, indent=2))
    else:
        print(f"{shown} is written; to check it: kvstore config show --config {shlex.quote(path)}")
    return 0
