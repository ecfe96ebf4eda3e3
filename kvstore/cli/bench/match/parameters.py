"""What one run measures: the sizes of the stores, and the memory that the largest one takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.cli.bench import host
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.memory_limits import available_memory_bytes
from kvstore.residency import ENTRY_BYTES
from kvstore.units import shown_bytes

ENTRIES_MIN = 1_000
#: Beside an entry: its key once more to ask for it, and its place in the dict of the limit.
_BESIDE_ENTRY_BYTES = 320
#: What a process with NumPy and nothing in it takes.
_PROCESS_BYTES = 64 * 1024 * 1024


class Trial(NamedTuple):
    """What is measured in one process: one store."""

    entries: int
    keys: int
    sequence_blocks: int
    rounds: int
    is_interleaved: bool
    l3_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Sizes and counts of one run."""

    entries: int
    keys: int
    sequence_blocks: int
    rounds: int
    is_interleaved: bool
    l3_bytes: int

    @property
    def sizes(self) -> list[int]:
        """Entries of each store: the powers of ten, but enough for a lookup, and the largest."""
        sizes, size = set(), ENTRIES_MIN
        while size < self.entries:
            sizes.add(max(size, self.keys))
            size *= 10
        return sorted({*sizes, self.entries})

    @property
    def memory_bytes(self) -> int:
        """What the largest store's process takes; the stores come one after another."""
        return (
            self.entries * (ENTRY_BYTES + _BESIDE_ENTRY_BYTES) + 2 * self.l3_bytes + _PROCESS_BYTES
        )

    def trials(self) -> list[Trial]:
        """What is to be measured, the smallest store first."""
        return [
            Trial(
                size,
                self.keys,
                self.sequence_blocks,
                self.rounds,
                self.is_interleaved,
                self.l3_bytes,
            )
            for size in self.sizes
        ]


def plan(
    *, entries: int, keys: int, sequence_blocks: int, rounds: int, is_interleaved: bool
) -> Parameters:
    """Check what was asked for. Raises ConfigError or InvalidRequest, which name the option."""
    if sequence_blocks < keys:
        raise InvalidRequest(
            f"--sequence-blocks is {sequence_blocks}: give --keys, {keys}, or more, so that a "
            "lookup finds them in one sequence"
        )
    if entries < keys:
        raise InvalidRequest(f"--entries is {entries}: give --keys, {keys}, or more")
    parameters = Parameters(
        entries=entries,
        keys=keys,
        sequence_blocks=sequence_blocks,
        rounds=rounds,
        is_interleaved=is_interleaved,
        l3_bytes=host.l3_bytes(),
    )
    available = available_memory_bytes()
    if parameters.memory_bytes > available:
        raise ConfigError(
            f"--entries is {entries}: this needs {shown_bytes(parameters.memory_bytes)} of memory, "
            f"and only {shown_bytes(available)} are available here: give less"
        )
    return parameters
