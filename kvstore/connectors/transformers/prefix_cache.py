"""`model.generate`, with the KV of every prefix that was computed before."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.clock import SystemClock
from kvstore.connectors.transformers import geometry, identity, refusals
from kvstore.connectors.transformers.faults import FAULTS, MissCounter, outcome_of
from kvstore.connectors.transformers.report import Tally
from kvstore.connectors.transformers.writer import BlockWriter, StoringStreamer
from kvstore.cuda import host_copy
from kvstore.errors import UnsupportedCache
from kvstore.keys import Namespace
from kvstore.types import Outcome

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    import torch
    from transformers import DynamicCache

    from kvstore.client.session import Session
    from kvstore.connectors.transformers.model import DecoderModel, Store
    from kvstore.connectors.transformers.report import Report
    from kvstore.types import BlockKey

#: Loading is a copy out of host memory: milliseconds. Only a stopped process keeps a lease so long.
LEASE_TTL_SECONDS = 30.0


class PrefixCache:
    """Prefix reuse for one decoder model: batch 1, one device, a `DynamicCache`.

    `store` is an open store; the caller closes it. `fingerprint` names the weights; by default all
    of them are hashed once, here (see `identity.fingerprint`): weights that change later need a new
    PrefixCache. `adapter` is the SHA-256 of an adapter's content (bytes, or "sha256:<hex>"), `salt`
    separates those who must not share. Whoever agrees in all of these, model and layout shares.

    Raises TypeError where `model` is no model or `store` no store, and UnsupportedCache, with what
    was found and what is supported, for models whose cache is not keys and values of all tokens.
    Calls from several threads are safe as far as `generate` itself is; `last` is then the report of
    whichever call ended last.
    """

    def __init__(
        self,
        model: DecoderModel,
        store: Store,
        *,
        block_tokens: int = 16,
        fingerprint: str | None = None,
        adapter: bytes | str | None = None,
        salt: bytes | str | None = None,
    ) -> None:
        _check_arguments(model, store)
        refusals.check_model(model)
        refusals.check_adapter(model, adapter)
        self._model = model
        self._store = store
        self._geometry = geometry.measure(model)
        self._model_kind = (model.dtype, model.device, identity.adapter_state(model))
        self._namespace = Namespace(
            model=identity.model_name(model),
            fingerprint=identity.fingerprint(model, fingerprint),
            layout=self._geometry.layout(),
            block_tokens=block_tokens,
            adapter=adapter,
            salt=salt,
        )
        self._misses = MissCounter()
        self._clock = SystemClock()
        self._last = self._report(Tally(0), from_caller=False)

    @property
    def namespace(self) -> Namespace:
        """The identity under which blocks are stored and found."""
        return self._namespace

    @property
    def last(self) -> Report:
        """What the last call did, also where it raised; all zero before the first one."""
        return self._last

    @property
    def misses(self) -> Counter[Outcome]:
        """Blocks that were not loaded or not stored, by reason, over all calls."""
        return self._misses.counts

    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> Any:  # noqa: ANN401
        """Return what `model.generate(input_ids, **arguments)` returns, sooner where it can.

        `input_ids` is [1, tokens]. The longest stored prefix of whole blocks is loaded, but never
        the last token: one has to be computed. Blocks are stored as they become full, after the
        first token was handed to the streamer. A cache of the caller's (`cache=` or
        `past_key_values=`, a plain DynamicCache) is copied and not grown; what it holds came from
        elsewhere, so nothing that follows from it is stored.

        Raises UnsupportedCache before anything is computed, for calls that it cannot serve. A store
        that fails costs its hits and one warning, never the call.
        """
        callers = _take_cache(arguments)
        refusals.check_call(self._model, input_ids, arguments)
        refusals.check_unchanged(self._model, *self._model_kind)
        tokens: list[int] = input_ids[0].tolist()
        tally = Tally(len(tokens))
        from_caller = callers is not None and callers.get_seq_length() > 0
        try:
            if callers is not None and from_caller:
                arguments[geometry.CACHE_ARGUMENT] = geometry.copy_of(self._model, callers)
                return self._model.generate(input_ids, **arguments)
            return self._generate_over_store(input_ids, tokens, arguments, tally)
        finally:
            self._finish(tally, from_caller=from_caller)

    def _generate_over_store(
        self, input_ids: torch.Tensor, tokens: list[int], arguments: dict[str, Any], tally: Tally
    ) -> object:
        with ExitStack() as stack:
            try:
                session = stack.enter_context(self._store.session(self._namespace))
            except FAULTS as fault:
                tally.reason = outcome_of(fault)
                return self._model.generate(input_ids, **arguments)
            cache = geometry.empty_cache(self._model)
            self._load(session, tokens, cache, tally)
            writer = BlockWriter(session, self._namespace, cache, tally, self._clock)
            arguments[geometry.CACHE_ARGUMENT] = cache
            arguments["streamer"] = StoringStreamer(writer, tokens, arguments.get("streamer"))
            return self._model.generate(input_ids, **arguments)

    def _load(
        self, session: Session, tokens: Sequence[int], cache: DynamicCache, tally: Tally
    ) -> None:
        """Fill the cache with the longest stored prefix, under one lease; else leave it empty."""
        loadable = _loadable_blocks(len(tokens), self._namespace.block_tokens)
        if loadable == 0:
            return
        started = self._clock.now()
        try:
            keys = self._namespace.keys(tokens[: loadable * self._namespace.block_tokens])
            loaded = self._load_leased(session, keys)
        except FAULTS as fault:
            loaded = _Loaded(None, 0, {}, outcome_of(fault))
        if loaded.prefix is not None:
            geometry.fill(cache, loaded.prefix)
        tally.loaded_blocks = loaded.blocks
        tally.hits_by_tier = loaded.by_tier
        tally.reason = loaded.reason
        tally.load_seconds = self._clock.now() - started

    def _load_leased(self, session: Session, keys: Sequence[BlockKey]) -> _Loaded:
        with session.lease(keys, ttl_seconds=LEASE_TTL_SECONDS, wait_seconds=0) as lease:
            blocks: int = lease.blocks
            if blocks == 0:
                return _Loaded(None, 0, {}, lease.reason)
            layers, heads, dim, dtype, device = self._geometry
            tokens = blocks * self._namespace.block_tokens
            prefix = host_copy.allocate_prefix((layers, 2, heads, tokens, dim), dtype, device)
            host_copy.load_blocks(lease.views, prefix)
            if not lease.valid():  # the memory may have been another block's while it was read
                return _Loaded(None, 0, {}, Outcome.EXPIRED)
            return _Loaded(prefix, blocks, dict(lease.by_tier), lease.reason)

    def _finish(self, tally: Tally, *, from_caller: bool) -> None:
        self._last = self._report(tally, from_caller=from_caller)
        if tally.reason is not None:
            loadable = _loadable_blocks(tally.prompt_tokens, self._namespace.block_tokens)
            missing = max(1, loadable - tally.loaded_blocks)
            self._misses.count(tally.reason, missing, "Prefix not loaded")
        for outcome, blocks in tally.put_outcomes.items():
            if outcome.is_miss:
                self._misses.count(outcome, blocks, "Blocks not stored")

    def _report(self, tally: Tally, *, from_caller: bool) -> Report:
        size = self._namespace.block_tokens
        block_bytes = self._namespace.layout.bytes_per_block(size)
        return tally.report(block_tokens=size, block_bytes=block_bytes, from_caller=from_caller)


class _Loaded(NamedTuple):
    """What a lease brought: [layers, 2, kv_heads, tokens, head_dim], or why it did not."""

    prefix: torch.Tensor | None
    blocks: int
    by_tier: dict[str, int]
    reason: Outcome | None


def _check_arguments(model: object, store: object) -> None:
    """Refuse what is no model and no store, such as the two in the wrong order."""
    can_generate = callable(getattr(model, "generate", None)) and hasattr(model, "config")
    if isinstance(model, type) or not can_generate:
        raise TypeError(
            f"model is {_described(model)}: expected a transformers model that can generate, "
            "as in PrefixCache(model, store)"
        )
    if isinstance(store, type) or not callable(getattr(store, "session", None)):
        raise TypeError(
            f"store is {_described(store)}: expected an open store, as kvstore.open() returns it"
        )


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"of type {type(value).__name__}"


def _loadable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Whole blocks of a prompt, without its last token, whose logits must be computed.

    prompt of n * block_tokens - 1 or n * block_tokens: n - 1 blocks; of one more: n blocks.
    """
    return max(0, prompt_tokens - 1) // block_tokens


def _take_cache(arguments: dict[str, Any]) -> DynamicCache | None:
    """Take the caller's cache out of the arguments, under the old and the new name; check it."""
    given = [arguments.pop(name, None) for name in ("cache", "past_key_values")]
    caches = [cache for cache in given if cache is not None]
    for cache in caches:
        refusals.check_cache(cache)
    if len(caches) == 2:
        raise UnsupportedCache("both cache and past_key_values are given; supported: one of them")
    return caches[0] if caches else None
