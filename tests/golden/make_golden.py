#!/usr/bin/env python3
"""Write golden.json: losses, logits and gradients of two tiny GPTs, in float64, from PyTorch.

    python make_golden.py              # writes golden.json beside this script
    python make_golden.py --check      # recomputes and compares with that file to 1e-10

The models are written here from primitive tensor operations (no nn.LayerNorm, no fused attention, no
cross_entropy), so that the numbers depend on formulas one can read on this page and on nothing that a
library may decide. Automatic differentiation is PyTorch's. Weights and tokens come from closed formulas
that a test can repeat in a few lines, so no weight file exists:

    weight k, element i (row-major)   norm weight:   1 + 0.1 * s
                                      anything else:     0.3 * s     with s = sin(0.7 * i + 0.05 * i * i + k)
    token (b, t)                      (7 * b + 3 * t + b * t + 1) mod V
    target (b, t)                     (5 * b + 2 * t + 3 * t * t + 2) mod V

k is the tensor's index in the listed order (`names` of the model), i counts from zero. All weights are
(out, in). All arithmetic is in double precision. (Without the term in i * i every matrix would have rank 2.)

Two models:

  gpt2    x = wte[token] + wpe[t];  x += attn(LayerNorm(x));  x += mlp(LayerNorm(x));
          logits = LayerNorm(x) wte^T.  Biases everywhere, mlp = proj(gelu_tanh(fc(x))).
  llama   x = wte[token];  x += attn(RMSNorm(x));  x += mlp(RMSNorm(x));
          logits = RMSNorm(x) lm_head^T.  No biases, mlp = proj(silu(gate(x)) * up(x)), rotary positions
          (the half-rotation of Hugging Face: element j is paired with j + D/2, angle t * base^(-2j/D)),
          query head h reads key/value head h // (H/G).

Rows of qkv.weight are q (H heads of D), then k (G heads), then v (G heads); rows of gate_up.weight are
gate, then up. Attention is causal, scores scaled by 1/sqrt(D). Normalisation uses the biased variance.

The loss of a position with target y and label smoothing e is
(1 - e) * -log p[y] + e * mean over the vocabulary of -log p; the loss of a case is its mean over the
positions whose target is not -100.

The file: {"format", "models": {name: {"config", "tensors": [{"name", "shape", "norm"}]}},
"cases": [{"name", "model", "label_smoothing", "tokens", "targets", "loss", "logits", "grads": {name: flat list}}],
"adamw": {...}, "optimizers": {...}}. formulas.py has the layers, gpt.py the models, optimizers.py the update rules. Lists are flat, row-major, written so that the double is recovered exactly.
"""

import argparse
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import torch

from check_gpt import check_against_library, check_against_transformers, check_gradients
from formulas import IGNORE, compare, describe, flat, make_tokens, make_weights, mean_loss
from gpt import GPT2, LLAMA, forward, tensor_shapes
from optimizers import make_optimizers


def make_case(name, config, targets, smoothing):
    weights = make_weights(tensor_shapes(config))
    tokens, _ = make_tokens(config)
    logits = forward(config, weights, tokens)
    loss = mean_loss(logits, targets, smoothing)
    loss.backward()
    return dict(
        name=name,
        model=config["kind"],
        label_smoothing=smoothing,
        tokens=tokens,
        targets=targets,
        loss=loss.item(),
        logits=flat(logits),
        grads={key: flat(w.grad) for key, w in weights.items()},
    )


def make_cases(config):
    _, plain = make_tokens(config)
    one_ignored, two_ignored = list(plain), list(plain)
    one_ignored[4] = IGNORE
    two_ignored[0] = two_ignored[9] = IGNORE
    kind = config["kind"]
    return [
        make_case(kind, config, plain, 0.0),
        make_case(f"{kind}_ignore", config, one_ignored, 0.0),
        make_case(f"{kind}_smoothing", config, two_ignored, 0.1),
    ]


def make_adamw(config, steps=5, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip=1.0):
    """The first steps of AdamW (decoupled decay on tensors of two dimensions) with global-norm clipping.

    Each step: gradients of the plain case's batch; norm = sqrt of the sum of squares over all tensors;
    gradients times min(1, clip / (norm + 1e-6)), the form of PyTorch and of Megatron-LM; w -= lr * decay * w;
    m, v updated; both bias-corrected; w -= lr * m_hat / (sqrt(v_hat) + eps). `losses` and `grad_norms` are
    those of before each update (norms before clipping), `final` describes the weights after the last.
    """
    weights = make_weights(tensor_shapes(config))
    tokens, targets = make_tokens(config)
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    losses, norms = [], []
    for step in range(1, steps + 1):
        for w in weights.values():
            w.grad = None
        loss = mean_loss(forward(config, weights, tokens), targets, 0.0)
        loss.backward()
        norm = math.sqrt(sum((w.grad * w.grad).sum().item() for w in weights.values()))
        scale = min(1.0, clip / (norm + 1e-6))
        with torch.no_grad():
            for name, w in weights.items():
                g = w.grad * scale
                m = first[name].mul_(betas[0]).add_(g, alpha=1 - betas[0])
                v = second[name].mul_(betas[1]).add_(g * g, alpha=1 - betas[1])
                if w.dim() == 2:
                    w.mul_(1 - lr * decay)
                m_hat = m / (1 - betas[0] ** step)
                v_hat = v / (1 - betas[1] ** step)
                w.sub_(lr * m_hat / (v_hat.sqrt() + eps))
        losses.append(loss.item())
        norms.append(norm)
    with torch.no_grad():
        after = mean_loss(forward(config, weights, tokens), targets, 0.0).item()
    check_against_torch(config, weights, tokens, targets, steps, lr, betas, eps, decay, clip)
    return dict(
        model=config["kind"],
        steps=steps,
        lr=lr,
        betas=list(betas),
        eps=eps,
        weight_decay=decay,
        clip_grad=clip,
        tokens=tokens,
        targets=targets,
        losses=losses,
        grad_norms=norms,
        loss_after=after,
        final={
            name: dict(sum=w.sum().item(), sum_of_squares=(w * w).sum().item(), first=flat(w)[:4])
            for name, w in weights.items()
        },
    )


def check_against_torch(config, mine, tokens, targets, steps, lr, betas, eps, decay, clip):
    """The update rule above is PyTorch's own AdamW and clipping, but for rounding."""
    weights = make_weights(tensor_shapes(config))
    groups = [
        dict(params=[w for w in weights.values() if w.dim() == 2], weight_decay=decay),
        dict(params=[w for w in weights.values() if w.dim() != 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    for _ in range(steps):
        optimizer.zero_grad()
        mean_loss(forward(config, weights, tokens), targets, 0.0).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), clip)
        optimizer.step()
    for name, w in weights.items():
        gap = (w - mine[name]).abs().max().item()
        # The key biases' true gradient is zero: what is left is rounding, which eps does not drown quite.
        assert gap < 1e-10, f"{name} differs from torch.optim.AdamW by {gap}"


def make_all(with_optax):
    return dict(
        format="ferrotron-golden-1",
        models={c["kind"]: dict(config=c, tensors=describe(tensor_shapes(c))) for c in (GPT2, LLAMA)},
        cases=make_cases(GPT2) + make_cases(LLAMA),
        adamw=make_adamw(GPT2),
        optimizers=make_optimizers(with_optax),
    )


def as_text(golden):
    """JSON with each innermost list on one line, so that a changed tensor is one changed line."""
    # json writes a double in the shortest form that reads back exactly, 17 digits at most.
    text = json.dumps(golden, indent=1, allow_nan=False)
    return re.sub(r"\[[\s\d.,eE+-]*\]", lambda m: " ".join(m.group().split()), text) + "\n"


def main():
    parser = argparse.ArgumentParser(description="golden values of two tiny GPTs, from PyTorch in float64")
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    check = parser.parse_args().check
    file = Path(__file__).with_name("golden.json")

    torch.set_num_threads(1)  # sums then have one order, so that a rerun gives the same file
    for config in (GPT2, LLAMA):
        check_against_library(config)
        check_against_transformers(config)
        check_gradients(config)
    with_optax = find_spec("optax") is not None
    if not (check or with_optax):
        parser.error("writing needs Optax: pip install optax")
    golden = make_all(with_optax)
    if check:
        want = json.loads(file.read_text())
        if not with_optax:
            want["optimizers"]["lion_optax"] = None
            print("skipped: Optax's Lion, since Optax is not installed; NumPy's is compared")
        compare(golden, want)
        print(f"{file.name}: all values recomputed")
        return
    file.write_text(as_text(golden))
    for case in golden["cases"]:
        print(f"{case['name']:16} loss {case['loss']!r}")
    print("adamw losses    ", golden["adamw"]["losses"])
    print("adamw grad norms", golden["adamw"]["grad_norms"])


if __name__ == "__main__":
    main()
