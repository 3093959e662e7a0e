"""Which cases of the table the emulator runs in which family of kernels, and the CPU path in which dtypes, unless
--thorough runs all in all.

Whatever a case has, each of its `traits`, is judged in both families, forward and backward; a case that would bring a
family nothing new runs in the other one alone, in turn. Of these runs, those are left out that show no two traits
together (`pairs`) which others of the family do not show, too. Pairs of values, lengths and dtypes: `fuzz/covering.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

from cupyflash.check.cases import CASES, Case
from cupyflash.plan.families import FAMILIES
from cupyflash.plan.spec import Spec
from cupyflash.problem import DTYPES
from tests.emulator.attention import EXTRA, small_device
from tests.emulator.cases import TABLE, can_use_tma

Trait = tuple[str, str, Any]  # pass, field, value
Pair = tuple[Trait, Trait]  # of one pass
_AS_THEY_ARE = ("values", "memory", "head_dim", "layout", "deterministic", "dlse", "softcap", "alibi", "sink", "bias",
                "mask", "mods")  # fmt: skip
_WHETHER = ("packed", "used_k", "ranges", "dropout_p", "head_dim_v")
# What `traits` looks at in another way, or no kernel knows.
_OTHERWISE = ("name", "level", "dtypes", "seqlen_q", "seqlen_k", "batch", "heads_q", "heads_k", "causal", "window",
              "scale", "backward", "lengths_q", "lengths_k")  # fmt: skip


def taken_backward(case: Case) -> bool:
    """Whether the sm90 family has a backward for the case."""
    if not (case.backward and can_use_tma(case)):
        return False
    spec = Spec.of(case.problem(case.dtypes[0]), backward=True)
    return FAMILIES["sm90"].why_not(spec, small_device("sm_90")) is None


def learns(case: Case) -> bool:
    """Whether its kernels differ by what is asked for."""
    return bool(case.alibi or case.sink or case.bias)


def traits(case: Case, family: str) -> set[Trait]:
    """What the emulator judges with a case in a family."""
    found: dict[str, Any] = {name: getattr(case, name) for name in _AS_THEY_ARE}
    found |= {name: bool(getattr(case, name)) for name in _WHETHER}
    found["visible"] = case.causal or (
        case.window and tuple(x if x is None else (x > 0) - (x < 0) for x in case.window)
    )
    found["scale"] = case.scale and case.scale > 0
    found["group"] = case.heads_q, case.heads_k
    found["rows"] = (case.seqlen_q > case.seqlen_k) - (case.seqlen_q < case.seqlen_k), case.batch > 1
    passes = {"sm80": (True, case.backward), "sm90": (can_use_tma(case), taken_backward(case))}[family]
    return {
        (which, name, value)
        for which, is_there in zip(("forward", "backward"), passes, strict=True)
        if is_there
        for name, value in found.items()
    }


def _length(n: int) -> str:
    """What a length is to tiles, all of which hold a multiple of 64 rows or divide it."""
    return {0: "none", 1: "one"}.get(n) or {0: "tiles", 1: "over", 63: "under"}.get(n % 64, "any")


def _lengths(case: Case) -> tuple[tuple[str, ...], ...]:
    of = (case.lengths_q or (case.seqlen_q,)), (case.lengths_k or (case.seqlen_k,))
    return tuple(tuple(sorted(set(map(_length, some)))) for some in of)


@functools.cache
def pairs(name: str, family: str) -> frozenset[Pair]:
    """What a case of the table shows of two traits at a time, lengths among them, in a family."""
    found = traits(TABLE[name], family)
    found |= {(which, "lengths", _lengths(TABLE[name])) for which, _, _ in found}
    ordered = sorted(found, key=lambda trait: trait[:2])
    return frozenset((a, b) for a, b in itertools.combinations(ordered, 2) if a[0] == b[0])


def needed(runs: dict[str, tuple[str, ...]], family: str) -> set[str]:
    """Of the cases that run in a family, enough to show all pairs; all of `EXTRA`, which some barriers need."""
    found = {name for name, of in runs.items() if family in of}
    shown = Counter(pair for name in found for pair in pairs(name, family))
    for name in runs:  # plain cases come first, and most of what they show others show, too
        if name in found and name not in EXTRA and all(shown[pair] > 1 for pair in pairs(name, family)):
            found.remove(name)
            shown.subtract(pairs(name, family))
    return found


@functools.cache
def families() -> dict[str, tuple[str, ...]]:
    """Those in which each case runs; none for one that shows nothing which others do not show."""
    runs = taken_in_turn()
    found = {family: needed(runs, family) for family in ("sm80", "sm90")}
    return {name: tuple(family for family in of if name in found[family]) for name, of in runs.items()}


@functools.cache
def taken_in_turn() -> dict[str, tuple[str, ...]]:
    """The families to which each case brings something new, else one."""
    seen: dict[str, set[Trait]] = {"sm80": set(), "sm90": set()}
    found: dict[str, tuple[str, ...]] = {}
    spare = 0
    for name, case in TABLE.items():
        able = [family for family in seen if traits(case, family)]
        new = [family for family in able if not traits(case, family) <= seen[family]]
        if not new:
            new, spare = [able[spare % len(able)]], spare + 1
        for family in new:
            seen[family] |= traits(case, family)
        found[name] = tuple(new)
    return found


def not_in(family: str) -> set[str]:
    """The cases that do not run in a family."""
    return {name for name, of in families().items() if family not in of}


@functools.cache
def dtypes() -> dict[str, tuple[str, ...]]:
    """Those in which the CPU path runs a case: all to which it brings something new, else one, in turn."""
    seen: dict[str, set[Trait]] = {dtype: set() for dtype in DTYPES}
    found: dict[str, tuple[str, ...]] = {}
    spare = 0
    for case in CASES:
        has = traits(case, "sm80")  # that family takes whatever the CPU path takes
        needed = tuple(dtype for dtype in DTYPES if not has <= seen[dtype])
        if not needed:
            needed, spare = (DTYPES[spare % len(DTYPES)],), spare + 1
        for dtype in needed:
            seen[dtype] |= has
        found[case.name] = needed
    return found
