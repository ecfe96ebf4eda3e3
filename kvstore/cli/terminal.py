"""Standard output as the commands use it: how wide it is, and what became of it."""

from __future__ import annotations

import os
import shutil
import textwrap
from typing import TextIO

WIDTH_MIN = 40
WIDTH_MAX = 100  # longer lines are hard to read, however wide the window is


def width() -> int:
    """Columns for text: what COLUMNS or the terminal says, within bounds; 80 where neither does."""
    return max(WIDTH_MIN, min(WIDTH_MAX, shutil.get_terminal_size().columns))


def fill(text: str) -> str:
    """Wrap a text of one or more paragraphs."""
    return "\n\n".join(fill_line(" ".join(part.split())) for part in text.split("\n\n"))


def fill_line(line: str, *, indent: str = "") -> str:
    """Wrap one line, whose own spaces stay; what does not fit goes on behind the indent."""
    return textwrap.fill(
        line,
        width(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def escaped(text: str) -> str:
    """A text that came from elsewhere, without what would move the cursor or change colours."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Output:
    """A stream that remembers its own error, so that it can be told from all others."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write, and note the error if there is one. What the encoding lacks becomes an escape."""
        try:
            return self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            return self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Flush, and note the error if there is one."""
        try:
            self.stream.flush()
        except OSError as error:
            self.error = error
            raise

    def discard(self) -> None:
        """Send what is still buffered nowhere, or it would fail once more at the exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)
