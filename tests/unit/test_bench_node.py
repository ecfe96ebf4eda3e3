"""`kvstore bench shm` and `bench control`: what they report, and that they find what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.cli.bench import host
from kvstore.cli.main import main
from kvstore.client.attachment import Attachment
from kvstore.client.session import Session

SHM = ["bench", "shm", "--block-size", "64KiB", "--batch", "4", "--rounds", "3", "--pool", "4MiB"]
CONTROL = ["bench", "control", "--batches", "20", "--rounds", "3", "--seconds", "1"]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "l3_bytes", lambda: 128 * 1024)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_shm_counts_the_cpu_time_of_both(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, *SHM, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["verified"] is True
    assert document["verified_batches"] == 2 * document["parameters"]["batches_per_round"]
    assert document["limit"]["ratio"] == 1
    get = document["get"]
    assert 0 < get["ratio_min"] <= get["ratio"] <= get["ratio_max"]
    assert get["daemon_cpu_s_per_gb"] > 0
    assert get["client_cpu_s_per_gb"] < get["cpu_s_per_gb"]
    assert 0 < get["p50_ms"] <= get["p99_ms"]


def test_shm_as_text_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *SHM)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "Verified: " in out


def test_shm_finds_a_wrong_byte(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    read = Attachment.read

    def spoiled(link: Attachment, batch: Any) -> Any:
        outcomes = read(link, batch)
        batch[-1][1][-1] ^= 1
        return outcomes

    monkeypatch.setattr(Attachment, "read", spoiled)
    code, out, err = run(capsys, *SHM, "--json")
    assert code == 1
    assert json.loads(out)["verified"] is False
    assert "wrong bytes: block 3 of batch 0 of get" in err


def test_control_reports_each_part(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, *CONTROL, "--clients", "2", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    for name in ("match_32", "lease_release_32"):
        least, most = document[f"{name}_cpu_us_min"], document[f"{name}_cpu_us_max"]
        assert 0 < least <= document[f"{name}_cpu_us"] <= most
        assert document[f"{name}_client_cpu_us"] > 0
        assert document[f"{name}_daemon_cpu_us"] > 0
    assert document["batches_per_core_s"] > document["batches_per_core_s_of_all"] > 0


def test_control_as_text(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, *CONTROL, "--clients", "1")
    assert code == 0
    assert "per CPU second of the daemon" in " ".join(out.split())


def test_control_fails_where_a_batch_is_not_answered_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    match: Callable[..., Any] = Session.match
    monkeypatch.setattr(Session, "match", lambda session, keys: match(session, keys[1:]))
    code, _, err = run(capsys, *CONTROL, "--clients", "1", "--json")
    assert code == 1

    assert "20 batches of match were not answered in full" in err
