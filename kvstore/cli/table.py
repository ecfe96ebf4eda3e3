"""Columns of text that fit the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.cli.terminal import escaped, width

if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP = "  "


def columns(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> list[str]:
    """Lines of equally long rows; those `left` are flush left, the others flush right.

    What is too long for the terminal ends in an ellipsis. Cells may hold anything.
    """
    cells = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(size) if number in left else cell.rjust(size)
            for number, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_fitted(_GAP.join(padded).rstrip()))
    return lines


def _fitted(line: str) -> str:
    most = width()
    return line if len(line) <= most else f"{line[: most - 1]}…"


def facts(rows: Sequence[tuple[str, str]]) -> list[str]:
    """A name and what there is to say of it, line by line; long texts go on below themselves."""
    from kvstore.cli.terminal import fill_line

    size = max(len(name) for name, _ in rows)
    indent = " " * (size + len(_GAP))
    return [fill_line(f"{name:{size}}{_GAP}{escaped(text)}", indent=indent) for name, text in rows]


def shown_duration(seconds: float) -> str:
    """A duration for people: "5.2 min"."""
    for unit, factor in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.0f} s"
