"""Our own rules for the text of this project, each with samples that it must find.

A rule is a function from a `Source` to its findings. `RULES` names for each one a sample that
breaks it and one that looks alike and does not: a rule that finds nothing fails here.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LINE_COLUMNS = 100
MAX_FILE_BYTES = 512 * 1024

#: Path -> why this file may catch everything. The daemon's outermost loop will stand here.
BROAD_EXCEPT_ALLOWED: dict[str, str] = {}

PRODUCT_FOLDERS = ("kvstore/", "tiers/", "cuda/", "server/")
#: What NVIDIA's own `cuda` namespace holds; a module of ours of that name would hide it.
NVIDIA_NAMES = {"bindings", "core", "pathfinder", "compute", "coop", "cccl", "tile"}

BANNED_WORDS = {"manager", "helper", "helpers", "util", "utils", "chunk", "chunks", "page", "pages"}
#: A page of memory is a page (say so: memory_page_bytes). Only a block of KV is never one.
MEMORY_PAGE = re.compile(
    r"page_?aligned|page_?size|huge_?pages?|(os|system|memory)_pages?", re.IGNORECASE
)

Findings = Iterator[str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file, by its path in the repository."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of a Python file; none of another."""
        return list(ast.walk(ast.parse(self.text))) if self.path.endswith(".py") else []

    @cached_property
    def imports(self) -> set[str]:
        """The modules that it imports, and `module.name` for each imported name."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return found


def short_files(source: Source) -> Findings:
    lines = source.text.count("\n")
    if source.path.endswith(".py") and lines > MAX_FILE_LINES:
        yield f"{lines} lines: part it by what its parts are for"


def short_functions(source: Source) -> Findings:
    for node in source.nodes:
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def short_lines(source: Source) -> Findings:
    if PurePosixPath(source.path).suffix in {".py", ".cpp", ".cu", ".h", ".sh"}:
        for number, line in enumerate(source.text.splitlines(), 1):
            if len(line) > MAX_LINE_COLUMNS:
                yield f"{number}: {len(line)} columns"


def plain_names(source: Source) -> Findings:
    """The field's words, in the names that we give (not in those of others that we use)."""
    for line, name in _given_names(source):
        rest = MEMORY_PAGE.sub("", name)
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", rest)}
        for word in sorted(words & BANNED_WORDS):
            yield f"{line}: {word!r} in {name!r}"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Engine"):
            yield f"{node.lineno}: {node.name}: an engine is what calls us"


def _given_names(source: Source) -> Iterator[tuple[int, str]]:
    if source.path.endswith(".py"):
        yield 0, PurePosixPath(source.path).stem
    for node in source.nodes:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case _:
                pass


def absolute_imports(source: Source) -> Findings:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{node.lineno}: relative import: another module where the link's target is open"


def narrow_excepts(source: Source) -> Findings:
    if source.path in BROAD_EXCEPT_ALLOWED:
        return
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = (
                {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
                if node.type
                else {""}
            )
            broad = caught & {"", "Exception", "BaseException"}
            # To undo something and pass the error on is no way to lose one.
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if broad and not (passes_on and broad == {"BaseException"}):
                yield f"{node.lineno}: except {broad.pop() or '(bare)'}"


def no_code_from_data(source: Source) -> Findings:
    roots = {name.partition(".")[0] for name in source.imports}
    for name in sorted(roots & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}):
        yield f"imports {name}: nothing is unpickled, ever"
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                yield f"{node.lineno}: {name}()"
            case _:
                pass


def one_world(source: Source) -> Findings:
    """A file is of the asyncio world or of the threads', and no bridge between them."""
    roots = {name.partition(".")[0] for name in source.imports}
    if {"asyncio", "threading"} <= roots:
        yield "imports both asyncio and threading"


def injected_time(source: Source) -> Findings:
    if source.path == "kvstore/clock.py":
        return
    asked = {"time", "time_ns", "monotonic", "monotonic_ns", "sleep"}
    for name in sorted({f"time.{name}" for name in asked} & source.imports):
        yield f"imports {name}: take a Clock"
    for node in source.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in asked:
                yield f"{node.lineno}: time.{name}: take a Clock"
            case _:
                pass
    stopwatch = {"perf_counter", "perf_counter_ns", "process_time", "thread_time"}
    timing = re.search(r"bench|runners/|demo|^tests/|^examples/|^scripts/", source.path)
    for node in [] if timing else source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in stopwatch:
            yield f"{node.lineno}: {node.attr}: only where something is measured for people"


def nvidia_namespace(source: Source) -> Findings:
    parts = PurePosixPath(source.path).parts
    if source.path == "cuda/__init__.py":
        yield "hides NVIDIA's namespace package, which torch and CuPy need"
    elif parts[0] == "cuda" and PurePosixPath(parts[1]).stem in NVIDIA_NAMES:
        yield f"{parts[1]} hides a module of NVIDIA's"


def no_places_of_one_machine(source: Source) -> Findings:
    machine = re.compile(
        r"(?<![\w.}])/(?:work|root|home/\w+|Users/\w+|opt/(?:pypi|wheels))\b(?!\.)"
    )
    registry = re.compile(
        r"(?:pypi|pythonhosted|crates)\.(?:org|io)\b|\b(?:download\.pytorch|registry\.npmjs)\.org\b"
        r"|\b(?:ghcr|docker|quay|nvcr)\.io\b"
    )
    for number, line in enumerate(source.text.splitlines(), 1):
        for pattern in (machine, registry):
            if found := pattern.search(line):
                yield f"{number}: {found.group()}"


def docstrings(source: Source) -> Findings:
    """Every public name says what it is; a name is public where all names around it are."""
    if not source.path.startswith(PRODUCT_FOLDERS) or not source.path.endswith(".py"):
        return
    module = ast.parse(source.text)
    if not ast.get_docstring(module):
        yield "no docstring"
    open_scopes: list[ast.Module | ast.ClassDef] = [module]
    while open_scopes:
        for node in open_scopes.pop().body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                open_scopes.append(node)
            if not ast.get_docstring(node) and not _is_further_signature(node):
                yield f"{node.lineno}: {node.name}"


def _is_further_signature(node: Function | ast.ClassDef) -> bool:
    """True for a property's setter and an overload: the first of that name has said it."""
    names = {getattr(mark, "attr", getattr(mark, "id", "")) for mark in node.decorator_list}
    return bool(names & {"setter", "overload"})


Rule = Callable[[Source], Findings]

_LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
_SLASH = "/"  # apart, or this file would break the rule itself

#: Rule, a source that breaks it, and one that does not.
RULES: list[tuple[Rule, Source, Source]] = [
    (short_files, Source("a.py", "\n" * 401), Source("a.py", "\n" * 400)),
    (short_functions, Source("a.py", _LONG_FUNCTION), Source("a.py", "def f():\n    pass\n")),
    (short_lines, Source("a.py", "#" * 101), Source("a.py", "#" * 100)),
    (
        plain_names,
        Source("a.py", "class BlockManager: ...\n"),
        Source("a.py", "page_aligned = mmap.PAGESIZE; huge_pages = x.pages()\n"),
    ),
    (plain_names, Source("tiers/utils.py", ""), Source("tiers/dram.py", "")),
    (plain_names, Source("a.py", "def f(chunk): ..."), Source("a.py", "def f(*, chunked): ...")),
    (plain_names, Source("a.py", "self.num_pages = 1"), Source("a.py", "self.num_blocks = 1")),
    (plain_names, Source("a.py", "import x as helper"), Source("a.py", "import helper")),
    (plain_names, Source("a.py", "class OurEngine: ..."), Source("a.py", "class EngineHash: ...")),
    (absolute_imports, Source("a.py", "from . import b"), Source("a.py", "from a import b")),
    (
        narrow_excepts,
        Source("a.py", "try: f()\nexcept (OSError, Exception): g()\n"),
        Source("a.py", "try: f()\nexcept OSError: g()\n"),
    ),
    (
        narrow_excepts,
        Source("a.py", "try: f()\nexcept: raise\n"),
        Source("a.py", "try: f()\nexcept BaseException:\n    g()\n    raise\n"),
    ),
    (
        no_code_from_data,
        Source("a.py", "from pickle import loads"),
        Source("a.py", "import picklefork"),
    ),
    (no_code_from_data, Source("a.py", "eval('1')"), Source("a.py", "model.eval()")),
    (
        one_world,
        Source("a.py", "import asyncio\nfrom threading import Lock\n"),
        Source("a.py", "import asyncio\n"),
    ),
    (injected_time, Source("a.py", "time.sleep(1)"), Source("kvstore/clock.py", "time.sleep(1)")),
    (injected_time, Source("a.py", "from time import time"), Source("a.py", "import time")),
    (
        injected_time,
        Source("kvstore/store.py", "time.perf_counter()"),
        Source("kvstore/runners/a.py", "time.perf_counter()"),
    ),
    (nvidia_namespace, Source("cuda/__init__.py", ""), Source("server/__init__.py", "")),
    (nvidia_namespace, Source("cuda/core.py", ""), Source("cuda/pinned.py", "")),
    (
        no_places_of_one_machine,
        Source("a.md", f"see {_SLASH}root{_SLASH}x"),
        Source("a.md", "a/root, /rooted"),
    ),
    (
        no_places_of_one_machine,
        Source("Makefile", "pip install -i https://pypi" + ".org/simple x"),
        Source("Makefile", "pip install x"),
    ),
    (
        docstrings,
        Source("tiers/a.py", '"""A."""\nclass A:\n    """A."""\n    def f(self): ...\n'),
        Source("tiers/a.py", '"""A."""\ndef f():\n    """F."""\n    def g(): ...\ndef _h(): ...\n'),
    ),
    (docstrings, Source("cuda/a.py", ""), Source("tests/a.py", "")),
]


def _name(rule: object) -> str | None:
    return getattr(rule, "__name__", None)


@pytest.fixture(scope="module")
def paths() -> list[str]:
    """Every file that git tracks, or would if it were added; links are not followed."""
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "-co", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = sorted(set(done.stdout.split("\0")) - {""})
    return [path for path in found if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


@pytest.fixture(scope="module")
def sources(paths: list[str]) -> list[Source]:
    """The files that are text."""
    texts = [path for path in paths if b"\0" not in (ROOT / path).read_bytes()]
    return [Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in texts]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES), ids=_name)
def test_tree_keeps_the_rule(rule: Rule, sources: list[Source]):
    findings = [f"{source.path}: {finding}" for source in sources for finding in rule(source)]
    assert not findings, "\n".join(["", *findings])


@pytest.mark.parametrize(("rule", "bad", "good"), RULES, ids=_name)
def test_rule_finds_its_sample(rule: Rule, bad: Source, good: Source):
    assert list(rule(bad))
    assert not list(rule(good))


def test_sources_are_found_once_and_in_all_folders(sources: list[Source]):
    paths = [source.path for source in sources]
    assert len(paths) == len(set(paths))
    assert {"Makefile", "kvstore/types.py", "server/__init__.py", "tests/test_tidy.py"} <= set(
        paths
    )
    assert not [path for path in paths if path.startswith(("kvstore/tiers/", "kvstore/cuda/"))]


def test_nothing_large_is_tracked(paths: list[str]):
    sizes = {path: (ROOT / path).stat().st_size for path in paths}
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_BYTES} == {}
