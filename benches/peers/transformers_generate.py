#!/usr/bin/env python3
"""The yardstick of `cargo bench --bench generate`: greedy tokens per second of GPT-2 124M in transformers.

    benches/peers/transformers_generate.py [--tokens N] [--threads N]

Weights are random; the vocabulary is padded to 50304. Prints a line for f32 and one for bf16: the median of rounds, from
the first generated token on, after one round that is not counted.
"""

import argparse
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

ROUNDS = 3
PROMPT = 16


class Moments:
    """The streamer that `generate` gives each token to, when it comes."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50304)).eval()
    prompt = torch.tensor([[i * 997 + 1 for i in range(PROMPT)]])
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        model = model.to(dtype)
        seconds = []
        for _ in range(ROUNDS + 1):
            moments = Moments()
            count = arguments.tokens + 1
            with torch.inference_mode():
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    min_new_tokens=count,
                    max_new_tokens=count,
                    pad_token_id=0,
                    streamer=moments,
                )
            times = moments.times[1:]  # the prompt comes first
            seconds.append((times[-1] - times[0]) / (len(times) - 1))
        print(f"gpt2-124m {name}: {1 / statistics.median(seconds[1:]):.1f} tokens/s, {arguments.threads} threads")


if __name__ == "__main__":
    main()
