"""`kvstore demo` at a small size: what it says, and that it says it in one JSON document."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from kvstore.cli.demo import report, runs
from kvstore.cli.main import main

SIZES = ["--prompt-tokens", "200", "--layers", "2", "--hidden", "64", "--new-tokens", "8"]
SMALL = [*SIZES, "--embedded"]


@pytest.fixture
def plain_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("HF_HUB_OFFLINE", "OMP_WAIT_POLICY"):  # so that what the demo sets is taken back
        monkeypatch.setenv(name, "")


def test_document(capsys, plain_terminal):
    code = main(["demo", "--json", *SMALL])
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert "nothing is downloaded" in output.err
    assert document["tokens_identical"] is True
    assert document["tokens_compared"] == 8 * 8
    assert document["smallest_logit_margin"] > 1e-3
    assert (document["prompt_tokens"], document["loaded_tokens"]) == (200, 192)
    assert document["hits_by_tier"] == {"dram": 12}
    # Prompt and answer are 208 tokens, of which the last has no KV: 12 blocks, found again whole.
    assert document["second_turn_prompt_tokens"] == 200 + 8 + 128
    assert document["second_turn_loaded_tokens"] == 192
    token_bytes = document["model"]["kv_bytes_per_token"]
    assert token_bytes == 2 * 2 * 64 * 4
    assert document["loaded_bytes"] == 6 * 192 * token_bytes
    assert document["dram_used_bytes"] == 21 * 16 * token_bytes
    # The first turn was stored twice, each time into an empty store.
    assert document["first_stored_bytes"] == 12 * 16 * token_bytes
    assert document["stored_bytes"] == (12 + 21) * 16 * token_bytes
    empty = [run for run in document["runs"] if run["name"] == "store, empty"]
    assert [(run["loaded_tokens"], run["stored_blocks"]) for run in empty] == [(0, 12)] * 2
    assert document["dram_capacity_bytes"] == 64 << 20
    for name in ("cold_ttft", "warm_ttft", "second_turn_cold_ttft", "second_turn_ttft"):
        assert document[f"{name}_seconds"] > 0
    # A model this small gains little, and the demo says so rather than boast or fail.
    assert (code, document["findings"], document["speedup_required"]) == (0, [], None)
    assert bool(document["notes"]) == (document["speedup"] < 10)


def test_table(capsys, plain_terminal):
    assert main(["demo", *SMALL]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert "Same tokens." in output
    assert "\x1b" not in output
    assert "turn 1, store, warm" in output
    assert "DIFFERENT" not in output
    assert output.count("identical") == 3
    assert ("▒ lookup and load" in output) == (output.count("▒") > 1)
    row = next(line for line in output.splitlines() if line.startswith("turn 1, store, empty"))
    assert not re.search(r"slower|\dx", row)
    assert "after the first token" in " ".join(output.split())


def test_two_engine_processes_share_what_a_daemon_holds(capsys, plain_terminal):
    assert main(["demo", "--json", *SIZES]) == 0
    processes = json.loads(capsys.readouterr().out)["processes"]
    first, second = processes["runs"]
    assert (first["loaded_tokens"], second["loaded_tokens"]) == (0, 192)
    assert first["tokens"] == second["tokens"]
    assert len(second["tokens"]) == 8
    assert first["pid"] != second["pid"]
    assert processes["findings"] == []


def test_processes_that_gain_nothing_fail(capsys, monkeypatch, plain_terminal):
    from kvstore.cli.demo import processes

    found = {"runs": [], "findings": ["the second process found nothing of the first"]}
    monkeypatch.setattr(processes, "measure_processes", lambda *_: found)
    assert main(["demo", *SIZES]) == 1
    assert "FAILED: the second process found nothing" in capsys.readouterr().out


def entry(speedup: float, cold: float, prompt: int, required: float | None) -> dict[str, object]:
    return {
        "tokens_identical": True,
        "speedup": speedup,
        "speedup_required": required,
        "cold_ttft_seconds": cold,
        "prompt_tokens": prompt,
    }


def test_only_a_felt_prefill_has_to_become_ten_times_faster():
    def required(cold: float, prompt: int) -> float | None:
        run = runs.Run(1, runs.ALONE, prompt, [], cold, cold, None, None)
        return report._required(run)

    assert required(1.0, 2048) == 10
    assert required(0.99, 2048) is None
    assert required(5.0, 2047) is None
    assert list(report._findings(entry(9.9, 2.0, 2048, 10))) != []
    assert list(report._findings(entry(0.5, 0.1, 64, None))) == []
    assert "too small a model" in next(report._notes(entry(0.5, 0.1, 64, None)))
    assert "too short a prompt" in next(report._notes(entry(5.0, 3.0, 64, None)))
    assert list(report._notes(entry(12.0, 0.1, 64, None))) == []


def test_tokens_that_differ_always_fail():
    summary = entry(12.0, 0.1, 64, None) | {"tokens_identical": False}
    assert "differ" in next(report._findings(summary))


def test_slower_is_said_as_such():
    assert report.comparison(0.8) == "slower than without the store"
    assert report.comparison(32.41) == "32.4 times sooner"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
        ),
        MemoryError(),
    ],
)
def test_memory_that_the_engine_is_refused_is_a_typed_error(
    capsys, monkeypatch, plain_terminal, error: Exception
):
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(runs, "measure", refuse)
    assert main(["demo", *SMALL]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("kvstore: --prompt-tokens is 200: the engine was refused memory")


def test_other_errors_of_the_engine_stay_what_they_are(monkeypatch, plain_terminal):
    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(runs, "measure", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        main(["demo", *SMALL])


def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kvstore", "demo", *SMALL]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "kvstore: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--hidden", "100"], "multiple of 64"), (["--prompt-tokens", "3"], "of 32 or more")],
)
def test_usage(capsys, words, message):
    assert main(["demo", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_engine_one_line_names_the_extra(missing):
    program = (
        f"import sys; sys.modules[{missing!r}] = None; from kvstore.cli.main import main; "
        "sys.exit(main(['demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "pip install '.[transformers]'" in done.stderr
