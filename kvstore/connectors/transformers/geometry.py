"""The shape of a model's cache, and how a `DynamicCache` is filled and read.

Everything that depends on the insides of transformers' cache classes is here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer

from kvstore.errors import UnsupportedCache
from kvstore.layout import KV_AXIS_ORDER, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.connectors.transformers.model import DecoderModel

#: The name of the cache among a model's arguments: `cache` from transformers 5.2x on.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


class Geometry(NamedTuple):
    """Shape, type and place of the keys and values of one token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def layout(self) -> Layout:
        """The same as part of a block's identity: keys as they lie in the cache, after RoPE."""
        return Layout.gqa(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            axis_order=KV_AXIS_ORDER,
        )


def measure(model: DecoderModel) -> Geometry:
    """The geometry of what the model really caches, from a forward pass over one token.

    A config says it under a dozen names, and not always truly. Raises UnsupportedCache where layers
    differ, or cache anything but a key and a value of one shape.
    """
    cache = empty_cache(model)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache})
    for index, layer in enumerate(_layers(cache)):
        if layer.keys is None or layer.values is None:
            raise UnsupportedCache(f"layer {index} cached nothing for a token")
        if layer.keys.shape != layer.values.shape:
            raise UnsupportedCache(
                f"layer {index}: keys {list(layer.keys.shape)}, values "
                f"{list(layer.values.shape)}; supported: keys and values of one shape"
            )
    kinds = {(tensor.shape, tensor.dtype, tensor.device) for tensor in kv_tensors(cache)}
    if len(kinds) != 1:
        raise UnsupportedCache(
            f"layers of {len(kinds)} shapes, dtypes or devices: {sorted(map(str, kinds))}; "
            "supported: all layers alike"
        )
    [(shape, dtype, device)] = kinds
    if len(shape) != 4 or shape[2] != 1:
        raise UnsupportedCache(
            f"keys of one token have shape {list(shape)}; supported: [batch, heads, tokens, dim]"
        )
    return Geometry(len(cache.layers), shape[1], shape[3], dtype, device)


def empty_cache(model: DecoderModel) -> DynamicCache:
    """The cache that `generate` would make for this model."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def fill(cache: DynamicCache, prefix: torch.Tensor) -> None:
    """Make `prefix`, [layers, 2, kv_heads, tokens, head_dim], the content of an empty cache.

    The layers are slices of it, so no byte is copied; they give it up with the first token that is
    added, since a DynamicLayer grows by concatenation.
    """
    for layer, (keys, values) in zip(_layers(cache), prefix.unsqueeze(2), strict=True):
        # An update of no tokens does what the layer needs once; one of all would copy them.
        layer.update(keys[:, :, :0], values[:, :, :0])
        layer.keys, layer.values = keys, values


def copy_of(model: DecoderModel, cache: DynamicCache) -> DynamicCache:
    """The same content in memory of its own; `generate` grows the cache that it is given."""
    copied = empty_cache(model)
    for layer, source in zip(_layers(copied), _layers(cache), strict=True):
        if source.keys is not None and source.values is not None:
            layer.update(source.keys.clone(), source.values.clone())
    return copied


def kv_tensors(cache: DynamicCache) -> Iterator[torch.Tensor]:
    """Keys, values, keys, values ... of the layers, each [batch, kv_heads, tokens, head_dim]."""
    for layer in _layers(cache):
        if layer.keys is not None and layer.values is not None:
            yield from (layer.keys, layer.values)


def foreign_layers(cache: DynamicCache) -> list[str]:
    """Which layers are more, or less, than plain keys and values of all tokens: index and type."""
    return [
        f"{index}: {type(layer).__name__}"
        for index, layer in enumerate(cache.layers)
        if type(layer) is not DynamicLayer
    ]


def _layers(cache: DynamicCache) -> list[DynamicLayer]:
    """Layers of a cache in which `foreign_layers` found none."""
    return cast("list[DynamicLayer]", cache.layers)
