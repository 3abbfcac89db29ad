#!/usr/bin/env python3
"""The yardstick of attention on a GPU: PyTorch's scaled_dot_product_attention by each backend that it has.

Prints one JSON line for each shape, backend and pass, with the names and the count of `cargo bench --bench gpu`:
causal, 2 products of the lower triangle forward and 5 backward.
"""

import argparse
import json
import sys

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

# batch, positions, heads, width: those of GPT-2 124M, 1558M, 1.7B and of a wide head.
SHAPES = [(32, 1024, 12, 64), (16, 1024, 25, 64), (8, 2048, 24, 96), (8, 2048, 16, 128)]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def seconds(device, f, repeat):
    """The mean time of `repeat` calls, behind one that is not counted."""
    f()
    if device == "cpu":
        import time

        start = time.perf_counter()
        for _ in range(repeat):
            f()
        return (time.perf_counter() - start) / repeat
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        f()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    shapes, backends = SHAPES, BACKENDS
    if args.device == "cpu":  # whether this program works, not how fast
        shapes, backends = [(1, 64, 2, 16)], {"math": SDPBackend.MATH}
    for batch, positions, heads, width in shapes:
        shape = f"{batch} x {positions} x {heads} x {width}"
        q, k, v = (torch.randn(batch, heads, positions, width, device=args.device, dtype=torch.bfloat16,
                               requires_grad=True) for _ in range(3))
        product = batch * heads * positions * positions * width
        for name, backend in backends.items():
            try:
                with sdpa_kernel(backend):
                    attend = lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    out = attend()
                    dout = torch.randn_like(out)
                    forward = seconds(args.device, attend, args.repeat)
                    both = seconds(args.device, lambda: torch.autograd.grad(attend(), (q, k, v), dout), args.repeat)
            except RuntimeError as error:
                print(f"{name} {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            for step, products, time in (("forward", 2, forward), ("backward", 5, both - forward)):
                print(json.dumps({"name": f"{name} {shape} {step}", "seconds": time, "unit": "TFLOP/s",
                                  "value": products * product / max(time, 1e-9) / 1e12}), flush=True)


if __name__ == "__main__":
    main()
