"""What the demo found, for people: a line for each run, a table, a picture and a verdict."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any, TextIO

from kvstore.cli import terminal
from kvstore.cli.demo.report import comparison
from kvstore.cli.demo.runs import ALONE, COLD_RUNS, STORE_EMPTY, STORE_WARM, WARM_RUNS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.cli.demo.parameters import Parameters
    from kvstore.cli.demo.runs import Run

_COLUMNS = (
    ("", "<20"),
    ("prompt", ">7"),
    ("loaded", ">8"),
    ("computed", ">9"),
    ("load", ">9"),
    ("TTFT", ">9"),
    ("speedup", ">8"),
    ("tokens", ">10"),
)
_LABEL_COLUMNS = 20  # of a run in the picture
_TEXT_COLUMNS = 34  # room beside the longest bar


class Display:
    """Writes to one stream; in colour where that is a terminal and NO_COLOR is not set."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._in_colour = stream.isatty() and not is_plain
        encoding = (stream.encoding or "ascii").lower().replace("-", "")
        self._bar, self._part_bar = ("█", "▒") if encoding == "utf8" else ("#", "=")

    def introduce(self, parameters: Parameters) -> None:
        """Say what is going to happen, before it does."""
        text = (
            f"A Llama of {parameters.layers} layers, hidden size {parameters.hidden} and "
            f"{parameters.kv_heads} KV head{'s' * (parameters.kv_heads > 1)}, in fp32, with "
            "random weights made here: nothing is downloaded. "
            f"It answers a prompt of {parameters.prompt_tokens:,} tokens and then a "
            "second turn, without the store and with it (in host memory), and every token is "
            "compared. At the default sizes: one to two minutes on two cores."
        )
        self._print(terminal.fill(text) + "\n", flush=True)

    def progress(self, name: str, run: Run | None) -> None:
        """One line for each run; on a terminal its name stands there while it lasts."""
        if run is None:
            if self._in_colour:
                self._print(f"  {name} …", end="", flush=True)
            return
        clear = "\r\x1b[K" if self._in_colour else ""
        self._print(
            f"{clear}  {name:<20}  first token {_duration(run.ttft_seconds):>9}  "
            f"{len(run.tokens):>3} tokens {_duration(run.total_seconds):>9}",
            flush=True,
        )

    def conclude(self, document: dict[str, Any]) -> None:
        """The table, where the time went, what it cost, and whether it paid."""
        rows = list(_median_runs(document))
        self._print()
        self._print(self._sgr("1", _row([title for title, _ in _COLUMNS])))
        baseline = 0.0
        for entry in rows:
            if entry["name"] == ALONE:
                baseline = entry["ttft_seconds"]
            self._print(_row(_cells(entry, baseline)))
        self._print()
        self._bars(rows)
        self._print()
        for title, text in _closing_lines(document):
            self._print(terminal.fill_line(f"{title:7}{text}", indent=" " * 7))
        self._print()
        findings, notes = document["findings"], document["notes"]
        if findings:
            verdict = f"FAILED: {'; '.join(findings)}"
        else:
            same, second = (
                comparison(document[name]) for name in ("speedup", "second_turn_speedup")
            )
            verdict = f"Same tokens. First token of the same prompt {same}, of the second turn "
            verdict += "too." if same == second else f"{second}."
        self._print(self._sgr("1;31" if findings else "1;32", terminal.fill(verdict)))
        for note in notes:
            self._print(terminal.fill(f"Note: {note}."))

    def conclude_processes(self, processes: dict[str, Any]) -> None:
        """A line for each engine process, and whether the second one gained by the first."""
        for number, run in enumerate(processes["runs"], 1):
            self._print(
                f"  process {number} ({run['pid']})  first token "
                f"{_duration(run['ttft_seconds']):>9}, {run['loaded_tokens']:,} of "
                f"{run['prompt_tokens']:,} tokens loaded"
            )
        findings, gain = processes["findings"], processes.get("speedup", 0.0)
        if findings:
            verdict = f"FAILED: {'; '.join(findings)}"
        elif gain > 1:
            verdict = f"Same tokens. First token of the second engine {gain:.1f} times sooner."
        else:
            verdict = "Same tokens. No sooner: the model is too small to gain from it."
        self._print()
        self._print(self._sgr("1;31" if findings else "1;32", terminal.fill(verdict)))

    def announce_processes(self) -> None:
        """Say what the second part is."""
        text = (
            "The same over a daemon (kvstore serve): two engine processes, one after the other, "
            "each with a model of its own. What the first one stored outlives it."
        )
        self._print(f"\n{terminal.fill(text)}\n", flush=True)

    def _bars(self, rows: list[dict[str, Any]]) -> None:
        longest = max(entry["ttft_seconds"] for entry in rows)
        columns = terminal.width() - _LABEL_COLUMNS - _TEXT_COLUMNS
        loads = [round(columns * entry["load_seconds"] / longest) for entry in rows]
        legend = f"time to first token: {self._bar} compute"
        self._print(legend + (f", {self._part_bar} lookup and load" if any(loads) else ""))
        for entry, load in zip(rows, loads, strict=True):
            total = max(1, load, round(columns * entry["ttft_seconds"] / longest))
            bar = self._part_bar * load + self._bar * (total - load)
            colour = "32" if entry["loaded_tokens"] else "33"
            label = f"turn {entry['turn']}, {entry['name']}"
            room = terminal.width() - _LABEL_COLUMNS - total - 2
            text = _parts(entry)
            if len(text) > room:  # below its bar, rather than over the edge
                indent = " " * (_LABEL_COLUMNS + 1)
                text = "\n" + textwrap.indent(
                    textwrap.fill(text, max(1, terminal.width() - len(indent))), indent
                )
            else:
                text = f" {text}"
            self._print(f"{label:<{_LABEL_COLUMNS}} {self._sgr(colour, bar)}{text}")

    def _sgr(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._in_colour else text

    def _print(self, text: str = "", *, end: str = "\n", flush: bool = False) -> None:
        print(text, file=self._stream, end=end, flush=flush)


def _median_runs(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of the table: of a run that was repeated, the one that the summary is of."""
    chosen = {
        (1, ALONE): document["cold_ttft_seconds"],
        (1, STORE_EMPTY): document["cold_with_store_ttft_seconds"],
        (1, STORE_WARM): document["warm_ttft_seconds"],
    }
    for entry in document["runs"]:
        ttft = entry["ttft_seconds"]
        if chosen.get((entry["turn"], entry["name"]), ttft) == ttft:
            yield entry


def _cells(entry: dict[str, Any], baseline: float) -> list[str]:
    is_alone = entry["name"] == ALONE
    verdict = "identical" if entry["tokens_identical"] else "DIFFERENT"
    return [
        f"turn {entry['turn']}, {entry['name']}",
        f"{entry['prompt_tokens']:,}",
        f"{entry['loaded_tokens']:,}",
        f"{entry['computed_tokens']:,}",
        "" if is_alone else _duration(entry["load_seconds"]),
        _duration(entry["ttft_seconds"]),
        # Nothing was loaded from an empty store, so what is left there is the machine's mood.
        _times(baseline / entry["ttft_seconds"]) if entry["loaded_tokens"] else "",
        "reference" if is_alone else verdict,
    ]


def _row(cells: list[str]) -> str:
    row = "".join(f"{cell:{form}}" for cell, (_, form) in zip(cells, _COLUMNS, strict=True))
    return row.rstrip()


def _parts(entry: dict[str, Any]) -> str:
    computed, compute = f"{entry['computed_tokens']:,}", _duration(entry["compute_seconds"])
    if not entry["loaded_tokens"]:
        return f"{computed} tokens computed {compute}"
    tiers = ", ".join(f"{blocks} blocks from {t}" for t, blocks in entry["hits_by_tier"].items())
    return f"{tiers} {_duration(entry['load_seconds'])}, then {computed} computed {compute}"


def _closing_lines(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model = document["model"]
    block_bytes = model["kv_bytes_per_token"] * document["block_tokens"]
    yield (
        "model",
        f"{model['parameters'] / 1e6:.0f} M parameters, {document['threads']} threads; named by "
        f"the hash of its weights, {_duration(document['fingerprint_and_probe_seconds'])} once",
    )
    yield (
        "store",
        f"{_size(document['dram_used_bytes'])} of {_size(document['dram_capacity_bytes'])} DRAM "
        f"in use, in blocks of {document['block_tokens']} tokens or {_size(block_bytes)}",
    )
    yield (
        "cost",
        f"storing the prompt and its answer, {_size(document['first_stored_bytes'])}, took "
        f"{_duration(document['first_store_seconds'])} in turn 1, all of it after the first token",
    )
    yield (
        "times",
        f"first turn: engine alone and empty store in turns, the faster of {COLD_RUNS} runs "
        f"each; warm the median of {WARM_RUNS}",
    )
    yield (
        "tokens",
        f"{document['tokens_compared']} compared; each led by "
        f"{document['smallest_logit_margin']:.1e} or more in its logit, so rounding decided none",
    )


def _times(speedup: float) -> str:
    return f"{speedup:.1f}x" if speedup >= 1 else "slower"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.995 else f"{seconds * 1e3:.1f} ms"


def _size(size_bytes: int) -> str:
    if size_bytes >= 10 << 20:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 10):.0f} KiB"
