"""How long the packed sequences are that `bench --packed` times."""

from __future__ import annotations

import numpy as np

DENSE = "dense"  # the contestant: our own call on the same rows, where all lengths are equal
# The longest lengths that each distribution is timed with, unless `--seqlens` says others.
LONGEST = {
    "cuda": {"equal": (512, 4096), "uniform": (1024,), "long-tailed": (4096,), "short": (16,)},
    "cpu": {"equal": (64, 256), "uniform": (128,), "long-tailed": (256,), "short": (16,)},
}
DISTRIBUTIONS = tuple(LONGEST["cuda"])


def draw(distribution: str, longest: int, tokens: int) -> tuple[int, ...]:
    """Lengths of at most `longest` that add up to `tokens`, the same ones each time.

    equal: all are `longest`; what does not divide `tokens` is left out. uniform, short: each length from 1 on is as
    likely. long-tailed: one of `longest`, two of half of it, and so many of a 256th to a 16th that `tokens` are full,
    in a random order. The last one drawn is cut where `tokens` are full.
    """
    if distribution == "equal":
        return (longest,) * max(1, tokens // longest)
    rng = np.random.default_rng(0)
    lengths, low, high = [], 1, longest
    if distribution == "long-tailed":
        lengths, low, high = [longest, longest // 2, longest // 2], max(1, longest // 256), max(1, longest // 16)
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(rng.integers(low, high, endpoint=True))))
    if distribution == "long-tailed":
        rng.shuffle(lengths)
    return tuple(lengths)
