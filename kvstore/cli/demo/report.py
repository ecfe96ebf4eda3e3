"""What the demo found, as one document for programs; `display` shows it to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvstore
from kvstore.cli.bench import host
from kvstore.cli.demo.parameters import BLOCK_TOKENS, PROMPT_TOKENS
from kvstore.cli.demo.runs import ALONE, STORE_EMPTY, STORE_WARM, only

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.cli.demo.parameters import Parameters
    from kvstore.cli.demo.runs import Measurement, Run

#: A prefix that is in memory must be worth this much, or the demo fails, where the prefill is felt:
SPEEDUP_MIN = 10.0
#: the first token takes this long without the store,
FELT_TTFT_SECONDS = 1.0
#: and the prompt is so long that its last block is next to nothing of it.
FELT_PROMPT_TOKENS = PROMPT_TOKENS


def document_of(parameters: Parameters, measurement: Measurement) -> dict[str, Any]:
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
        "speedup_required": _required(alone),
        "prompt_tokens": parameters.prompt_tokens,
        "loaded_tokens": warm.loaded_tokens,
        "hits_by_tier": warm.hits_by_tier,
        "second_turn_prompt_tokens": parameters.second_prompt_tokens,
        "second_turn_loaded_tokens": second_warm.loaded_tokens,
        "second_turn_hits_by_tier": second_warm.hits_by_tier,
        "loaded_bytes": sum(report.loaded_bytes for report in reports),
        "stored_bytes": sum(report.stored_bytes for report in reports),
        "first_stored_bytes": empty.report.stored_bytes if empty.report else 0,
        "first_store_seconds": empty.report.store_seconds if empty.report else 0.0,
        "dram_capacity_bytes": measurement.audit.capacity_bytes,
        "dram_used_bytes": measurement.audit.ready_bytes,
    }
    return {
        "demo": "transformers",
        "kvstore": kvstore.__version__,
        **summary,
        "findings": list(_findings(summary)),
        "notes": list(_notes(summary)),
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


def _required(alone: Run) -> float | None:
    """How many times sooner the warm first token must come; None where there is little to gain."""
    is_felt = alone.ttft_seconds >= FELT_TTFT_SECONDS and alone.prompt_tokens >= FELT_PROMPT_TOKENS
    return SPEEDUP_MIN if is_felt else None


def _findings(summary: dict[str, Any]) -> Iterator[str]:
    if not summary["tokens_identical"]:
        yield "tokens with the store differ from those without it"
    required = summary["speedup_required"]
    if required is not None and summary["speedup"] < required:
        yield (
            f"the first token of the warm prompt came {comparison(summary['speedup'])}, and "
            f"{required:.0f} times sooner is expected: does other work disturb this machine?"
        )


def _notes(summary: dict[str, Any]) -> Iterator[str]:
    if summary["speedup_required"] is not None or summary["speedup"] >= SPEEDUP_MIN:
        return
    if summary["cold_ttft_seconds"] < FELT_TTFT_SECONDS:
        yield (
            "too small a model to gain from it: a first token that takes less than "
            f"{FELT_TTFT_SECONDS:.0f} s without the store leaves little to save"
        )
    else:
        yield (
            f"too short a prompt to gain {SPEEDUP_MIN:.0f} times: its last tokens are computed in "
            "any case"
        )


def comparison(speedup: float) -> str:
    """A time to first token against that without the store, in words."""
    if speedup < 1:
        return "slower than without the store"
    return f"{speedup:.1f} times sooner"


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
