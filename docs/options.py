"""Writes what is made from the settings: config/kvstore.toml, and the table in configuration.md."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.config.text import commented_file, option_table

ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"(?<=<!-- written by `make options` -->\n).*?(?=<!-- end -->)", re.DOTALL)


def documents() -> dict[Path, str]:
    """The text that each of them has to have."""
    guide = ROOT / "docs/configuration.md"
    text, count = _TABLE.subn(lambda _: option_table(), guide.read_text(encoding="utf-8"))
    assert count == 1, "configuration.md has no place for the table"
    return {ROOT / "config/kvstore.toml": commented_file(), guide: text}


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
