#!/usr/bin/env python3
"""The yardstick of `cargo bench --bench generate`: greedy tokens per second of GPT-2 124M in transformers.

    benches/peers/transformers_generate.py [--tokens N] [--threads N]

Weights are random; the vocabulary is padded to 50304. Prints lines for f32 and bf16, for 1, 4 and 8 texts together, in each
state of the core: the median step of rounds, from the first generated token on, after one round that is not counted.
"""

import argparse
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, StoppingCriteria, StoppingCriteriaList

from states import by_state, limit, small_product

ROUNDS = 3
PROMPT = 16
BATCHES = [1, 4, 8]


class Steps(StoppingCriteria):
    """Notes the time from each token to the next, and stops nothing."""

    def __init__(self, probe):
        self.probe = probe
        self.began = None
        self.samples = []

    def __call__(self, ids, _scores, **_):
        now = time.perf_counter()
        self.probe()  # the first one only brings the caches back
        probe = self.probe()
        if self.began:
            before, start = self.began
            self.samples.append((before, now - start, probe))
        self.began = probe, time.perf_counter()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50304)).eval()
    probe, found = small_product(torch.float32), []
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        model = model.to(dtype)
        for batch in BATCHES:
            rounds = [steps(model, batch, arguments.tokens, probe) for _ in range(ROUNDS + 1)]
            found.append((name, batch, sum(rounds[1:], [])))
    shared = limit([sample for *_, samples in found for sample in samples])
    for name, batch, samples in found:
        for state, taken in by_state(samples, shared).items():
            if taken:
                speed = batch / statistics.median(taken)
                print(f"gpt2-124m {name}, {batch} together: {speed:.1f} tokens/s, "
                      f"{arguments.threads} threads, {state} ({len(taken)})")


def steps(model, batch, tokens, probe):
    """The steps from one token of each text to the next, with the probe before and after each."""
    prompt = torch.tensor([[i * 997 + 1 + text for i in range(PROMPT)] for text in range(batch)])
    steps = Steps(probe)
    with torch.inference_mode():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=tokens + 1,
            max_new_tokens=tokens + 1,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([steps]),
        )
    return steps.samples


if __name__ == "__main__":
    main()
