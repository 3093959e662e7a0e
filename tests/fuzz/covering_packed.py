"""Of the covering set, problems with packed sequences instead of a batch, and with ranges of keys."""

from __future__ import annotations

import dataclasses
from random import Random

from .spec import Spec

# (shares of the queries, of the keys, of the keys that count) in sixteenths, rows behind the last sequence
SHAPES = (
    (((16, 16, 16), (3, 5, 4), (0, 2, 1)), 0),
    (((4, 0, 0), (16, 16, 15), (7, 16, 16), (1, 1, 0)), 5),
    (((0, 0, 0), (16, 16, 16), (0, 0, 0), (9, 3, 3), (16, 8, 8)), 33),
)

SEQUENCES = "75:97:90,0:5:5,30:120:120"  # three, to be written down


def packed(spec: Spec, number: int) -> Spec:
    """A problem of one batch with sequences as long as its lengths, shorter ones, and rows of none."""
    shares, outside = SHAPES[number % len(SHAPES)]
    rng, found = Random(number), []
    for a, b, used in shares:
        lengths = [-(-n * share // 16) for n, share in ((spec.sq, a), (spec.sk, b), (spec.sk, used))]
        found.append((lengths[0], lengths[1], min(lengths[1:])))
    rng.shuffle(found)
    text = ",".join("{}:{}:{}".format(*x) for x in found)
    return dataclasses.replace(spec, packed=text, batch=1, sq=outside, sk=outside)


# The first and the last key of a range, in sixteenths of the keys.
RANGES = ((5, 16), (0, 9), (3, 12), (16, 16), (0, 16))


def ranged(spec: Spec, number: int) -> Spec:
    """A problem whose sequences have ranges of keys."""
    keys = [b for _, b, _ in spec.lengths] if spec.packed else [spec.sk] * spec.batch
    shares = (RANGES[(number + i) % len(RANGES)] for i in range(len(keys)))
    ranges = ",".join(f"{n * a // 16}:{-(-n * b // 16)}" for n, (a, b) in zip(keys, shares, strict=True))
    return dataclasses.replace(spec, ranges=ranges)
