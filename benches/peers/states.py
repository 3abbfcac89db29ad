"""Sorts samples by the state of the core: a probe before and after each tells whether the core had its units to itself
("alone": both at 0.75 of the fast ones' speed or more) or shared them ("shared": both below)."""

import time

import torch

ALONE = 0.75


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def small_product(dtype):
    """A probe: a product whose operands stay in the caches. Returns a function that gives its seconds."""
    a, b, c = (torch.randn(256, 256).to(dtype) for _ in range(3))

    def probe():
        return timed(lambda: torch.mm(a, b, out=c))

    for _ in range(200):
        probe()
    return probe


def limit(samples):
    """The seconds of a probe from which on the core is shared, of samples (before, seconds, after)."""
    probes = sorted(probe for before, _, after in samples for probe in (before, after))
    return probes[len(probes) // 20] / ALONE


def by_state(samples, limit):
    """The seconds of the samples in each state."""
    found = {"alone": [], "shared": []}
    for before, seconds, after in samples:
        if (before <= limit) == (after <= limit):
            found["alone" if before <= limit else "shared"].append(seconds)
    return found
