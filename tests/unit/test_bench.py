"""`kvstore bench dram`: what it reports, what it refuses, and that it finds a wrong byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.cli.bench import host
from kvstore.cli.bench.dram import parameters
from kvstore.cli.bench.dram.payload import Payload
from kvstore.cli.main import main
from kvstore.keys import Namespace
from kvstore.layout import Layout
from kvstore.tiers.dram import DramTier

KIB, MIB = 1024, 1024 * 1024

SMALL = ["bench", "dram", "--block-size", "16KiB", "--batch", "4", "--rounds", "4"]
POOL = ["--pool", "1MiB"]

FIGURES = {
    "gb_per_s", "ratio", "ratio_min", "ratio_max", "wall_ratio", "cpu_s_per_gb", "p50_ms",
    "p99_ms", "rounds", "batches",
}  # fmt: skip
CHECKSUM_FIGURES = {"checksum_cpu_s_per_gb", "ratio_with_checksum"}


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch):
    """A machine whose L3 is small, so that a cold working set is, too."""
    monkeypatch.setattr(host, "l3_bytes", lambda: 128 * KIB)


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*SMALL, *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("more", [[], ["--interleaved"], ["--unaligned"]])
def test_reports_every_figure(capsys: pytest.CaptureFixture[str], more: list[str]):
    code, document = run_json(capsys, *POOL, *more)
    assert code == 0
    assert document["benchmark"] == "dram"
    assert document["verified"] is True
    # Two rounds are verified: what get read, and what put had stored.
    assert document["verified_batches"] == 2 * 2 * document["parameters"]["batches_per_round"]
    assert document["findings"] == []
    assert document["aligned"] is ("--unaligned" not in more)
    assert document["parameters"]["interleaved"] is ("--interleaved" in more)
    assert isinstance(document["native"], bool)
    assert (document["revision"] is None) == (document["dirty"] is None)
    for name in ("limit", "get", "put", "put_free"):
        figures = document[name]
        expected = FIGURES | CHECKSUM_FIGURES if name.startswith("put") else FIGURES
        assert set(figures) == expected
        assert 0 < figures["ratio_min"] <= figures["ratio"] <= figures["ratio_max"]
        assert 0 < figures["p50_ms"] <= figures["p99_ms"]
        assert figures["gb_per_s"] > 0
    assert document["limit"]["ratio"] == 1
    assert document["get"]["rounds"] == 4
    # Into a full pool and into a free one, in turns.
    assert document["put"]["rounds"] == document["put_free"]["rounds"] == 2
    put = document["put"]
    assert put["ratio_with_checksum"] <= put["ratio"]
    assert put["checksum_cpu_s_per_gb"] > 0


def test_sizes_add_up_and_are_cold_by_default(capsys: pytest.CaptureFixture[str]):
    _, document = run_json(capsys)
    sizes = document["parameters"]
    working_set = sizes["batches_per_round"] * sizes["batch_blocks"] * sizes["block_bytes"]
    assert sizes["working_set_bytes"] == working_set >= 4 * 128 * KIB
    assert sizes["pool_bytes"] == 2 * working_set
    assert document["cold"] is True


def test_text_explains_itself(capsys: pytest.CaptureFixture[str]):
    assert main([*SMALL, *POOL]) == 0
    out = capsys.readouterr().out
    for words in (
        "limit",
        "get",
        "put_free",
        "ratio: payload per CPU second",
        "page-aligned on both sides",
    ):
        assert words in out
    assert "WARNING" not in out


def test_says_when_it_is_not_cold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host, "l3_bytes", lambda: MIB)
    assert main([*SMALL, *POOL]) == 0
    assert "WARNING: the working set is less than 4 times the L3" in capsys.readouterr().out


def spoil_after(method: Callable[..., Any], *, is_pool: bool) -> Callable[..., Any]:
    """The same transfer, after which one bit of its last piece is another."""

    def spoiled(tier: DramTier, batch: Any) -> Any:
        outcomes = method(tier, batch)
        place, memory = batch[-1]
        target = tier.view(place) if is_pool else memory
        target[-1] ^= 1
        return outcomes

    return spoiled


@pytest.mark.parametrize(("name", "is_pool"), [("read", False), ("write", True)])
def test_finds_a_wrong_byte(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, is_pool: bool
):
    monkeypatch.setattr(DramTier, name, spoil_after(getattr(DramTier, name), is_pool=is_pool))
    assert main([*SMALL, *POOL, "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["verified"] is False
    assert "wrong bytes: block 3 of batch 0 of" in document["findings"][0]
    assert "wrong bytes" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block-size", "big"], "'big' is no size"),
        (["--block-size", "1000"], "--block-size is 1000 bytes"),
        (["--block-size", "0"], "--block-size is 0 bytes"),
        (["--batch", "0"], "--batch is 0"),
        (["--rounds", "1"], "--rounds is 1"),
        (["--pool", "64KiB", "--block-size", "16KiB"], "--pool is 65536 bytes"),
        (["--pool", "1000TiB"], "of memory, and only"),
        (["--batch", "many"], "--batch"),
    ],
)
def test_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert main(["bench", "dram", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_needs_a_tier_that_it_knows(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "tape"]) == 2
    assert "dram" in capsys.readouterr().err


def test_small_memory_is_a_config_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parameters, "available_memory_bytes", lambda: MIB)
    assert main(["bench", "dram"]) == 2
    assert "only 1048576 are available" in capsys.readouterr().err


def test_payload_differs_in_every_word_and_key():
    layout = Layout.gqa(layers=1, kv_heads=1, head_dim=64, dtype="bfloat16")
    namespace = Namespace(model="m", fingerprint="f", layout=layout, block_tokens=16)
    keys = namespace.keys(range(32))
    payload = Payload(4 * KIB)
    contents = [np.zeros(4 * KIB, np.uint8) for _ in keys]
    for key, content in zip(keys, contents, strict=True):
        payload.write(key, content)
        assert len(np.unique(content.view(np.uint64))) == len(content) // 8
        assert payload.is_in(key, content)
    assert not payload.is_in(keys[0], contents[1])
    assert not payload.is_in(keys[0], np.roll(contents[0], 8))


def test_host_is_described():
    described = host.describe()
    assert described["cores"]
    assert described["l3_bytes"] == 128 * KIB
    assert described["numpy"] == np.__version__
