#!/usr/bin/env python3
"""Prints the checksums that the tests of `src/megatron_order` expect: Megatron-LM's indices, restated with NumPy.

The rules are those of `gpt_dataset.py`, `helpers.cpp` and `blended_dataset.py` in `megatron/core/datasets`.
"""
import zlib

import numpy as np

EXTRA = 1  # the token behind a sample, its last target


def crc32(array):
    return f"{zlib.crc32(array.tobytes()):08x}"


def indices(lengths, ids, seq_length, samples, seed):
    random, tokens, epochs, apart = np.random.RandomState(seed), int(lengths.sum()), 1, False
    while samples is not None and epochs * tokens < samples * seq_length + EXTRA:
        epochs += 1
    before = ((epochs - 1) * tokens - EXTRA) // seq_length
    if epochs > 1:
        apart = samples - before < int(0.80 * ((tokens - EXTRA) // seq_length))

    def documents(epochs):
        order = np.tile(ids, epochs).astype(np.int32)
        random.shuffle(order)
        return order

    order = np.concatenate((documents(epochs - 1), documents(1))) if apart else documents(epochs)
    total = (epochs * tokens - EXTRA) // seq_length
    length_of, starts, position, offset = dict(zip(ids.tolist(), lengths.tolist())), [(0, 0)], 0, 0
    for _ in range(total):
        rest = seq_length + EXTRA
        while rest > 0:
            length = length_of[int(order[position])] - offset
            rest -= length
            if rest <= 0:
                offset += rest + length - EXTRA
            else:
                position, offset = position + 1, 0
        starts.append((position, offset))
    cut = before if apart else total
    parts = [np.arange(0, cut, dtype=np.uint32), np.arange(cut, total, dtype=np.uint32)]
    for part in parts:
        random.shuffle(part)
    return order, np.array(starts, dtype=np.int32), np.concatenate(parts)


def blend(weights, samples):
    weights = np.array(weights, dtype=np.float64)
    weights = (weights / np.sum(weights)).tolist()
    taken, sets, numbers = [0] * len(weights), [], []
    for step in range(samples):
        lags = [weight * max(step, 1.0) - count for weight, count in zip(weights, taken)]
        chosen = lags.index(max(lags))
        sets.append(chosen)
        numbers.append(taken[chosen])
        taken[chosen] += 1
    return np.array(sets, dtype=np.int16), np.array(numbers, dtype=np.int64)


for first, end, seq_length, samples, seed in [
    (0, 969, 16, 3000, 1234),
    (0, 969, 16, 1300, 1234),
    (969, 999, 7, 400, 99),
    (0, 1000, 512, None, 0),
]:
    ids = np.arange(first, end)
    print(*map(crc32, indices(ids * 31 % 41, ids, seq_length, samples, seed)))
print(*map(crc32, blend([1.0 / (i + 3) for i in range(37)], 50000)))
print(*map(crc32, blend([(i * 7919 % 1000 + 1) / 3.0 for i in range(300)], 50000)))
