"""From samples to figures: one document for programs, one table for people."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.cli.bench import host
from kvstore.cli.bench.dram.measure import WARM_UP_ROUNDS
from kvstore.cli.bench.heading import heading, machine_line
from kvstore.units import shown_bytes

if TYPE_CHECKING:
    from kvstore.cli.bench.dram.measure import Outcomes, Sample
    from kvstore.cli.bench.dram.parameters import Parameters

_COLUMNS = (
    ("GB/s", "gb_per_s", "7.2f"),
    ("ratio", "ratio", "7.3f"),
    ("min", "ratio_min", "7.3f"),
    ("max", "ratio_max", "7.3f"),
    ("wall", "wall_ratio", "7.3f"),
    ("CPU s/GB", "cpu_s_per_gb", "10.4f"),
    ("p50 ms", "p50_ms", "8.2f"),
    ("p99 ms", "p99_ms", "8.2f"),
)
_MEANING = {
    "limit": "plain np.copyto of the same bytes",
    "get": "get_into: look up, copy, check",
    "put": "new keys, pool full: evicts as many",
    "put_free": "new keys, room made before",
}


def document(parameters: Parameters, outcomes: Outcomes) -> dict[str, Any]:
    """Everything that a reader of the numbers needs; benchmarks/README.md says each field."""
    return {
        **heading("dram"),
        "verified": outcomes.verified_batches > 0 and not outcomes.findings,
        "verified_batches": outcomes.verified_batches,
        "findings": outcomes.findings,
        "aligned": parameters.is_aligned,
        "cold": parameters.is_cold,
        "machine": host.describe(),
        "parameters": {
            "block_bytes": parameters.block_bytes,
            "batch_blocks": parameters.batch_blocks,
            "batches_per_round": parameters.batches,
            "rounds": parameters.rounds,
            "warm_up_rounds": WARM_UP_ROUNDS,
            "pool_bytes": parameters.pool_bytes,
            "working_set_bytes": parameters.working_set_bytes,
            "interleaved": parameters.is_interleaved,
        },
        **{
            name: _figures(name, outcomes.samples, parameters.working_set_bytes)
            for name in _MEANING
        },
    }


def text(document: dict[str, Any]) -> str:
    """The table, and how to read it."""
    parameters = document["parameters"]
    put = document["put"]
    lines = [
        f"{document['benchmark']}: blocks of {shown_bytes(parameters['block_bytes'])}, "
        f"{parameters['batch_blocks']} per batch, {parameters['rounds']} rounds of "
        f"{shown_bytes(parameters['working_set_bytes'])} each, "
        f"pool {shown_bytes(parameters['pool_bytes'])}",
        machine_line(document),
        "",
        " " * 9 + "".join(f"{title:>{_width(form)}}" for title, _, form in _COLUMNS),
    ]
    for name, meaning in _MEANING.items():
        figures = "".join(f"{document[name][field]:{form}}" for _, field, form in _COLUMNS)
        lines.append(f"{name:9}{figures}  {meaning}")
    lines += [
        "",
        "ratio: payload per CPU second, against the limit's in the same round; median, min and max",
        "over the rounds. wall: the same per second of the clock. 1 is a plain copy.",
        f"put: the checksum's {put['checksum_cpu_s_per_gb']:.4f} CPU s/GB are in GB/s, wall and "
        "ms, but not in ratio",
        f"and CPU s/GB; with them the ratio is {put['ratio_with_checksum']:.3f}.",
        _alignment(document["aligned"]),
        _verification(document),
    ]
    if not document["cold"]:
        lines.append(
            "WARNING: the working set is less than 4 times the L3 cache: these are copies within "
            "caches."
        )
    return "\n".join(lines)


def _figures(name: str, samples: dict[str, dict[int, Sample]], payload: int) -> dict[str, Any]:
    """The figures of one measurement. Each round is compared with the limit of that round."""
    own, limits = samples[name], samples["limit"]
    gigabytes = payload / 1e9
    walls_ms = [wall / 1e6 for sample in own.values() for wall in sample.walls_ns]
    cpu_ns = {number: s.cpu_ns - s.checksum_cpu_ns for number, s in own.items()}
    ratios = [limits[number].cpu_ns / cpu for number, cpu in cpu_ns.items()]
    p50_ms, p99_ms = np.percentile(walls_ms, [50, 99])
    figures: dict[str, Any] = {
        "gb_per_s": median(payload / s.wall_ns for s in own.values()),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "wall_ratio": median(limits[number].wall_ns / s.wall_ns for number, s in own.items()),
        "cpu_s_per_gb": median(cpu / 1e9 / gigabytes for cpu in cpu_ns.values()),
        "p50_ms": float(p50_ms),
        "p99_ms": float(p99_ms),
        "rounds": len(own),
        "batches": len(walls_ms),
    }
    if name.startswith("put"):
        figures["checksum_cpu_s_per_gb"] = median(
            s.checksum_cpu_ns / 1e9 / gigabytes for s in own.values()
        )
        figures["ratio_with_checksum"] = median(
            limits[number].cpu_ns / s.cpu_ns for number, s in own.items()
        )
    return {
        field: round(value, 4) if isinstance(value, float) else value
        for field, value in figures.items()
    }


def _alignment(is_aligned: bool) -> str:
    if is_aligned:
        return (
            "Buffers are page-aligned on both sides; one that is not, as NumPy often makes them,\n"
            "can cost up to half of the speed at 64 to 512 KiB (see --unaligned)."
        )
    return "The caller's buffers start 16 bytes into a page, for the limit as well."


def _verification(document: dict[str, Any]) -> str:
    if document["verified"]:
        return f"Verified: {document['verified_batches']} batches had exactly the bytes put."
    findings = document["findings"]
    return f"NOT VERIFIED: {len(findings)} findings, first: {findings[0] if findings else 'none'}"


def _width(form: str) -> int:
    return int(form.partition(".")[0])
