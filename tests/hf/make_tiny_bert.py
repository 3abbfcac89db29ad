#!/usr/bin/env python3
"""Write random tiny BERTs as transformers saves them, with what they compute.

    python make_tiny_bert.py OUT_DIR

OUT_DIR/NAME/config.json, model.safetensors   from save_pretrained of a class each:
    bert                 BertForPreTraining: norms behind the residual additions, masked tokens and order
    bert-mlm             BertForMaskedLM: the same with masked tokens alone, and max(0, x) for GELU
    megatron-bert        MegatronBertForPreTraining: norms before attention and MLP
    megatron-bert-mlm    MegatronBertForMaskedLM
    bert-choices         BertForMultipleChoice: one logit a choice
    megatron-bert-choices    MegatronBertForMultipleChoice
OUT_DIR/NAME/expected.json    {"tokens", "segments", "labels": (B, T), "order": (B), "logits": (B, T, V),
                              "order_logits": (B, 2), "loss"}, from transformers in float32. loss is the mean over
                              the labels that are not -100 plus, where there is an order, the mean over samples.
                              Lists are nested; without an order its two lists are null.
                              With choices {"tokens", "segments": (B, 4, T), "lengths": (B, 4), "labels": (B),
                              "logits": (B, 4), "loss"}: attention leaves out what lies behind the lengths.

The copy of its output in tests/hf/tiny-bert lets the Rust tests run without Python.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertForMultipleChoice,
    MegatronBertForPreTraining,
)
from transformers.utils import logging

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=16,
    # Wide enough that logits differ visibly.
    initializer_range=0.25,
)
MODELS = {
    "bert": (BertForPreTraining, BertConfig(**SIZES)),
    "bert-mlm": (BertForMaskedLM, BertConfig(**SIZES, hidden_act="relu")),
    "megatron-bert": (MegatronBertForPreTraining, MegatronBertConfig(**SIZES, hidden_act="gelu_new")),
    "megatron-bert-mlm": (MegatronBertForMaskedLM, MegatronBertConfig(**SIZES)),
    "bert-choices": (BertForMultipleChoice, BertConfig(**SIZES)),
    "megatron-bert-choices": (MegatronBertForMultipleChoice, MegatronBertConfig(**SIZES)),
}


def write(name, kind, config, out):
    torch.manual_seed(20)
    model = kind(config).eval()
    with torch.no_grad():
        # The library starts biases at 0 and norms at 1: a loader that forgot them would go unnoticed.
        for _, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    choose = choices if "MultipleChoice" in kind.__name__ else pairs
    expected = choose(model, config)
    lines = (f' "{key}": {json.dumps(value)}' for key, value in expected.items())
    (out / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for file in sorted(out.iterdir()):
        print(f"{file.stat().st_size:8} {name}/{file.name}")


@torch.no_grad()
def choices(model, config):
    """Two questions with four choices, in rows of several lengths."""
    tokens = torch.randint(0, config.vocab_size, (2, 4, 12))
    segments = (torch.arange(12) >= torch.randint(3, 6, (2, 4, 1))).long()
    lengths = torch.tensor([[12, 7, 9, 12], [6, 11, 12, 8]])
    mask = (torch.arange(12) < lengths[..., None]).long()
    labels = torch.tensor([2, 0])
    result = model(input_ids=tokens, token_type_ids=segments, attention_mask=mask, labels=labels)
    return dict(
        loss=result.loss.item(),
        tokens=tokens.tolist(),
        segments=segments.tolist(),
        lengths=lengths.tolist(),
        labels=labels.tolist(),
        logits=result.logits.tolist(),
    )


def pairs(model, config):
    """Two pairs of segments with masked tokens and, if the model has a head for it, their order."""
    tokens = torch.randint(0, config.vocab_size, (2, 12))
    segments = (torch.arange(12)[None, :] >= torch.tensor([[5], [8]])).long()
    labels = torch.where(torch.rand(2, 12) < 0.4, torch.randint(0, config.vocab_size, (2, 12)), -100)
    order = torch.tensor([1, 0]) if "ForPreTraining" in type(model).__name__ else None
    with torch.no_grad():
        inputs = dict(input_ids=tokens, token_type_ids=segments, labels=labels)
        if order is None:
            result = model(**inputs)
            logits, order_logits = result.logits, None
        else:
            result = model(**inputs, next_sentence_label=order)
            logits, order_logits = result.prediction_logits, result.seq_relationship_logits
    return dict(
        loss=result.loss.item(),
        tokens=tokens.tolist(),
        segments=segments.tolist(),
        labels=labels.tolist(),
        order=None if order is None else order.tolist(),
        order_logits=None if order is None else order_logits.tolist(),
        logits=logits.tolist(),
    )


def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, (kind, config) in MODELS.items():
        write(name, kind, config, out / name)


if __name__ == "__main__":
    main()
