"""What is wrong with a configuration, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import load
from kvstore.errors import ConfigError


def problems(text: str | bytes, environment: dict[str, str] | None = None) -> list[str]:
    """The lines of the error, in a file called a.toml of the current directory."""
    Path("a.toml").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as error:
        load("a.toml", environment or {})
    return str(error.value).split("\n")
