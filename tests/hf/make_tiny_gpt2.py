#!/usr/bin/env python3
"""Write a random tiny GPT-2 as transformers saves it, and as the Hub's gpt2 file is laid out.

    python make_tiny_gpt2.py OUT_DIR

OUT_DIR/config.json, model.safetensors   from GPT2LMHeadModel.save_pretrained: names begin with `transformer.`
OUT_DIR/hub/config.json, model.safetensors   the same weights without the prefix, and with the causal-mask
                                             buffers h.N.attn.bias and h.N.attn.masked_bias of old files
OUT_DIR/expected.json                    {"tokens": (B, T), "logits": (B, T, V), "loss"}, from transformers in
                                         float32; loss is the mean over the B * (T - 1) next-token predictions
                                         within each row. Lists are nested.

The copy of its output in tests/hf/tiny-gpt2 lets the Rust tests run without Python.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

PREFIX = "transformer."


def build():
    torch.manual_seed(20)
    config = GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        # Wide enough that logits differ visibly, so that a wrong transpose cannot hide in noise.
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        # The library starts biases at 0 and norms at 1: a loader that forgot them would go unnoticed.
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    return model


def write_hub_layout(model_dir, hub_dir, config):
    """The same weights under the names of the Hub's gpt2 file, mask buffers included."""
    hub_dir.mkdir(exist_ok=True)
    tensors = {name.removeprefix(PREFIX): t for name, t in load_file(model_dir / "model.safetensors").items()}
    mask = torch.ones(config.n_positions, config.n_positions).tril()[None, None]
    for i in range(config.n_layer):
        tensors[f"h.{i}.attn.bias"] = mask.clone()
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, hub_dir / "model.safetensors", metadata={"format": "pt"})
    (hub_dir / "config.json").write_text((model_dir / "config.json").read_text())


def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = build()
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    write_hub_layout(out, out / "hub", model.config)

    tokens = torch.randint(0, model.config.vocab_size, (2, 12))
    with torch.no_grad():
        result = model(tokens, labels=tokens)
    expected = dict(tokens=tokens.tolist(), logits=result.logits.tolist(), loss=result.loss.item())
    batches = ",\n  ".join(json.dumps(batch) for batch in expected["logits"])
    (out / "expected.json").write_text(
        "{\n"
        f' "loss": {expected["loss"]!r},\n'
        f' "tokens": {json.dumps(expected["tokens"])},\n'
        f' "logits": [\n  {batches}\n ]\n'
        "}\n"
    )

    again = GPT2LMHeadModel.from_pretrained(out / "hub")
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b), f"{name} is not the same in the Hub's layout"
    for file in sorted(p for p in out.rglob("*") if p.is_file()):
        print(f"{file.stat().st_size:8} {file.relative_to(out)}")


if __name__ == "__main__":
    main()
