#!/usr/bin/env python3
"""The yardstick of `cargo bench --bench generate`: greedy tokens per second of GPT-2 124M in transformers.

    benches/peers/transformers_generate.py [--tokens N] [--threads N]

Weights are random; the vocabulary is padded to 50304. Prints a line for f32 and one for bf16, for 1, 4 and 8 texts
together: the median of rounds, from the first generated token on, after one round that is not counted.
"""

import argparse
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, StoppingCriteria, StoppingCriteriaList

ROUNDS = 3
PROMPT = 16
BATCHES = [1, 4, 8]


class Moments(StoppingCriteria):
    """Notes the time of each token, and stops nothing."""

    def __init__(self):
        self.times = []

    def __call__(self, ids, _scores, **_):
        self.times.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50304)).eval()
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        model = model.to(dtype)
        for batch in BATCHES:
            seconds = [step_seconds(model, batch, arguments.tokens) for _ in range(ROUNDS + 1)]
            speed = batch / statistics.median(seconds[1:])
            print(f"gpt2-124m {name}, {batch} together: {speed:.1f} tokens/s, {arguments.threads} threads")


def step_seconds(model, batch, tokens):
    """Seconds from one token of each text to the next."""
    prompt = torch.tensor([[i * 997 + 1 + text for i in range(PROMPT)] for text in range(batch)])
    moments = Moments()
    with torch.inference_mode():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=tokens + 1,
            max_new_tokens=tokens + 1,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([moments]),
        )
    return (moments.times[-1] - moments.times[0]) / (len(moments.times) - 1)


if __name__ == "__main__":
    main()
