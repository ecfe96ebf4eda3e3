"""Where the values of settings come from: a file, the environment over it, the defaults below.

Only variables whose names begin with `KVSTORE_CFG_` are ours. Kubernetes gives every pod beside a
service that is called kvstore `KVSTORE_PORT`, `KVSTORE_SERVICE_HOST` and others: they are not.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kvstore.config import toml_file
from kvstore.config.kinds import printable, shown_given
from kvstore.config.table import (
    ENVIRONMENT_PREFIX,
    Contradiction,
    Setting,
    settings_of,
    tables_of,
)
from kvstore.config.tree import Config
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import msgspec

    from kvstore.config.table import Table
    from kvstore.config.toml_file import TomlFile

#: More are not shown: somebody gave another program's file.
_PROBLEMS_MAX = 20
_LISTED = "`kvstore config init` lists what there is"

Tree = TypeVar("Tree", bound="msgspec.Struct")


class Source(NamedTuple):
    """Where a value comes from: `kind` is "default", "file" or "environment"."""

    kind: str
    place: str | None  # the file with the line, or the variable


DEFAULT = Source("default", None)


class Resolved(NamedTuple, Generic[Tree]):
    """A configuration and, by the names of its settings, where each value comes from."""

    config: Tree
    sources: dict[str, Source]


def load(
    path: str | os.PathLike[str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """The configuration of a process: the file's, where one is named, under the environment's.

    Raises ConfigError, with a line for each thing that is wrong: where it stands, what it is, and
    what is allowed or nearest. `environment` is the process's own unless it is given.
    """
    return resolve(Config, path, environment).config


def resolve(
    tree: type[Tree],
    path: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved[Tree]:
    """Like `load`, for any tree of tables, and says where each value comes from."""
    reading = _Reading(tree)
    if path is not None:
        secret_keys = [each.key for each in settings_of(tree) if each.spec.is_secret]
        reading.read_file(toml_file.read(path, secret_keys))
    reading.read_environment(os.environ if environment is None else environment)
    tables = reading.tables()
    if reading.problems:
        more = len(reading.problems) - _PROBLEMS_MAX
        shown = reading.problems[:_PROBLEMS_MAX] + ([f"and {more} more"] if more > 0 else [])
        raise ConfigError("\n".join(shown))
    return Resolved(tree(**tables), reading.sources)


class _Reading:
    """Values that were found so far, by table and key, and a line for whatever is wrong."""

    def __init__(self, tree: type[msgspec.Struct]) -> None:
        self.problems: list[str] = []
        self._tables = tables_of(tree)
        self._settings = settings_of(tree)
        self._values: dict[str, dict[str, Any]] = {name: {} for name in self._tables}
        self.sources = {setting.name: DEFAULT for setting in self._settings}

    def read_file(self, file: TomlFile) -> None:
        """Take what a file sets."""
        for table, content in file.tree.items():
            place = file.place_of(table)
            if table not in self._tables:
                self.problems.append(f"{place}: {self._unknown_table(table, content)}")
            elif not isinstance(content, dict):
                keys = ", ".join(each.key for each in self._settings if each.table == table)
                self.problems.append(
                    f"{place}: {table} is {shown_given(content)}: it is a table, [{table}], with "
                    f"its settings below: {keys}"
                )
            else:
                for key, value in content.items():
                    self._read_line(table, key, value, file.place_of(table, key))

    def read_environment(self, environment: Mapping[str, str]) -> None:
        """Take what the variables with our prefix set; it goes before what was read so far."""
        by_variable = {setting.variable: setting for setting in self._settings}
        for variable in sorted(environment):
            setting = by_variable.get(variable)
            if setting is not None:
                source = Source("environment", variable)
                self._take(setting, environment[variable], source, variable)
            elif variable.startswith(ENVIRONMENT_PREFIX):
                # Without the prefix, which would make all of them look alike.
                by_rest = {name.removeprefix(ENVIRONMENT_PREFIX): name for name in by_variable}
                rest = variable.removeprefix(ENVIRONMENT_PREFIX).upper()
                near = get_close_matches(rest, by_rest, n=1)
                hint = f"did you mean {by_rest[near[0]]}?" if near else _LISTED
                self.problems.append(f"{printable(variable)} sets nothing; {hint}")

    def tables(self) -> dict[str, Table]:
        """The tables of all values; compares them, if each of them is right."""
        tables: dict[str, Table] = {}
        for name, table in self._tables.items() if not self.problems else ():
            try:
                tables[name] = table(**self._values[name])
            except Contradiction as error:
                told = (f"{each} ({self.sources[each].place or 'default'})" for each in error.names)
                self.problems.append(error.text.format(*told))
        return tables

    def _read_line(self, table: str, key: str, value: object, place: str) -> None:
        known = {setting.key: setting for setting in self._settings if setting.table == table}
        if key in known:
            source = Source("file", place)
            self._take(known[key], value, source, f"{place}: {known[key].name}")
            return
        found = _nearest(key, known.values()) or _nearest(key, self._settings)
        hint = f"did you mean {found.name}?" if found else f"[{table}] has {', '.join(known)}"
        self.problems.append(f"{place}: {table}.{printable(key)} is no setting; {hint}")

    def _take(self, setting: Setting, value: object, source: Source, name: str) -> None:
        try:
            self._values[setting.table][setting.key] = setting.parse(value, name)
            self.sources[setting.name] = source
        except ConfigError as error:
            self.problems.append(str(error))

    def _unknown_table(self, table: str, content: object) -> str:
        listed = f"there are {', '.join(f'[{name}]' for name in self._tables)}"
        if not isinstance(content, dict):  # a setting above all tables
            found = _nearest(table, self._settings)
            hint = f"did you mean {found.key} under [{found.table}]?" if found else listed
            return f"{printable(table)} stands in no table; {hint}"
        near = get_close_matches(table.lower(), self._tables, n=1)
        hint = f"did you mean [{near[0]}]?" if near else listed
        return f"there is no table [{printable(table)}]; {hint}"


def _nearest(key: str, settings: Iterable[Setting]) -> Setting | None:
    """The setting whose key is spelt most alike."""
    by_key = {setting.key: setting for setting in settings}
    near = get_close_matches(key.lower().replace("-", "_"), by_key, n=1)
    return by_key[near[0]] if near else None
