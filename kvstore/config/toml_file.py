"""Reading a TOML file: what is wrong with it in plain words, and where a setting stands in it."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.config.kinds import printable, quoted
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

#: A file that is larger is not meant as one of settings.
FILE_BYTES_MAX = 256 * 1024
_LINE_CHARACTERS = 80

_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_BARE_WORD = re.compile(r"(?=.*[A-Za-z%])[\w.%+-]+( ?[\w%]+)?")
_ASSIGNMENT = re.compile(r"""\s*(?P<key>[\w.'"-]+)\s*=\s*(?P<value>[^#]*?)\s*(?:#.*)?""")


class TomlFile(NamedTuple):
    """A file that was read: its name as it is shown, its text, and the tree in it."""

    name: str
    text: str
    tree: dict[str, Any]

    def place_of(self, *keys: str) -> str:
        """Where a table or a setting stands: "kvstore.toml:3", or the file where that is unclear.

        It is the first line with its name on which begins what gives the tree this setting: what
        only looks like it, in a comment or in a text, is passed over.
        """
        lines = self.text.split("\n")
        word = re.compile(rf"(?<![\w-]){re.escape(keys[-1])}(?![\w-])")
        for index, line in enumerate(lines):
            if word.search(line) and _begins_at(lines, index, keys):
                return f"{self.name}:{index + 1}"
        return self.name


def read(path: str | os.PathLike[str], secret_keys: Collection[str] = ()) -> TomlFile:
    """Read a file. Raises ConfigError with its name, and the line where there is one.

    A line that has one of `secret_keys` is named by its number and not shown.
    """
    name = shown_path(path)
    text = _read_text(path, name)
    try:
        return TomlFile(name, text, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}{_explain(text, str(error), secret_keys)}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; [[[[[[…
        raise ConfigError(f"{name} has a value that is too long or too deep to read") from error


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as it can be printed anywhere, on one line."""
    return printable(os.fsdecode(path))


def _read_text(path: str | os.PathLike[str], name: str) -> str:
    if not os.fspath(path):
        raise ConfigError("the name of the configuration file is empty")
    try:
        with Path(os.fsdecode(path)).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
    except ValueError as error:  # a zero byte in the name
        raise ConfigError(f"cannot read {name}: no file can have this name") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{name} is larger than 256 KiB: it is no file of settings")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: this is no text in UTF-8, as TOML has to be") from error


def _explain(text: str, message: str, secret_keys: Collection[str]) -> str:
    """What is wrong with a text that is no TOML, with its line; `message` is tomllib's."""
    place = _PLACE.search(message)
    if place is None or place[1] is None:
        if re.match(r"""Expected "'|Expected '"|Unterminated""", message):
            return ": a quote is not closed"
        return f": this is no TOML at its end: {_uncapitalised(message)}"
    line = text.split("\n")[int(place[1]) - 1].strip()
    if any(key in line for key in secret_keys):
        return f":{place[1]}: this is no TOML; the line has a secret and is not shown"
    return f":{place[1]}: {_explain_line(line, message)}"


def _explain_line(line: str, message: str) -> str:
    shown = printable(line if len(line) <= _LINE_CHARACTERS else f"{line[:_LINE_CHARACTERS]}…")
    is_second = re.search("overwrite|twice", message) is not None
    assignment = _ASSIGNMENT.fullmatch(line)
    if assignment is not None:
        key, value = assignment["key"], assignment["value"]
        if is_second:
            return f"{key} stands here for the second time"
        if not value:
            return f"there is no value: {shown}"
        if value.lower() in {"true", "false"}:
            return f"true and false are written small: {key} = {value.lower()}"
        if _BARE_WORD.fullmatch(value):
            return f"a value with letters or a unit goes in quotes: {key} = {quoted(value)}"
        if value[0] in "\"'" and value.count(value[0]) == 1:
            return f"a quote is not closed: {shown}"
    elif is_second:
        return f"the table stands here for the second time: {shown}"
    elif not re.search(r"[=\[\]{}]", line):
        return f"this is neither [table] nor name = value: {shown}"
    return f"this is no TOML, {_uncapitalised(message)}: {shown}"


def _uncapitalised(message: str) -> str:
    reason = _PLACE.sub("", message)
    return reason[:1].lower() + reason[1:]


def _begins_at(lines: list[str], index: int, keys: tuple[str, ...]) -> bool:
    """Is the setting there as soon as the text from this line on is TOML?"""
    for end in range(index + 1, len(lines) + 1):
        found = _has("\n".join(lines[:end]), keys)
        if found is not None:
            return found
    return False


def _has(text: str, keys: tuple[str, ...]) -> bool | None:
    """Whether the tree of a text has the setting; None where the text is no TOML."""
    try:
        tree: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    for key in keys:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True
