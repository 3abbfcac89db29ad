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
"adamw": {...}, "optimizers": {...}}. Lists are flat, row-major, written so that the double is recovered exactly.
"""

import argparse
import json
import math
import re
from pathlib import Path

import torch

IGNORE = -100

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


def is_norm_weight(name):
    return "norm" in name and name.endswith(".weight")


def make_weights(config):
    """Every tensor from the closed formula, as float64 leaves that want gradients."""
    weights = {}
    for k, (name, shape) in enumerate(tensor_shapes(config)):
        waves = [math.sin(0.7 * i + 0.05 * i * i + k) for i in range(math.prod(shape))]
        values = [1.0 + 0.1 * w for w in waves] if is_norm_weight(name) else [0.3 * w for w in waves]
        weights[name] = torch.tensor(values, dtype=torch.float64).reshape(shape).requires_grad_()
    return weights


def make_tokens(config):
    vocab = config["vocab_size"]
    grid = [(b, t) for b in range(config["batch_size"]) for t in range(config["seq_length"])]
    tokens = [(7 * b + 3 * t + b * t + 1) % vocab for b, t in grid]
    targets = [(5 * b + 2 * t + 3 * t * t + 2) % vocab for b, t in grid]
    return tokens, targets


def normalise(config, weights, name, x):  # (B, T, C)
    if config["kind"] == "llama":
        root = torch.sqrt((x * x).mean(-1, keepdim=True) + config["norm_epsilon"])
        return x / root * weights[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    root = torch.sqrt((centred * centred).mean(-1, keepdim=True) + config["norm_epsilon"])
    return centred / root * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def affine(weights, name, x):
    y = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


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
    scores = scores - scores.amax(-1, keepdim=True).detach()
    weight = scores.exp()
    mixed = (weight / weight.sum(-1, keepdim=True)) @ v
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


def mean_loss(logits, targets, smoothing):
    rows = logits.reshape(-1, logits.shape[-1])
    log_p = rows - rows.logsumexp(-1, keepdim=True)
    counted = [i for i, y in enumerate(targets) if y != IGNORE]
    losses = []
    for i in counted:
        losses.append(-(1 - smoothing) * log_p[i, targets[i]] - smoothing * log_p[i].mean())
    return torch.stack(losses).mean()


def flat(tensor):
    return tensor.detach().reshape(-1).tolist()


def make_case(name, config, targets, smoothing):
    weights = make_weights(config)
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
    weights = make_weights(config)
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
    weights = make_weights(config)
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


def check_against_library(config):
    """The formulas above are the library's layers and the loss its cross_entropy."""
    functional = torch.nn.functional
    weights = make_weights(config)
    x = weights["wte.weight"][torch.arange(config["vocab_size"])][None]
    width, epsilon = config["hidden_size"], config["norm_epsilon"]
    if config["kind"] == "gpt2":
        want = functional.layer_norm(x, (width,), weights["norm_f.weight"], weights["norm_f.bias"], epsilon)
        gelu = functional.gelu(affine(weights, "blocks.0.mlp.fc", x), approximate="tanh")
        mlp = affine(weights, "blocks.0.mlp.proj", gelu)
    else:
        want = functional.rms_norm(x, (width,), weights["norm_f.weight"], epsilon)
        gate, up = affine(weights, "blocks.0.mlp.gate_up", x).chunk(2, -1)
        mlp = affine(weights, "blocks.0.mlp.proj", functional.silu(gate) * up)
    torch.testing.assert_close(normalise(config, weights, "norm_f", x), want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(feed_forward(config, weights, "blocks.0.mlp", x), mlp, rtol=1e-13, atol=1e-13)
    tokens, targets = make_tokens(config)
    targets[4] = IGNORE
    logits = forward(config, weights, tokens)
    want = functional.cross_entropy(
        logits.reshape(-1, config["vocab_size"]), torch.tensor(targets), ignore_index=IGNORE, label_smoothing=0.1
    )
    torch.testing.assert_close(mean_loss(logits, targets, 0.1), want, rtol=1e-13, atol=1e-13)


def check_against_transformers(config):
    """The whole models are the library's GPT-2 and Llama: same logits from the same weights."""
    import transformers

    weights = {name: w.detach() for name, w in make_weights(config).items()}
    heads, groups, dim = config["num_attention_heads"], config["num_query_groups"], config["head_dim"]
    common = dict(
        vocab_size=config["vocab_size"],
        tie_word_embeddings=config["tied"],
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    state = {}
    if config["kind"] == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_positions=config["seq_length"],
                n_embd=config["hidden_size"],
                n_layer=config["num_layers"],
                n_head=heads,
                n_inner=config["ffn_hidden_size"],
                layer_norm_epsilon=config["norm_epsilon"],
                **common,
            )
        )
        renamed = [
            ("norm_1", "ln_1"),
            ("norm_2", "ln_2"),
            ("attn.qkv", "attn.c_attn"),
            ("attn.proj", "attn.c_proj"),
            ("mlp.fc", "mlp.c_fc"),
            ("mlp.proj", "mlp.c_proj"),
            ("norm_f", "ln_f"),
            ("blocks.", "h."),
        ]
        for name, w in weights.items():
            inside = name.startswith("blocks.") and w.dim() == 2
            for ours, theirs in renamed:
                name = name.replace(ours, theirs)
            state[f"transformer.{name}"] = w.T if inside else w  # their Conv1D is (in, out)
        state["lm_head.weight"] = weights["wte.weight"]
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=config["hidden_size"],
                intermediate_size=config["ffn_hidden_size"],
                num_hidden_layers=config["num_layers"],
                num_attention_heads=heads,
                num_key_value_heads=groups,
                head_dim=dim,
                max_position_embeddings=config["seq_length"],
                rms_norm_eps=config["norm_epsilon"],
                rope_parameters=dict(rope_type="default", rope_theta=config["rotary_base"]),
                **common,
            )
        )
        state["model.embed_tokens.weight"] = weights["wte.weight"]
        state["model.norm.weight"] = weights["norm_f.weight"]
        state["lm_head.weight"] = weights["lm_head.weight"]
        for i in range(config["num_layers"]):
            ours, theirs = f"blocks.{i}", f"model.layers.{i}"
            q, k, v = weights[f"{ours}.attn.qkv.weight"].split([heads * dim, groups * dim, groups * dim])
            gate, up = weights[f"{ours}.mlp.gate_up.weight"].chunk(2)
            state[f"{theirs}.self_attn.q_proj.weight"] = q
            state[f"{theirs}.self_attn.k_proj.weight"] = k
            state[f"{theirs}.self_attn.v_proj.weight"] = v
            state[f"{theirs}.self_attn.o_proj.weight"] = weights[f"{ours}.attn.proj.weight"]
            state[f"{theirs}.mlp.gate_proj.weight"] = gate
            state[f"{theirs}.mlp.up_proj.weight"] = up
            state[f"{theirs}.mlp.down_proj.weight"] = weights[f"{ours}.mlp.proj.weight"]
            state[f"{theirs}.input_layernorm.weight"] = weights[f"{ours}.norm_1.weight"]
            state[f"{theirs}.post_attention_layernorm.weight"] = weights[f"{ours}.norm_2.weight"]
    model = model.double().eval()
    model.load_state_dict(state)
    tokens, _ = make_tokens(config)
    index = torch.tensor(tokens).reshape(config["batch_size"], config["seq_length"])
    with torch.no_grad():
        gap = (model(index).logits - forward(config, weights, tokens)).abs().max().item()
    # Theirs keeps the rotary angles in f32 whatever the dtype of the model.
    bound = 1e-12 if config["kind"] == "gpt2" else 1e-6
    assert gap < bound, f"{config['kind']}: logits differ from transformers' by {gap}"
    print(f"{config['kind']}: logits within {gap:.1e} of transformers'")


def check_gradients(config):
    """Central differences on one element of every tensor agree with the recorded gradients."""
    weights = make_weights(config)
    tokens, targets = make_tokens(config)
    mean_loss(forward(config, weights, tokens), targets, 0.1).backward()
    step = 1e-5
    for k, (name, w) in enumerate(weights.items()):
        at = (5 * k + 3) % w.numel()
        line, sides = w.detach().view(-1), []
        centre = line[at].item()
        for sign in (1, -1):
            line[at] = centre + sign * step
            sides.append(mean_loss(forward(config, weights, tokens), targets, 0.1).item())
        line[at] = centre
        numeric, analytic = (sides[0] - sides[1]) / (2 * step), w.grad.view(-1)[at].item()
        close = abs(numeric - analytic) < 1e-7 * max(1.0, abs(analytic))
        assert close, f"{name}[{at}]: {analytic} but numerically {numeric}"


def make_optimizers(steps=10, shape=(6, 4), lr=0.02, decay=0.1, ema_decay=0.9):
    """Ten steps of one matrix by several rules, in float64, but Muon's in float32: it iterates in bfloat16 inside.

    The gradient of step t (from 1) is w - sin(0.7 i + 0.3 t + 0.05 i * i) for element i of the weights w before it.
    SGD and Muon are PyTorch's; the moving average is torch.optim.swa_utils.AveragedModel's. PyTorch has no Lion: its
    algorithm 2 (arXiv 2302.06675) is written out.
    """
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    start = (0.3 * torch.sin(0.7 * index + 0.05 * index * index)).reshape(shape)
    target = lambda t: torch.sin(0.7 * index + 0.3 * t + 0.05 * index * index).reshape(shape)

    def train(dtype, make, average=False):
        weights = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = make([weights])
        model = torch.nn.ParameterList([weights])
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(ema_decay)
        )
        for t in range(1, steps + 1):
            weights.grad = weights.detach() - target(t).to(dtype)
            optimizer.step()
            averaged.update_parameters(model)
        return flat((averaged.module[0] if average else weights).detach().double())

    def lion(dtype, beta1=0.9, beta2=0.99):
        weights, mean = start.to(dtype), torch.zeros(shape, dtype=dtype)
        for t in range(1, steps + 1):
            grad = weights - target(t).to(dtype)
            weights = weights * (1 - lr * decay) - lr * torch.sign(mean * beta1 + grad * (1 - beta1))
            mean = mean * beta2 + grad * (1 - beta2)
        return flat(weights.double())

    sgd = lambda nesterov: lambda params: torch.optim.SGD(
        params, lr=lr, momentum=0.9, weight_decay=decay, nesterov=nesterov
    )
    muon = lambda params: torch.optim.Muon(params, lr=lr, weight_decay=decay, momentum=0.95, nesterov=True)
    return {
        "steps": steps,
        "shape": list(shape),
        "lr": lr,
        "weight_decay": decay,
        "ema_decay": ema_decay,
        "start": flat(start),
        "sgd": train(torch.float64, sgd(False)),
        "nesterov": train(torch.float64, sgd(True)),
        "ema": train(torch.float64, sgd(True), average=True),
        "lion": lion(torch.float64),
        "muon": train(torch.float32, muon),
    }


def describe(config):
    tensors = [dict(name=n, shape=list(s), norm=is_norm_weight(n)) for n, s in tensor_shapes(config)]
    return dict(config=config, tensors=tensors)


def make_all():
    return dict(
        format="ferrotron-golden-1",
        models={config["kind"]: describe(config) for config in (GPT2, LLAMA)},
        cases=make_cases(GPT2) + make_cases(LLAMA),
        adamw=make_adamw(GPT2),
        optimizers=make_optimizers(),
    )


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
    golden = make_all()
    if check:
        compare(golden, json.loads(file.read_text()))
        print(f"{file.name}: all values recomputed")
        return
    file.write_text(as_text(golden))
    for case in golden["cases"]:
        print(f"{case['name']:16} loss {case['loss']!r}")
    print("adamw losses    ", golden["adamw"]["losses"])
    print("adamw grad norms", golden["adamw"]["grad_norms"])


if __name__ == "__main__":
    main()
