"""What the core can be told: plain values, resolved and checked by whoever read them."""

from __future__ import annotations

from typing import NamedTuple


class CoreSettings(NamedTuple):
    """The settings of a core, with their defaults. Fractions are of a tier's capacity.

    The ranges that a configuration may set are in `kvstore.config`; nothing is checked here.
    """

    #: A name of `kvstore.policy.POLICIES`.
    policy: str = "lru"
    #: Above the high one blocks are evicted unasked, down to the low one; 1.0 turns that off.
    watermark_high: float = 1.0
    watermark_low: float = 0.9
    #: What may be leased at a time: the rest stays open to writers, whatever readers hold.
    leased_fraction: float = 0.5
    #: However often it is renewed, no lease lasts longer than this after it was granted.
    lease_seconds_max: float = 3_600.0
    #: What the hard pins of one tenant may take up.
    hard_pin_fraction: float = 0.25
    #: No pin with a TTL lasts longer than this after it was set or renewed.
    pin_seconds_max: float = 30 * 24 * 3_600.0
    #: How many keys that were dropped are remembered, with the reason.
    history_entries: int = 65_536


DEFAULT_SETTINGS = CoreSettings()
