"""A chat of three turns over one store: each turn computes only what is new.

Runs as it is, with a small model of random weights. For a real one, make `model` and the token ids
as you always do; nothing else changes.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.connectors.transformers import PrefixCache

NEW_TOKENS = 24


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    with kvstore.open(dram_capacity_bytes="256MiB") as store:
        cache = PrefixCache(model, store)
        chat = torch.randint(1000, (1, 200))  # the system prompt
        for turn in range(3):
            question = torch.randint(1000, (1, 20))
            chat = torch.cat([chat, question], dim=1)
            chat = cache.generate(chat, do_sample=False, max_new_tokens=NEW_TOKENS)
            print(f"turn {turn + 1}: {cache.last}")


if __name__ == "__main__":
    main()
