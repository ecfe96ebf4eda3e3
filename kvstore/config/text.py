"""The settings as text: a commented file, and the table of the documents. Both come from the tree.

A kind or a meaning is written once, at its field in `kvstore.config.tree`.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.config.kinds import quoted
from kvstore.config.table import settings_of, settings_of_table, tables_of
from kvstore.config.tree import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.config.sources import Resolved
    from kvstore.config.table import Setting
    from kvstore.config.tree import Computed

_COLUMNS = 80

_INTRODUCTION = """\
Every setting of kvstore, with its default. To change one, remove the "#" before its name. A name
that is unknown and a value that is not allowed are errors.

This file is read where it is named, as in kvstore.open("kvstore.toml"), and nowhere else; variables
of the environment go before it: KVSTORE_CFG_STORE__POLICY sets store.policy. To check it and see
what holds: kvstore config show --config kvstore.toml"""


class Shown(NamedTuple):
    """A setting as it is shown."""

    name: str
    #: In the base unit; None where it is secret.
    value: object
    unit: str
    shown: str
    #: "default", "file" or "environment", and there: the file with its line, or the variable.
    source: str
    place: str | None
    #: What the value follows from on this machine, if it does.
    computed_from: str | None


def shown_settings(resolved: Resolved[Any], computed: Mapping[str, Computed[Any]]) -> list[Shown]:
    """Every setting with its value and where it comes from.

    `computed` has the values that depend on the machine, by the names of their settings.
    """
    rows = []
    for setting in settings_of(type(resolved.config)):
        kind = setting.spec.kind
        value = getattr(getattr(resolved.config, setting.table), setting.key)
        value, computed_from = computed.get(setting.name, (value, None))
        shown = kind.shown(value)
        if setting.spec.is_secret:
            value, shown = None, "not shown" if value else "not set"
        source = resolved.sources[setting.name]
        rows.append(Shown(setting.name, value, kind.unit, shown, *source, computed_from))
    return rows


def commented_file() -> str:
    """A complete file in which everything is commented out; what it shows are the defaults."""
    parts = [_comment(_INTRODUCTION)]
    for name, table in tables_of(Config).items():
        parts.append(f"[{name}]\n{_comment(inspect.getdoc(table) or '')}")
        parts += map(_commented_setting, settings_of_table(table))
    return "\n\n".join(parts) + "\n"


def option_table() -> str:
    """The settings as a Markdown table, and what the words mean that some of them take."""
    lines = ["| setting | unit | default | allowed | meaning |", "|---|---|---|---|---|"]
    words = []
    for setting in settings_of(Config):
        kind = setting.spec.kind
        default = kind.literal(setting.default)
        cells = (f"`{setting.name}`", kind.unit, f"`{default}`", kind.range, setting.spec.meaning)
        lines.append(f"| {' | '.join(cells)} |")
        if kind.meanings:
            words.append(f"\n`{setting.name}` is one of these:\n")
            words += [f"* `{quoted(word)}`: {text}" for word, text in kind.meanings.items()]
    return "\n".join([*lines, *words]) + "\n"


def _commented_setting(setting: Setting) -> str:
    kind = setting.spec.kind
    allowed = f"{kind.allowed[0].upper()}{kind.allowed[1:]}"
    lines = [f"{setting.spec.meaning} {allowed}."]
    lines += [f"{quoted(word)}: {text}" for word, text in (kind.meanings or {}).items()]
    shown = f"#{setting.key} = {kind.literal(setting.default)}"
    return "\n".join([*map(_comment, lines), shown])


def _comment(text: str) -> str:
    """Lines that begin with "# ", one paragraph after the other."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    lines = (
        textwrap.wrap(each, _COLUMNS - 2, break_long_words=False, break_on_hyphens=False)
        for each in paragraphs
    )
    return "\n#\n".join("\n".join(f"# {line}" for line in each) for each in lines)
