"""Caches of transformers that tell more than their own kind does, and are read and filled here.

Everything that depends on the insides of transformers' cache classes is in this module.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvstore.connectors.transformers.model import DecoderModel

    #: A key and a value, each [row, head, column, dim].
    Pair = tuple[torch.Tensor, torch.Tensor]

#: The name of the cache among a model's arguments: `cache` from transformers 5.2x on.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

#: A sliding layer drops what leaves its window, but that is to be stored, too. So much of it is
#: kept until then, at most, over all layers; of a longer prompt only the end has such parts.
RECORD_BYTES = 1 << 30


class RecordingLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A sliding window that also keeps what has left it, from column `recorded_from` on."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.recorded_from = 0
        self.is_recording = False
        self._columns_max = 0
        self._recorded: list[Pair] = []

    def record(self, columns_max: int) -> None:
        """From now on keep everything, but no more than the last `columns_max` columns."""
        self.is_recording = True
        self._columns_max = columns_max
        self._recorded = []
        self.recorded_from = self.get_seq_length()
        if self.recorded_from:
            keys, values = content_of(self)
            self._recorded = [(keys, values)]
            self.recorded_from -= keys.shape[2]

    def stop_recording(self) -> None:
        """Keep no more than any sliding window does."""
        self.is_recording = False
        self._recorded = []

    def recorded(self) -> Pair | None:
        """The columns from `recorded_from` on."""
        if len(self._recorded) > 1:
            keys, values = zip(*self._recorded, strict=True)
            self._recorded = [(torch.cat(keys, dim=2), torch.cat(values, dim=2))]
        return self._recorded[0] if self._recorded else None

    def forget(self, column: int) -> None:
        """Drop the columns before `column`."""
        while self._recorded and self.recorded_from < column:
            keys, values = self._recorded.pop(0)
            dropped = min(column - self.recorded_from, keys.shape[2])
            self.recorded_from += dropped
            if dropped < keys.shape[2]:
                # A copy, or a few columns would keep a whole prompt alive.
                rest = (keys[:, :, dropped:].clone(), values[:, :, dropped:].clone())
                self._recorded.insert(0, rest)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Pair:
        """Add the next columns, and return what they see."""
        if self.is_recording and key_states.shape[2]:
            self._recorded.append((key_states, value_states))
            self.forget(self.get_seq_length() + key_states.shape[2] - self._columns_max)
        seen: Pair = super().update(key_states, value_states, *args, **kwargs)
        return seen

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put the rows into that order."""
        super().reorder_cache(beam_idx)
        self._recorded = [
            (
                keys.index_select(0, beam_idx.to(keys.device)),
                values.index_select(0, beam_idx.to(values.device)),
            )
            for keys, values in self._recorded
        ]


class FollowedCache(DynamicCache):
    """A `DynamicCache` to store from: its sliding layers record, and it tells of beams."""

    #: Called with the new order of the rows: row i is what row `order[i]` was.
    on_reorder: Callable[[torch.Tensor], None] | None = None
    #: The last reorder of a search drops rows that its answers may come from. Where this says that
    #: the next one is the last, nobody hears of it, and the rows stay at hand as they were.
    keeps_rows = False

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                self.layers[index] = RecordingLayer(layer.sliding_window)
        self._kept: dict[int, tuple[int, Pair] | None] = {}

    def fill(self, tensors: Mapping[int, Pair], columns: int, repeats: int) -> None:
        """Make the keys and values of each layer, by its index, the content of the empty cache.

        They are of the first `columns`, or of the last of these that a sliding layer keeps. Each
        row becomes `repeats` neighbouring ones. Where there is one row, or no repetition, no byte
        is copied; the layers give the tensors up with the next token, since they grow by
        concatenation.
        """
        for index, (keys, values) in tensors.items():
            layer = cast("DynamicLayer", self.layers[index])
            # An update of no tokens does what the layer needs once; one of all would copy them.
            layer.update(keys[:, :, :0], values[:, :, :0])
            layer.keys, layer.values = _repeated(keys, repeats), _repeated(values, repeats)
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = columns

    def record(self, columns_max: int) -> None:
        """Let the sliding layers keep what leaves their windows, so many columns of it at most."""
        for layer in self._recording_layers():
            layer.record(columns_max)

    def forget(self, column: int) -> None:
        """Drop what was kept of the columns before `column`."""
        for layer in self._recording_layers():
            layer.forget(column)

    def columns_of(self, index: int) -> tuple[int, Pair] | None:
        """The first column that is at hand of a layer, and keys and values from there on."""
        if index in self._kept:
            return self._kept[index]
        layer = cast("DynamicLayer", self.layers[index])
        if isinstance(layer, RecordingLayer):
            recorded = layer.recorded()
            return None if recorded is None else (layer.recorded_from, recorded)
        return 0, content_of(layer)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put the rows into that order."""
        if self.keeps_rows:
            self._kept = {index: self.columns_of(index) for index in cached_layers(self)}
        elif self.on_reorder is not None:
            self.on_reorder(beam_idx)
        super().reorder_cache(beam_idx)

    def stop_recording(self) -> None:
        """Keep no more than any cache does."""
        for layer in self._recording_layers():
            layer.stop_recording()

    def release(self) -> None:
        """Be a cache like any other from here on: it may be the caller's."""
        self.on_reorder = None
        self.keeps_rows = False
        self._kept = {}
        self.stop_recording()

    def _recording_layers(self) -> Iterator[RecordingLayer]:
        return (layer for layer in self.layers if isinstance(layer, RecordingLayer))


def is_plain(cache: object) -> bool:
    """True for a cache that `generate` or this connector made for one device."""
    return type(cache) in (DynamicCache, FollowedCache) and not getattr(cache, "offloading", False)


def copy_of(model: DecoderModel, cache: DynamicCache) -> DynamicCache:
    """The same content in memory of its own; `generate` grows the cache that it is given."""
    copied = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index in cached_layers(cache):
        layer, source = (cast("DynamicLayer", each.layers[index]) for each in (copied, cache))
        keys, values = content_of(source)
        layer.update(keys.clone(), values.clone())
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = source.get_seq_length()
    return copied


def content_of(layer: DynamicLayer) -> Pair:
    """What a layer holds that has seen a token."""
    return cast("torch.Tensor", layer.keys), cast("torch.Tensor", layer.values)


def cached_layers(cache: DynamicCache) -> list[int]:
    """The layers that have a cache of their own: some models have others go by one of these."""
    return [i for i, layer in enumerate(cache.layers) if type(layer).__name__ != "DummyLayer"]


def foreign_layers(cache: DynamicCache) -> list[str]:
    """Which layers keep more, or less, than keys and values of tokens: index and type."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer, RecordingLayer)
    return [
        f"{index}: {type(cache.layers[index]).__name__}"
        for index in cached_layers(cache)
        if type(cache.layers[index]) not in kinds
    ]


def _repeated(tensor: torch.Tensor, repeats: int) -> torch.Tensor:
    rows, *rest = tensor.shape
    return tensor.unsqueeze(1).expand(rows, repeats, *rest).flatten(0, 1)
