#!/usr/bin/env python3
"""Write bert.json: losses, logits and gradients of two tiny BERTs, in float64, from PyTorch.

    python make_bert_golden.py            # writes bert.json beside this script
    python make_bert_golden.py --check    # recomputes and compares with that file to 1e-10

Weights, tokens and primitive operations are those of make_golden.py, in formulas.py. The models:

  post    x = LayerNorm(wte[token] + wse[segment] + wpe[t]);
          x = norm_1(x + attn(x));  x = norm_2(x + mlp(x))                     Devlin et al., arXiv 1810.04805
  pre     x = wte[token] + wse[segment] + wpe[t];
          x += attn(norm_1(x));  x += mlp(norm_2(x));  x = norm_f(x) at the end    Shoeybi et al., arXiv 1909.08053

Attention covers all positions; mlp = proj(gelu(fc(x))), gelu exact. The heads: logits of the tokens are
mlm_head.norm(gelu(mlm_head.transform(x))) wte^T + mlm_head.bias, logits of the order binary_head(tanh(pooler(x[:, 0]))).
The loss is the mean cross-entropy over the targets that are not -100, plus the mean over samples of that of the order.

    segment (b, t)    0 if t < 2 + b else 1
    order b           1 - b mod 2
    target (b, t)     that of make_golden.py where (b + t) mod 3 == 0, else -100

The file: {"models": {name: {"config", "tensors": [{"name", "shape", "norm"}], "tokens", "segments", "targets", "order",
"losses": [masked tokens, order], "logits", "order_logits", "grads": {name: flat list}}}}.
"""

import argparse
import json
import math
from pathlib import Path

import torch

from formulas import IGNORE, affine, compare, describe, flat, layer_norm, make_tokens, make_weights, mean_loss, softmax

SIZES = dict(
    vocab_size=13,
    hidden_size=8,
    num_layers=2,
    num_attention_heads=2,
    ffn_hidden_size=20,
    seq_length=6,
    batch_size=2,
    norm_epsilon=1e-5,
)


def tensor_shapes(placement):
    """The model's tensors as (name, shape), in the order that numbers them."""
    vocab, width, ffn = SIZES["vocab_size"], SIZES["hidden_size"], SIZES["ffn_hidden_size"]
    out = [("wte.weight", (vocab, width)), ("wse.weight", (2, width)), ("wpe.weight", (SIZES["seq_length"], width))]

    def linear(name, rows, cols):
        out.extend([(f"{name}.weight", (rows, cols)), (f"{name}.bias", (rows,))])

    def norm(name):
        out.extend([(f"{name}.weight", (width,)), (f"{name}.bias", (width,))])

    if placement == "post":
        norm("embedding_norm")
    for i in range(SIZES["num_layers"]):
        block = f"blocks.{i}"
        if placement == "pre":
            norm(f"{block}.norm_1")
        linear(f"{block}.attn.qkv", 3 * width, width)
        linear(f"{block}.attn.proj", width, width)
        if placement == "post":
            norm(f"{block}.norm_1")
        else:
            norm(f"{block}.norm_2")
        linear(f"{block}.mlp.fc", ffn, width)
        linear(f"{block}.mlp.proj", width, ffn)
        if placement == "post":
            norm(f"{block}.norm_2")
    if placement == "pre":
        norm("norm_f")
    linear("mlm_head.transform", width, width)
    norm("mlm_head.norm")
    out.append(("mlm_head.bias", (vocab,)))
    linear("pooler", width, width)
    linear("binary_head", 2, width)
    return out


def normalise(weights, name, x):
    return layer_norm(weights, name, x, SIZES["norm_epsilon"])


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def attention(weights, name, x):
    batch, length, width = x.shape
    heads = SIZES["num_attention_heads"]
    joined = affine(weights, f"{name}.qkv", x).reshape(batch, length, 3, heads, width // heads)
    q, k, v = joined.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
    scores = q @ k.transpose(2, 3) / math.sqrt(width // heads)
    mixed = softmax(scores) @ v
    return affine(weights, f"{name}.proj", mixed.transpose(1, 2).reshape(batch, length, width))


def feed_forward(weights, name, x):
    return affine(weights, f"{name}.proj", gelu(affine(weights, f"{name}.fc", x)))


def make_model(placement):
    weights = make_weights(tensor_shapes(placement))
    batch, length = SIZES["batch_size"], SIZES["seq_length"]
    tokens, targets = make_tokens(SIZES)
    grid = [(b, t) for b in range(batch) for t in range(length)]
    targets = [y if (b + t) % 3 == 0 else IGNORE for (b, t), y in zip(grid, targets)]
    segments = [0 if t < 2 + b else 1 for b, t in grid]
    order = [1 - b % 2 for b in range(batch)]

    index = torch.tensor(tokens).reshape(batch, length)
    x = weights["wte.weight"][index] + weights["wse.weight"][torch.tensor(segments).reshape(batch, length)]
    x = x + weights["wpe.weight"][:length]
    if placement == "post":
        x = normalise(weights, "embedding_norm", x)
    for i in range(SIZES["num_layers"]):
        attn, mlp, norm_1, norm_2 = (f"blocks.{i}.{part}" for part in ("attn", "mlp", "norm_1", "norm_2"))
        if placement == "post":
            x = normalise(weights, norm_1, x + attention(weights, attn, x))
            x = normalise(weights, norm_2, x + feed_forward(weights, mlp, x))
        else:
            x = x + attention(weights, attn, normalise(weights, norm_1, x))
            x = x + feed_forward(weights, mlp, normalise(weights, norm_2, x))
    if placement == "pre":
        x = normalise(weights, "norm_f", x)
    features = normalise(weights, "mlm_head.norm", gelu(affine(weights, "mlm_head.transform", x)))
    logits = features @ weights["wte.weight"].T + weights["mlm_head.bias"]
    order_logits = affine(weights, "binary_head", torch.tanh(affine(weights, "pooler", x[:, 0])))
    losses = [mean_loss(logits, targets), mean_loss(order_logits, order)]
    sum(losses).backward()
    return dict(
        config=SIZES,
        tensors=describe(tensor_shapes(placement)),
        tokens=tokens,
        segments=segments,
        targets=targets,
        order=order,
        losses=[loss.item() for loss in losses],
        logits=flat(logits),
        order_logits=flat(order_logits),
        grads={name: flat(w.grad) for name, w in weights.items()},
    )


def main():
    parser = argparse.ArgumentParser(description="golden values of BERT")
    parser.add_argument("--check", action="store_true", help="compare with bert.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = Path(__file__).with_name("bert.json")
    golden = dict(models={placement: make_model(placement) for placement in ("post", "pre")})
    if args.check:
        compare(golden, json.loads(file.read_text()), "bert")
        print(f"{file.name}: equal to 1e-10")
        return
    models = []
    for name, model in golden["models"].items():
        grads = ",\n".join(f'   "{key}": {json.dumps(grad)}' for key, grad in model.pop("grads").items())
        rest = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in model.items())
        models.append(f' "{name}": {{\n{rest},\n  "grads": {{\n{grads}\n  }}\n }}')
    file.write_text('{"models": {\n' + ",\n".join(models) + "\n}}\n")
    print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
