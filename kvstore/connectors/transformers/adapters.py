"""The digest of an adapter, such as a LoRA: by its content, since names are reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.connectors.transformers.identity import tensor_digests
from kvstore.errors import UnsupportedCache

if TYPE_CHECKING:
    import os

    import torch

#: The files that PEFT saves an adapter as.
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

#: Fields of an adapter's config that do not change what it computes.
VOLATILE_FIELDS = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
)


def adapter_digest(
    weights: Mapping[str, torch.Tensor] | str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
) -> str:
    """`sha256:` and the digest of an adapter's weights and config, for `PrefixCache(adapter=…)`.

    `weights` are a state dict, a safetensors file, or a folder as PEFT saves it, which has the
    config too. Else `config` is needed: it says what the weights do not, `lora_alpha` above all; a
    dict of anything that JSON can say, {} where there is nothing to say. Equal content gives equal
    digests, wherever it comes from and whatever it is called.

    Raises UnsupportedCache for a folder whose weights are a pickle, TypeError without a config.
    """
    if isinstance(weights, Mapping):
        tensors = weights
    else:
        path = Path(weights)
        if path.is_dir():
            config = (
                json.loads((path / CONFIG_FILE).read_text("utf-8")) if config is None else config
            )
            path = path / WEIGHTS_FILE
        tensors = _load(path)
    if config is None:
        raise TypeError(
            "config: expected the adapter's config, since its weights do not say how much they "
            "count for (lora_alpha); {} where there is none"
        )
    description = {"config": _plain(config), "weights": tensor_digests(sorted(tensors.items()))}
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode('utf-8')).hexdigest()}"


def _load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # comes with transformers

    if not path.exists() and path.with_suffix(".bin").exists():
        raise UnsupportedCache(
            f"{path.with_suffix('.bin')} is a pickle, which may run code when it is read; "
            "supported: safetensors"
        )
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def _plain(value: object) -> object:
    """A config as JSON has it, without its volatile fields; names in an order of their own."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in VOLATILE_FIELDS}
    if isinstance(value, (set, frozenset, list, tuple)):
        items = [_plain(item) for item in value]
        # The modules that an adapter is for come as a set, or in any order.
        return sorted(items, key=str) if all(isinstance(item, str) for item in items) else items
    if value is None or isinstance(value, (str, int, float)):
        return value
    return repr(value)
