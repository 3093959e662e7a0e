"""Of the covering set, problems with features: each of these meets every value of every axis, and each other one with
which it goes together.

Which do is asked of cupyflash's own checks. A row carries as many features as it helps, so what goes together costs
fewer problems than what does not.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from .covering_bias import biased, masked
from .covering_packed import packed, ranged
from .generate import legal
from .modding import LEARNED, MODS
from .spec import Spec

Row = dict[str, Any]
Feature = Callable[[Spec, int], Spec]

P = (0.2, 0.5, 2.0**-16, 0.05)
BLOCKS = ("tiles_of_heads", "tiles", "blocks", "stripes", "tiles_of_batch", "holes")
SEED, CANDIDATES = 16, 60
CARRIED = 0.35  # how likely a further feature is


def _capped(spec: Spec, number: int) -> Spec:
    return dataclasses.replace(spec, softcap=1.5 if spec.values == "nonfinite" else (0.5, 0.8, 1.2)[number % 3])


def _modded(spec: Spec, number: int) -> Spec:
    """Without gradients of arrays, which not every row may ask for."""
    names = [name for name in MODS if name not in LEARNED]
    return dataclasses.replace(spec, mods=names[number % len(names)])


# In the order in which they are added to a problem: a bias may change its lengths, and ranges follow from these. They
# are told how many problems before have them.
FEATURES: dict[str, Feature] = {
    "bias": biased,
    "mask": masked,
    "packed": packed,
    "ranges": ranged,
    "dropout": lambda spec, number: dataclasses.replace(spec, dropout=P[number % len(P)]),
    "blocks": lambda spec, number: dataclasses.replace(spec, blocks=BLOCKS[number % len(BLOCKS)]),
    "softcap": _capped,
    "alibi": lambda spec, number: dataclasses.replace(spec, alibi=1 + number % 2),
    "sink": lambda spec, number: dataclasses.replace(spec, sink=True),
    "mods": _modded,
}
# Those that meet the axes here, all of them (()) or some; softcap, slopes and sinks have problems of their own, whose
# names planted bugs know. Mods are compiled into kernels of their own, which cost seconds each.
MEETING: dict[str, tuple[str, ...]] = dict.fromkeys(("bias", "mask", "packed", "ranges", "dropout", "blocks"), ())
MEETING["mods"] = ("kernel",)
Pair = tuple[str, str, Any]  # a feature, an axis and its value; or a feature, another one, True


@functools.cache
def together(features: frozenset[str]) -> bool:
    """Whether these go together."""
    return legal(with_features(Spec(sq=70, sk=70, batch=2, heads=2), features, Counter()))


def with_features(spec: Spec, features: Iterable[str], numbers: Counter[str]) -> Spec:
    """A problem with some more; `numbers` counts those with each."""
    for name in FEATURES:
        if name in features:
            spec = FEATURES[name](spec, numbers[name])
            numbers[name] += 1
    return spec


def pairs(axes: dict[str, tuple[Any, ...]]) -> list[Pair]:
    """What is to be covered."""
    found = [(f, axis, value) for f, some in MEETING.items() for axis in some or axes for value in axes[axis]]
    return found + [(f, g, True) for f, g in itertools.combinations(FEATURES, 2) if together(frozenset((f, g)))]


def covered(row: Row, features: frozenset[str], hiding: Iterable[tuple[str, Any]]) -> set[Pair]:
    """What a row shows: one with a value that hides faults shows that value alone."""
    hides = {axis for axis, value in hiding if row[axis] == value}
    seen = {axis for axis in row if hides <= {axis}}
    found = {(f, axis, row[axis]) for f in features & {*MEETING} for axis in seen}
    return found | ({(f, g, True) for f, g in itertools.permutations(features, 2)} if not hides else set())


def feature_rows(
    rows: tuple[Row, ...], axes: dict[str, tuple[Any, ...]], hiding: Iterable[tuple[str, Any]]
) -> tuple[tuple[Row, frozenset[str]], ...]:
    """Some of the rows, with features: greedily, the first of those that cover most."""
    rng, todo, found = Random(SEED), dict.fromkeys(pairs(axes)), []
    while todo:
        wanted = next(iter(todo))
        candidates = (_draw(rng, rows, wanted) for _ in range(CANDIDATES))
        fitting = [c for c in candidates if wanted in covered(*c, hiding)]
        if fitting:
            best = max(fitting, key=lambda c: sum(pair in todo for pair in covered(*c, hiding)))
            found.append(best)
            for pair in covered(*best, hiding):
                todo.pop(pair, None)
    return tuple(found)


def _draw(rng: Random, rows: tuple[Row, ...], wanted: Pair) -> tuple[Row, frozenset[str]]:
    """A row that may cover a pair: with its features, and others at random as long as they go together."""
    feature, axis, value = wanted
    features = frozenset((feature, axis) if axis in FEATURES else (feature,))
    fitting = [row for row in rows if axis in FEATURES or row[axis] == value]
    row = rng.choice(fitting)
    for other in rng.sample(list(FEATURES), len(FEATURES)):
        if rng.random() < CARRIED and together(features | {other}):
            features |= {other}
    return row, features
