#!/usr/bin/env python3
"""The yardstick of `ferrotron bench`: the same GPT-2-style training step in PyTorch.

One step is forward, backward, clipping to a global norm of 1.0 and fused AdamW, on fresh random tokens. Prints
one JSON line with the keys of `ferrotron bench`:

    s_per_step     median over --steps timed steps, in seconds; --warmup steps before them are not counted
    tokens_per_s   micro-batch size * sequence length / s_per_step
    gflops         (6 * parameters + 12 * layers * hidden * sequence) * tokens / s_per_step / 1e9: the count of
                   the PaLM paper's appendix, causal attention not halved, tied embeddings counted once
    peak_rss_mb    the process's largest resident set, in MiB, the interpreter and the libraries included
    last_loss      mean cross-entropy of the last step, before its update

Where torch.compile fails, for want of a C compiler, say, the step is timed without it, and `mode` says so.

Model: pre-LN, learned positions (as many as --seq-length), GELU tanh, biases, LayerNorm eps 1e-5, tied head,
normal(0, 0.02) weights, dropout 0. The defaults are GPT-2 124M with its vocabulary padded to 50304.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
import traceback

if "--instruction-set=avx2" in sys.argv or "avx2" in sys.argv[1:]:
    # Read while torch is imported.
    os.environ.update(ATEN_CPU_CAPABILITY="avx2", MKL_ENABLE_INSTRUCTIONS="AVX2", ONEDNN_MAX_CPU_ISA="AVX2")

import torch
from torch import nn
from torch.nn import functional

LEARNING_RATE = 6e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_GRAD = 1.0


class Attention(nn.Module):
    def __init__(self, width, heads, bias=True):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x):  # (B, T, C)
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, bias=True):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, bias=bias)
        self.attn = Attention(width, heads, bias)
        self.norm_2 = nn.LayerNorm(width, bias=bias)
        self.fc = nn.Linear(width, 4 * width, bias=bias)
        self.proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        x = x + self.attn(self.norm_1(x))
        return x + self.proj(functional.gelu(self.fc(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Returns the mean loss of next-token targets; `residual_std` is the spread of the two residual projections."""

    def __init__(self, vocab, width, layers, heads, length, bias=True, residual_std=0.02):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias) for _ in range(layers))
        self.norm_f = nn.LayerNorm(width, bias=bias)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=residual_std if name.endswith("proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets, reduction="mean"):  # (B, T)
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets, reduction)

    def loss(self, x, targets, reduction):
        logits = functional.linear(self.norm_f(x), self.wte.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def make_optimizer(model, lr, betas, weight_decay):
    """Fused AdamW that decays matrices and embeddings, not biases and norms."""
    groups = [
        dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=weight_decay),
        dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)


def peak_rss_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def arguments():
    parser = argparse.ArgumentParser(description="time a GPT training step in PyTorch")
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--num-attention-heads", type=int, default=12)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instruction-set", choices=["avx2"], help="let PyTorch, MKL and oneDNN use no better one")
    parser.add_argument("--compile", action="store_true", help="run the model through torch.compile")
    parser.add_argument("--compile-blocks", action="store_true",
                        help="compile one block, which all share, and the head with the loss: much sooner than 48 blocks at once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="bf16: autocast, f32 weights")
    parser.add_argument("--bf16", dest="dtype", action="store_const", const="bf16", help="as --dtype bf16")
    return parser.parse_args()


def main():
    args = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    on_gpu = args.device.startswith("cuda")
    if on_gpu:
        torch.set_float32_matmul_precision("high")

    width, layers, length = args.hidden_size, args.num_layers, args.seq_length
    model = Gpt(args.vocab_size, width, layers, args.num_attention_heads, length).to(args.device)
    optimizer = make_optimizer(model, LEARNING_RATE, BETAS, WEIGHT_DECAY)
    run = torch.compile(model) if args.compile else model
    if args.compile_blocks:
        for block in model.blocks:
            block.compile()
        model.loss = torch.compile(model.loss)
    cast = torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=args.dtype == "bf16")

    def finish():
        if on_gpu:
            torch.cuda.synchronize()

    def gradients(tokens, targets):
        with cast:
            loss = run(tokens, targets)
        loss.backward()
        return loss

    mode = "compiled" if args.compile else "compiled blocks" if args.compile_blocks else "eager"
    if mode != "eager":
        nothing = torch.zeros(args.micro_batch_size, length, dtype=torch.long, device=args.device)
        try:
            gradients(nothing, nothing)  # the first call compiles
        except Exception as error:  # of whichever compiler
            traceback.print_exc()
            torch.compiler.set_stance("force_eager")
            reason = " ".join(str(error).split("\n\n")[0].split())  # without the hints behind it
            mode = f"eager, since torch.compile failed: {type(error).__name__}: {reason[:160]}"
        optimizer.zero_grad(set_to_none=True)

    seconds = []
    for _ in range(args.warmup + args.steps):
        text = torch.randint(args.vocab_size, (args.micro_batch_size, length + 1), device=args.device)
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        finish()
        start = time.perf_counter()
        loss = gradients(tokens, targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        finish()
        seconds.append(time.perf_counter() - start)

    median = statistics.median(seconds[args.warmup :])
    count = sum(p.numel() for p in model.parameters())
    tokens_per_step = args.micro_batch_size * length
    flops = (6 * count + 12 * layers * width * length) * tokens_per_step
    result = dict(
        system=f"torch {torch.__version__}",
        mode=mode,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        parameters=count,
        s_per_step=round(median, 6),
        tokens_per_s=round(tokens_per_step / median, 1),
        gflops=round(flops / median / 1e9, 2),
        peak_rss_mb=peak_rss_mb(),
        last_loss=loss.item(),
    )
    if on_gpu:
        result["device_peak_mb"] = torch.cuda.max_memory_allocated() // 2**20
    print(json.dumps(result))


if __name__ == "__main__":
    main()
