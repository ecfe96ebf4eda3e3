"""What the demo found: a document for programs, a table and a picture for people."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any, TextIO

import kvstore
from kvstore.cli.bench import host
from kvstore.cli.demo.runs import (
    ALONE,
    BLOCK_TOKENS,
    COLD_RUNS,
    STORE_EMPTY,
    STORE_WARM,
    WARM_RUNS,
    Measurement,
    Parameters,
    Run,
    only,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A prefix that is in memory must be worth this much, or the demo fails.
SPEEDUP_MIN = 10.0

_BAR_COLUMNS = 44
_COLUMNS = (
    ("", "<24"),
    ("prompt", ">7"),
    ("loaded", ">7"),
    ("computed", ">9"),
    ("lookup+load", ">12"),
    ("compute", ">10"),
    ("TTFT", ">10"),
    ("speedup", ">9"),
    ("tokens", ">11"),
)


def document(parameters: Parameters, measurement: Measurement) -> dict[str, Any]:
    """One flat summary, and each run. Times in seconds, sizes in bytes."""
    runs = measurement.runs
    alone, empty, warm = (only(runs, 1, name) for name in (ALONE, STORE_EMPTY, STORE_WARM))
    second_alone, second_warm = only(runs, 2, ALONE), only(runs, 2, STORE_WARM)
    reports = [run.report for run in runs if run.report is not None]
    margins = [run.smallest_margin for run in runs if run.smallest_margin is not None]
    summary: dict[str, Any] = {
        "tokens_identical": all(_is_identical(runs, run) for run in runs),
        "tokens_compared": sum(len(run.tokens) for run in runs if run.name != ALONE),
        "smallest_logit_margin": min(margins),
        "cold_ttft_seconds": alone.ttft_seconds,
        "cold_with_store_ttft_seconds": empty.ttft_seconds,
        "warm_ttft_seconds": warm.ttft_seconds,
        "second_turn_cold_ttft_seconds": second_alone.ttft_seconds,
        "second_turn_ttft_seconds": second_warm.ttft_seconds,
        "speedup": alone.ttft_seconds / warm.ttft_seconds,
        "second_turn_speedup": second_alone.ttft_seconds / second_warm.ttft_seconds,
        "speedup_required": SPEEDUP_MIN,
        "prompt_tokens": parameters.prompt_tokens,
        "loaded_tokens": warm.loaded_tokens,
        "hits_by_tier": warm.hits_by_tier,
        "second_turn_prompt_tokens": parameters.second_prompt_tokens,
        "second_turn_loaded_tokens": second_warm.loaded_tokens,
        "second_turn_hits_by_tier": second_warm.hits_by_tier,
        "loaded_bytes": sum(report.loaded_bytes for report in reports),
        "stored_bytes": sum(report.stored_bytes for report in reports),
        "dram_capacity_bytes": measurement.audit.capacity_bytes,
        "dram_used_bytes": measurement.audit.ready_bytes,
    }
    return {
        "demo": "transformers",
        "kvstore": kvstore.__version__,
        **summary,
        "findings": list(_findings(summary)),
        "model": {
            "layers": parameters.layers,
            "hidden": parameters.hidden,
            "kv_heads": parameters.kv_heads,
            "dtype": "float32",
            "parameters": measurement.parameters_of_model,
            "kv_bytes_per_token": measurement.token_bytes,
            "fingerprint": measurement.fingerprint,
        },
        "block_tokens": BLOCK_TOKENS,
        "fingerprint_and_probe_seconds": measurement.construct_seconds,
        "threads": measurement.threads,
        "machine": host.describe(),
        "runs": [_run_entry(runs, run) for run in runs],
    }


def _findings(summary: dict[str, Any]) -> Iterator[str]:
    if not summary["tokens_identical"]:
        yield "tokens with the store differ from those without it"
    if summary["speedup"] < SPEEDUP_MIN:
        yield (
            f"the warm prompt was {summary['speedup']:.1f} times as fast as the cold one, and "
            f"{SPEEDUP_MIN:.0f} times are expected: a short prompt or a small model has little to "
            "gain, and other work on this machine disturbs"
        )


def _is_identical(runs: list[Run], run: Run) -> bool:
    return run.tokens == only(runs, run.turn, ALONE).tokens


def _run_entry(runs: list[Run], run: Run) -> dict[str, Any]:
    report = run.report
    return {
        "turn": run.turn,
        "name": run.name,
        "prompt_tokens": run.prompt_tokens,
        "loaded_tokens": run.loaded_tokens,
        "computed_tokens": run.prompt_tokens - run.loaded_tokens,
        "load_seconds": report.load_seconds if report else 0.0,
        "compute_seconds": run.ttft_seconds - (report.load_seconds if report else 0.0),
        "ttft_seconds": run.ttft_seconds,
        "total_seconds": run.total_seconds,
        "store_seconds": report.store_seconds if report else 0.0,
        "stored_blocks": report.stored_blocks if report else 0,
        "hits_by_tier": run.hits_by_tier,
        "loaded_bytes": report.loaded_bytes if report else 0,
        "stored_bytes": report.stored_bytes if report else 0,
        "miss_reason": report.reason if report else None,
        "tokens_identical": _is_identical(runs, run),
    }


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
            "compared. At the default sizes: half a minute on two free cores."
        )
        self._print(textwrap.fill(text, 96))
        self._print()

    def progress(self, name: str, run: Run | None) -> None:
        """One line for each run; on a terminal its name stands there while it lasts."""
        if run is None:
            if self._in_colour:
                self._print(f"  {name} …", end="", flush=True)
            return
        clear = "\r\x1b[K" if self._in_colour else ""
        self._print(
            f"{clear}  {name:<22} first token {_duration(run.ttft_seconds):>9}   "
            f"{len(run.tokens)} tokens {_duration(run.total_seconds):>9}",
            flush=True,
        )

    def conclude(self, document: dict[str, Any]) -> None:
        """The table, where the time went, and what it cost."""
        rows = list(_median_runs(document))
        self._print()
        self._print(self._bold(_row([title for title, _ in _COLUMNS])))
        baseline = 0.0
        for entry in rows:
            if entry["name"] == ALONE:
                baseline = entry["ttft_seconds"]
            self._print(_row(_cells(entry, baseline)))
        self._print()
        self._bars(rows)
        self._print()
        for line in _closing_lines(document):
            self._print(line)
        verdict = (
            f"Same tokens. First token of the same prompt {document['speedup']:.1f} times sooner, "
            f"of the second turn {document['second_turn_speedup']:.1f} times."
        )
        if document["findings"]:
            verdict = f"FAILED: {'; '.join(document['findings'])}"
        self._print()
        self._print(self._verdict(verdict, is_good=not document["findings"]))

    def _bars(self, rows: list[dict[str, Any]]) -> None:
        longest = max(entry["ttft_seconds"] for entry in rows)
        self._print(f"time to first token: {self._bar} compute, {self._part_bar} lookup and load")
        for entry in rows:
            load = _columns(entry["load_seconds"], longest)
            total = max(1, load, _columns(entry["ttft_seconds"], longest))
            bar = self._part_bar * load + self._bar * (total - load)
            label = f"turn {entry['turn']}, {entry['name']}"
            self._print(f"  {label:<22} {self._tint(bar, entry)} {_parts(entry)}")

    def _tint(self, bar: str, entry: dict[str, Any]) -> str:
        return self._sgr("32" if entry["loaded_tokens"] else "33", bar)

    def _bold(self, text: str) -> str:
        return self._sgr("1", text)

    def _verdict(self, text: str, *, is_good: bool) -> str:
        return self._sgr("1;32" if is_good else "1;31", text)

    def _sgr(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._in_colour else text

    def _print(self, text: str = "", *, end: str = "\n", flush: bool = False) -> None:
        print(text, file=self._stream, end=end, flush=flush)


def _median_runs(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of the table: of a run that was repeated, the one that the summary is of."""
    chosen = {
        (1, ALONE): document["cold_ttft_seconds"],
        (1, STORE_WARM): document["warm_ttft_seconds"],
        (2, STORE_WARM): document["second_turn_ttft_seconds"],
    }
    for entry in document["runs"]:
        if (
            chosen.get((entry["turn"], entry["name"]), entry["ttft_seconds"])
            == entry["ttft_seconds"]
        ):
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
        _duration(entry["compute_seconds"]),
        _duration(entry["ttft_seconds"]),
        "" if is_alone else f"{baseline / entry['ttft_seconds']:.1f}x",
        "reference" if is_alone else verdict,
    ]


def _row(cells: list[str]) -> str:
    return "".join(f"{cell:{form}}" for cell, (_, form) in zip(cells, _COLUMNS, strict=True))


def _parts(entry: dict[str, Any]) -> str:
    computed = f"{entry['computed_tokens']:,} tokens computed {_duration(entry['compute_seconds'])}"
    if not entry["loaded_tokens"]:
        return computed
    tiers = ", ".join(f"{blocks} blocks from {t}" for t, blocks in entry["hits_by_tier"].items())
    return f"{tiers} {_duration(entry['load_seconds'])}, {computed}"


def _closing_lines(document: dict[str, Any]) -> Iterator[str]:
    model = document["model"]
    first_store = next(entry for entry in document["runs"] if entry["name"] == STORE_EMPTY)
    block_bytes = model["kv_bytes_per_token"] * document["block_tokens"]
    yield (
        f"model  {model['parameters'] / 1e6:.0f} M parameters, {document['threads']} threads; "
        f"named by the hash of its weights, {_duration(document['fingerprint_and_probe_seconds'])} "
        "once"
    )
    yield (
        f"store  {_size(document['dram_used_bytes'])} of {_size(document['dram_capacity_bytes'])} "
        f"DRAM in use, in blocks of {document['block_tokens']} tokens or {_size(block_bytes)}"
    )
    yield (
        f"moved  {_size(document['loaded_bytes'])} loaded; {_size(document['stored_bytes'])} "
        f"stored, after the first token: {_duration(first_store['store_seconds'])} in turn 1"
    )
    yield (
        f"times  first turn: engine alone the faster of {COLD_RUNS} runs, warm the median of "
        f"{WARM_RUNS}"
    )
    yield (
        f"tokens {document['tokens_compared']} compared; each led by "
        f"{document['smallest_logit_margin']:.1e} or more in its logit, so rounding decided none"
    )


def _columns(seconds: float, longest: float) -> int:
    return round(_BAR_COLUMNS * seconds / longest)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.995 else f"{seconds * 1e3:.1f} ms"


def _size(size_bytes: int) -> str:
    if size_bytes >= 10 << 20:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 10):.0f} KiB"
