"""The shape of what a model caches, as a layout and as the forms of its blocks' parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvstore.connectors.transformers.caches import CACHE_ARGUMENT, cached_layers
from kvstore.cuda.block_form import BlockForm, Member
from kvstore.errors import InvalidLayout, UnsupportedCache
from kvstore.layout import KVLayer, LatentLayer, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers.cache_utils import DynamicLayer

    from kvstore.connectors.transformers.caches import Pair
    from kvstore.connectors.transformers.model import DecoderModel
    from kvstore.layout import CacheGroup, TensorSpec

#: How far the keys and values of a token may move, against the largest of them, when another
#: token follows: rounding in bfloat16 moves them by a hundredth.
CAUSAL_TOLERANCE = 0.05


class PartForm(NamedTuple):
    """One part of a block: the layers of a cache group, by their index in the model's cache."""

    layers: tuple[int, ...]
    group: CacheGroup
    form: BlockForm

    def first_needed(self, tokens: int) -> int:
        """The first token that the token after a prefix of so many sees, or its place if none."""
        window = self.group.window_tokens
        if window is None:
            return 0
        if self.group.attention == "sliding":
            return max(0, tokens - (window - 1))
        return tokens - tokens % window

    def first_kept(self, columns: int) -> int:
        """The first of so many columns that the layers' caches keep."""
        window = self.group.window_tokens
        return 0 if window is None else max(0, columns - (window - 1))


class Geometry(NamedTuple):
    """What a model caches for one token, of which type, and where; `layers` have a cache."""

    layout: Layout
    layers: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def forms(self, block_tokens: int) -> list[PartForm]:
        """The parts of a block: keys and values as they lie in the cache, after RoPE."""
        forms = []
        for part, group in zip(self.layout.parts, self.layout.groups, strict=True):
            specs = self.layout.tensors(part, block_tokens)
            members = [member for spec in specs for member in self._members(spec)]
            layers = tuple(self.layers[layer] for layer in group.layers)
            form = BlockForm(members, block_tokens, self.dtype)
            forms.append(PartForm(layers, group, form))
        return forms

    def _members(self, spec: TensorSpec) -> Iterator[Member]:
        """A key or a value; or, of a latent, both: what the cache calls them is side by side."""
        if spec.name != "latent":
            heads, _, dim = spec.shape
            head_step, token_step, _ = spec.stride_bytes
            yield Member(spec.offset_bytes, heads, dim, head_step, token_step)
            return
        layer = cast("LatentLayer", self.layout.specs[spec.layer])
        latent_bytes = layer.latent_dim * self.dtype.itemsize
        token_step = spec.stride_bytes[0]
        yield Member(spec.offset_bytes, 1, layer.latent_dim, 0, token_step)
        yield Member(spec.offset_bytes + latent_bytes, 1, layer.rope_dim, 0, token_step)


def measure(model: DecoderModel) -> Geometry:
    """The geometry of what the model really caches, from forward passes over a token or two.

    A config says it under a dozen names, and not always truly. Raises UnsupportedCache where a
    layer caches anything but keys and values, or they depend on what follows.
    """
    cache, pairs = _cached(model, tokens=1)
    layers = cached_layers(cache)
    kinds = {(str(tensor.dtype), str(tensor.device)) for pair in pairs for tensor in pair}
    if len(kinds) != 1:
        raise UnsupportedCache(
            f"the cache has tensors of {sorted(kinds)}; supported: one dtype on one device"
        )
    try:
        specs = [
            _layer_spec(model, cache, index, *pair)
            for index, pair in zip(layers, pairs, strict=True)
        ]
    except InvalidLayout as error:
        raise UnsupportedCache(f"{type(model).__name__}: {error}") from error
    _, followed = _cached(model, tokens=2)
    for layer, one, two in zip(layers, pairs, followed, strict=True):
        _check_causal(layer, one, two)
    return Geometry(Layout.of(specs), tuple(layers), pairs[0][0].dtype, pairs[0][0].device)


def _cached(model: DecoderModel, tokens: int) -> tuple[DynamicCache, list[Pair]]:
    """The cache after a forward pass over a few tokens, and what it has of each layer."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    # Not token 0, which is often for padding and then embedded as zeros.
    input_ids = torch.arange(1, tokens + 1, device=model.device)[None]
    with torch.no_grad():
        model(input_ids=input_ids, use_cache=True, **{CACHE_ARGUMENT: cache})
    pairs = []
    for index in cached_layers(cache):
        layer = cast("DynamicLayer", cache.layers[index])
        if layer.keys is None or layer.values is None:
            raise UnsupportedCache(f"layer {index} cached nothing for a token")
        pairs.append((layer.keys, layer.values))
    if not pairs:
        raise UnsupportedCache(f"{type(model).__name__} caches nothing")
    return cache, pairs


def _layer_spec(
    model: DecoderModel,
    cache: DynamicCache,
    index: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> KVLayer | LatentLayer:
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[::2] != (1, 1):
        raise UnsupportedCache(
            f"layer {index}: keys {list(keys.shape)} and values {list(values.shape)} of one token; "
            "supported: [batch, heads, tokens, dim], of as many heads"
        )
    heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    dtype = str(keys.dtype)
    attention, window = _rule(model, cache, index)
    config = model.config.get_text_config(decoder=True)
    latent = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    if heads == 1 and latent == (key_dim, value_dim):
        return LatentLayer(
            latent_dim=key_dim,
            rope_dim=value_dim,
            dtype=dtype,
            attention=attention,
            window_tokens=window,
        )
    return KVLayer(
        kv_heads=heads,
        head_dim=key_dim,
        value_head_dim=value_dim,
        dtype=dtype,
        attention=attention,
        window_tokens=window,
    )


def _rule(model: DecoderModel, cache: DynamicCache, index: int) -> tuple[str, int | None]:
    """Which earlier tokens a layer sees: to the cache a span of tokens is a window, too."""
    layer = cache.layers[index]
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return "full", None
    window = int(layer.sliding_window)
    if window < 2:
        raise UnsupportedCache(f"layer {index}: a window of {window} tokens; supported: 2 or more")
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if types is None:
        has_window = getattr(config, "sliding_window", None) is not None
        return ("sliding" if has_window else "chunked"), window
    return ("chunked" if types[index] == "chunked_attention" else "sliding"), window


def _check_causal(index: int, alone: Pair, followed: Pair) -> None:
    """A prefix names a block only if its keys and values are the same whatever follows."""
    for before, after in zip(alone, followed, strict=True):
        if after.shape[2] < 2:
            continue  # a window of two tokens has forgotten the first one
        first, scale = after[:, :, :1].float(), before.float().abs().max()
        if bool((before.float() - first).abs().max() > CAUSAL_TOLERANCE * scale):
            raise UnsupportedCache(
                f"layer {index}: the keys or values of a token change with the token after it; "
                "supported: causal attention"
            )
