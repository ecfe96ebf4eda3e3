"""`model.generate`, with the KV of every prefix that was computed before."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessorList

from kvstore.clock import SystemClock
from kvstore.connectors.transformers import caches, geometry, identity, refusals
from kvstore.connectors.transformers.beams import StoringProcessor
from kvstore.connectors.transformers.faults import FAULTS, MissCounter, outcome_of
from kvstore.connectors.transformers.loader import load, loadable_blocks
from kvstore.connectors.transformers.prompts import (
    read_columns_max,
    read_ends,
    read_prompts,
    setting,
)
from kvstore.connectors.transformers.report import Tally
from kvstore.connectors.transformers.sequences import Sequences
from kvstore.connectors.transformers.writer import BlockWriter, StoringStreamer
from kvstore.errors import UnsupportedCache
from kvstore.keys import Namespace

if TYPE_CHECKING:
    from collections import Counter

    import torch
    from transformers import DynamicCache

    from kvstore.client.session import Session
    from kvstore.connectors.transformers.model import DecoderModel, Store
    from kvstore.connectors.transformers.report import Report
    from kvstore.types import Outcome


class PrefixCache:
    """Prefix reuse for one decoder model on one device, over a `DynamicCache`.

    `store` is an open store; the caller closes it. `fingerprint` names the weights; by default all
    of them are hashed once, here (see `identity.fingerprint`): weights that change later need a new
    PrefixCache. `adapter` is the digest of an adapter's content, as `adapter_digest` computes it,
    `salt` separates those who must not share. Whoever agrees in all of these, model and layout
    shares.

    Raises TypeError where `model` is no model or `store` no store, and UnsupportedCache, with what
    was found and what is supported, for models whose cache is not keys and values of tokens.
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
            layout=self._geometry.layout,
            block_tokens=block_tokens,
            adapter=adapter,
            salt=salt,
        )
        self._forms = self._geometry.forms(self._namespace.block_tokens)
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

        `input_ids` is [rows, tokens], padded on the left where rows differ in length, as
        `attention_mask` says. The longest stored prefix of whole blocks is loaded for each row, as
        far as it lies before the first column that any row has to compute, and never the last
        token. Blocks are stored as they become full, after the first token was handed to the
        streamer; in beam search, those that the answers have. A cache of the caller's (`cache=` or
        `past_key_values=`, a plain DynamicCache) is copied and not grown; what it holds came from
        elsewhere, so nothing that follows from it is stored.

        Raises UnsupportedCache before anything is computed, for calls that it cannot serve. A store
        that fails costs its hits and one warning, never the call.
        """
        callers = _take_cache(arguments)
        refusals.check_call(self._model, input_ids, arguments)
        refusals.check_unchanged(self._model, *self._model_kind)
        if callers is not None and callers.get_seq_length() > 0:
            arguments[caches.CACHE_ARGUMENT] = caches.copy_of(self._model, callers)
            try:
                return self._model.generate(input_ids, **arguments)
            finally:
                self._finish(Tally(input_ids.numel()), from_caller=True)
        prompts = read_prompts(self._model, input_ids, arguments)
        ends = read_ends(self._model, arguments)
        sequences = Sequences(self._namespace, prompts, ends)
        lengths = [len(prompt.tokens) for prompt in prompts]
        size = self._namespace.block_tokens
        tally = Tally(sum(lengths), sum(loadable_blocks(length, size) for length in lengths))
        try:
            return self._generate_over_store(input_ids, arguments, sequences, tally)
        finally:
            self._finish(tally, from_caller=False)

    def _generate_over_store(
        self,
        input_ids: torch.Tensor,
        arguments: dict[str, Any],
        sequences: Sequences,
        tally: Tally,
    ) -> object:
        with ExitStack() as stack:
            try:
                session = stack.enter_context(self._store.session(self._namespace))
            except FAULTS as fault:
                tally.lose_load(outcome_of(fault))
                return self._model.generate(input_ids, **arguments)
            beams = int(setting(self._model, arguments, "num_beams") or 1)
            answers = int(setting(self._model, arguments, "num_return_sequences") or 1)
            cache = caches.FollowedCache(self._model)
            stack.callback(cache.release)  # it may be the caller's from then on
            self._load(session, sequences, cache, max(beams, answers), tally)
            writer = BlockWriter(session, sequences, cache, self._forms, tally, self._clock)
            arguments[caches.CACHE_ARGUMENT] = cache
            if beams > 1:
                return self._generate_with_beams(input_ids, arguments, cache, writer, beams)
            streamer = arguments.get("streamer")
            arguments["streamer"] = StoringStreamer(writer, streamer)
            return self._model.generate(input_ids, **arguments)

    def _generate_with_beams(
        self,
        input_ids: torch.Tensor,
        arguments: dict[str, Any],
        cache: caches.FollowedCache,
        writer: BlockWriter,
        beams: int,
    ) -> object:
        columns_max = read_columns_max(self._model, input_ids, arguments)
        processor = StoringProcessor(writer, cache, beams, columns_max)
        cache.on_reorder = processor.reorder
        given = arguments.get("logits_processor") or ()
        arguments["logits_processor"] = LogitsProcessorList([*given, processor])
        output = self._model.generate(input_ids, **arguments)
        processor.finish(getattr(output, "sequences", output).tolist())
        return output

    def _load(
        self,
        session: Session,
        sequences: Sequences,
        cache: caches.FollowedCache,
        repeats: int,
        tally: Tally,
    ) -> None:
        """Fill the cache with what the store has of each row, which is `repeats` rows from then."""
        started = self._clock.now()
        loaded = load(session, sequences, self._forms, self._geometry.device, tally)
        if loaded is not None:
            for form, prefix in zip(self._forms, loaded.prefixes, strict=True):
                tensors = prefix.tensors()
                pairs = zip(tensors[::2], tensors[1::2], strict=True)
                cache.fill(dict(zip(form.layers, pairs, strict=True)), loaded.columns, repeats)
        sequences.repeat(repeats)
        cache.record(self._recorded_columns(len(sequences.rows)))
        tally.load_seconds = self._clock.now() - started

    def _finish(self, tally: Tally, *, from_caller: bool) -> None:
        self._last = self._report(tally, from_caller=from_caller)
        for reason, blocks in tally.misses.items():
            self._misses.count(reason, blocks, "Prefix not loaded")
        for outcome, blocks in tally.put_outcomes.items():
            if outcome.is_miss:
                self._misses.count(outcome, blocks, "Blocks not stored")

    def _report(self, tally: Tally, *, from_caller: bool) -> Report:
        return tally.report(from_caller=from_caller)

    def _recorded_columns(self, rows: int) -> int:
        """How much of what leaves sliding windows is kept until it is stored."""
        windows = [form for form in self._forms if form.group.window_tokens is not None]
        column_bytes = sum(form.form.token_bytes for form in windows) * rows
        return caches.RECORD_BYTES // column_bytes if column_bytes else 0


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


def _take_cache(arguments: dict[str, Any]) -> DynamicCache | None:
    """Take the caller's cache out of the arguments, under the old and the new name; check it."""
    given = [arguments.pop(name, None) for name in ("cache", "past_key_values")]
    found = [cache for cache in given if cache is not None]
    for cache in found:
        refusals.check_cache(cache)
    if len(found) == 2:
        raise UnsupportedCache("both cache and past_key_values are given; supported: one of them")
    return found[0] if found else None
