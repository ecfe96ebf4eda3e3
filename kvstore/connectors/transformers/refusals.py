"""What cannot be kept without loss is refused, by type and with what was found and what is allowed.

A prefix of tokens names a block. So whatever else decides a block's bytes, or the tokens that come
out, is either part of the namespace or refused here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin

from kvstore.connectors.transformers import caches, identity
from kvstore.connectors.transformers.prompts import setting
from kvstore.errors import UnsupportedCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvstore.connectors.transformers.model import DecoderModel

#: These take their frequencies from the length of the whole sequence, so that the keys of a prefix
#: depend on what follows it.
UNSTABLE_ROPE_TYPES = frozenset({"dynamic", "longrope"})

#: Settings of `generate` that lead away from greedy search, sampling and beam search over one
#: DynamicCache, with the values that do not.
_PLAIN_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "num_beam_groups": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    # Assisted decoding begins at the first token, whatever the cache holds.
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    # Before transformers 5.2x such a prefill began at the first token, whatever the cache held.
    "prefill_chunk_size": (None,),
    # Their first entry is of the prefill, which would be shorter by the loaded tokens.
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
_PLAIN_ARGUMENTS = ("assistant_model", "custom_generate")


def check_model(model: DecoderModel) -> None:
    """Raise UnsupportedCache for a model whose cache is not keys and values of all tokens."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedCache(
            f"{type(model).__name__} is an encoder-decoder model; supported: decoder models"
        )
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    foreign = caches.foreign_layers(cache)
    if foreign:
        raise UnsupportedCache(
            f"cache layers {', '.join(foreign[:4])}{' ...' if foreign[4:] else ''} "
            f"({len(foreign)} in all) keep more or less than the keys and values of tokens; "
            "supported: DynamicLayer (full attention) and DynamicSlidingWindowLayer"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedCache(
            f"{type(model).__name__} keeps a state that cannot be cut back to a prefix; supported: "
            "models that keep only keys and values"
        )
    for part in (model, getattr(model, "model", None)):
        if hasattr(part, "rope_deltas"):
            raise UnsupportedCache(
                f"{type(model).__name__} shifts positions by what its last image was; supported: "
                "models whose positions depend on the tokens alone"
            )
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedCache(
            "use_bidirectional_attention: the keys of a prefix change with what follows; "
            "supported: causal attention"
        )
    for rope_type in _rope_types(config.to_dict()):
        if rope_type in UNSTABLE_ROPE_TYPES:
            raise UnsupportedCache(
                f"RoPE of type {rope_type!r}: the keys of a prefix change with the length of what "
                "follows; supported: types with fixed frequencies"
            )
    tensors = (*model.named_parameters(), *model.named_buffers())
    devices = sorted({str(tensor.device) for _, tensor in tensors})
    if len(devices) != 1:
        raise UnsupportedCache(f"the model lies on {', '.join(devices)}; supported: one device")


def check_adapter(model: DecoderModel, adapter: object) -> None:
    """Raise UnsupportedCache where an adapter is loaded and nobody has said which is active."""
    adapters = getattr(model, "peft_config", None) or {}
    for name, config in adapters.items():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedCache(
                f"adapter {name!r} puts keys and values of its own before the prompt; supported: "
                "adapters that change weights"
            )
    if adapters and adapter is None:
        raise UnsupportedCache(
            f"a PEFT adapter is loaded ({', '.join(sorted(map(str, adapters)))}): merge it, or "
            "pass adapter= with the digest of the active one, which adapter_digest() computes"
        )


def check_call(model: DecoderModel, input_ids: torch.Tensor, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedCache for a call of `generate` that goes other ways than those supported."""
    is_batch = isinstance(input_ids, torch.Tensor) and input_ids.ndim == 2
    if not is_batch or input_ids.is_floating_point() or 0 in input_ids.shape:
        found = list(getattr(input_ids, "shape", [])) or type(input_ids).__name__
        kind = f" of {input_ids.dtype}" if is_batch else ""
        raise TypeError(
            f"input_ids: expected a tensor of token ids, [rows, tokens], got {found}{kind}"
        )
    if model.training:
        raise UnsupportedCache("the model is in training mode (dropout); call model.eval()")
    device_type = input_ids.device.type
    if torch.is_autocast_enabled(device_type):
        raise UnsupportedCache(
            "autocast is on, so the cache may have another dtype than its layout; supported: off"
        )
    _check_arguments(arguments)
    _check_settings(model, arguments)


def check_unchanged(
    model: DecoderModel,
    dtype: torch.dtype,
    device: torch.device,
    adapters: frozenset[identity.AdapterState],
) -> None:
    """Raise UnsupportedCache where the model is no longer what its fingerprint was taken from.

    Edits of single weights are not seen.
    """
    if identity.adapter_state(model) != adapters:
        raise UnsupportedCache(
            "the model's adapter was exchanged, scaled, switched on or off or merged since; make "
            "another PrefixCache, one for each adapter"
        )
    if (model.dtype, model.device) != (dtype, device):
        raise UnsupportedCache(
            f"the model was {dtype} on {device} and is now {model.dtype} on {model.device}; make "
            "another PrefixCache"
        )


def check_cache(cache: object) -> None:
    """Raise UnsupportedCache for a caller's cache that cannot be copied as keys and values."""
    if not isinstance(cache, DynamicCache) or not caches.is_plain(cache):
        raise UnsupportedCache(
            f"{caches.CACHE_ARGUMENT} is a {type(cache).__name__}"
            f"{' that offloads' if getattr(cache, 'offloading', False) else ''}; "
            "supported: a plain DynamicCache, or none"
        )
    foreign = caches.foreign_layers(cache)
    if foreign:
        raise UnsupportedCache(
            f"{caches.CACHE_ARGUMENT} has layers {', '.join(foreign[:4])}; "
            "supported: those of full attention and of sliding windows"
        )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    for name in _PLAIN_ARGUMENTS:
        if arguments.get(name) is not None:
            raise UnsupportedCache(
                f"{name} is given; supported: greedy search, sampling and beam search by generate"
            )
    allowed = {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "inputs"}
    allowed |= {*vars(_default_settings()), "attention_mask", "tokenizer"}
    for name, value in arguments.items():
        if name not in allowed and value is not None:
            raise UnsupportedCache(
                f"model input {name!r}: it may change what is cached, and blocks are found by "
                "their tokens alone; supported: input_ids and attention_mask"
            )


def _check_settings(model: DecoderModel, arguments: Mapping[str, Any]) -> None:
    for name, plain in _PLAIN_SETTINGS.items():
        value = setting(model, arguments, name)
        if value not in plain:
            shown = " or ".join(repr(each) for each in plain if each is not None) or "not set"
            raise UnsupportedCache(f"{name}={value!r}; supported: {shown}")


def _default_settings() -> object:
    make: Callable[[], object] = GenerationConfig
    return make()


def _rope_types(config: object) -> Iterator[str]:
    """All RoPE types in a config, be they of the model, of a layer type or of a part of it."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name in {"rope_type", "type"} and isinstance(value, str):
                yield value
            else:
                yield from _rope_types(value)
