"""docs/sdk.md stays true: its code runs, its signatures and outcomes are those of the code."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore import errors

TEXT = (Path(__file__).resolve().parents[2] / "docs/sdk.md").read_text(encoding="utf-8")
CLASSES: dict[str, type] = {
    "store": kvstore.EmbeddedStore,
    "node": kvstore.NodeStore,
    "session": kvstore.Session,
    "lease": kvstore.Lease,
    "reservation": kvstore.Reservation,
    "namespace": kvstore.Namespace,
    "layout": kvstore.Layout,
}
#: Not for callers: what `put` tells the store beside its commit, and a constant of 32 bytes.
LEFT_OUT = {"differing_puts": None, "parent_hash": "parent_hash"}

SIGNATURES = re.findall(r"^\| `(?:(\w+)\.)?(\w+)\((.*?)\)` \|", TEXT, re.MULTILINE)


def plain_signature(function: object, *, is_method: bool) -> str:
    """Names and defaults, without types."""
    assert callable(function)
    shown: list[str] = []
    parameters = list(inspect.signature(function).parameters.values())[is_method:]
    for parameter in parameters:
        text = parameter.name
        if parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        if parameter.default is not parameter.empty:
            default = (
                str.__repr__(parameter.default)
                if isinstance(parameter.default, str)
                else repr(parameter.default)
            )
            text += f"={default}"
        text = LEFT_OUT.get(parameter.name, text) or ""
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if text and is_keyword and "*" not in shown:
            shown.append("*")
        shown += [text] if text else []
    return ", ".join(shown)


def test_its_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == TEXT.count("```python") > 5
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    # What it prints is what its comments say.
    assert done.stdout.splitlines() == re.findall(r"print\(.*?\)  # (.*)", TEXT)


@pytest.mark.parametrize(("owner", "name", "given"), SIGNATURES)
def test_a_signature_is_that_of_the_code(owner: str, name: str, given: str):
    holder: object = CLASSES.get(owner) or getattr(kvstore, owner, kvstore)
    function = getattr(holder, name)
    is_method = owner in CLASSES
    assert given == plain_signature(function, is_method=is_method)


@pytest.mark.parametrize("owner", ["store", "node", "session", "lease", "reservation"])
def test_every_public_name_is_there(owner: str):
    named = set(re.findall(rf"^\| `{owner}\.(\w+)", TEXT, re.MULTILINE))
    public = {name for name in vars(CLASSES[owner]) if not name.startswith("_")}
    internal = {"places", "checksums", "write"}  # of a reservation, for `put`
    assert public - internal <= named


def test_every_outcome_and_error_is_there():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \| [^|]+ \|$", TEXT, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert named >= set(kvstore.Outcome)
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    tree = re.search(r"```\n(KVStoreError.*?)```", TEXT, re.DOTALL)
    assert tree
    assert kinds <= set(re.findall(r"\w+", tree[1]))
