"""Two tiny GPTs from primitive operations, in float64: the models of make_golden.py."""

import math

import torch

from formulas import affine, layer_norm, softmax

GPT2 = dict(
    kind="gpt2",
    vocab_size=13,
    hidden_size=8,
    num_layers=2,
    num_attention_heads=2,
    num_query_groups=2,
    head_dim=4,
    ffn_hidden_size=32,
    seq_length=6,
    batch_size=2,
    norm_epsilon=1e-5,
    tied=True,
)
LLAMA = dict(
    kind="llama",
    vocab_size=13,
    hidden_size=16,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=4,
    ffn_hidden_size=24,
    seq_length=6,
    batch_size=2,
    norm_epsilon=1e-5,
    rotary_base=10000.0,
    tied=False,
)


def tensor_shapes(config):
    """The model's tensors as (name, shape), in the order that numbers them."""
    vocab, width, ffn = config["vocab_size"], config["hidden_size"], config["ffn_hidden_size"]
    heads, groups, dim = config["num_attention_heads"], config["num_query_groups"], config["head_dim"]
    biased = config["kind"] == "gpt2"
    out = []

    def linear(name, rows, cols):
        out.append((f"{name}.weight", (rows, cols)))
        if biased:
            out.append((f"{name}.bias", (rows,)))

    def norm(name):
        out.append((f"{name}.weight", (width,)))
        if biased:
            out.append((f"{name}.bias", (width,)))

    out.append(("wte.weight", (vocab, width)))
    if biased:
        out.append(("wpe.weight", (config["seq_length"], width)))
    for i in range(config["num_layers"]):
        norm(f"blocks.{i}.norm_1")
        linear(f"blocks.{i}.attn.qkv", (heads + 2 * groups) * dim, width)
        linear(f"blocks.{i}.attn.proj", width, heads * dim)
        norm(f"blocks.{i}.norm_2")
        if biased:
            linear(f"blocks.{i}.mlp.fc", ffn, width)
        else:
            linear(f"blocks.{i}.mlp.gate_up", 2 * ffn, width)
        linear(f"blocks.{i}.mlp.proj", width, ffn)
    norm("norm_f")
    if not config["tied"]:
        out.append(("lm_head.weight", (vocab, width)))
    return out


def normalise(config, weights, name, x):  # (B, T, C)
    if config["kind"] == "gpt2":
        return layer_norm(weights, name, x, config["norm_epsilon"])
    root = torch.sqrt((x * x).mean(-1, keepdim=True) + config["norm_epsilon"])
    return x / root * weights[f"{name}.weight"]


def rotate(config, x):  # (B, heads, T, D)
    length, dim = x.shape[-2:]
    inverse = [config["rotary_base"] ** (-2.0 * j / dim) for j in range(dim // 2)]
    angles = torch.tensor([[t * f for f in inverse] for t in range(length)], dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(config, weights, name, x):
    batch, length, _ = x.shape
    heads, groups, dim = config["num_attention_heads"], config["num_query_groups"], config["head_dim"]
    joined = affine(weights, f"{name}.qkv", x).reshape(batch, length, heads + 2 * groups, dim)
    joined = joined.transpose(1, 2)  # (B, H + 2G, T, D)
    q, k, v = joined[:, :heads], joined[:, heads : heads + groups], joined[:, heads + groups :]
    if config["kind"] == "llama":
        q, k = rotate(config, q), rotate(config, k)
    shared_by = torch.arange(heads) // (heads // groups)
    k, v = k[:, shared_by], v[:, shared_by]
    scores = q @ k.transpose(2, 3) / math.sqrt(dim)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    mixed = softmax(scores) @ v
    return affine(weights, f"{name}.proj", mixed.transpose(1, 2).reshape(batch, length, heads * dim))


def feed_forward(config, weights, name, x):
    if config["kind"] == "llama":
        gate, up = affine(weights, f"{name}.gate_up", x).chunk(2, -1)
        return affine(weights, f"{name}.proj", gate / (1 + torch.exp(-gate)) * up)
    h = affine(weights, f"{name}.fc", x)
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return affine(weights, f"{name}.proj", h)


def forward(config, weights, tokens):
    """Logits (B, T, V)."""
    index = torch.tensor(tokens).reshape(config["batch_size"], config["seq_length"])
    x = weights["wte.weight"][index]
    if config["kind"] == "gpt2":
        x = x + weights["wpe.weight"][: index.shape[1]]
    for i in range(config["num_layers"]):
        block = f"blocks.{i}"
        x = x + attention(config, weights, f"{block}.attn", normalise(config, weights, f"{block}.norm_1", x))
        x = x + feed_forward(config, weights, f"{block}.mlp", normalise(config, weights, f"{block}.norm_2", x))
    x = normalise(config, weights, "norm_f", x)
    return x @ weights["wte.weight" if config["tied"] else "lm_head.weight"].T
