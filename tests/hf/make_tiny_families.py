#!/usr/bin/env python3
"""Write random tiny language models of several families as transformers saves them, with what they compute.

    python make_tiny_families.py OUT_DIR
    python make_tiny_families.py --check EXPORTS FOLDER...
    python make_tiny_families.py --recompute FOLDER...

OUT_DIR/NAME/config.json, model.safetensors   from save_pretrained of the family's class, norms and biases random
OUT_DIR/NAME/expected.json    {"tokens": (B, T), "logits": (B, T, V), "loss", "prompt", "greedy"}: logits and loss in
                              float64, where what transformers does in float32 whatever the dtype (RMSNorm, rotary
                              angles, softmax) is done in float64 too; loss is the mean over the B * (T - 1) next-token
                              predictions within each row; greedy holds the 64 likeliest tokens after the prompt, one
                              after another, each at least 1e-3 likelier than the second.

With --check, transformers loads EXPORTS/NAME of each FOLDER of that name, which must hold the tensors of FOLDER to the
last bit and no others, and compute its expected.json within 1e-5 in float32. With --recompute, every number of
FOLDER/expected.json is computed anew from the weights of FOLDER: logits and loss within 1e-12, the greedy tokens exactly.

The copy of its output in tests/hf/families lets the Rust tests run without Python.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

SIZES = dict(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=128,
    # Wide enough that logits differ visibly.
    initializer_range=0.25,
    bos_token_id=None,
    eos_token_id=None,
)
GROUPED = dict(SIZES, num_key_value_heads=2, rms_norm_eps=1e-5, head_dim=4)
LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
MODELS = {
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_inner=24, n_positions=128, initializer_range=0.25,
        bos_token_id=None, eos_token_id=None,
    ),
    "llama": dict(GROUPED, model_type="llama", tie_word_embeddings=False, rope_theta=100.0, rope_scaling=LLAMA3),
    "smollm": dict(GROUPED, model_type="llama", tie_word_embeddings=True),
    "llama-biases": dict(
        GROUPED, model_type="llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "mistral": dict(GROUPED, model_type="mistral", sliding_window=5, tie_word_embeddings=False),
    "qwen2": dict(GROUPED, model_type="qwen2", tie_word_embeddings=True, rope_theta=1000.0),
    "qwen2-windows": dict(
        GROUPED, model_type="qwen2", tie_word_embeddings=False, num_hidden_layers=3,
        use_sliding_window=True, sliding_window=5, max_window_layers=1,
    ),
    "qwen3": dict(GROUPED, model_type="qwen3", tie_word_embeddings=False, head_dim=8),
    # The root of the width is no whole number, and heads are not hidden / heads wide.
    "gemma2": dict(
        GROUPED, model_type="gemma2", hidden_size=24, num_hidden_layers=3, head_dim=8, query_pre_attn_scalar=10,
        sliding_window=5, attn_logit_softcapping=3.0, final_logit_softcapping=4.0, pad_token_id=None,
    ),
    "pythia": dict(SIZES, model_type="gpt_neox", rotary_pct=0.5, tie_word_embeddings=False),
    "neox-sequential": dict(SIZES, model_type="gpt_neox", rotary_pct=1.0, use_parallel_residual=False),
}  # fmt: skip


def frequencies(module):
    """The rotary frequencies in float64, from the configuration."""
    params = module.config.rope_parameters
    pairs = len(module.inv_freq)
    inv = [params["rope_theta"] ** (-i / pairs) for i in range(pairs)]
    if params["rope_type"] == "llama3":
        low, high, length = (
            params[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )

        def scaled(f):
            turns = length * f / (2 * math.pi)
            share = min(max((turns - low) / (high - low), 0), 1)
            return (1 - share) * f / params["factor"] + share * f

        inv = [scaled(f) for f in inv]
    inv = torch.tensor(inv, dtype=torch.float64)
    assert torch.allclose(inv.float(), module.inv_freq.float(), rtol=1e-6), (inv, module.inv_freq)
    return inv


def in_float64(model):
    """The model in float64 throughout."""
    model = model.double()
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RotaryEmbedding"):
            inv = frequencies(module)

            def angles(x, position_ids, inv=inv):
                turned = position_ids[..., None].double() * inv
                turned = torch.cat((turned, turned), dim=-1)
                return turned.cos(), turned.sin()

            module.forward = angles
        elif name == "Gemma2TextScaledWordEmbedding":
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        elif name == "Gemma2RMSNorm":

            def centered(x, module=module):
                return (1 + module.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps))

            module.forward = centered
        elif name.endswith("RMSNorm"):

            def norm(x, module=module):
                return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

            module.forward = norm
    return model


def softmax_in_float64():
    """Lets eager attention take its softmax in the dtype of the scores, where it asks for float32."""
    softmax = torch.nn.functional.softmax

    def unrounded(x, *args, dtype=None, **kwargs):
        return softmax(x, *args, dtype=torch.promote_types(x.dtype, dtype or x.dtype), **kwargs)

    torch.nn.functional.softmax = unrounded


def greedy(model, prompt, count):
    """The likeliest tokens, and the least distance to the second."""
    tokens, least = list(prompt), math.inf
    for _ in range(count):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        (first, second), (token, _) = (list(x) for x in logits.topk(2))
        least = min(least, (first - second).item())
        tokens.append(token.item())
    return tokens[len(prompt) :], least


def compute(model, tokens):
    """The contents of expected.json, and the least distance of a greedy token to the second."""
    prompt = tokens[0].tolist()
    continuation, least = greedy(model, prompt, 64)
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    expected = dict(
        loss=loss.item(), tokens=tokens.tolist(), prompt=prompt, greedy=continuation, logits=logits.tolist()
    )
    return expected, least


def attention_of(config):
    """The attention of "sdpa" does not go through float32, but has no soft cap."""
    return "eager" if config.model_type == "gemma2" else "sdpa"


@torch.no_grad()
def write(name, fields, out):
    fields = dict(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    for seed in range(100):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config)).eval()
        # The library starts biases at 0 and norms at 1: a loader that forgot them would go unnoticed.
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
        tokens = torch.randint(0, config.vocab_size, (2, 12))
        model.save_pretrained(out)
        expected, least = compute(in_float64(model), tokens)
        if least > 1e-3 and len(set(expected["greedy"])) > 4:
            break
    (out / "generation_config.json").unlink(missing_ok=True)
    lines = (f' "{key}": {json.dumps(value)}' for key, value in expected.items())
    (out / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{name}: seed {seed}, loss {expected['loss']:.4f}, the second token is at least {least:.4f} behind")


@torch.no_grad()
def check(export, folder):
    print(export.name, end=": ", flush=True)
    model, loading = AutoModelForCausalLM.from_pretrained(
        export, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    for kind, names in loading.items():
        assert not names, f"transformers reports {kind}: {sorted(names)}"
    want, got = (load_file(path / "model.safetensors") for path in (folder, export))
    assert want.keys() == got.keys(), f"tensor names differ: {sorted(want.keys() ^ got.keys())}"
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), f"{name} differs"
    expected = json.loads((folder / "expected.json").read_text())
    logits = model(torch.tensor(expected["tokens"])).logits
    gap = (logits - torch.tensor(expected["logits"])).abs().max().item()
    assert gap <= 1e-5, f"logits differ by {gap:.2e}"
    print(f"{type(model).__name__}, {len(want)} tensors equal, logits within {gap:.1e}")


@torch.no_grad()
def recompute(folder):
    """Computes expected.json anew."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention_of(config), dtype=torch.float32
    ).eval()
    want = json.loads((folder / "expected.json").read_text())
    got, least = compute(in_float64(model), torch.tensor(want["tokens"]))
    assert least > 1e-3, f"a second token is {least:.1e} behind"
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    assert (got["prompt"], got["greedy"]) == (want["prompt"], want["greedy"]), "the greedy tokens differ"
    for name in ("logits", "loss"):
        a, b = (torch.tensor(numbers[name], dtype=torch.float64) for numbers in (got, want))
        gap = (a - b).abs().max().item()
        assert gap <= 1e-12, f"{name} differ by {gap:.2e}"
    print(f"{folder.name}: {type(model).__name__}, expected.json is what transformers computes")


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if sys.argv[1] == "--check":
        for folder in map(Path, sys.argv[3:]):
            check(Path(sys.argv[2]) / folder.name, folder)
        return
    softmax_in_float64()
    if sys.argv[1] == "--recompute":
        for folder in sys.argv[2:]:
            recompute(Path(folder))
        return
    for name, fields in MODELS.items():
        write(name, fields, Path(sys.argv[1]) / name)


if __name__ == "__main__":
    main()
