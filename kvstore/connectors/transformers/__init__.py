"""Prefix reuse for Hugging Face transformers: `PrefixCache` stands in front of `model.generate`.

    with kvstore.open(dram_capacity_bytes=4 << 30) as store:
        cache = PrefixCache(model, store)
        tokens = cache.generate(input_ids, max_new_tokens=64)

`cache.last` says what that call loaded, computed and stored.
"""

from __future__ import annotations

from kvstore.connectors.transformers.adapters import adapter_digest
from kvstore.connectors.transformers.prefix_cache import PrefixCache
from kvstore.connectors.transformers.report import Report

__all__ = ["PrefixCache", "Report", "adapter_digest"]
