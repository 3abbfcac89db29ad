#!/usr/bin/env python3
"""Score two small made tasks with lm-evaluation-harness, by transformers and by `ferrotron serve`, and compare.

The server runs on one rank, and then on two that share each layer (tensor parallelism); transformers runs once.

    python compare_harness.py FERROTRON MODEL_FOLDER

Needs `pip install lm_eval[api,hf]`, or what .ci/requirements.txt has of it, and no network: the tasks are files made here,
of multiple choice (log-likelihoods) and of greedy generation up to a stop. Prints the results of both, and fails unless
accuracies are equal and log-likelihoods agree to 1e-3.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %(data)s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: label
doc_to_choice: choices
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
"""

GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: {test: %(data)s}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n", "and"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""

WORDS = ["mill", "river", "wheel", "museum", "school", "winter"]


def write_tasks(folder):
    rows = [
        {"text": f"The {a} was old and the", "choices": [b, "teachers", c], "label": i % 3}
        for i, (a, b, c) in enumerate(zip(WORDS * 2, WORDS[1:] + WORDS, WORDS[3:] + WORDS))
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "choice.yaml").write_text(CHOICE % {"data": data})
    (folder / "generate.yaml").write_text(GENERATE % {"data": data})


# The tasks are files, and so is the model: nothing asks a server other than the one that is tested.
OFFLINE = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", NO_PROXY="127.0.0.1")


def harness(folder, name, model, arguments):
    """The results and the answers to every request."""
    out = folder / name
    environment = os.environ | OFFLINE | dict(HF_HOME=str(folder / "cache"))
    subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments, "--batch_size", "4", "--tasks",
         "tiny_choice,tiny_generate", "--include_path", folder, "--output_path", out, "--log_samples", "--device", "cpu"],
        check=True, stdout=subprocess.DEVNULL, env=environment,
    )
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"]
    numbers = {
        (task, metric): value
        for task, values in results.items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    answers = {}
    for path in out.rglob("samples_*.jsonl"):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            answers[path.name.split("_20")[0], sample["doc_id"]] = sample["resps"]
    return numbers, answers


def flat(value):
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


def same(a, b):
    try:
        return abs(float(a) - float(b)) <= 1e-3
    except ValueError:
        return a == b


def served(folder, name, ferrotron, model, longest, ranks):
    """The results and answers by a server on some ranks, which then ends without an error."""
    server = subprocess.Popen(
        [ferrotron, "serve", "--load", model, "--port", "0", *ranks], stdout=subprocess.PIPE, text=True
    )
    try:
        address = server.stdout.readline().split()[-1]
        found = harness(
            folder, name, "local-completions",
            f"model=tiny,base_url={address},tokenizer={model},tokenizer_backend=huggingface,num_concurrent=3,"
            f"max_length={longest}",
        )
    finally:
        server.terminate()
        code = server.wait(60)
    assert code == 0, code
    return found


def compare(wanted, found, name):
    assert wanted[0] == found[0], f"{name}: the results differ"
    assert wanted[1].keys() == found[1].keys() and wanted[1]
    for key, answers in wanted[1].items():
        pairs = list(zip(flat(answers), flat(found[1][key]), strict=True))
        assert all(same(*pair) for pair in pairs), (name, key, pairs)
    print(f"{len(wanted[1])} answers agree")


def main():
    ferrotron, model = sys.argv[1], Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        longest = json.loads((model / "config.json").read_text())["n_positions"]
        wanted = harness(folder, "hf", "hf", f"pretrained={model},dtype=float32")
        print("transformers:", wanted[0])
        for name, ranks in [("one rank", []), ("two ranks", ["--nproc", "2", "--tensor-model-parallel-size", "2"])]:
            found = served(folder, name.replace(" ", "-"), ferrotron, model, longest, ranks)
            print(f"ferrotron, {name}:", found[0])
            compare(wanted, found, name)


main()
