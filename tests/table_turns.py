"""Which cases of the table the emulator runs in which family of kernels, and the CPU path in which dtypes, unless
--thorough runs all in all.

Whatever a case has, each of its `traits`, is judged in both families, forward and backward; a case that would bring a
family nothing new runs in the other one alone, in turn. Pairs of values, lengths and dtypes: `fuzz/covering.py`.
"""

from __future__ import annotations

import functools
from typing import Any

from cupyflash.check.cases import CASES, Case
from cupyflash.plan.families import FAMILIES
from cupyflash.plan.spec import Spec
from cupyflash.problem import DTYPES
from tests.emulator.attention import small_device
from tests.emulator.cases import TABLE, can_use_tma

Trait = tuple[str, str, Any]  # pass, field, value
_AS_THEY_ARE = ("values", "memory", "head_dim", "layout", "deterministic", "dlse", "softcap", "alibi", "sink", "bias",
                "mask", "mods")  # fmt: skip
_WHETHER = ("packed", "used_k", "ranges", "dropout_p")


def taken_backward(case: Case) -> bool:
    """Whether the sm90 family has a backward for the case."""
    if not (case.backward and can_use_tma(case)):
        return False
    spec = Spec.of(case.problem(case.dtypes[0]), backward=True)
    return FAMILIES["sm90"].why_not(spec, small_device("sm_90")) is None


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


@functools.cache
def families() -> dict[str, tuple[str, ...]]:
    """Those of each case."""
    seen: dict[str, set[Trait]] = {"sm80": set(), "sm90": set()}
    found: dict[str, tuple[str, ...]] = {}
    spare = 0
    for name, case in TABLE.items():
        able = [family for family in seen if traits(case, family)]
        needed = [family for family in able if not traits(case, family) <= seen[family]]
        if not needed:
            needed, spare = [able[spare % len(able)]], spare + 1
        for family in needed:
            seen[family] |= traits(case, family)
        found[name] = tuple(needed)
    return found


def not_in(family: str) -> set[str]:
    """The cases that run in another family alone."""
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
