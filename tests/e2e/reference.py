"""What the model itself says, to compare with what came out of a store.

Tokens alone are a weak witness: a window that is short of a token seldom changes the next one. So
logits are compared, too, and stored bytes with the keys and values of a forward pass over the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from kvstore.connectors.transformers import PrefixCache
from kvstore.connectors.transformers.caches import CACHE_ARGUMENT, cached_layers

BLOCK = 16
PAD = 0
#: A step counts as decided if the best token leads by this much; rounding moves logits by 1e-5.
MARGIN = 1e-3
#: Of the largest of them, how far logits, keys and values may be apart.
TOLERANCE = 1e-4
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def plain(model: Any, input_ids: Any, **arguments: Any) -> Any:
    """What generate says without the store, after a look at how clearly it says it."""
    output = model.generate(input_ids, **{**GREEDY, **arguments, **LOGITS})
    best, second = torch.cat(output.logits).topk(2).values.unbind(1)
    assert (best - second).min() > MARGIN
    return output.sequences


def check_same(model: Any, cache: PrefixCache, input_ids: Any, **arguments: Any) -> Any:
    """Call both with one seed: equal tokens and, up to rounding, equal logits; the tokens."""
    outputs = []
    for generate in (model.generate, cache.generate):
        torch.manual_seed(7)
        outputs.append(generate(input_ids, **{**GREEDY, **arguments, **LOGITS}))
    alone, through = outputs
    close(torch.stack(through.logits), torch.stack(alone.logits))
    assert torch.equal(through.sequences, alone.sequences)
    return through.sequences


def check_cold_and_warm(
    model: Any, cache: PrefixCache, input_ids: Any, *, loaded: int, **arguments: Any
) -> Any:
    """The same with an empty store and then with what that left, of which so much is loaded."""
    check_same(model, cache, input_ids, **arguments)
    assert cache.last.loaded_tokens == 0
    sequences = check_same(model, cache, input_ids, **arguments)
    assert cache.last.loaded_tokens == loaded
    return sequences


def close(actual: Any, expected: Any) -> None:
    """Equal up to rounding."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE * scale)


def batch(*rows: Any) -> dict[str, Any]:
    """The arguments of a batch of rows of different lengths: padded on the left."""
    lists = [torch.as_tensor(row).reshape(-1).tolist() for row in rows]
    columns = max(map(len, lists))
    padding = [columns - len(row) for row in lists]
    return {
        "input_ids": torch.tensor([[PAD] * n + row for n, row in zip(padding, lists, strict=True)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (columns - n) for n in padding]),
        "pad_token_id": PAD,
    }


def texts(arguments: dict[str, Any], sequences: Any) -> list[list[int]]:
    """The rows that came out of a batch, each without its padding."""
    masks = arguments["attention_mask"]
    answers = len(sequences) // len(masks)
    padding = (masks == 0).sum(1).repeat_interleave(answers).tolist()
    return [row[n:] for n, row in zip(padding, sequences.tolist(), strict=True)]


def stored_blocks(cache: PrefixCache, store: Any, tokens: list[int]) -> int:
    """How many blocks of a row are in the store."""
    with store.session(cache.namespace) as session:
        blocks: int = session.match(cache.namespace.keys(tokens)).blocks
    return blocks


def check_blocks(model: Any, cache: PrefixCache, store: Any, tokens: list[int]) -> list[int]:
    """Compare what is stored of a row with a forward pass; how many blocks of each part there are.

    A window's part is looked for at every block, whether or not this prefix needs it.
    """
    layout, size = cache.namespace.layout, cache.namespace.block_tokens
    keys = cache.namespace.keys(tokens)
    own = _forward(model, tokens)
    layers = cached_layers(_empty_cache(model))
    counts = []
    for part in layout.parts:
        counts.append(0)
        with store.session(cache.namespace, part=part) as session:
            for block in range(len(keys)):
                with session.lease(keys[: block + 1]) as lease:
                    # What a shorter prefix has of a window was looked at before.
                    if lease.blocks <= block or lease.views[block] is None:
                        continue
                    memory = np.array(lease.views[block])
                counts[-1] += 1
                for spec in layout.tensors(part, size):
                    expected = _own(own.layers[layers[spec.layer]], spec, block * size, size)
                    close(_tensor(memory, spec), expected)
    return counts


def _empty_cache(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config.get_text_config(decoder=True))


def _forward(model: Any, tokens: list[int]) -> Any:
    """The cache after one pass over a row by itself, in which sliding layers keep all tokens."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([tokens]), **{CACHE_ARGUMENT: cache})
    return cache


def _tensor(memory: Any, spec: Any) -> Any:
    array = np.ndarray(spec.shape, spec.dtype, memory, spec.offset_bytes, spec.stride_bytes)
    return torch.from_numpy(np.array(array))


def _own(layer: Any, spec: Any, first: int, size: int) -> Any:
    span = slice(first, first + size)
    if spec.name == "latent":
        return torch.cat([layer.keys[0, 0, span], layer.values[0, 0, span]], dim=-1)
    return (layer.keys if spec.name == "key" else layer.values)[0, :, span]
