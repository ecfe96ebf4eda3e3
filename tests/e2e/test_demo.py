"""`kvstore demo` at a small size: what it says, and that it says it in one JSON document."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from kvstore.cli.main import main

SMALL = ["--prompt-tokens", "200", "--layers", "2", "--hidden", "64", "--new-tokens", "8"]


@pytest.fixture
def plain_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("HF_HUB_OFFLINE", "OMP_WAIT_POLICY"):  # so that what the demo sets is taken back
        monkeypatch.setenv(name, "")


def test_document(capsys, plain_terminal):
    code = main(["demo", "--json", *SMALL])
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert "nothing is downloaded" in output.err
    assert document["tokens_identical"] is True
    assert document["tokens_compared"] == 7 * 8
    assert document["smallest_logit_margin"] > 1e-3
    assert (document["prompt_tokens"], document["loaded_tokens"]) == (200, 192)
    assert document["hits_by_tier"] == {"dram": 12}
    # Prompt and answer are 208 tokens, of which the last has no KV: 12 blocks, found again whole.
    assert document["second_turn_prompt_tokens"] == 200 + 8 + 128
    assert document["second_turn_loaded_tokens"] == 192
    token_bytes = document["model"]["kv_bytes_per_token"]
    assert token_bytes == 2 * 2 * 64 * 4
    assert document["loaded_bytes"] == 6 * 192 * token_bytes
    assert document["stored_bytes"] == document["dram_used_bytes"] == 21 * 16 * token_bytes
    assert document["dram_capacity_bytes"] == 64 << 20
    for name in ("cold_ttft", "warm_ttft", "second_turn_cold_ttft", "second_turn_ttft"):
        assert document[f"{name}_seconds"] > 0
    # A model this small gains little, and the demo says so rather than boast.
    too_slow = document["speedup"] < document["speedup_required"]
    assert len(document["findings"]) == code == int(too_slow)


def test_table(capsys, plain_terminal):
    main(["demo", *SMALL])
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "turn 1, store, warm" in output
    assert "DIFFERENT" not in output
    assert output.count("identical") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--hidden", "100"], "multiple of 64"), (["--prompt-tokens", "3"], "give 32 or more")],
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
    assert "pip install 'tiered-kvstore[transformers]'" in done.stderr
