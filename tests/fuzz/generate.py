"""Random specs. What the emulator compiles (`kind`) is drawn once for several problems, everything else each time."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from cupyflash.check.case_masks import MASKS
from cupyflash.errors import CupyflashError

from .arrays import FOR_RESULTS, MEMORY, UNALIGNED, VALUES
from .modding import LEARNED, MODS
from .spec import Spec

HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 136, 160, 192, 200, 248, 256)
GROUPS = (1, 1, 1, 2, 2, 3, 4, 5, 8)
BORDERS = (0, 1, 2, 31, 32, 33, 63, 64, 65, 80, 127, 128, 129, 191, 192, 193, 255, 256, 257)
EMULATOR_PAIRS = 3e5  # of queries, keys and heads in one problem: a few seconds
CPU_PAIRS = 4e5
GPU_PAIRS = 4e6  # the oracle is the slow part
BOUNDED = (
    "hidden",
    "nonfinite",
    "last_infinite",
    "infinite_scores",
    "infinite_queries",
)  # scores must stay where exp does not underflow in float64


def _scale(rng: Random, d: int, negative: bool, *, moderate: bool) -> float | None:
    """Any size and sign; `negative`: or zero. Large ones are left out where scores must stay moderate."""
    if not negative and rng.random() < 0.5:
        return None
    size = 10 ** rng.uniform(-4, 0 if moderate else 1) * d**-0.5
    if rng.random() < 0.1:
        size = 1e-30
    return float(f"{0.0 if negative and rng.random() < 0.2 else -size if negative else size:.4g}")


def _softcap(rng: Random, values: str) -> float:
    """From 0.5 to 50; where NaN and inf must lie as in float64, no score may be so far beyond that its tanh is 1."""
    return float(f"{rng.choice([2.0 if values in BOUNDED else 0.5, 5.0]) * 10 ** rng.uniform(0, 1):.3g}")


def _length(rng: Random, most: int) -> int:
    """0 now and then, 1, next to the border of a tile, or any."""
    if rng.random() < 0.6:
        fitting = [n for n in BORDERS if n <= most and (n > 0 or rng.random() < 0.3)]
        return rng.choice(fitting)
    return rng.randint(1, most)


def _bound(rng: Random, most: int) -> int:
    """Of a window; -1 has a warning of its own."""
    bound = rng.choice([0, rng.randint(0, 70), rng.randint(0, most + 5), rng.randint(-most - 5, 5)])
    return -2 if bound == -1 else bound


def _window(rng: Random, most: int, mask: str) -> dict[str, Any]:
    """The options of a mask: full, causal or window."""
    if mask != "window":
        return {"causal": mask == "causal"}
    while True:
        sides = rng.choice(["left", "right", "both", "both"])
        left = None if sides == "right" else _bound(rng, most)
        right = None if sides == "left" else _bound(rng, most)
        if left is None or right is None or left + right >= 0:
            return {"left": left, "right": right, "causal": rng.random() < 0.2}


def _lengths(rng: Random, heads: int, pairs: float) -> tuple[int, int]:
    """seqlen_q and seqlen_k of `heads` heads in all."""
    most = max(2, int(min(600, (2 * pairs / heads) ** 0.5)))
    while True:
        sq, sk = _length(rng, most), _length(rng, most)
        if rng.random() < 0.05:
            sk = 5 * most
        if sq * sk * heads <= pairs:
            return sq, sk


def _packed(rng: Random, sq: int, sk: int) -> dict[str, Any]:
    """Some sequences of about so many rows in all, rows of none behind them."""
    found = []
    for _ in range(rng.choice([1, 2, 3, 5, 9, 40])):
        a, b = _length(rng, max(1, sq)), _length(rng, max(1, sk))
        a, b = min(a, sq) * (rng.random() < 0.9), min(b, sk) * (rng.random() < 0.9)
        found.append((a, b, b if rng.random() < 0.7 else rng.randint(0, b)))
        sq, sk = sq - a, sk - b
    return {"packed": ",".join("{}:{}:{}".format(*x) for x in found), "batch": 1, "sq": sq % 40, "sk": sk % 40}


def _ranges(rng: Random, keys: list[int]) -> str:
    """Of sequences with so many keys: padded on the left, on the right, on both sides, or not; none now and then."""
    found = []
    for n in keys:
        a, b = sorted((min(_length(rng, max(1, n)), n), min(_length(rng, max(1, n)), n)))
        found.append(rng.choice([(a, n), (0, b), (a, b), (0, n), (a, a)] + 2 * [(a, n)]))
    return ",".join("{}:{}".format(*x) for x in found) or "0:0"


def _bias(rng: Random) -> str:
    """A bias, or a mask, or both: along any dimensions, in any memory, some elements -inf."""
    found = [_added(rng, is_mask) for is_mask in rng.choice([(False,), (False,), (True,), (False, True)])]
    return " + ".join(found)


def _added(rng: Random, is_mask: bool) -> str:
    dims = "".join(d for d in "bhqk" if rng.random() < 0.7) or "-"
    words = [word for word in ("fp32", "hides", "turned", "shifted", "whole") if rng.random() < 0.25]
    return " ".join([dims, *["bool"] * is_mask, *words])


def _dropout(rng: Random) -> float:
    """From 2^-16 to nearly all."""
    return rng.choice([2.0**-16, 0.1, 0.1, 0.3, 0.5, float(f"{rng.random():.4f}"), 0.99])


def legal(spec: Spec) -> bool:
    """Whether cupyflash takes it: its checks know which features go together."""
    try:
        spec.problem()
    except CupyflashError:
        return False
    return True


def has_its_ranges(spec: Spec) -> bool:
    """Whether each sequence has the keys of its range."""
    keys = [used for _, _, used in spec.lengths] if spec.packed else [spec.sk] * spec.batch
    return all(not r or int(r.split(":")[1]) <= n for r, n in zip(spec.bounds, keys, strict=True))


def _together(rng: Random, spec: Spec) -> Spec:
    """Without some features, as many as it takes to be legal."""
    names = ["bias", "dropout", "blocks", "mods"]
    rng.shuffle(names)
    for name in names:
        if not legal(spec):
            spec = dataclasses.replace(spec, **{name: getattr(Spec(), name)})
    return spec


def _few_modes(rng: Random) -> str:
    return rng.choice(["race"] * 4 + ["late", "any", "early", "priority", "starve", "lanes", "race lanes"])


def kind(rng: Random, where: str) -> dict[str, Any]:
    """What kernels are compiled for. `unaligned` and `negative` (a scale that is) are no fields of a spec."""
    dtypes = ("bf16", "fp16") if where != "cpu" else ("bf16", "fp16", "fp32", "fp64")
    arch = rng.choice(["sm_80", "sm_86", "sm_90", "sm_90", "sm_90", "sm_100", "sm_120"])
    found = {
        "dtype": rng.choice(dtypes), "d": rng.choice(HEAD_DIMS), "arch": arch,
        "family": "sm80" if arch == "sm_90" and rng.random() < 0.1 else "",
        "mask": rng.choice(["full", "causal", "window"]), "negative": rng.random() < 0.25,
        "deterministic": rng.random() < 0.35, "unaligned": rng.random() < 0.2, "softcap": rng.random() < 0.2,
        "packed": rng.random() < 0.3, "alibi": rng.random() < 0.2, "kv_range": rng.random() < 0.25,
        "sink": rng.random() < 0.2, "bias": rng.random() < 0.3, "dropout": rng.random() < 0.25,
        "blocks": rng.random() < 0.25,
    }  # fmt: skip
    mods = [name for name in MODS if not (found["deterministic"] and name in LEARNED)]
    found["mods"] = rng.choice(mods) if rng.random() < 0.2 else ""
    is_wide = found["d"] > 224 and arch in ("sm_86", "sm_120")  # of these there is no backward in fp32
    if where != "cpu" and rng.random() < 0.3 and not is_wide:
        found["dtype"] = "fp32"
    return found


def _memory(rng: Random, unaligned: bool, where: str) -> dict[str, str]:
    """Strides of each array on its own; half of the problems have plain ones."""
    plain = rng.random() < 0.4
    inputs = [name for name in MEMORY if name not in UNALIGNED and (where != "gpu" or name != "backwards")]
    found = {
        name: "contiguous" if plain or rng.random() < 0.3 else rng.choice(inputs) for name in ("q", "k", "v", "dout")
    }
    if unaligned:
        for name in rng.sample(sorted(found), rng.randint(1, 4)):
            found[name] = rng.choice(UNALIGNED)
    if where == "emulator":
        found |= {name: rng.choice(FOR_RESULTS) for name in ("o", "dq", "dk", "dv") if not plain}
    return found


def problem(rng: Random, where: str, of: dict[str, Any]) -> Spec:
    """A problem of a kind."""
    values = rng.choice([*VALUES, "normal", "normal", "hidden", "nonfinite"])
    group, heads, batch = rng.choice(GROUPS), rng.randint(1, 3), rng.choice([0] + [1] * 10 + [2] * 6 + [3] * 3)
    if rng.random() < 0.1:
        heads = rng.randint(4, 12)
    pairs = {"cpu": CPU_PAIRS, "emulator": EMULATOR_PAIRS * min(1, 96 / of["d"]), "gpu": GPU_PAIRS}[where]
    sq, sk = _lengths(rng, max(1, batch) * heads * group, pairs)
    softcap = _softcap(rng, values) if of["softcap"] else None
    spec = Spec(
        dtype=of["dtype"], d=of["d"], batch=batch, sq=sq, sk=sk, heads=heads, group=group,
        scale=_scale(rng, of["d"], of["negative"], moderate=values in BOUNDED), deterministic=of["deterministic"],
        softcap=softcap, alibi=rng.choice([1, 2]) if of["alibi"] else 0,
        layout=rng.choice(["bshd", "bhsd"]), dlse=rng.random() < 0.5, values=values, seed=rng.randrange(10**6),
        sink=of["sink"], mods=of["mods"], family=of["family"], **_window(rng, max(sq, sk), of["mask"]),
        **_memory(rng, of["unaligned"], where),
    )  # fmt: skip
    if of["packed"]:
        spec = dataclasses.replace(spec, **_packed(rng, sq, sk))
    if of["bias"]:
        spec = dataclasses.replace(spec, bias=_bias(rng))
    if of["dropout"]:
        spec = dataclasses.replace(spec, dropout=_dropout(rng))
    if of["blocks"] and spec.batch:
        spec = dataclasses.replace(spec, blocks=rng.choice(list(MASKS)))
    spec = _together(rng, spec)
    if of["kv_range"]:
        keys = [b for _, b, _ in spec.lengths] if of["packed"] else [sk] * spec.batch
        spec = dataclasses.replace(spec, ranges=_ranges(rng, keys))
    if where == "emulator":
        spec = dataclasses.replace(
            spec, layout="bshd", arch=of["arch"], sms=rng.randint(1, 4), section=rng.choice([0, 0, 1, 2, 3]),
            mode=_few_modes(rng), order=rng.randrange(1000),
        )  # fmt: skip
    return spec


def _simpler_lengths(spec: Spec) -> list[Spec]:
    """A sequence less, or one that is shorter, or all of whose keys count."""
    of, found = spec.lengths, []
    for i, (a, b, used) in enumerate(of):
        ones = [
            [(a // 2, b, used)],
            [(a, b // 2, min(used, b // 2))],
            [(a, b, b)],
            [] if len(of) > 1 else [(a, b, used)],
        ]
        found += [[*of[:i], *one, *of[i + 1 :]] for one in ones]
    words = [",".join("{}:{}:{}".format(*x) for x in lengths) for lengths in found]
    return [dataclasses.replace(spec, packed=word) for word in dict.fromkeys(words) if word != spec.packed]


def _simpler_bias(text: str) -> list[str]:
    """One of a bias and a mask, or with a word less."""
    parts = text.split(" + ")
    found = parts if len(parts) > 1 else []
    for i, part in enumerate(parts):
        dims, *words = part.split() or [""]
        less = [" ".join([dims, *(w for w in words if w != word)]) for word in words if word != "bool" or i == 0]
        found += [" + ".join([*parts[:i], x, *parts[i + 1 :]]) for x in less]
    return found


def simpler(spec: Spec) -> list[Spec]:
    """Specs that differ from `spec` in one place and are simpler there."""
    default, found = Spec(), _simpler_lengths(spec)
    found += [dataclasses.replace(spec, bias=text) for text in _simpler_bias(spec.bias)]
    if "," in spec.ranges:
        found += [dataclasses.replace(spec, ranges=r) for r in dict.fromkeys(spec.ranges.split(","))]
    for field in dataclasses.fields(Spec):
        name, value = field.name, getattr(spec, field.name)
        tries = [getattr(default, name)] if name not in ("d", "dtype", "sq", "sk", "seed", "packed", "ranges") else []
        if name in ("sq", "sk", "heads", "group", "batch") and value > 1:
            tries += [1, value // 2, value - 1]
        if name in ("left", "right") and value is not None and value > 0:
            tries += [0, value // 2]
        found += [dataclasses.replace(spec, **{name: x}) for x in tries if x != value]
    return found
