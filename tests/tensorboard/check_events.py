#!/usr/bin/env python3
"""Checks with TensorBoard's own reader what `ferrotron train --tensorboard-dir` has written.

    tests/tensorboard/check_events.py EVENTS METRICS

EVENTS is the folder of event files of a run that was resumed from before its last step; METRICS is its metrics.jsonl.
The event files must hold each step once, with the numbers of the metrics.
"""
import json
import sys

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator

CURVES = {
    "lm loss": lambda line: line["loss"],
    "learning-rate": lambda line: line["lr"],
    "grad-norm": lambda line: line["grad_norm"],
    "loss-scale": lambda line: line.get("loss_scale", 1.0),
    "batch-size": lambda line: line["samples"],
    "throughput": lambda line: line["tflops"],
    "tokens-per-second": lambda line: line["tokens_per_s"],
    "iteration-time": lambda line: line["step_ms"] / 1e3,
    "mem-max-allocated-bytes": lambda line: line["mem_peak_bytes"],
}


def main(events, metrics):
    with open(metrics) as file:
        lines = [json.loads(line) for line in file]
    reader = EventAccumulator(events, size_guidance={SCALARS: 0, TENSORS: 0}).Reload()
    for tag, value in CURVES.items():
        found = [(event.step, event.value) for event in reader.Scalars(tag)]
        wanted = [(line["step"], float(np.float32(value(line)))) for line in lines]
        assert found == wanted, f"{tag}: {found} is not {wanted}"
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    for tag, value in ("lm loss validation", lambda loss: loss), ("lm loss validation ppl", np.exp):
        found = [(event.step, event.value) for event in reader.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in validation], f"{tag}: {found}"
        assert np.allclose([number for _, number in found], [value(loss) for _, loss in validation], rtol=1e-6), tag
    for tag, word in ("options/text_summary", b"| --train-iters |"), ("sample/text_summary", b"    "):
        texts = [event.tensor_proto.string_val[0] for event in reader.Tensors(tag)]
        assert texts and all(word in text for text in texts), f"{tag}: {texts}"
        assert reader.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    print(f"{len(lines)} steps, {len(reader.Tags()['scalars'])} curves, as in {metrics}")


main(*sys.argv[1:])
