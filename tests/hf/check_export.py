#!/usr/bin/env python3
"""Load a folder that `ferrotron export --format hf` wrote with transformers, and compare.

    python check_export.py DIR EXPECTED [--weights FILE]

EXPECTED is an expected.json of make_tiny_gpt2.py: transformers' logits of DIR must match its logits within
1e-5, and the loss likewise. With --weights FILE (the model.safetensors that the export came from, either
prefix) every tensor must be equal to the last bit. The safetensors header must be what transformers itself
writes: the prefix `transformer.`, no tied lm_head, {"format": "pt"}.

Exit code 0 when all holds, 1 with one line that says what does not.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel
from transformers.utils import logging

PREFIX = "transformer."


def without_buffers(tensors):
    """Names without the prefix; the causal-mask buffers of old files are no weights."""
    named = {name.removeprefix(PREFIX): t for name, t in tensors.items()}
    return {n: t for n, t in named.items() if not n.endswith((".attn.bias", ".attn.masked_bias"))}


def require(condition, message):
    if not condition:
        sys.exit(f"check_export: {message}")


def check_header(folder, tied):
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata, names = file.metadata(), set(file.keys())
    require((metadata or {}).get("format") == "pt", f'metadata is {metadata}, want {{"format": "pt"}}')
    stray = sorted(n for n in names if not n.startswith(PREFIX) and n != "lm_head.weight")
    require(not stray, f"names without the prefix {PREFIX}: {stray}")
    require(not (tied and "lm_head.weight" in names), "lm_head.weight is written although it is tied")


def check_weights(model, source):
    want = without_buffers(load_file(source))
    got = without_buffers(model.state_dict())
    if "lm_head.weight" not in want:
        got.pop("lm_head.weight")
    require(got.keys() == want.keys(), f"tensor names differ: {sorted(got.keys() ^ want.keys())}")
    for name, tensor in want.items():
        require(got[name].shape == tensor.shape, f"{name}: {tuple(got[name].shape)}, want {tuple(tensor.shape)}")
        require(torch.equal(got[name], tensor), f"{name}: values differ from {source.name}")
    return len(want)


def main():
    parser = argparse.ArgumentParser(description="check a Hugging Face export with transformers")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("expected", type=Path, metavar="EXPECTED")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="source that every tensor must equal exactly")
    args = parser.parse_args()

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, loading = GPT2LMHeadModel.from_pretrained(args.folder, output_loading_info=True)
    model.eval()
    for kind, names in loading.items():
        require(not names, f"transformers reports {kind}: {sorted(names)}")
    check_header(args.folder, model.config.tie_word_embeddings)

    done = []
    if args.weights:
        done.append(f"{check_weights(model, args.weights)} tensors equal")
    expected = json.loads(args.expected.read_text())
    tokens, want = torch.tensor(expected["tokens"]), torch.tensor(expected["logits"])
    with torch.no_grad():
        result = model(tokens, labels=tokens)
    require(result.logits.shape == want.shape, f"logits {tuple(result.logits.shape)}, want {tuple(want.shape)}")
    gap = (result.logits - want).abs().max().item()
    require(gap <= 1e-5, f"logits differ by {gap:.2e}")
    loss_gap = abs(result.loss.item() - expected["loss"])
    require(loss_gap <= 1e-5, f"loss {result.loss.item()}, want {expected['loss']}")
    done.append(f"logits within {gap:.1e}, loss within {loss_gap:.1e}")
    print(f"check_export: {'; '.join(done)}")


if __name__ == "__main__":
    main()
