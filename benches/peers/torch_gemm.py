#!/usr/bin/env python3
"""The yardstick of `cargo bench --bench kernels -- gemm`: the products of a GPT-2 124M step in PyTorch (oneDNN, MKL).

Prints a row for each product with GFLOP/s: median and best of the samples taken while the core had its units to
itself ("alone") and while it shared them ("shared"). A small product before and after each sample tells the two apart.
"""

import argparse
import statistics
import time

import torch

from states import by_state, limit, small_product, timed

ROWS = 1024
LAYERS = 12
# (k, n, times in a step)
LINEARS = [(768, 2304, LAYERS), (768, 768, LAYERS), (768, 3072, LAYERS), (3072, 768, LAYERS), (768, 50304, 1)]


def product(kind, k, n, dtype):
    def random(*shape):
        return torch.randn(shape).to(dtype)

    if kind == "y":
        x, weight, bias, out = random(ROWS, k), random(n, k), random(n), random(ROWS, n)
        return lambda: torch.addmm(bias, x, weight.t(), out=out)
    if kind == "dx":
        dy, weight, out = random(ROWS, n), random(n, k), random(ROWS, k)
        return lambda: torch.mm(dy, weight, out=out)
    dy, x, out = random(ROWS, n), random(ROWS, k), random(n, k)
    return lambda: torch.mm(dy.t(), x, out=out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each product")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    probe, rows = small_product(dtype), []
    for kind in ("y", "dx", "dw"):
        for k, n, times in LINEARS:
            run, samples = product(kind, k, n, dtype), []
            run()
            start = time.perf_counter()
            while time.perf_counter() - start < args.seconds or len(samples) < 5:
                # The first probe after a product only brings the caches back.
                before, seconds, _ = probe(), timed(run), probe()
                samples.append((before, seconds, probe()))
            rows.append((kind, k, n, times, samples))

    shared = limit([sample for *_, samples in rows for sample in samples])
    print(f"{'product':16}{'alone: median / best (samples)':>32}{'shared':>28}   GFLOP/s, {args.dtype}")
    totals = {"alone": [0.0, 0.0], "shared": [0.0, 0.0]}
    for kind, k, n, times, samples in rows:
        work = 2e-9 * ROWS * k * n
        cells = []
        for state, taken in by_state(samples, shared).items():
            if not taken:
                cells.append("-")
                continue
            median = statistics.median(taken)
            totals[state][0] += times * work
            totals[state][1] += times * median
            cells.append(f"{work / median:.0f} / {work / min(taken):.0f} ({len(taken)})")
        print(f"{f'{kind} {k} {n}':16}{cells[0]:>32}{cells[1]:>28}")
    for state, (work, seconds) in totals.items():
        if seconds:
            print(f"a step's products, {state}: {work / seconds:.0f} GFLOP/s over {work:.0f} GFLOP")


if __name__ == "__main__":
    main()
