"""Counters, in one place. They only go up, so that they can be summed over a fleet.

`counters["misses", "evicted"]` is what a metrics endpoint calls
`kvstore_misses_total{reason="evicted"}`; counters without a label have the label "".
"""

from __future__ import annotations

from collections import Counter

#: name -> (label, what it counts)
COUNTERS = {
    "lookup_tokens": ("", "tokens of all prefixes that were to be leased or read"),
    "hit_tokens": ("tier", "tokens of those prefixes that were there"),
    "hit_blocks": ("tier", "blocks of those prefixes that were there"),
    "misses": ("reason", "blocks asked for and not there, by why the prefix ended"),
    "stored_blocks": ("tier", "blocks committed"),
    "stored_bytes": ("tier", "payload of the blocks committed"),
    "refused_blocks": ("reason", "blocks that a writer could not reserve"),
    "dropped_blocks": ("reason", "blocks that left: evicted, expired, deleted, corrupt"),
    "evicted_before_first_read": (
        "reason",
        "blocks that left, for whatever reason, and were never hit",
    ),
    "dropped_bytes": ("reason", "payload of the blocks that left"),
    "ended_leases": ("reason", "leases that ended: released, expired"),
    "ended_reservations": ("reason", "reservations that ended: committed, aborted, expired"),
    "differing_puts": ("", "puts of a present key with other bytes; the first ones stay"),
    "lost_blocks": ("outcome", "hit blocks that were copied too late: lease or block was gone"),
}


class Counters:
    """All counters of one core."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Count `amount` more. The name must be listed in `COUNTERS`."""
        if name not in COUNTERS:
            raise KeyError(f"no counter {name!r}")
        if amount:
            self._values[name, label] += amount

    def __getitem__(self, name_and_label: tuple[str, str]) -> int:
        return self._values[name_and_label]

    def by_label(self, name: str) -> dict[str, int]:
        """The values of one counter by its label."""
        return {label: value for (n, label), value in self._values.items() if n == name}

    def snapshot(self) -> dict[str, int | dict[str, int]]:
        """Every counter, also those that are 0, as plain values."""
        return {
            name: self.by_label(name) if label else self._values[name, ""]
            for name, (label, _) in COUNTERS.items()
        }
