"""What a tree of settings is made of: tables, and settings with all that is to know of them."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, get_args

import msgspec

from kvstore.config.kinds import Kind, shown_given
from kvstore.errors import ConfigError

ENVIRONMENT_PREFIX = "KVSTORE_CFG_"


class Spec(NamedTuple):
    """What is to know of a setting, beside its name and its default."""

    kind: Kind[Any]
    meaning: str
    #: Its value is never shown, neither by `kvstore config show` nor in an error.
    is_secret: bool = False


class Setting(NamedTuple):
    """One setting of a tree."""

    table: str
    key: str
    default: Any
    spec: Spec

    @property
    def name(self) -> str:
        """The dotted name, as TOML may have it too: "dram.capacity_bytes"."""
        return f"{self.table}.{self.key}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"{ENVIRONMENT_PREFIX}{self.table.upper()}__{self.key.upper()}"

    def parse(self, value: object, name: str) -> Any:  # noqa: ANN401 - of the type of its field
        """The value. Raises ConfigError, which calls the setting `name`."""
        try:
            return self.spec.kind.parse(value)
        except ConfigError as error:
            given = "not shown" if self.spec.is_secret else shown_given(value)
            raise ConfigError(f"{name} is {given}: {error}") from error


class Contradiction(ConfigError):
    """Settings, each allowed, that cannot all hold. `text` has a {} for each of their names."""

    def __init__(self, text: str, *names: str) -> None:
        super().__init__(text.format(*names))
        self.text = text
        self.names = names


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the tree. A table that exists is right: its fields are parsed and checked.

    Raises ConfigError with one line for each setting that is wrong.
    """

    NAME: ClassVar[str]

    def __post_init__(self) -> None:
        problems = []
        for setting in settings_of_table(type(self)):
            try:
                value = setting.parse(getattr(self, setting.key), setting.name)
                msgspec.structs.force_setattr(self, setting.key, value)
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))
        self.check()

    def check(self) -> None:
        """Compare the settings with each other. Raises Contradiction."""


def tables_of(tree: type[msgspec.Struct]) -> dict[str, type[Table]]:
    """The tables of a tree, by name."""
    return {field.name: field.type for field in msgspec.structs.fields(tree)}


def settings_of(tree: type[msgspec.Struct]) -> list[Setting]:
    """The settings of a tree, in the order of the file."""
    return [setting for table in tables_of(tree).values() for setting in settings_of_table(table)]


def settings_of_table(table: type[Table]) -> list[Setting]:
    """The settings of one table."""
    found = []
    for field in msgspec.structs.fields(table):
        spec = next(each for each in get_args(field.type) if isinstance(each, Spec))
        found.append(Setting(table.NAME, field.name, field.default, spec))
    return found
