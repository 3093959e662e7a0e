"""Problems that cover all pairs: any two values of two axes of `AXES` meet in one of them, unless `is_legal` says no,
and no third value (`HIDING`) keeps a fault from being seen there.

A small greedy generator with a seed of its own. A problem that needs kernels that none before it needs costs some
seconds of g++, so it must cover `NEW_KIND` pairs more than another one to be taken.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from random import Random
from typing import Any

from cupyflash.gpu.device import Device
from cupyflash.plan.families import variants_of_calls
from cupyflash.problem import Problem

from .arrays import NOT_FOR_TMA, UNALIGNED
from .covering_features import FEATURES, feature_rows, with_features
from .covering_packed import SEQUENCES, packed, ranged
from .spec import Spec

MEMORY = ("contiguous", "bhsd", "padded", "misaligned", "one_head")
RESULTS = ("contiguous", "bhsd", "padded")
LENGTHS = ("one", "less", "under", "over", "many")  # relative to a tile, less or more by one
AXES: dict[str, tuple[Any, ...]] = {
    # Which loops run: the family and head_dim, a multiple of 64, of 16, of 8; more than 128, and the most.
    "kernel": tuple(itertools.product(("sm80", "sm90"), (64, 80, 72, 200, 256))),
    "dtype": ("bf16", "fp16"),
    "mask": ("full", "causal", "both", "left", "right", "empty"),
    "scale": ("+", "-", "0"),
    "deterministic": (False, True),
    "sq": LENGTHS,
    "sk": LENGTHS,
    "batch": (1, 2, 3),
    "heads": (1, 2, 3),
    "group": (1, 2, 5, 8),
    "dlse": (False, True),
    "values": ("normal", "constant", "outliers", "hidden", "nonfinite"),
    "q": MEMORY, "k": MEMORY, "v": MEMORY, "dout": MEMORY,
    "o": RESULTS, "dq": RESULTS, "dk": RESULTS, "dv": RESULTS,
    "section": (0, 1, 2),
    "mode": ("race", "late", "any"),
}  # fmt: skip
# Values with which much is zero or cancels, so that many a fault does not show.
HIDING = (("sq", "one"), ("sk", "one"), ("values", "constant"), ("scale", "0"))
Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]
SEED, CANDIDATES, NEW_KIND = 3, 300, 50
FAIR = 1e7  # cost of a row among equals
MOST_WORK = 8e7  # queries times keys times heads times head_dim: some seconds in the emulator
DEAR = 1e7  # a row must cover a pair more for each so much of its cost


def is_legal(row: Row) -> bool:
    """Whether these axes, some or all, go together."""
    memory = [row[name] for name in ("q", "k", "v", "dout") if name in row]
    if row.get("kernel", " ")[0] == "sm90" and any(how in NOT_FOR_TMA for how in memory):
        return False  # goes to the sm80 family
    return not (row.get("values") == "hidden" and row.get("mask") == "full")  # nothing is hidden


def covered(row: Row) -> set[Pair]:
    """The pairs that a row shows: one that hides faults counts for those pairs alone that it is part of."""
    hiding = {axis for axis, value in HIDING if row[axis] == value}
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(AXES, 2) if hiding <= {a, b}}


def allcovered() -> list[Pair]:
    """Those that are legal."""
    return [
        (a, x, b, y)
        for a, b in itertools.combinations(AXES, 2)
        for x, y in itertools.product(AXES[a], AXES[b])
        if is_legal({a: x, b: y})
    ]


def _kind(row: Row) -> tuple[Any, ...]:
    """What is compiled for a row."""
    mask = row["mask"] if row["mask"] in ("full", "causal") else "window"
    unaligned = any(row[name] in UNALIGNED for name in ("q", "k", "v", "dout"))
    return row["kernel"], row["dtype"], mask, row["scale"] == "+", row["deterministic"], unaligned


def _work(row: Row) -> float:
    """About what it costs, in whole tiles, whichever they are: these may change, and the rows keep their names."""
    length = {"one": 64, "less": 64, "under": 128, "over": 192, "many": 350}
    heads = row["batch"] * row["heads"] * row["group"]
    return float(length[row["sq"]] * length[row["sk"]] * heads * row["kernel"][1])


def _cost(row: Row) -> float:
    """With what is computed again where there is NaN."""
    return _work(row) * {"hidden": 3, "nonfinite": 3}.get(row["values"], 1)


@functools.cache
def rows() -> tuple[Row, ...]:
    """The covering set."""
    rng, found, kinds = Random(SEED), [], set()
    todo = dict.fromkeys(allcovered())  # a set that keeps its order
    plain = {name: tuple(x for x in values if (name, x) not in HIDING) for name, values in AXES.items()}
    while todo:
        a, x, b, y = next(iter(todo))
        best, best_score = None, -1e9
        tries = 0
        while tries < CANDIDATES or best is None:
            row = {name: values[int(rng.random() * len(values))] for name, values in plain.items()} | {a: x, b: y}
            if tries % 2 and found:  # the kernels of an earlier row
                like = found[int(rng.random() * len(found))]
                row |= {n: like[n] for n in ("kernel", "dtype", "mask", "scale", "deterministic") if n not in (a, b)}
            tries += 1
            if not is_legal(row) or _work(row) > MOST_WORK:
                continue
            price = _cost(row) / DEAR + NEW_KIND * (_kind(row) not in kinds)
            score = sum(pair in todo for pair in covered(row)) - price
            if score > best_score:
                best, best_score = row, score
        assert best is not None
        found.append(best)
        kinds.add(_kind(best))
        for pair in covered(best):
            todo.pop(pair, None)
    return tuple(found)


@functools.cache
def capped() -> tuple[Row, ...]:
    """Of `rows`, a few that show every value of every axis: a softcap meets all of them there.

    Neither short ones first nor long ones, which cost the emulator seconds; none in which no query sees a key.
    """
    some = [row for row in rows() if _sees(spec(row, 0))]
    shown = [{(a, x) for a, x in row.items() if {a} >= {n for n, y in HIDING if row[n] == y}} for row in some]
    todo, found = {(a, x) for a, values in AXES.items() for x in values}, []
    while todo:
        best = max(
            (i for i in range(len(shown)) if shown[i] & todo),
            key=lambda i: len(shown[i] & todo) - abs(math.log2(_cost(some[i]) / FAIR)) / 2,
        )
        found.append(some[best])
        todo -= shown[best]
    return tuple(found)


def _sees(s: Spec) -> bool:
    return bool((s.visible[:, 0] < s.visible[:, 1]).any())


def _tiles(row: Row) -> tuple[int, int]:
    """The forward's queries and the backward's keys of a tile."""
    family, d = row["kernel"]
    device, problem = Device.synthetic("sm_90"), Problem(row["dtype"], 1, 1, 1, 1, 1, d, 1.0)
    forward, _, backward, _ = variants_of_calls(problem, device, family=family)
    return forward.rows, backward.rows


def _window(mask: str, sq: int, sk: int) -> dict[str, Any]:
    """The options of a mask. "empty": about half of the queries see no key."""
    beyond = sq - sk - sq // 2 - 2
    return {
        "full": {},
        "causal": {"causal": True},
        "both": {"left": sk // 3 + 5, "right": sk // 4},
        "left": {"left": sk // 4},
        "right": {"right": -2 - sk // 9},
        "empty": {"right": beyond - (beyond == -1)},  # -1 warns
    }[mask]


def spec(row: Row, number: int) -> Spec:
    """A row as a problem."""
    block_m, block_n = _tiles(row)
    length = {"one": 1, "less": 23}
    sq = {**length, "under": block_m - 1, "over": block_m + 1, "many": 2 * block_m + 41}[row["sq"]]
    sk = {**length, "under": block_n - 1, "over": block_n + 1, "many": 323}[row["sk"]]
    family, d = row["kernel"]
    size = 0.7 * d**-0.5
    same = {n: row[n] for n in AXES if n not in ("kernel", "mask", "scale", "sq", "sk")}
    return Spec(
        **same, sq=sq, sk=sk, **_window(row["mask"], sq, sk), scale={"+": None, "-": -size, "0": 0.0}[row["scale"]],
        family=family, d=d, seed=number, sms=1 + number % 3, order=number,
    )  # fmt: skip


# Persistent blocks that see many tiles: a queue that loses count now and then has time for it.
_MANY = Spec(batch=3, heads=12, sq=9, sk=17, sms=1)
MANY_TILES = {
    f"tiles-{i}": dataclasses.replace(_MANY, d=d, group=group, mode=mode, seed=i, **more)
    for i, (d, group, mode, more) in enumerate(
        (
            (64, 1, "race", {}),
            (80, 1, "race", {"causal": True, "dtype": "fp16"}),
            (128, 1, "late", {"dlse": True}),
            (200, 1, "race", {"causal": True, "section": 5}),
            (256, 1, "race", {"dtype": "fp16"}),
            (256, 2, "late", {"causal": True, "dlse": True, "section": 5}),
            (64, 1, "race lanes", {}),  # of a warp that waits, each lane on its own
            (200, 1, "race lanes", {}),
        )
    )
}


# Where a block begins or ends with a key that one query sees: with blocks of 64, and 32 or 64 queries,
# seqlen_k - seqlen_q - left is -65, or seqlen_k - seqlen_q is 1 under the causal mask.
_LEFT, _CAUSAL = Spec(sq=300, sk=323, left=88, heads=2), Spec(sq=300, sk=301, causal=True, heads=2)
_SHARES = Spec(sq=40, sk=1003, batch=2, group=2, deterministic=True)  # six shares of dQ and more
EDGES = {
    f"{name}-{family}-d{d}": dataclasses.replace(spec, family=family, d=d, dtype=dtype, mode="race")
    for name, spec in (("left", _LEFT), ("causal", _CAUSAL), ("shares", _SHARES))
    for family, d, dtype in (
        ("sm80", 64, "bf16"), ("sm90", 64, "fp16"), ("sm80", 200, "fp16"), ("sm90", 200, "fp16"), ("sm80", 72, "fp32"),
    )
}  # fmt: skip
# Rows that are computed again, of groups and batches, with strides of their own: what sees an inf, and what does not.
REPAIRS = {
    f"repair-{family}-d{d}-{group}": Spec(
        family=family, d=d, dtype=dtype, sq=40, sk=100, group=group, heads=2, batch=2, left=left,
        causal=left is None,
        values="last_infinite", k="padded", v="bhsd", dout="rows_first", q="every_second", dk="bhsd", scale=scale,
        seed=group,
    )
    for family, d, dtype in (
        ("sm80", 64, "bf16"), ("sm90", 64, "fp16"), ("sm80", 200, "fp16"), ("sm90", 200, "bf16"), ("sm80", 136, "fp32"),
    )
    for group, left, scale in ((5, 20, None), (8, None, -0.05))
}  # fmt: skip
# Maxima that grow by more than P may exceed the one in use: it would overflow fp16, and in bf16 the fp32 sums of P V.
CLIFFS = {
    f"cliff-{dtype}-d{d}": Spec(dtype=dtype, d=d, sq=70, sk=323, values="cliff", heads=2, causal=d == 128)
    for dtype in ("bf16", "fp16")
    for d in (64, 128)
}

# Tiles of keys that nobody sees, of which nothing is summed up; NaN that rows beyond the last query would see.
UNSEEN = {
    f"unseen-{family}": Spec(family=family, sq=30, sk=430, left=20, heads=2, group=2, alibi=1)
    for family in ("sm80", "sm90")
} | {"unseen-wide": Spec(family="sm90", d=200, sq=30, sk=100, right=-9, heads=2, values="hidden", alibi=1)}
# Shares of dQ in order, of queries that do not see the first blocks of keys.
RANKS = {"rank-sm80": Spec(family="sm80", sq=23, sk=323, left=80, deterministic=True)}
# Gradients of what mods read, along diagonals, keys and queries, beside whatever goes with mods.
_READS = Spec(sq=75, sk=203, batch=2, heads=2, group=2, dlse=True)
LEARNED_MODS = {
    f"learned-{mods}-{family}-d{d}": dataclasses.replace(_READS, mods=mods, family=family, d=d, dtype=dtype, **more)
    for family, d, dtype, mods, more in (
        ("sm80", 64, "bf16", "distances", {"packed": SEQUENCES, "dropout": 0.2, "ranges": "0:31,2:5,7:120"}),
        ("sm90", 192, "fp16", "distances", {"bias": "hqk", "sink": True}),
        ("sm80", 200, "fp16", "scaled", {"softcap": 1.2, "causal": True, "alibi": 2}),
        ("sm90", 64, "bf16", "scaled", {"packed": SEQUENCES, "causal": True, "sink": True}),
        ("sm80", 80, "bf16", "heated", {"blocks": "stripes", "bias": "bqk bool", "left": 60, "values": "outliers"}),
        ("sm90", 72, "fp16", "heated", {"alibi": 1, "softcap": 1.2, "ranges": "9:203,0:66", "scale": -0.08}),
    )
}
# A bias whose rows lie in chunks, of which a forward on Hopper interleaves the keys, beside all that goes
# with it there.
CHUNKED = {
    f"chunks-{i}": Spec(family="sm90", d=d, dtype=dtype, bias=bias, sq=203, sk=328, heads=2, batch=2, **more)
    for i, (d, dtype, bias, more) in enumerate(
        (
            (64, "bf16", "hqk", {"causal": True, "group": 2, "dlse": True}),
            (64, "fp16", "bhqk fp32", {"left": 113, "right": 82, "softcap": 1.2, "alibi": 1}),
            (40, "fp16", "qk hides", {"right": -37, "values": "outliers", "sink": True}),
            (80, "bf16", "bqk", {"scale": -0.08, "causal": True, "alibi": 2, "k": "padded", "v": "bhsd"}),
            (128, "fp16", "hqk", {"values": "nonfinite", "deterministic": True}),
            (128, "bf16", "bhqk fp32", {"values": "hidden", "right": -9, "mode": "any"}),
            (64, "bf16", "bhqk", {"ranges": "9:200,0:66", "mode": "lanes"}),
            (128, "fp16", "qk hides", {"causal": True, "k": "every_second", "softcap": 1.2, "values": "dominated"}),
            (64, "bf16", "hqk hides", {"left": 82, "values": "nonfinite", "sink": True}),
            (8, "bf16", "qk fp32", {"causal": True, "values": "cliff", "mode": "starve"}),
        )
    )
}
# A mask alone, which becomes a block mask.
MASKED = {
    f"masked-{i}": Spec(family=family, d=d, dtype=dtype, bias=bias, sq=203, sk=sk, heads=2, batch=2, **more)
    for i, (family, d, dtype, bias, sk, more) in enumerate(
        (
            ("sm90", 64, "bf16", "bhqk bool tiles", 328, {"ranges": "9:200,0:66", "mode": "lanes"}),
            ("sm90", 128, "fp16", "qk bool tiles", 336, {"causal": True, "k": "every_second", "values": "dominated"}),
            ("sm90", 64, "bf16", "hqk bool tiles", 327, {"left": 82, "values": "nonfinite", "sink": True}),
            ("sm80", 64, "bf16", "bqk bool tiles whole", 336, {"values": "nonfinite", "deterministic": True}),
            ("sm80", 72, "fp16", "bk bool tiles", 328, {"softcap": 1.2, "alibi": 2, "group": 2, "dlse": True}),
            ("sm90", 256, "bf16", "bhqk bool tiles turned", 70, {"values": "hidden", "right": -9, "mode": "any"}),
            ("sm80", 40, "bf16", "qk bool tiles", 336, {"dropout": 0.3, "values": "outliers"}),
        )
    )
}
# A key that outweighs all others, met after another maximum.
DOMINATED = {
    f"dominated-{dtype}-d{d}": Spec(dtype=dtype, d=d, sq=70, sk=323, values="dominated", heads=8, scale=2.0**-3)
    for dtype in ("bf16", "fp16")
    for d in (64, 256)
}


@functools.cache
def cases() -> dict[str, Spec]:
    """All of them by name."""
    pairs = {f"pair-{i}": spec(row, i) for i, row in enumerate(rows())}
    caps = {f"softcap-{i}": FEATURES["softcap"](spec(row, i), i) for i, row in enumerate(capped())}
    slopes = {f"alibi-{i}": _with_slopes(row, i) for i, row in enumerate(capped())} | UNSEEN
    sinks = {f"sink-{i}": _with_sinks(row, i) for i, row in enumerate(capped())}
    numbers: Counter[str] = Counter()
    features = {f"features-{i}": with_features(spec(row, i), of, numbers) for i, (row, of) in enumerate(featured())}
    by_hand = MANY_TILES | EDGES | RANKS | REPAIRS | CLIFFS | DOMINATED | LEARNED_MODS | CHUNKED | MASKED
    return pairs | by_hand | caps | slopes | sinks | features


@functools.cache
def featured() -> tuple[tuple[Row, frozenset[str]], ...]:
    """Rows in which a query sees a key, each with some features."""
    return feature_rows(tuple(row for row in rows() if _sees(spec(row, 0))), AXES, HIDING)


def _with_sinks(row: Row, i: int) -> Spec:
    """Sinks alone, with slopes, packed, and with ranges of keys."""
    found = spec(row, i)
    found = (found, dataclasses.replace(found, alibi=1), packed(found, i), ranged(found, i))[i % 4]
    return dataclasses.replace(found, sink=True)


def _with_slopes(row: Row, i: int) -> Spec:
    """Slopes of all sequences or of each, some with a softcap, some packed."""
    found = packed(spec(row, i), i) if i % 3 == 2 else spec(row, i)
    softcap = 1.1 if i % 4 == 1 and row["values"] != "nonfinite" else None
    return dataclasses.replace(found, alibi=1 + i % 2, softcap=softcap)
