#!/usr/bin/env python3
"""The yardstick of `cargo bench -p ferrotron-data --bench tokenizers`: Hugging Face's `tokenizers` on the same documents.

    RAYON_NUM_THREADS=2 python tokenizers_speed.py TOKENIZER.JSON FILE...

Prints MB/s, MB per second of processors, the number of tokens and the bench's hash of the ids, for `encode_batch_fast` and
`encode_batch` without special tokens, in batches of 1000 documents. Documents are cut as in the bench.
"""

import sys
import time
import zlib
from array import array

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
        encode = getattr(tokenizer, name)
        clock = processors = tokens = number = hash = 0
        for at in range(0, len(batches), 1000):
            start = time.time(), time.process_time()
            encodings = encode(batches[at : at + 1000], add_special_tokens=False)
            tokens += sum(len(encoding) for encoding in encodings)
            clock, processors = clock + time.time() - start[0], processors + time.process_time() - start[1]
            for encoding in encodings:
                number += 1
                hash += zlib.crc32(array("I", encoding.ids).tobytes()) * number
            # Freed within the time, as the bench does.
            start = time.time(), time.process_time()
            del encodings
            clock, processors = clock + time.time() - start[0], processors + time.process_time() - start[1]
        rate = len(text) / 1e6
        print(
            f"{name}: {rate / clock:.1f} MB/s, {rate / processors:.1f} MB per processor second, {tokens} tokens in "
            f"{len(batches)} documents, ids {hash % 2**64:016x}",
            flush=True,
        )
