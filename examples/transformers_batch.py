"""A padded batch of questions on one system prompt, several answers to each, and then beam search.

Runs as it is, with a small model of random weights. For a real one, let its tokenizer make the
batch (`padding_side="left"`); nothing else changes.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.connectors.transformers import PrefixCache

PAD, END = 0, 1


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000, bos_token_id=None, pad_token_id=PAD,
        eos_token_id=END,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    system = torch.randint(2, 1000, (200,))
    questions = [torch.randint(2, 1000, (tokens,)) for tokens in (20, 35, 8)]
    rows = [torch.cat([system, question]) for question in questions]
    input_ids = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=PAD, padding_side="left"
    )
    batch = {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long()}

    with kvstore.open(dram_capacity_bytes="256MiB") as store:
        cache = PrefixCache(model, store)
        answers = cache.generate(**batch, do_sample=True, num_return_sequences=2, max_new_tokens=24)
        print(f"{len(answers)} answers to {len(rows)} questions: {cache.last}")
        cache.generate(**batch, num_beams=3, max_new_tokens=24)
        print(f"beam search over the same prompts: {cache.last}")


if __name__ == "__main__":
    main()
