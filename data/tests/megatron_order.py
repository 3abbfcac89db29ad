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


def normalize(weights):
    weights = np.array(weights, dtype=np.float64)
    return (weights / np.sum(weights)).tolist()


def blend(weights, samples):
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
# The builder and the blend both normalize.
print(*map(crc32, blend(normalize(normalize([1.0 / (i + 3) for i in range(37)])), 50000)))
print(*map(crc32, blend(normalize(normalize([(i * 7919 % 1000 + 1) / 3.0 for i in range(300)])), 50000)))


def training(sequences, first, seq_length, samples):
    """Samples of the 96.9 % of a set whose tokens count up from `first`, in the order in which they are taken."""
    share = 969 / np.sum(np.array([969.0, 30.0, 1.0]))
    ids = np.arange(0, int(round(share * float(sequences))))
    lengths = ids * 31 % 41
    offsets = first + np.concatenate(([0], np.cumsum(lengths)))
    order, starts, shuffle = indices(lengths, ids, seq_length, samples, 1234)
    stream = np.concatenate([np.arange(offsets[i], offsets[i] + lengths[i]) for i in order])
    begins = np.concatenate(([0], np.cumsum(lengths[order])))
    places = [begins[position] + offset for position, offset in starts[:-1][shuffle]]
    return [stream[place : place + seq_length] for place in places]


def run(sets, weights, samples):
    ceil = lambda x: int(np.ceil(x))
    if weights is None and len(sets) == 1:
        return training(*sets[0], 16, samples)[:samples]
    if weights is None:
        rows = [training(*each, 16, None) for each in sets]
        weights = normalize([len(each) for each in rows])
    else:
        weights = normalize(weights)
        needed = [ceil(ceil(samples * weight) * (1 + 0.005)) for weight in weights]
        rows = [training(*each, 16, count) for each, count in zip(sets, needed)]
        weights = normalize(weights)
    return [rows[chosen][number] for chosen, number in zip(*blend(weights, samples))]


a, b, c = (400, 0), (500, 500_000), (77, 700_000)
for sets, weights, samples in [
    ([a], None, 1300),
    ([a], [2.0], 480),
    ([a, b], [30.0, 70.0], 1000),
    ([a, b, c], [0.1, 0.2, 0.4], 3001),
    ([a, b, c], None, 900),
]:
    print(crc32(np.concatenate(run(sets, weights, samples)).astype(np.uint32)))


def held_out(sequences, first, seq_length, samples, shares, part):
    """The same of the validation (1) or test part (2) of a set divided by `shares`."""
    ends = np.cumsum(np.array(shares, dtype=np.float64) / np.sum(shares))
    bounds = [0] + [int(round(end * float(sequences))) for end in ends]
    ids = np.arange(bounds[part], bounds[part + 1])
    all_lengths = np.arange(0, sequences) * 31 % 41
    offsets = first + np.concatenate(([0], np.cumsum(all_lengths)))
    order, starts, shuffle = indices(all_lengths[ids], ids, seq_length, samples, 1234)
    stream = np.concatenate([np.arange(offsets[i], offsets[i] + all_lengths[i]) for i in order])
    begins = np.concatenate(([0], np.cumsum(all_lengths[order])))
    places = [begins[position] + offset for position, offset in starts[:-1][shuffle]]
    return [stream[place : place + seq_length] for place in places]


# A run of 10 steps with an evaluation every 4 steps over 3 batches of 4 samples: 3 x (10 // 4 + 1) x 4 samples.
shares = [700.0, 250.0, 50.0]
total, each = 3 * (10 // 4 + 1) * 4, 3 * 4
one = held_out(*a, 16, total, shares, 1)
ceil = lambda x: int(np.ceil(x))
weights = normalize([30.0, 70.0])
counts = [ceil(ceil(total * weight) * (1 + 0.005)) for weight in weights]
rows = [held_out(*each_set, 16, count, shares, 1) for each_set, count in zip([a, b], counts)]
two = [rows[chosen][number] for chosen, number in zip(*blend(normalize(weights), total))]
# A part of two sequences that is shorter than a sample is read several times within one.
short = held_out(*(20, 0), 64, total, [18.0, 2.0, 0.0], 1)
for samples in (one, two, short):
    print(*(crc32(np.concatenate(samples[k * each : (k + 1) * each]).astype(np.uint32)) for k in range(3)))
