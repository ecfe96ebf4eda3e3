"""What an installation is, in every way to make one, by the real pip.

The tree is copied and probes are planted in the linked folders, so that nothing is written into
this checkout and the tests know what to find. Environments have no pip of their own (that saves
seconds each) and see this environment's packages through a .pth file, except for kvstore, which
stands in none of its folders.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
MAX_BASE_PACKAGES = 5
MODES = ["checkout", "editable", "wheel", "sdist", "git"]

#: Runs where kvstore is installed, with a namespace package `cuda.bindings` on the path.
PROBE = """
import sys, importlib.resources, cuda.bindings
import kvstore, kvstore.types, kvstore.cuda.probe, kvstore.server.probe, kvstore.tiers.probe
assert cuda.bindings.ORIGIN == "NVIDIA", cuda.bindings
assert kvstore.cuda.probe.ORIGIN == kvstore.server.probe.ORIGIN == "kvstore"
assert importlib.resources.files("kvstore.cuda").joinpath("probe.cu").is_file()
assert importlib.resources.files("kvstore").joinpath("py.typed").is_file()
import cuda
assert cuda.__spec__.origin is None, "a regular package hides the namespace"
print(kvstore.__version__)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that has to succeed; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def pip(*words: str | Path, python: Path | None = None) -> None:
    """Pip without network: what a build needs is here."""
    target = ["--python", str(python)] if python else []
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    verb, *rest = words
    run(sys.executable, "-m", "pip", *target, verb, *options, *rest, cwd=Path("/"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tree of this one, and the probes, in one commit."""
    copy = tmp_path_factory.mktemp("tree") / "kvstore"
    listing = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "-co", "--exclude-standard"]
    for path in filter(None, run(*listing, cwd=ROOT).split("\0")):
        source, target = ROOT / path, copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_file():  # and not one that is tracked but was just removed
            target.write_bytes(source.read_bytes())
    for name in ("cuda", "server", "tiers"):
        (copy / name).mkdir(exist_ok=True)  # git keeps no empty folder
        (copy / name / "probe.py").write_text('ORIGIN = "kvstore"\n', encoding="utf-8")
    (copy / "cuda/probe.cu").write_text("// a probe\n", encoding="utf-8")
    identity = ("-c", "user.name=kvstore", "-c", "user.email=kvstore@localhost")
    run("git", "init", "--quiet", cwd=copy)
    run("git", "add", "--all", cwd=copy)
    run("git", *identity, "-c", "commit.gpgsign=false", "commit", "--quiet", "-m", "a", cwd=copy)
    return copy


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as NVIDIA's wheels make it: `cuda` without __init__.py, with `bindings` in it."""
    folder = tmp_path_factory.mktemp("nvidia")
    (folder / "cuda/bindings").mkdir(parents=True)
    (folder / "cuda/bindings/__init__.py").write_text('ORIGIN = "NVIDIA"\n', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", folder, tree)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    hook = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", hook, cwd=tree)
    return next(folder.glob("*.tar.gz"))


def site_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))


@pytest.fixture(scope="module", params=MODES)
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tree: Path
) -> Path:
    """A virtual environment with kvstore installed in one way ("checkout": in none)."""
    mode = request.param
    folder = tmp_path_factory.mktemp(mode)
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=Path("/"))
    site = site_packages(folder)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = folder / "bin/python"
    if mode == "editable":
        pip("install", "--editable", tree, python=python)
    elif mode in {"wheel", "sdist"}:
        pip("install", request.getfixturevalue(mode), python=python)
    elif mode == "git":
        pip("install", f"git+file://{tree}", python=python)
    return folder


def test_imports_beside_nvidias_namespace(environment: Path, tree: Path, nvidia: Path):
    python = environment / "bin/python"
    is_installed = (environment / "bin/kvstore").exists()
    # In the repository's root, a folder named cuda stands before every other on the path.
    for cwd in [tree, Path("/")] if is_installed else [tree]:
        version = run(python, "-c", PROBE, cwd=cwd, PYTHONPATH=str(nvidia))
        assert re.fullmatch(r"\d+\.\d+\.\d+\n", version)
    run(python, "-m", "kvstore", "version", cwd=tree)


def test_only_kvstore_is_installed(environment: Path):
    found = {path.name for path in site_packages(environment).iterdir()} - {"others.pth"}
    ours = re.compile(
        r"kvstore|__pycache__|tiered_kvstore-\S+\.dist-info|__editable__\S*kvstore\S+"
    )
    assert not [name for name in found if not ours.fullmatch(name)]
    if not (environment / "bin/kvstore").exists():
        return
    probe = (
        "import importlib.util as u\n"
        "assert u.find_spec('kvstore')\n"
        "assert not any(u.find_spec(name) for name in ('tiers', 'server', 'tests'))\n"
    )
    run(environment / "bin/python", "-c", probe, cwd=Path("/"))
    assert "kvstore" in run(environment / "bin/kvstore", "--help", cwd=Path("/"))


def python_files(tree: Path) -> set[str]:
    listing = run("git", "ls-files", "-z", cwd=tree).split("\0")
    moved = (re.sub(r"^(tiers|cuda|server)/", r"kvstore/\1/", path) for path in listing)
    return {path for path in moved if path.startswith("kvstore/") and path.endswith(".py")}


def test_wheel_holds_all_modules_and_nothing_else(wheel: Path, tree: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == python_files(tree)
    assert {"kvstore/py.typed", "kvstore/cuda/probe.cu"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "kvstore",
        "tiered_kvstore",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_from_sdist_is_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path):
    pip("wheel", "--wheel-dir", tmp_path, sdist)
    rebuilt = next(tmp_path.glob("*.whl"))
    assert rebuilt.name == wheel.name
    assert set(zipfile.ZipFile(rebuilt).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_sdist_has_files_for_links(sdist: Path):
    with tarfile.open(sdist) as archive:
        links = [member.name for member in archive if member.issym() or member.islnk()]
        assert not links
        assert any(name.endswith("/kvstore/cuda/probe.py") for name in archive.getnames())


def requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)]


def applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def test_base_install_is_small(wheel: Path):
    waiting = [each for each in requirements(wheel) if applies(each)]
    assert sorted(each.name for each in waiting) == ["msgspec", "numpy", "xxhash"]
    found: set[str] = set()
    while waiting:
        name = waiting.pop().name
        if name not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or [])
            waiting.extend(each for each in needed if applies(each))
    assert len(found) <= MAX_BASE_PACKAGES, found


def test_each_extra_is_declared(wheel: Path):
    extras = set(re.findall(r'extra == "(\w+)"', "\n".join(map(str, requirements(wheel)))))
    assert extras == {"daemon", "gpu", "lint", "lz4", "remote", "test", "transformers"}
