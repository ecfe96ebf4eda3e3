"""Documents that name tests stay true: every test exists, every state and every fault is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvstore.slots import SlotState

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("docs/lease.md", "docs/faults.md")
#: How many faults there are of each kind.
FAULTS = {
    "ID": 13, "CO": 18, "LI": 15, "CA": 16, "CC": 9, "NE": 13, "PE": 7, "OP": 10, "SE": 10,
}  # fmt: skip
PARTS = "daemon|SSD tier|remote pool|GPU tier|vLLM connector|tenants|metrics"

REFERENCE = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
FAULT_ROW = re.compile(r"^\| ([A-Z]{2}\d\d) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
ANSWER = re.compile(rf"with (the )?({PARTS})|does not apply: |open: |{REFERENCE.pattern}")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@cache
def named_tests(path: Path) -> frozenset[str]:
    """The names of all test functions of a file, those of its classes included."""
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def missing_tests(text: str) -> list[str]:
    """What a document names and nobody can run."""
    missing = []
    for name, test in REFERENCE.findall(text):
        path = ROOT / (name if "/" in name else f"tests/unit/{name}")
        if test not in named_tests(path):
            missing.append(f"{name}::{test}")
    return missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_is_named_exists(document: str):
    assert missing_tests(text_of(document)) == []
    assert len(REFERENCE.findall(text_of(document))) > 50


@pytest.mark.parametrize("document", DOCUMENTS)
def test_nothing_that_looks_like_a_test_is_left_unchecked(document: str):
    names = set(re.findall(r"\btest_\w+\b(?!\.py)", text_of(document)))
    assert names == {test for _, test in REFERENCE.findall(text_of(document))}


def test_a_name_of_no_test_is_found():
    text = (
        "`test_core.py::test_nothing`, `tests/none.py::test_x`, `test_slots.py::test_a_slot_is_f`"
    )
    assert missing_tests(text) == [
        "test_core.py::test_nothing",
        "tests/none.py::test_x",
        "test_slots.py::test_a_slot_is_f",
    ]
    assert missing_tests("`test_slots.py::test_a_slot_is_freed_once`") == []


def test_every_state_of_a_slot_has_its_row_and_its_column():
    text = text_of("docs/lease.md")
    states = ["free", *SlotState]
    header = next(line for line in text.splitlines() if line.startswith("| event |"))
    columns = [column.strip() for column in header.strip("|").split("|")][1:]
    assert sorted(columns) == sorted(states)
    for state in states:
        assert f"\n| `{state}` |" in text


def test_every_numbered_transition_is_explained_once():
    text = text_of("docs/lease.md")
    events = re.search(r"^\| event \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert events
    named = {int(number) for number in re.findall(r"\((\d+)\)", events[0])}
    rows = [int(number) for number in re.findall(r"^\| (\d+) \| ", text, re.MULTILINE)]
    assert rows == sorted(named) == list(range(1, len(rows) + 1))
    for line in text.splitlines():
        assert not re.match(r"\| \d+ \|", line) or REFERENCE.search(line), line


def test_every_fault_is_there_once_and_answered():
    rows = FAULT_ROW.findall(text_of("docs/faults.md"))
    expected = [f"{kind}{i:02}" for kind, count in FAULTS.items() for i in range(1, count + 1)]
    assert len(expected) == 111
    assert [row[0] for row in rows] == expected
    assert [row[0] for row in rows if not ANSWER.search(row[3])] == []
