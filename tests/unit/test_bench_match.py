"""`kvstore bench match`: what it reports and refuses, and that it finds a wrong answer."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.cli.bench import BENCHMARKS, host
from kvstore.cli.bench.match import parameters, trials
from kvstore.cli.bench.match.measure import CountingKey, measure
from kvstore.cli.bench.match.parameters import Trial, plan
from kvstore.cli.bench.match.pauses import (
    Collections,
    full_collection_ms,
    without_what_was_before,
)
from kvstore.cli.bench.match.residents import Residents, Sequences
from kvstore.cli.main import main
from kvstore.errors import KVStoreError
from kvstore.index import Index

KIB = 1024
SMALL = ["bench", "match", "--entries", "3000", "--keys", "64", "--rounds", "3"]

LOOKUP_FIGURES = {"p50_us", "p99_us", "cpu_p50_us", "cpu_p99_us"}
STORE_FIGURES = {
    "entries", "bytes_per_entry", "probes_per_key", "comparisons_per_key", "fill_cpu_us_per_block",
    "gc_full_ms", "gc_longest_ms", "gc_longest_ms_by_generation", "gc_collections_by_generation",
    "cold", "warm",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch):
    """A machine whose L3 is small, so that overwriting it takes no time."""
    monkeypatch.setattr(host, "l3_bytes", lambda: 128 * KIB)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch):
    """Each store is measured here, where a test can break it."""
    monkeypatch.setattr(trials, "measure_apart", measure)


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*SMALL, *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_reports_every_figure_from_processes_of_their_own(capsys: pytest.CaptureFixture[str]):
    code, document = run_json(capsys, "--entries", "12000")
    assert code == 0
    assert document["benchmark"] == "match"
    assert document["verified"] is True
    assert document["findings"] == []
    # Of each store: four kinds, cold and warm, a warm-up round and three more; and the count.
    assert document["verified_lookups"] == 3 * (4 * 2 * (1 + 3) + 1)
    assert document["parameters"] == {
        "entries": 12_000, "keys": 64, "sequence_blocks": 1_024, "rounds": 3, "interleaved": False,
    }  # fmt: skip
    assert (document["revision"] is None) == (document["dirty"] is None)
    assert document["machine"]["cores"]
    assert [store["entries"] for store in document["stores"]] == [1_000, 10_000, 12_000]
    for store in document["stores"]:
        check_store(store)
    smallest, largest = document["stores"][0], document["stores"][-1]
    for name in ("p50_us", "p99_us"):
        assert document[name] == largest["cold"]["match"][name]
    for name in ("probes_per_key", "bytes_per_entry", "gc_full_ms", "gc_longest_ms"):
        assert document[name] == largest[name]
    for state, growth in document["growth"].items():
        for name, factor in growth.items():
            p50_us = [store[state][name]["p50_us"] for store in (smallest, largest)]
            assert factor == pytest.approx(p50_us[1] / p50_us[0], abs=1e-3)
    assert smallest["bytes_per_entry"] is None
    assert 500 < document["bytes_per_entry"] < 2_500


def check_store(store: dict[str, Any]) -> None:
    assert set(store) == STORE_FIGURES
    assert store["probes_per_key"] == store["comparisons_per_key"] == 1
    assert store["fill_cpu_us_per_block"] > 0
    assert sum(store["gc_collections_by_generation"]) > 0
    assert store["gc_longest_ms"] == max(store["gc_longest_ms_by_generation"])
    for state in ("cold", "warm"):
        assert set(store[state]) == {"limit", "match", "lease_release", "miss"}
        for name, figures in store[state].items():
            expected = (
                LOOKUP_FIGURES if name == "miss" else LOOKUP_FIGURES | {"ns_per_key", "ratio"}
            )
            assert set(figures) == expected
            assert 0 < figures["p50_us"] <= figures["p99_us"]
        assert store[state]["limit"]["ratio"] == 1
        # One key of 64 is looked for where the first one is missing.
        assert store[state]["miss"]["p50_us"] < store[state]["lease_release"]["p50_us"]


@pytest.mark.usefixtures("in_this_process")
def test_text_explains_itself(capsys: pytest.CaptureFixture[str]):
    assert main([*SMALL, "--interleaved"]) == 0
    out = capsys.readouterr().out
    for words in ("lookups of 64 blocks", "cold, us", "warm, us", "probes/key", "longest GC ms"):
        assert words in out
    assert "From 1000 to 3000 entries a match takes" in out
    assert "Verified: 66 lookups found what is there." in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("first", [["--json", "bench"], ["bench", "--json"]])
def test_json_may_stand_before_its_name(capsys: pytest.CaptureFixture[str], first: list[str]):
    assert main([*first, *SMALL[1:]]) == 0
    assert json.loads(capsys.readouterr().out)["benchmark"] == "match"


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize(("columns", "most"), [("60", 80), ("300", 100)])
def test_the_help_of_each_benchmark_fits_the_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    benchmark: str,
    columns: str,
    most: int,
):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["bench", benchmark, "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= most


@pytest.mark.usefixtures("in_this_process")
def test_finds_a_wrong_number_of_blocks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    right = Index.prefix
    monkeypatch.setattr(
        Index, "prefix", lambda index, domain, keys: right(index, domain, keys)[:-1]
    )
    assert main([*SMALL, "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["verified"] is False
    assert len(document["findings"]) == 20
    assert "found 63 blocks of 64" in document["findings"][0]
    assert captured.err == f"kvstore: {document['findings'][0]}\n"
    assert main(SMALL) == 1
    assert "WRONG: " in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_counts_the_probes_that_a_lookup_makes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    once = Index.prefix

    def twice(index: Index, domain: bytes, keys: list[bytes]):
        for key in keys:
            index.find(domain, key)
        return once(index, domain, keys)

    monkeypatch.setattr(Index, "prefix", twice)
    _, document = run_json(capsys)
    assert document["probes_per_key"] == 2


def test_a_counting_key_counts_what_tables_ask_of_it():
    key = CountingKey(b"k" * 32)
    CountingKey.probes = CountingKey.comparisons = 0
    assert {b"k" * 32: 1}.get(key) == 1
    assert {b"x" * 32: 1}.get(key) is None
    assert key in {b"k" * 32}
    assert (CountingKey.probes, CountingKey.comparisons) == (3, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--entries", "many"], "--entries is 'many': give a whole number above 0"),
        (["--entries", "100"], "--entries is 100: give --keys, 1024, or more"),
        (["--keys", "0"], "--keys is 0: give a whole number above 0"),
        (["--keys", "64", "--sequence-blocks", "32"], "--sequence-blocks is 32: give --keys, 64,"),
        (["--rounds", "1"], "--rounds is 1: give a whole number of 2 or more"),
        (["--entries", "10000000000"], "--entries is 10000000000: this needs"),
        (["--block-size", "4KiB"], "unrecognized arguments: --block-size 4KiB"),
    ],
)
def test_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert main(["bench", "match", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_small_memory_is_a_config_error_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parameters, "available_memory_bytes", lambda: 1024 * KIB)
    assert main(["bench", "match"]) == 2
    error = capsys.readouterr().err
    assert "--entries is 1000000: this needs 1.4" in error
    assert "only 1 MiB are available here: give less (see kvstore bench match --help)" in error


@pytest.mark.parametrize(
    ("entries", "keys", "sizes"),
    [
        (1_000_000, 1_024, [1_024, 10_000, 100_000, 1_000_000]),
        (250_000, 16, [1_000, 10_000, 100_000, 250_000]),
        (1_000, 1_000, [1_000]),
        (500, 16, [500]),
        (20_000, 15_000, [15_000, 20_000]),
    ],
)
def test_stores_grow_tenfold_from_a_thousand_and_hold_a_lookup(
    entries: int, keys: int, sizes: list[int]
):
    planned = plan(entries=entries, keys=keys, sequence_blocks=keys, rounds=2, is_interleaved=False)
    assert planned.sizes == sizes
    assert [trial.entries for trial in planned.trials()] == sizes


def test_a_process_that_fails_is_told_with_its_last_words():
    trial = Trial(64, 65, 65, 2, False, 128 * KIB)  # no sequence is that long
    with pytest.raises(KVStoreError, match=r"measured 64 entries ended with 1: .*Error: "):
        trials.measure_apart(trial)


class TestSequences:
    @pytest.mark.parametrize("is_interleaved", [False, True])
    def test_every_block_has_one_turn_in_the_order_of_its_sequence(self, is_interleaved: bool):
        sequences = Sequences(1_000, 64, is_interleaved=is_interleaved)
        assert sequences.lengths == [64] * 15 + [40]
        ends = [0] * len(sequences)
        turns = list(sequences.turns())
        for sequence, first, end in turns:
            assert first == ends[sequence] < end
            ends[sequence] = end
        assert ends == sequences.lengths
        assert len(turns) == (1_000 if is_interleaved else 16)
        assert turns == list(sequences.turns())

    def test_keys_are_equal_and_never_the_same_objects(self):
        sequences = Sequences(200, 64)
        keys = [sequences.keys(n, 0, length) for n, length in enumerate(sequences.lengths)]
        again = [sequences.keys(n, 0, length) for n, length in enumerate(sequences.lengths)]
        assert keys == again
        assert len({key for column in keys for key in column}) == 200
        assert not any(
            a is b for x, y in zip(keys, again, strict=True) for a, b in zip(x, y, strict=True)
        )
        assert sequences.keys(3, 2, 5) == keys[3][2:5]
        assert {len(key) for key in keys[0]} == {32}

    @pytest.mark.parametrize("is_interleaved", [False, True])
    def test_a_core_filled_with_them_is_full_and_sound(self, is_interleaved: bool):
        residents = Residents(300)
        residents.fill(Sequences(300, 64, is_interleaved=is_interleaved))
        found = residents.core.check()
        assert (found.ready_blocks, found.free_bytes, found.reservations) == (300, 0, 0)
        # Each has its parent: of five sequences, four are whole, and only the ends are leaves.
        assert sum(not entry.children for entry in residents.core._blocks.index) == 5


def make_tracked() -> list[list[Any]]:
    return [[] for _ in range(300_000)]


class TestPauses:
    @pytest.fixture(autouse=True)
    def settled(self):
        gc.collect()

    def test_collections_are_counted_by_generation_while_the_context_is_open(self):
        collections = Collections()
        gc.collect(0)
        with collections:
            gc.collect(0)
            gc.collect(1)
        with collections:
            gc.collect(1)
        gc.collect(1)
        assert collections.counts[1] == 2
        assert collections.counts[0] >= 1
        assert collections.counts[2] == 0
        assert collections.longest_ms[1] > 0

    def test_the_longest_is_kept(self):
        collections = Collections()
        with collections:
            gc.collect()
            short = collections.longest_ms[2]
            kept = make_tracked()
            gc.collect()
            long = collections.longest_ms[2]
            kept.clear()
            gc.collect()
        assert short < long == collections.longest_ms[2]

    def test_what_was_before_is_left_out(self):
        kept: Callable[[], int] = make_tracked().__len__
        with_it = full_collection_ms()
        with without_what_was_before():
            without_it = full_collection_ms()
            more = make_tracked()
            with_more = full_collection_ms()
        assert without_it < with_it / 4
        assert without_it < with_more / 4
        assert gc.get_freeze_count() == 0
        assert kept() == len(more)
