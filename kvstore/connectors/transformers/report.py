"""What one call of `PrefixCache.generate` did, and why it did no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One call. Tokens of the prompts are either loaded or computed, over all rows of the batch.

    `reason` says why no more was loaded, None where no more could be or where the store was not
    asked (`from_caller`: the caller brought KV of its own, which is neither looked up nor stored).
    `hits_by_tier` counts the blocks that were found, by the tier that held them; a block counts for
    each prompt that has it, though it is read once (`loaded_bytes`).
    `put_outcomes` counts the blocks offered to the store, of which `stored_blocks` are new in it.
    `load_seconds` is lookup, lease and copy, all of it before the first token; `store_seconds` is
    all time spent on storing, none of it before the first token is handed out.
    """

    prompt_tokens: int
    loaded_tokens: int
    computed_tokens: int
    stored_blocks: int
    loaded_bytes: int
    stored_bytes: int
    hits_by_tier: Mapping[str, int]
    reason: Outcome | None
    put_outcomes: Mapping[Outcome, int]
    load_seconds: float
    store_seconds: float
    from_caller: bool

    def __str__(self) -> str:
        """One line for people."""
        tiers = [f"{blocks} blocks from {tier}" for tier, blocks in self.hits_by_tier.items()]
        puts = [f"{blocks} {outcome}" for outcome, blocks in self.put_outcomes.items()]
        reason = [f"then {self.reason}" if tiers else self.reason] if self.reason else []
        return (
            f"{self.loaded_tokens} of {self.prompt_tokens} prompt tokens loaded "
            f"({', '.join([*tiers, *reason]) or 'none to load'}; "
            f"{self.load_seconds * 1e3:.1f} ms), {self.computed_tokens} computed; blocks stored: "
            f"{', '.join(puts) or 'none'} ({self.store_seconds * 1e3:.1f} ms)"
        )


@dataclass(slots=True)
class Tally:
    """The same while the call runs, and the `misses` among the blocks that could be loaded."""

    prompt_tokens: int
    loadable_blocks: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    hits_by_tier: Counter[str] = field(default_factory=Counter)
    reason: Outcome | None = None
    misses: Counter[Outcome] = field(default_factory=Counter)
    put_outcomes: Counter[Outcome] = field(default_factory=Counter)
    stored_blocks: int = 0
    stored_bytes: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0

    def lose_load(self, reason: Outcome) -> None:
        """Note that nothing was loaded, whatever was found."""
        self.reason = reason
        self.misses = Counter({reason: max(1, self.loadable_blocks)})

    def report(self, *, from_caller: bool) -> Report:
        """Freeze it."""
        return Report(
            prompt_tokens=self.prompt_tokens,
            loaded_tokens=self.loaded_tokens,
            computed_tokens=self.prompt_tokens - self.loaded_tokens,
            stored_blocks=self.stored_blocks,
            loaded_bytes=self.loaded_bytes,
            stored_bytes=self.stored_bytes,
            hits_by_tier=MappingProxyType(dict(self.hits_by_tier)),
            reason=self.reason,
            put_outcomes=MappingProxyType(dict(self.put_outcomes)),
            load_seconds=self.load_seconds,
            store_seconds=self.store_seconds,
            from_caller=from_caller,
        )
