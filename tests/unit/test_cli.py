"""The shell of the command line: how a command is found, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvstore
from kvstore import errors, native
from kvstore.cli import main as cli
from kvstore.cli import version


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `probe`; a test sets its `run`."""
    module = ModuleType("kvstore.cli.probe")
    vars(module)["add_arguments"] = lambda parser: parser.add_argument("--blocks", type=int)
    vars(module)["run"] = lambda arguments: 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command(module.__name__, "look"))
    return module


def raising(error: BaseException):
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


def run_kvstore(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


def test_help_lists_each_command_with_its_summary(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in out
        assert command.summary in " ".join(out.split())
    assert "Exit codes" in out


@pytest.mark.parametrize("words", [[], *([name] for name in cli.COMMANDS)])
@pytest.mark.parametrize(("columns", "most"), [("60", 80), ("80", 80), ("300", 100)])
def test_help_fits_the_terminal(capsys, monkeypatch, words: list[str], columns: str, most: int):
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if not line.startswith("  kvstore ")]  # whole commands
    assert max(map(len, shown)) <= most


def test_texts_about_durations_agree(capsys):
    assert cli.main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "one to two minutes on two cores" in out
    assert "10 to 30 s" in out
    assert cli.main(["demo", "--help"]) == 0
    assert "one to two minutes on two cores" in " ".join(capsys.readouterr().out.split())
    described = Path(__file__).resolve().parents[2] / "benchmarks/README.md"
    text = described.read_text(encoding="utf-8")
    assert "a million entries (a minute)" in out
    for name, takes in (("dram", "It takes 10 to 30 s"), ("match", "It takes about a minute")):
        assert cli.main(["bench", name, "--help"]) == 0
        assert takes in " ".join(capsys.readouterr().out.split())
        assert takes in text


def test_without_a_command_the_help_goes_to_stderr(capsys):
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "commands:" in captured.err


def test_version_option(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvstore {kvstore.__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("verison", "version"), ("dmeo", "demo")])
def test_misspelt_command_names_the_nearest(capsys, typed: str, meant: str):
    assert cli.main([typed]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvstore: no command {typed!r}; did you mean {meant!r}?")
    assert captured.err.count("\n") == 1


def test_a_word_like_no_command_lists_them(capsys):
    assert cli.main(["xyzzy"]) == 2
    assert (
        "there are demo, serve, status, ls, stat, verify, check, doctor, "
        "config, bench, replay, version" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words", [["--bloks", "3"], ["--block", "3"], ["--blocks", "a/b"], ["more"]]
)
def test_wrong_options_are_usage(probe, capsys, words: list[str]):
    assert cli.main(["probe", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvstore: ")
    assert captured.err.endswith(" (see kvstore probe --help)\n")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("demo --new-tokens abc", "--new-tokens is 'abc': give a whole number above 0"),
        ("demo --new-tokens 0", "--new-tokens is 0: give a whole number above 0"),
        ("demo --prompt-tokens 3", "--prompt-tokens is 3: give a whole number of 32 or more"),
        ("demo --threads 5000", "--threads is 5000: give a whole number from 1 to 1024"),
        ("demo --hidden 100", "--hidden is 100: give a multiple of 64"),
        ("bench ssd", "BENCHMARK is 'ssd': there is dram, match, shm, control"),
        ("bench", "BENCHMARK is missing"),
        ("bench dram --batch x", "--batch is 'x': give a whole number above 0"),
        ("bench match --entries 0", "--entries is 0: give a whole number above 0"),
        ("bench match --entries 9", "--entries is 9: give --keys, 1024, or more"),
        ("bench dram --rounds 1", "--rounds is 1: give a whole number of 2 or more"),
        ("bench dram --block-size 1000", "--block-size is 1000 bytes: give a multiple of 4KiB"),
    ],
)
def test_wrong_arguments_are_told_in_one_style(capsys, words: str, message: str):
    command = re.split(r" -| ssd", words)[0]
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err == f"kvstore: {message} (see kvstore {command} --help)\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--prompt-tokens", 99999999999), ("--layers", 10**7), ("--hidden", 64 * 10**7)],
)
def test_a_demo_that_memory_cannot_hold_names_the_option(capsys, option: str, value: int):
    assert cli.main(["demo", option, str(value)]) == 2
    error = capsys.readouterr().err
    number = r"[\d,]+\.\d GiB"
    assert re.fullmatch(
        rf"kvstore: {option} is {value}: the demo needs {number} of memory with it, and {number} "
        rf"are available here: give less \(see kvstore demo --help\)\n",
        error,
    )


def test_json_may_stand_before_the_command(probe, capsys):
    seen: list[argparse.Namespace] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 0

    probe.run = run
    assert cli.main(["--json", "probe", "--blocks", "3"]) == 0
    assert seen == [argparse.Namespace(blocks=3, json=True)]
    assert cli.main(["--json"]) == 2
    assert "--json goes with a command" in capsys.readouterr().err


def test_a_command_gets_its_options_and_json(probe):
    seen: list[argparse.Namespace] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 1

    probe.run = run
    assert cli.main(["probe", "--blocks", "3", "--json"]) == 1
    assert seen == [argparse.Namespace(blocks=3, json=True)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidTokens("token 3\nis negative"), 2),
        (errors.ConfigError("dram.capcity: did you mean capacity?"), 2),
        (errors.TierError("ssd: input/output error"), 1),
        (errors.StoreClosed(), 1),
    ],
)
def test_our_errors_are_one_line(probe, capsys, error: Exception, code: int):
    probe.run = raising(error)
    assert cli.main(["probe"]) == code
    message = " ".join(str(error).split()) or type(error).__name__
    assert capsys.readouterr().err == f"kvstore: {message}\n"


def test_ctrl_c(probe, capsys):
    probe.run = raising(KeyboardInterrupt())
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "kvstore: interrupted\n"


def test_a_bug_keeps_its_traceback(probe):
    probe.run = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_missing_package_names_the_extra(monkeypatch, probe, capsys):
    command = cli.COMMANDS["probe"]._replace(extra="transformers")
    monkeypatch.setitem(cli.COMMANDS, "probe", command)
    probe.run = raising(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == (
        "kvstore: `kvstore probe` needs torch: pip install '.[transformers]' in the checkout of "
        "kvstore\n"
    )


def test_missing_module_of_ours_is_a_bug(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("kvstore.cli.nowhere", "look", "lz4"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["probe"])


def test_version_as_json(capsys):
    assert cli.main(["version", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == version.collect()
    assert report["version"] == kvstore.__version__
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["packages"].keys() >= set(version.SHOWN_PACKAGES)
    assert report["native"] is native.IS_COMPILED


def test_version_is_short(monkeypatch, capsys):
    monkeypatch.setattr(version, "git_revision", lambda: f"{'0123456789' * 4}-dirty")
    monkeypatch.setattr(version, "has_native_copy", lambda: False)
    assert cli.main(["version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"kvstore {kvstore.__version__} (012345678901-dirty)"
    assert [line.split()[0] for line in others] == [
        "python",
        "numpy",
        "torch",
        "transformers",
        "native",
    ]
    assert others[-1] == "native copy no: copies go through NumPy"


def test_version_names_what_is_absent(monkeypatch, capsys):
    monkeypatch.setattr(version, "_installed_version", lambda name: None)
    assert cli.main(["version"]) == 0
    assert "torch not installed\n" in capsys.readouterr().out


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "words", ["--help", "version", "version --json", "bench --help", "config init"]
)
def test_a_full_disk_is_one_line(words: str, unbuffered: str):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = run_kvstore(*words.split(), stdout=full, env=environment)
    assert done.returncode == 1
    assert done.stderr == "kvstore: cannot write the output: No space left on device\n"


def test_an_error_of_something_else_is_not_one_of_the_output(probe):
    probe.run = raising(PermissionError(13, "Permission denied", "a file"))
    before = sys.stdout
    with pytest.raises(PermissionError):
        cli.main(["probe"])
    assert sys.stdout is before


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [["--help"], ["version"], ["version", "--json"]])
def test_a_closed_pipe_is_no_traceback(words: list[str], unbuffered: str):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        done = run_kvstore(*words, stdout=writing, env=environment)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_stdout_is_no_traceback():
    done = run_kvstore("version", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupted_process_ends_with_130():
    code = (
        "import os, signal, sys, types, kvstore.cli.main as cli\n"
        "probe = types.ModuleType('probe')\n"
        "probe.add_arguments = lambda parser: None\n"
        "probe.run = lambda arguments: os.kill(os.getpid(), signal.SIGINT) or signal.pause()\n"
        "sys.modules['probe'] = probe\n"
        "cli.COMMANDS['probe'] = cli.Command('probe', 'look')\n"
        "sys.exit(cli.main(['probe']))\n"
    )
    command = [sys.executable, "-c", code]
    # An interactive shell's background job, and some runners, hand SIGINT down ignored.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stderr) == (130, "kvstore: interrupted\n")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_no_color(environment: dict[str, str]):
    done = run_kvstore("--help", stdout=subprocess.PIPE, env={**os.environ, **environment})
    assert "\033" not in done.stdout


def test_public_names_are_loaded_lazily():
    code = (
        "import sys, kvstore\n"
        "assert set(kvstore.__all__) <= set(dir(kvstore))\n"
        "assert 'kvstore.types' not in sys.modules\n"
        "assert kvstore.Outcome is sys.modules['kvstore.types'].Outcome\n"
        "assert kvstore.errors.KVStoreError\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", kvstore.__all__)
def test_public_name_exists(name: str):
    assert getattr(kvstore, name) is getattr(kvstore, name)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Namespase"):
        _ = kvstore.Namespase
