"""`kvstore replay`: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.main import main
from kvstore.policy import POLICIES
from kvstore.replay.trace import read_trace

TOY = str(Path(__file__).resolve().parents[1] / "data/mooncake/toy.jsonl")
MADE = ["replay", "--generate", "chat", "--requests", "60"]


def run_json(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def process(*words, **options):
    command = [sys.executable, "-m", "kvstore", "replay", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_one_replay_is_a_flat_document(capsys):
    document = run_json(capsys, "replay", TOY, "--policy", "lru-r", "--capacity-blocks", "5")
    assert document["hit_blocks"] == 7
    assert document["sha256_per_request_hits"].startswith("cebc57a3")
    assert (document["requests"], document["footprint_blocks"]) == (6, 7)
    assert document["second_half"]["requests"] == 3
    (result,) = document.pop("results")
    assert {name: document[name] for name in result} == result


def test_several_replays_are_a_list(capsys):
    words = ["--policy", "lru,credit", "--policy", "lru", "--capacity-fraction", "50%,1/7"]
    document = run_json(capsys, "replay", TOY, *words, "--capacity-fraction", "0.9")
    assert "hit_blocks" not in document
    cells = [
        (r["policy"], r["capacity_fraction"], r["capacity_blocks"]) for r in document["results"]
    ]
    assert cells == [
        (policy, fraction, blocks)
        for fraction, blocks in ((0.5, 3), (1 / 7, 1), (0.9, 6))
        for policy in ("lru", "credit")
    ]


def test_every_policy_can_be_compared(capsys):
    document = run_json(capsys, *MADE, "--policy", "all", "--capacity-fraction", "0.1")
    assert [result["policy"] for result in document["results"]] == list(POLICIES)
    assert document["trace"] == "chat, seed 1"
    assert {result["requests"] for result in document["results"]} == {60}
    assert document["unlimited"]["hit_ratio"] >= max(r["hit_ratio"] for r in document["results"])


def test_the_sizes_are_four_unless_given(capsys):
    document = run_json(capsys, *MADE)
    assert [r["capacity_fraction"] for r in document["results"]] == [0.01, 0.03, 0.1, 0.3]
    tiny = run_json(capsys, "replay", TOY)
    assert [r["capacity_fraction"] for r in tiny["results"]] == [0.3], "others come to no block"


def test_mode_full_leaves_partial_blocks_out(capsys):
    counts = [
        run_json(capsys, "replay", TOY, "--capacity-blocks", "5", "--mode", mode)["block_accesses"]
        for mode in ("all", "full")
    ]
    assert counts == [16, 14]


def test_the_table_has_a_row_for_each_replay(capsys):
    assert main([*MADE, "--policy", "all", "--capacity-fraction", "3%,30%"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] and "%" in line]
    assert [row[0] for row in rows if row[0] in POLICIES] == list(POLICIES) * 2
    assert "A store that never forgets would have" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_what_is_odd_about_a_trace_is_said(capsys, tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"input_length": 600, "hash_ids": [1, 2, 3]}\n' * 2, encoding="utf-8")
    assert main(["replay", str(path), "--capacity-blocks", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "number of ids does not fit that of tokens" in out
    assert "2 blocks found no room: some requests have more blocks than the store" in out


def test_what_is_made_can_be_written_and_read(capsys, tmp_path):
    path = str(tmp_path / "made.jsonl.gz")
    assert main([*MADE, "--seed", "9", "--out", path]) == 0
    assert capsys.readouterr().out == f"{path}: 60 requests\n"
    assert run_json(capsys, *MADE, "--out", path) == {"trace": path, "requests": 60}
    assert len(read_trace(path)) == 60
    direct = run_json(capsys, *MADE, "--capacity-fraction", "0.1")
    read = run_json(capsys, "replay", path, "--capacity-fraction", "0.1")
    assert direct["sha256_per_request_hits"] == read["sha256_per_request_hits"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "TRACE is missing: give a file, or make a workload with --generate chat"),
        ("nowhere.jsonl", "nowhere.jsonl: No such file or directory"),
        (f"{TOY} --policy fifo", "--policy is 'fifo': there is lru, lru-r, lru-n, credit, all"),
        (f"{TOY} --policy lru,", "--policy is '': there is lru"),
        (f"{TOY} --capacity-fraction 3", "--capacity-fraction is '3': give a fraction above 0 and"),
        (f"{TOY} --capacity-fraction 0", "--capacity-fraction is '0': give a fraction above 0"),
        (f"{TOY} --capacity-fraction x", "--capacity-fraction is 'x': give a fraction above 0"),
        (f"{TOY} --capacity-fraction 3%%", "--capacity-fraction is '3%%': give a fraction"),
        (f"{TOY} --capacity-fraction nan", "--capacity-fraction is 'nan': give a fraction"),
        (f"{TOY} --capacity-fraction 1%", "--capacity-fraction is 0.01: of 7 blocks that is less"),
        (f"{TOY} --capacity-blocks 8", "--capacity-blocks is 8: the trace names 7 blocks"),
        (f"{TOY} --capacity-blocks 0", "--capacity-blocks is 0: give a whole number above 0"),
        (f"{TOY} --mode half", "--mode is 'half': there is all, full"),
        (f"{TOY} --mode full --block-tokens 9999", "there is no block in"),
        (f"{TOY} --seed 3", "--seed goes with --generate only"),
        (f"{TOY} --out x", "--out goes with --generate only"),
        (f"{TOY} --generate chat", "--generate makes a workload: leave out TRACE"),
        ("--generate talk", "--generate is 'talk': there is chat, agent"),
        ("--generate chat --requests 0", "--requests is 0: give a whole number from 1 to 10000000"),
        ("--generate chat --seed -1", "--seed is -1: give a whole number of 0 or more"),
        ("--generate chat --out - --json", "--out - writes the trace where --json would write"),
        ("--generate chat --out x --policy lru", "--out replays nothing: leave out --policy"),
        ("--generate chat --out nowhere/x", "--out nowhere/x: No such file or directory"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, words, message):
    assert main(["replay", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvstore: {message}")
    assert captured.err.count("\n") == 1


def test_a_fraction_that_is_too_small_says_which_is_not(capsys):
    words = ["replay", TOY, "--capacity-fraction"]
    assert main([*words, "1%"]) == 2
    least = capsys.readouterr().err.partition("give at least ")[2].split()[0]
    assert main([*words, least]) == 0


def test_a_trace_goes_through_a_pipe():
    made = process("--generate", "agent", "--requests", "40", "--out", "-")
    assert made.returncode == 0
    done = process("-", "--capacity-fraction", "0.2", input=made.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("standard input: ")


@pytest.mark.parametrize("words", [["--out", "-"], ["--capacity-fraction", "0.1"]])
def test_a_reader_that_leaves_is_no_error_of_ours(words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kvstore", *MADE, *words]
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_is_one_line():
    done = process("--generate", "chat", "--out", "/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("kvstore: --out /dev/full: No space left on device")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_it_in_one_line():
    command = [sys.executable, "-m", "kvstore", *MADE[:-1], "20000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # An interactive shell's background job, and some runners, hand SIGINT down ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("chat, seed 1")  # and now the first replay
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    assert (running.returncode, error) == (130, "kvstore: interrupted\n")
