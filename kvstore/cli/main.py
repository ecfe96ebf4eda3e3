"""The command `kvstore`: finds the command, loads its module alone, and turns errors into exits.

A command is a module with `add_arguments(parser)` and `run(arguments) -> int`. Both may import what
they like; that costs nothing to the other commands. `--json` is added here, for all of them:
`arguments.json` asks for one JSON document on standard output, and nothing else there.

Exit codes: 0 done, 1 a finding or a failure, 2 usage, 3 no daemon answers, 130 interrupted, 141
nobody reads our output. Output that cannot be written for another reason, such as a full disk, is a
failure.
"""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO, cast

import kvstore
from kvstore.cli import terminal
from kvstore.cli.arguments import USAGE, Parser, with_hint
from kvstore.errors import ConfigError, DaemonUnavailable, InvalidRequest, KVStoreError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DONE = 0
FAILED = 1
UNREACHABLE = 3
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
OUTPUT_CLOSED = 128 + 13  # as a shell reports SIGPIPE


class CommandModule(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the command."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it, and return the exit code."""
        ...


class Command(NamedTuple):
    """One line of the help, and where the command lives."""

    module: str
    summary: str
    extra: str | None = None  # of the distribution, where the base install is not enough


COMMANDS = {
    "demo": Command(
        "kvstore.cli.demo",
        "run a small model cold, then warm: the same tokens, sooner, and why",
        extra="transformers",
    ),
    "serve": Command("kvstore.cli.serve", "hold a store that all processes of this node share"),
    "status": Command("kvstore.cli.status", "what the daemon of this node holds and has done"),
    "ls": Command("kvstore.cli.ls", "list the blocks, leases, reservations or clients of a daemon"),
    "stat": Command("kvstore.cli.stat", "show all that the daemon knows of one block"),
    "verify": Command("kvstore.cli.verify", "have the daemon recount everything it believes"),
    "check": Command("kvstore.cli.check", "put, read and delete some blocks through the daemon"),
    "doctor": Command(
        "kvstore.cli.doctor", "look for what of this machine a daemon would run into"
    ),
    "config": Command("kvstore.cli.config", "show which settings hold and why, or write a file"),
    "bench": Command("kvstore.cli.bench", "measure what a tier moves and what a lookup costs here"),
    "replay": Command(
        "kvstore.cli.replay", "replay a trace of requests: which policy and size would hit how much"
    ),
    "version": Command("kvstore.cli.version", "show the version, and what it would run with here"),
}

_INTRODUCTION = """\
A tiered store for the KV cache of LLM inference. It keeps the blocks of KV that a prefill has
computed, by the hash of their prefix, in host memory and below; the next request that begins with
the same tokens loads them instead of computing them again."""

_EPILOGUE = """\
examples:
  kvstore demo                what it does for a time to first token
                              (one to two minutes on two cores)
  kvstore bench dram          what this machine moves per second (10 to 30 s)
  kvstore bench match         what a lookup costs with a million entries (a minute)
  kvstore bench dram --json   the first of these, for a program to read
  kvstore replay --generate chat --policy all   what each policy would hit
  kvstore serve               a store for all processes of this node, until Ctrl-C
  kvstore status              what it holds; doctor says what is wrong with the machine
  kvstore config show         every setting, its value, and where that comes from
  kvstore COMMAND --help      the options of one command

"""

_LAST_WORDS = """\
Every command takes --json. Exit codes: 0 done, 1 a finding or a failure, 2 usage, 3 no
daemon answers.

In Python: `import kvstore`, then `help(kvstore)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code, and let no foreseen error out as a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # the caller started us with it closed
        return _run_guarded(words)
    output = terminal.Output(sys.stdout)
    sys.stdout = cast("TextIO", output)
    try:
        code = _run_guarded(words)
        output.flush()  # here, where it can still be answered for
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except OSError as error:
        if error is not output.error:
            raise
        output.discard()
        if isinstance(error, BrokenPipeError):
            return OUTPUT_CLOSED  # whoever closed the pipe knows
        return _complain(f"cannot write the output: {error.strerror}", FAILED)
    finally:
        sys.stdout = output.stream
    return code


def _run_guarded(words: list[str]) -> int:
    """Run the command; its interruption and our own errors become one line and an exit code."""
    try:
        return _run(words)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except DaemonUnavailable as error:
        return _complain(str(error), UNREACHABLE)
    except KVStoreError as error:
        is_usage = isinstance(error, InvalidRequest | ConfigError)
        message = str(error) or type(error).__name__
        if message.startswith("--"):  # an option, which only the command itself could judge
            named = takewhile(lambda word: not word.startswith("-"), _command_first(words))
            message = with_hint(message, " ".join(["kvstore", *named]))
        # A configuration has a line for each thing that is wrong with it.
        lines = message.split("\n") if isinstance(error, ConfigError) else [message]
        return [_complain(line, USAGE if is_usage else FAILED) for line in lines][-1]


def _run(words: list[str]) -> int:
    """Find the command and run it; argparse's own exits come back as a code."""
    words = _command_first(words)
    try:
        if not words or words[0].startswith("-"):
            return _run_without_command(words)
        name = words[0]
        command = COMMANDS.get(name)
        if command is None:
            return _complain(_unknown(name), USAGE)
        return _run_command(name, command, words[1:])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED


def _command_first(words: list[str]) -> list[str]:
    """`--json version` means `version --json`."""
    if words[:1] == ["--json"] and len(words) > 1 and not words[1].startswith("-"):
        return [words[1], "--json", *words[2:]]
    return words


def _run_without_command(words: list[str]) -> int:
    """Answer --help and --version, and help somebody who gave no command."""
    if words == ["--json"]:
        return _complain("--json goes with a command: kvstore version --json", USAGE)
    wide = max(map(len, COMMANDS))
    lines = (f"  {name:{wide}}  {each.summary}" for name, each in COMMANDS.items())
    table = "\n".join(terminal.fill_line(line, indent=" " * (wide + 4)) for line in lines)
    parser = Parser("kvstore", f"{terminal.fill(_INTRODUCTION)}\n\ncommands:\n{table}")
    parser.usage = "kvstore COMMAND [options]"
    parser.epilog = _EPILOGUE + terminal.fill(_LAST_WORDS)
    parser.add_argument("--version", action="version", version=f"kvstore {kvstore.__version__}")
    parser.parse_args(words)
    parser.print_help(sys.stderr)
    return USAGE


def _run_command(name: str, command: Command, words: list[str]) -> int:
    """Load the module of one command, parse its options, and run it."""
    try:
        module = cast("CommandModule", import_module(command.module))
        sentence = f"{command.summary[0].upper()}{command.summary[1:]}."
        parser = Parser(f"kvstore {name}", terminal.fill(sentence))
        module.add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="one JSON document as the output")
        return module.run(parser.parse_args(words))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if command.extra is None or missing == "kvstore":
            raise  # not a matter of what the user installed: ours to mend
        install = f"pip install '.[{command.extra}]' in the checkout of kvstore"
        return _complain(f"`kvstore {name}` needs {missing}: {install}", USAGE)


def _unknown(name: str) -> str:
    """Say that there is no such command, and which one may be meant."""
    from difflib import get_close_matches

    nearest = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(COMMANDS)}"
    return f"no command {name!r}; {hint} (see kvstore --help)"


def _complain(message: str, code: int) -> int:
    """One line on standard error; return `code`."""
    print(f"kvstore: {' '.join(message.split())}", file=sys.stderr)
    return code
