"""Formulas that all golden values share: weights, tokens, and layers from primitive operations, and their comparison.

A model is a list of tensors (name, shape). Weights and tokens come from closed formulas that a test can repeat in a few
lines: see make_golden.py.
"""

import math

import torch

IGNORE = -100


def is_norm_weight(name):
    return "norm" in name and name.endswith(".weight")


def make_weights(shapes):
    """Every tensor from the closed formula, as float64 leaves that want gradients."""
    weights = {}
    for k, (name, shape) in enumerate(shapes):
        waves = [math.sin(0.7 * i + 0.05 * i * i + k) for i in range(math.prod(shape))]
        values = [1.0 + 0.1 * w for w in waves] if is_norm_weight(name) else [0.3 * w for w in waves]
        weights[name] = torch.tensor(values, dtype=torch.float64).reshape(shape).requires_grad_()
    return weights


def describe(shapes):
    return [dict(name=name, shape=list(shape), norm=is_norm_weight(name)) for name, shape in shapes]


def make_tokens(config):
    vocab = config["vocab_size"]
    grid = [(b, t) for b in range(config["batch_size"]) for t in range(config["seq_length"])]
    tokens = [(7 * b + 3 * t + b * t + 1) % vocab for b, t in grid]
    targets = [(5 * b + 2 * t + 3 * t * t + 2) % vocab for b, t in grid]
    return tokens, targets


def affine(weights, name, x):
    y = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def layer_norm(weights, name, x, epsilon):
    centred = x - x.mean(-1, keepdim=True)
    root = torch.sqrt((centred * centred).mean(-1, keepdim=True) + epsilon)
    return centred / root * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def softmax(scores):
    weight = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return weight / weight.sum(-1, keepdim=True)


def mean_loss(logits, targets, smoothing=0.0):
    """The mean over the targets that are not IGNORE."""
    rows = logits.reshape(-1, logits.shape[-1])
    log_p = rows - rows.logsumexp(-1, keepdim=True)
    counted = [(i, y) for i, y in enumerate(targets) if y != IGNORE]
    losses = [-(1 - smoothing) * log_p[i, y] - smoothing * log_p[i].mean() for i, y in counted]
    return torch.stack(losses).mean()


def flat(tensor):
    return tensor.detach().reshape(-1).tolist()


def compare(got, want, path="golden"):
    """Same structure, same integers and texts, floats within 1e-10, Muon's within 1e-2."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), f"{path}: keys differ"
        for key in want:
            compare(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), f"{path}: {len(got)} elements, file has {len(want)}"
        for i, pair in enumerate(zip(got, want)):
            compare(*pair, f"{path}[{i}]")
    elif isinstance(want, float):
        # Products in bfloat16 differ from processor to processor.
        tolerance = 1e-2 if path.startswith("golden.optimizers.muon") else 1e-10
        assert abs(got - want) <= tolerance * max(1.0, abs(want)), f"{path}: computed {got!r}, file has {want!r}"
    else:
        assert got == want, f"{path}: computed {got!r}, file has {want!r}"
