"""The parser of all commands: its help fits the terminal, and its errors are one line."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.cli import terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import SupportsWrite

USAGE = 2  # the exit code
_SHOWN_CHARACTERS = 40
_QUOTE = "'"


class Parser(argparse.ArgumentParser):
    """Wraps its texts, and says what is wrong as every other error of ours is said."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:  # noqa: ANN401
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,  # a script that abbreviates would break when we add an option
            **options,  # of argparse's own, where it makes the parser of a part of a command
        )

    def error(self, message: str) -> NoReturn:
        """One line: what is wrong, and where the options are listed."""
        message = re.sub(
            r"invalid choice: (.*) \(choose from (.*)\)",
            lambda found: f"is {found[1]}: there is {found[2].replace(_QUOTE, '')}",
            message,
        )
        found = re.fullmatch(r"argument (?:.*/)?([^:]+?): (.*)", message, re.DOTALL)
        if found:
            joint = " " if found[2].startswith("is ") else ": "
            message = f"{found[1]}{joint}{found[2]}"
        message = re.sub(r"^the following arguments are required: (.*)$", r"\1 is missing", message)
        self.exit(USAGE, f"kvstore: {with_hint(' '.join(message.split()), self.prog)}\n")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Like argparse's, which hides that nothing could be written."""
        if message:
            print(message, end="", file=sys.stderr if file is None else file)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=terminal.width())


def with_hint(message: str, prog: str) -> str:
    """The message, and which help lists what is allowed."""
    return f"{message} (see {prog} --help)"


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """An option's `type`: a whole number within bounds."""
    allowed = "above 0" if least == 1 else f"of {least} or more"
    if most is not None:
        allowed = f"from {least} to {most}"

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise refusal(repr(_shortened(text)), f"give a whole number {allowed}") from None
        if value < least or (most is not None and value > most):
            raise refusal(_shortened(text), f"give a whole number {allowed}")
        return value

    return number


def refusal(value: str, remedy: str) -> argparse.ArgumentTypeError:
    """What a `type` raises; the parser puts the option's name before it."""
    return argparse.ArgumentTypeError(f"is {value}: {remedy}")


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
