"""Which model is this? The part of a namespace that transformers alone can answer.

Equal names with other weights must never meet, so the fingerprint is taken from what is in memory:
a merged adapter, an edited weight, another dtype each make another namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvstore.errors import UnsupportedCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.connectors.transformers.model import DecoderModel

#: Fields of a config that do not change what the model computes: who wrote it and when, labels,
#: what a call returns. The dtype is that of the tensors, which are hashed themselves.
VOLATILE_FIELDS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def model_name(model: DecoderModel) -> str:
    """A name for people, from the config: of the hub, of the folder, or of the architecture."""
    name = str(getattr(model.config, "name_or_path", None) or model.config.model_type)
    # A path differs between machines that serve the same model; its last part seldom does.
    return Path(name).resolve().name if Path(name).is_dir() else name


def fingerprint(model: DecoderModel, weights: str | None = None) -> str:
    """`sha256:` and the digest of the weights and of the config that says what is done with them.

    `weights` names the weights where the caller knows better, by the hub's revision for example;
    the config counts all the same. Otherwise all parameters and buffers are read once, tensor by
    tensor on all cores (about 1 GB/s for each core with SHA instructions), with memory for one
    tensor per core where the model is not on the CPU. Raises UnsupportedCache where weights are in
    memory that this cannot see.
    """
    description = {
        "config": _lasting(model.config.to_dict()),
        "weights": _weights(model) if weights is None else weights,
    }
    adapters = adapter_state(model)
    if adapters and weights is None:
        # Of several that are loaded, which one is active is in no weight.
        description["adapters"] = sorted(map(repr, adapters))
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), default=repr)
    return f"sha256:{hashlib.sha256(text.encode('utf-8')).hexdigest()}"


class AdapterState(NamedTuple):
    """How one module of a model has its adapters."""

    is_disabled: bool
    is_merged: bool
    active: tuple[str, ...]
    scaling: tuple[tuple[str, float], ...]


def adapter_state(model: DecoderModel) -> frozenset[AdapterState]:
    """Which adapters count, and how much, wherever there are any in the model."""
    if not getattr(model, "peft_config", None):
        return frozenset()
    return frozenset(
        AdapterState(
            bool(module.disable_adapters),
            bool(getattr(module, "merged", False)),
            tuple(getattr(module, "active_adapters", ())),
            tuple(sorted(getattr(module, "scaling", {}).items())),
        )
        for module in model.modules()
        # The model itself has methods of these names.
        if isinstance(getattr(module, "disable_adapters", None), bool)
    )


def tensor_digests(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[list[object]]:
    """Name, type, shape and digest of each tensor; on all cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashlib releases the GIL
        digests = list(pool.map(_tensor_digest, (tensor for _, tensor in tensors)))
    return [
        [name, str(tensor.dtype), list(tensor.shape), digest]
        for (name, tensor), digest in zip(tensors, digests, strict=True)
    ]


def _weights(model: DecoderModel) -> list[list[object]]:
    _check_weights_visible(model)
    return tensor_digests(sorted(_tensors(model), key=lambda named: named[0]))


def _check_weights_visible(model: DecoderModel) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedCache(
            "the model is quantised, and its scales may lie outside its parameters and buffers: "
            "pass fingerprint=, for example the hub revision"
        )
    if any(tensor.is_meta for _, tensor in _tensors(model)):
        raise UnsupportedCache(
            "some weights are on the meta device, so they cannot be hashed: pass fingerprint=, for "
            "example the hub revision"
        )


def _tensors(model: DecoderModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensor_digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.data).hexdigest()


def _lasting(value: object) -> object:
    """The config without its volatile fields, also in the configs that it is made of."""
    if isinstance(value, dict):
        return {
            str(key): _lasting(inner) for key, inner in value.items() if key not in VOLATILE_FIELDS
        }
    if isinstance(value, list | tuple):
        return [_lasting(inner) for inner in value]
    return value
