"""What one replay counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any, Self

#: How many requests' hits are told one by one.
FIRST_HITS = 40


@dataclass(slots=True)
class Counts:
    """Of some requests of a replay. Every number adds up over stretches of a trace."""

    requests: int = 0
    block_accesses: int = 0
    input_tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    requests_with_hit: int = 0
    full_hits: int = 0  # requests of which every block was there
    blocks_written: int = 0
    evictions: int = 0
    refused_blocks: int = 0  # for which there was no room: of requests larger than the store
    # Why blocks were missed; with the hits they add up to the accesses.
    missed_new: int = 0  # no request before it names it
    missed_evicted: int = 0  # was named before, and is not held
    missed_out_of_reach: int = 0  # is held, behind one that is missing

    @property
    def hit_ratio(self) -> float:
        """Of the input tokens, those that were read instead of computed."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def __add__(self, other: Self) -> Self:
        names = [each.name for each in fields(self)]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))

    def document(self) -> dict[str, Any]:
        """All of it as plain values."""
        values = asdict(self)
        missed = {name: values.pop(f"missed_{name}") for name in ("new", "evicted", "out_of_reach")}
        return {**values, "hit_ratio": self.hit_ratio, "missed_blocks": missed}


@dataclass(slots=True)
class Outcome:
    """What came of a whole replay."""

    policy: str
    capacity_blocks: int
    total: Counts
    second_half: Counts
    resident_blocks: int  # at the end
    misses: dict[str, int]  # blocks, by the reason that the store gave
    hits: list[int] = field(repr=False)  # blocks, of each request

    @property
    def sha256_per_request_hits(self) -> str:
        """One digest of all hits, so that two replays can be compared exactly."""
        return sha256(",".join(map(str, self.hits)).encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            **self.total.document(),
            "misses": self.misses,
            "resident_end": self.resident_blocks,
            "first_hits": self.hits[:FIRST_HITS],
            "sha256_per_request_hits": self.sha256_per_request_hits,
            "second_half": self.second_half.document(),
        }
