#!/usr/bin/env python3
"""The yardstick of `cargo bench -p ferrotron-data --bench tokenizers`: Hugging Face's `tokenizers` on the same documents.

    RAYON_NUM_THREADS=2 python tokenizers_speed.py TOKENIZER.JSON FILE...

Prints MB/s and the number of tokens of `encode_batch_fast` and `encode_batch`, without special tokens, in batches of 1000
documents. Documents are cut as in the bench.
"""

import sys
import time

from tokenizers import Tokenizer

DOCUMENT = 4096


def documents(text):
    out, start, end = [], 0, -1
    while (end := text.find(b"\n", end + 1)) >= 0:
        if end + 1 - start >= DOCUMENT:
            out.append(text[start : end + 1])
            start = end + 1
    return [document.decode() for document in [*out, text[start:]]]


tokenizer = Tokenizer.from_file(sys.argv[1])
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        text = file.read()
    batches = documents(text)
    for name in ("encode_batch_fast", "encode_batch"):
        encode, tokens, start = getattr(tokenizer, name), 0, time.time()
        for at in range(0, len(batches), 1000):
            encodings = encode(batches[at : at + 1000], add_special_tokens=False)
            tokens += sum(len(encoding) for encoding in encodings)
        seconds = time.time() - start
        print(f"{path} {name}: {len(text) / 1e6 / seconds:.2f} MB/s, {tokens} tokens in {len(batches)} documents", flush=True)
