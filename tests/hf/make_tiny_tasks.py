#!/usr/bin/env python3
"""Write a tiny GPT-2 with a tokenizer, the data of evaluation tasks, and the numbers that transformers finds for them.

    python make_tiny_tasks.py OUT_DIR            makes everything, or the numbers alone of a model that is there
    python make_tiny_tasks.py --check OUT_DIR    computes the numbers of OUT_DIR/expected.json anew

OUT_DIR/config.json, model.safetensors, tokenizer.json   the model; it has learned half of the passages
OUT_DIR/wiki.txt                                         a text as WikiText's files are tokenized
OUT_DIR/lambada.jsonl                                    passages whose last word is asked for
OUT_DIR/expected.json                                    {"wikitext": {STRIDE: {..}}, "lambada": {..},
                                                         "lambada_openai": {.., "log_likelihoods", "greedy"},
                                                         "completions": [{"text", "prompt", "token_logprobs",
                                                                          "continuation"}]}: greedy tokens

The numbers follow the definitions of Megatron-LM's zero-shot tasks and of lm-evaluation-harness; each window and each
passage goes through the model by itself.
"""

import json
import math
import re
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

POSITIONS = 24
STRIDES = [4, 24]

WIKI = (
    " = The Old Mill = \n \n The mill was built in 1 @,@ 846 by two brothers , who had come from the north ; "
    "their well @-@ kept house ( now a museum ) stands 2 @.@ 5 miles away . \n Its \" great wheel \" turned until "
    "the river ' s course was changed : nobody knows why ! Was it the flood [ of 1901 ] ? \n \n = = Later use = = "
    "\n \n In the boys ' school , which moved in later , N pupils read \" Old Mills \" and 'By the river ' . The "
    "winter was cold , down to 12 \u00b0 C , and the teachers ' rooms had { almost } no heating . \n"
)

WORDS = ["mill", "river", "wheel", "museum", "school", "winter"]
PASSAGES = [
    f"The {a} was old and the {b} was new , so the teachers went to the {b} and came back to the {a}"
    for a in WORDS
    for b in WORDS
    if a < b
][:11] + ["  The river froze in winter and the wheel of the mill stood  still"]  # forms differ on doubled spaces

# (pattern, replacement), in the order of the sources.
RULES = [(re.escape(a), b) for a, b in [
    ("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": "), (" ; ", "; "), (" . ", ". "),
    (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
]] + [
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"),
] + [(re.escape(a), b) for a, b in [
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"),
    (" N ", " 1 "), (" 's", "'s"),
]]


def detokenize(text):
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return text


def make(out):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [detokenize(WIKI), *PASSAGES],
        trainers.BpeTrainer(
            vocab_size=310,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    torch.manual_seed(20)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size() + 2,  # two rows of padding
        n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    wiki = tokenizer.encode(detokenize(WIKI)).ids
    learned = [tokenizer.encode(text).ids[-(POSITIONS + 1):] for text in PASSAGES[::2]]
    learned += [wiki[start: start + POSITIONS + 1] for start in range(0, len(wiki) // 2, POSITIONS)]
    for _ in range(120):
        logits = [(model(torch.tensor([ids[:-1]])).logits[0], torch.tensor(ids[1:])) for ids in learned]
        losses = [torch.nn.functional.cross_entropy(*pair) for pair in logits]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "wiki.txt").write_text(WIKI)
    (out / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))


@torch.no_grad()
def scores(model, ids, first):
    """The log-probabilities of ids[first:], and whether each is the likeliest."""
    log_probs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)[first - 1:]
    targets = torch.tensor(ids[first:])
    own = log_probs.gather(1, targets[:, None])[:, 0]
    return own.tolist(), (log_probs.argmax(-1) == targets).tolist()


def wikitext(model, tokenizer, text, stride):
    ids = tokenizer.encode(detokenize(text)).ids
    total, words = 0.0, len(text.strip().split(" "))
    # Windows with masks, as Megatron-LM's data set has them.
    count = max(math.ceil(max(len(ids) - 1 - stride, 0) / stride) + 1, 1)
    scored = 0
    for window in range(count):
        tokens = ids[window * stride: window * stride + POSITIONS + 1]
        mask = [1] * (len(tokens) - 1) + [0] * (POSITIONS + 1 - len(tokens))
        if stride != POSITIONS and window != 0:
            mask[:-stride] = [0] * (POSITIONS - stride)
        if len(tokens) < 2:
            continue
        own, _ = scores(model, tokens, 1)
        total += sum(x * m for x, m in zip(own, mask))
        scored += sum(mask)
    assert scored == len(ids) - 1, (scored, len(ids))
    loss, ratio = -total / (len(ids) - 1), (len(ids) - 1) / (words - 1)
    return dict(loss=loss, ppl=math.exp(loss), adjusted_ppl=math.exp(loss * ratio), token_ratio=ratio,
                tokens=len(ids), words=words)


def lambada(model, pairs):
    likelihoods, greedy = [], []
    for context, word in pairs:
        ids = (context + word)[-(POSITIONS + 1):]
        own, right = scores(model, ids, len(ids) - len(word))
        likelihoods.append(sum(own))
        greedy.append(all(right))
    count = len(greedy)
    return dict(acc=sum(greedy) / count, perplexity=math.exp(-sum(likelihoods) / count), examples=count,
                log_likelihoods=likelihoods, greedy=greedy)


@torch.no_grad()
def completion(model, tokenizer, text, length, count):
    ids = tokenizer.encode(text).ids[:length]
    own, _ = scores(model, ids, 1)
    added = []
    for _ in range(count):
        added.append(model(torch.tensor([ids + added])).logits[0, -1].argmax().item())
    return dict(text=tokenizer.decode(ids), prompt=ids, token_logprobs=own, continuation=added)


def compute(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = GPT2LMHeadModel.from_pretrained(folder).double().eval()
    text = (folder / "wiki.txt").read_text()
    passages = [json.loads(line)["text"] for line in (folder / "lambada.jsonl").read_text().splitlines()]

    def encode(text):
        return tokenizer.encode(text).ids

    strict, harness = [], []
    for passage in passages:
        word = passage.split()[-1]
        strict.append((encode(passage[:passage.rfind(word)].strip()), encode(" " + word)))
        words = passage.split(" ")
        # The harness moves white space from the end of a context to its continuation.
        context = encode(" ".join(words[:-1]).rstrip())
        whole = encode(" ".join(words[:-1]) + " " + words[-1])
        harness.append((context, whole[len(context):]))
    return dict(
        wikitext={str(stride): wikitext(model, tokenizer, text, stride) for stride in STRIDES},
        lambada=lambada(model, strict),
        lambada_openai=lambada(model, harness),
        completions=[
            completion(model, tokenizer, detokenize(text), 20, 4),
            completion(model, tokenizer, passages[0], 14, 10),
        ],
    )


def close(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == b if isinstance(a, (bool, int, str)) else abs(a - b) <= 1e-6 * max(1.0, abs(a))


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    check = sys.argv[1] == "--check"
    folder = Path(sys.argv[2 if check else 1])
    if not check and not (folder / "config.json").exists():
        folder.mkdir(exist_ok=True)
        make(folder)
    found = compute(folder)
    path = folder / "expected.json"
    if not check:
        path.write_text(json.dumps(found, indent=1) + "\n")
    elif not close(json.loads(path.read_text()), found):
        sys.exit(f"{path} is not what transformers computes: {json.dumps(found)}")
    print(f"{folder}: accuracy {found['lambada']['acc']}, {found['lambada_openai']['acc']}")


main()
