#!/usr/bin/env python3
"""nanoGPT's published CPU recipe on a text file, in PyTorch: the yardstick of a training run.

    python torch_shakespeare.py --data input.txt --seed 1

A character-level GPT without biases: 4 layers, 4 heads, width 128, context 64, batch 12, 2000 steps of AdamW
(betas 0.9 / 0.99, decay 0.1 on matrices, clipping 1.0), learning rate 1e-3 after 100 linear warm-up steps,
then cosine to 1e-4; no dropout; residual projections start at 0.02 / sqrt(2 * layers). The first 90 % of the
characters are for training, the last 10 % for validation.

Prints one JSON line: `seconds` of the training loop alone (drawing batches included, evaluation and set-up not),
`val_loss` over the whole validation split: windows of 64 characters laid end to end, the last one shorter, so
that every character but the split's first is predicted exactly once; the mean is over characters.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

from torch_gpt import Gpt, make_optimizer, peak_rss_mb

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 4, 4, 128, 64, 12
PEAK_LR, FINAL_LR, WARMUP = 1e-3, 1e-4, 100
BETAS, WEIGHT_DECAY, CLIP_GRAD = (0.9, 0.99), 0.1, 1.0


def learning_rate(step, steps):
    """`step` counts from zero."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return FINAL_LR + 0.5 * (1 + math.cos(math.pi * done)) * (PEAK_LR - FINAL_LR)


def draw_batch(data):
    starts = torch.randint(len(data) - LENGTH, (BATCH, 1))
    text = data[starts + torch.arange(LENGTH + 1)]
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@torch.no_grad()
def validation_loss(model, data):
    targets = len(data) - 1
    whole = targets // LENGTH * LENGTH
    tokens, following = data[:whole].view(-1, LENGTH), data[1 : whole + 1].view(-1, LENGTH)
    pieces = list(zip(tokens.split(64), following.split(64)))
    if whole < targets:
        pieces.append((data[None, whole:-1], data[None, whole + 1 :]))
    return sum(model(x, y, reduction="sum").item() for x, y in pieces) / targets


def main():
    parser = argparse.ArgumentParser(description="nanoGPT's CPU recipe in PyTorch")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a text file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bias", action="store_true", help="give linear layers and norms biases, as GPT-2 has")
    parser.add_argument("--compile", action="store_true", help="run the model through torch.compile")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    text = args.data.read_text(encoding="utf-8")
    letters = sorted(set(text))
    index = {c: i for i, c in enumerate(letters)}
    data = torch.tensor([index[c] for c in text])
    cut = len(data) * 9 // 10
    train, validation = data[:cut], data[cut:]

    residual_std = 0.02 / math.sqrt(2 * LAYERS)
    model = Gpt(len(letters), WIDTH, LAYERS, HEADS, LENGTH, bias=args.bias, residual_std=residual_std)
    optimizer = make_optimizer(model, PEAK_LR, BETAS, WEIGHT_DECAY)
    run = torch.compile(model) if args.compile else model

    start = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        loss = run(*draw_batch(train))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - start

    result = dict(
        system=f"torch {torch.__version__}",
        mode="compiled" if args.compile else "eager",
        threads=args.threads,
        seed=args.seed,
        bias=args.bias,
        steps=args.steps,
        parameters=sum(p.numel() for p in model.parameters()),
        seconds=round(seconds, 3),
        s_per_step=round(seconds / args.steps, 6),
        tokens_per_s=round(args.steps * BATCH * LENGTH / seconds, 1),
        peak_rss_mb=peak_rss_mb(),
        train_loss=loss.item(),
        val_loss=validation_loss(model, validation),
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
