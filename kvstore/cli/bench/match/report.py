"""From the figures of each store to one document, and to tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.cli.bench import host
from kvstore.cli.bench.heading import heading, machine_line
from kvstore.cli.bench.match.measure import FINDINGS_MAX, STATES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.cli.bench.match.parameters import Parameters

#: Title, measurement, figure, form.
_LOOKUP_COLUMNS = (
    ("limit p50", "limit", "p50_us", "11.1f"),
    ("match p50", "match", "p50_us", "11.1f"),
    ("p99", "match", "p99_us", "9.1f"),
    ("CPU p99", "match", "cpu_p99_us", "10.1f"),
    ("ns/key", "match", "ns_per_key", "8.0f"),
    ("ratio", "match", "ratio", "8.3f"),
    ("lease+release", "lease_release", "p50_us", "15.1f"),
    ("miss", "miss", "p50_us", "8.1f"),
)
_STORE_COLUMNS = (
    ("probes/key", "probes_per_key", "12.2f"),
    ("bytes/entry", "bytes_per_entry", "13.0f"),
    ("fill us/block", "fill_cpu_us_per_block", "15.1f"),
    ("full GC ms", "gc_full_ms", "12.2f"),
    ("longest GC ms", "gc_longest_ms", "15.2f"),
)
_ENTRIES_COLUMNS = 10


def document(parameters: Parameters, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything that a reader of the numbers needs; benchmarks/README.md says each field."""
    findings = [finding for result in results for finding in result["findings"]]
    smallest, largest = results[0], results[-1]
    return {
        **heading("match"),
        "verified": not findings,
        "verified_lookups": sum(result["lookups"] for result in results),
        "findings": findings[:FINDINGS_MAX],
        "machine": host.describe(),
        "parameters": {
            "entries": parameters.entries,
            "keys": parameters.keys,
            "sequence_blocks": parameters.sequence_blocks,
            "rounds": parameters.rounds,
            "interleaved": parameters.is_interleaved,
        },
        "p50_us": largest["cold"]["match"]["p50_us"],
        "p99_us": largest["cold"]["match"]["p99_us"],
        "probes_per_key": largest["probes_per_key"],
        "bytes_per_entry": largest["bytes_per_entry"],
        "gc_full_ms": largest["gc_full_ms"],
        "gc_longest_ms": largest["gc_longest_ms"],
        "growth": {
            state: {
                name: round(largest[state][name]["p50_us"] / smallest[state][name]["p50_us"], 3)
                for name in ("limit", "match", "lease_release", "miss")
            }
            for state in STATES
        },
        "stores": [
            {name: value for name, value in result.items() if name not in ("findings", "lookups")}
            for result in results
        ],
    }


def text(document: dict[str, Any]) -> str:
    """The tables, and how to read them."""
    parameters, stores, growth = document["parameters"], document["stores"], document["growth"]
    lines = [
        f"match: lookups of {parameters['keys']} blocks, all there, in sequences of "
        f"{parameters['sequence_blocks']}, {parameters['rounds']} of each kind",
        machine_line(document),
    ]
    for state in STATES:
        titles = "".join(f"{title:>{_width(form)}}" for title, _, _, form in _LOOKUP_COLUMNS)
        lines += ["", f"{state + ', us':<{_ENTRIES_COLUMNS}}{titles}"]
        for store in stores:
            figures = "".join(
                f"{store[state][name][field]:{form}}" for _, name, field, form in _LOOKUP_COLUMNS
            )
            lines.append(f"{store['entries']:>{_ENTRIES_COLUMNS}}{figures}")
    titles = "".join(f"{title:>{_width(form)}}" for title, _, form in _STORE_COLUMNS)
    lines += ["", f"{'entries':>{_ENTRIES_COLUMNS}}{titles}"]
    for store in stores:
        figures = "".join(_cell(store[field], form) for _, field, form in _STORE_COLUMNS)
        lines.append(f"{store['entries']:>{_ENTRIES_COLUMNS}}{figures}")
    lines += [
        "",
        f"From {stores[0]['entries']} to {stores[-1]['entries']} entries a match takes "
        f"{growth['cold']['match']:.2f} times as long cold, {growth['warm']['match']:.2f} times "
        f"warm;",
        f"a look into a plain dict (limit) {growth['cold']['limit']:.2f} and "
        f"{growth['warm']['limit']:.2f} times.",
        "ratio: the limit's CPU time over that of match, in the same round; median. Cold: caches",
        "overwritten before each lookup. GC: CPU time of one collection; longest: of those that",
        "Python started by itself while the store was filled and read.",
    ]
    if document["findings"]:
        lines.append(f"WRONG: {document['findings'][0]}")
    else:
        lines.append(f"Verified: {document['verified_lookups']} lookups found what is there.")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return f"{'-':>{_width(form)}}" if value is None else f"{value:{form}}"


def _width(form: str) -> int:
    return int(form.partition(".")[0])
