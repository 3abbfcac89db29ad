#!/usr/bin/env python3
"""Load BERTs that ferrotron exported with transformers, and compare.

    python check_bert_export.py EXPORTS FIXTURE...

EXPORTS/NAME is an export of each FIXTURE, the folder of tests/hf/tiny-bert of that name. The class that config.json names
must load it without missing or unexpected tensors, every tensor must equal the fixture's to the last bit, and logits and
loss must match those of FIXTURE/expected.json within 1e-5.

Exit code 0 when all holds, 1 with one line that says what does not.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import logging


def require(condition, message):
    if not condition:
        sys.exit(f"check_bert_export: {message}")


def check(folder, fixture):
    print(f"check_bert_export: {folder.name}", end=": ", flush=True)
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, loading = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    model.eval()
    for kind, names in loading.items():
        require(not names, f"transformers reports {kind}: {sorted(names)}")
    got, want = (load_file(path / "model.safetensors") for path in (folder, fixture))
    require(got.keys() == want.keys(), f"tensor names differ: {sorted(got.keys() ^ want.keys())}")
    for key, tensor in want.items():
        require(torch.equal(got[key], tensor), f"{key}: values differ")
    expected = json.loads((fixture / "expected.json").read_text())
    inputs = dict(
        input_ids=torch.tensor(expected["tokens"]),
        token_type_ids=torch.tensor(expected["segments"]),
        labels=torch.tensor(expected["labels"]),
    )
    if "lengths" in expected:
        lengths = torch.tensor(expected["lengths"])
        inputs["attention_mask"] = (torch.arange(inputs["input_ids"].shape[-1]) < lengths[..., None]).long()
    if expected.get("order") is not None:
        inputs["next_sentence_label"] = torch.tensor(expected["order"])
    with torch.no_grad():
        result = model(**inputs)
    logits = result.logits if expected.get("order") is None else result.prediction_logits
    gap = (logits - torch.tensor(expected["logits"])).abs().max().item()
    require(gap <= 1e-5, f"logits differ by {gap:.2e}")
    if expected.get("order") is not None:
        order_gap = (result.seq_relationship_logits - torch.tensor(expected["order_logits"])).abs().max().item()
        require(order_gap <= 1e-5, f"logits of the order differ by {order_gap:.2e}")
    loss_gap = abs(result.loss.item() - expected["loss"])
    require(loss_gap <= 1e-5, f"loss {result.loss.item()}, want {expected['loss']}")
    print(f"{name}, {len(want)} tensors equal; logits within {gap:.1e}, loss within {loss_gap:.1e}")


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for fixture in map(Path, sys.argv[2:]):
        check(Path(sys.argv[1]) / fixture.name, fixture)


if __name__ == "__main__":
    main()
