"""The shell of the command line: how a command is found, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest

import kvstore
from kvstore import errors
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
        assert command.summary in out
    assert "Exit codes" in out
    assert max(map(len, out.splitlines())) <= 100


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
    assert "there are demo, bench, version" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--bloks", "3"], ["--block", "3"], ["--blocks", "x"], ["more"]])
def test_wrong_options_are_usage(probe, capsys, words: list[str]):
    assert cli.main(["probe", *words]) == 2
    assert "usage: kvstore probe" in capsys.readouterr().err


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
    expected = "kvstore: `kvstore probe` needs torch: pip install 'tiered-kvstore[transformers]'\n"
    assert capsys.readouterr().err == expected


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
    assert report["packages"].keys() >= {"numpy", "torch"}


def test_version_names_what_is_absent(monkeypatch, capsys):
    monkeypatch.setattr(version, "PACKAGES", ("tiered-no-such-thing",))
    assert cli.main(["version"]) == 0
    assert "tiered-no-such-thing not installed\n" in capsys.readouterr().out


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
    # Unbuffered, argparse itself swallows that nobody read its help.
    allowed = {0, 141} if words == ["--help"] else {141}
    assert done.returncode in allowed
    assert done.stderr == ""


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
