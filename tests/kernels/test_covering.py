"""The covering set (`tests/fuzz/covering.py`): all pairs of axes, on the CPU path, in the emulator and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.plan.families import plan_call
from cupyflash.plan.kernels_sm90 import BackwardDkvSm90, BackwardDqSm90, ForwardSm90
from cupyflash.plan.spec import CHUNKS
from tests.ahead import Ahead
from tests.emulator import attention
from tests.fuzz import covering, emulated, modding, oracle, run
from tests.fuzz import covering_features as features
from tests.fuzz.arrays import draw
from tests.fuzz.spec import Spec

CASES = covering.cases()
ALONE = {name: s for name, s in CASES.items() if not name.startswith(("features-", "learned-", "chunks-", "masked-"))}
FEATURED = [(row, of, CASES[f"features-{i}"]) for i, (row, of) in enumerate(covering.featured())]
OF_SPEC: dict[str, Callable[[Spec], Any]] = {
    "bias": lambda s: s.bias and "bool" not in s.bias.split(" + ")[0], "mask": lambda s: "bool" in s.bias,
    "packed": lambda s: s.packed, "ranges": lambda s: s.ranges, "dropout": lambda s: s.dropout,
    "blocks": lambda s: s.blocks, "softcap": lambda s: s.softcap, "alibi": lambda s: s.alibi,
    "sink": lambda s: s.sink, "mods": lambda s: s.mods,
}  # fmt: skip
SHARP = ("normal", "outliers")  # for which the 2x rule holds, too: it sees errors that add up


def check(spec: Spec, where: str) -> None:
    x = draw(spec)
    results = run.WHERE[where](spec, x)
    wrong = run.verdicts(spec, x, results)
    if spec.values in SHARP and any(alone.sk > 1 for *_, alone in spec.parts()):  # else dS is what rounding leaves of 0
        judge = Oracle(spec.problem(), *x)
        comparisons = [*judge.judge_forward(*results[:2]), *judge.judge_backward(*results[2 : 5 + len(x.learned)])]
        wrong += [str(c) for c in comparisons if not c.passed]
    assert not wrong, "\n".join([str(spec), *wrong])


AHEAD = Ahead(lambda name: emulated.run(CASES[name], draw(CASES[name])), attention)


@pytest.mark.parametrize("name", CASES)
def test_cpu(name: str) -> None:
    check(CASES[name], "cpu")


@pytest.mark.needs("g++")
@pytest.mark.parametrize("name", CASES)
def test_emulator(name: str, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    check(CASES[name], "emulator")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu(name: str) -> None:
    check(CASES[name], "gpu")


def test_all_pairs_are_covered() -> None:
    """Counted again from the rows, not by the generator."""
    rows = covering.rows()
    for a, b in itertools.combinations(covering.AXES, 2):
        met = {
            (row[a], row[b])
            for row in rows
            if all(axis in (a, b) for axis, value in covering.HIDING if row[axis] == value)
        }
        wanted = {
            (x, y) for x, y in itertools.product(covering.AXES[a], covering.AXES[b]) if covering.is_legal({a: x, b: y})
        }
        assert wanted <= met, f"{a}, {b}: {wanted - met}"
    assert all(covering.is_legal(row) for row in rows)


def test_a_softcap_meets_everything() -> None:
    """Counted again from the rows. More than a few would each cost a build."""
    rows = covering.capped()
    capped = {name for name, s in ALONE.items() if s.softcap is not None and not (s.alibi or s.sink)}
    assert capped == {f"softcap-{i}" for i in range(len(rows))}
    for axis, values in covering.AXES.items():
        met = {row[axis] for row in rows if all(axis == a for a, value in covering.HIDING if row[a] == value)}
        assert met == set(values), axis
    assert len(rows) <= 16


def test_features_meet_everything() -> None:
    """Counted again from the rows: every value of every axis, and each other feature with which they go together."""
    for feature, axes in features.MEETING.items():
        for axis in axes or covering.AXES:
            met = {
                row[axis]
                for row, of, _ in FEATURED
                if feature in of and all(axis == a for a, value in covering.HIDING if row[a] == value)
            }
            assert met == set(covering.AXES[axis]), (feature, axis)
    for a, b in itertools.combinations(features.FEATURES, 2):
        met_each_other = any({a, b} <= of for row, of, _ in FEATURED if _shows(row))
        assert met_each_other == features.together(frozenset((a, b))), (a, b)


def _shows(row: covering.Row) -> bool:
    return all(row[axis] != value for axis, value in covering.HIDING)


def test_features_go_together_that_should() -> None:
    """What is refused is little, and never a feature alone."""
    apart = [x for x in itertools.combinations(features.FEATURES, 2) if not features.together(frozenset(x))]
    assert len(apart) <= 9, apart
    assert all(features.together(frozenset((name,))) for name in features.FEATURES)
    assert {tuple(of) for _, of, _ in FEATURED if len(of) == 1} <= {(name,) for name in features.FEATURES}


def _with(feature: str) -> list[Spec]:
    return [spec for _, of, spec in FEATURED if feature in of]


def test_features_are_of_all_kinds() -> None:
    """Counted again from the specs."""
    for _, of, spec in FEATURED:
        assert of == {name for name in features.FEATURES if OF_SPEC[name](spec)}, spec
    assert {s.dropout for s in _with("dropout")} == set(features.P)
    assert {s.seed_dims for s in _with("dropout")} == {1, 2}
    assert {s.blocks for s in _with("blocks")} == set(features.BLOCKS)
    assert {s.alibi for s in _with("alibi")} == {1, 2}


def test_packed_sequences_are_of_all_lengths() -> None:
    specs = _with("packed")
    lengths = [x for s in specs for x in s.lengths]
    assert {0, 1} <= {a for a, _, _ in lengths} & {b for _, b, _ in lengths}
    assert any(0 < used < b for _, b, used in lengths)
    assert {s.sq > 0 for s in specs} == {False, True}


def test_ranges_are_of_all_kinds() -> None:
    specs = _with("ranges")
    pairs = [(*map(int, r.split(":")), one.sk) for s in specs for r, (*_, one) in zip(s.bounds, s.parts(), strict=True)]
    assert {(a > 0, b < n) for a, b, n in pairs if a < b} == {(x, y) for x in (False, True) for y in (False, True)}
    assert any(a == b for a, b, n in pairs)
    assert {(s.alibi > 0, bool(s.packed)) for s in specs} == set(itertools.product((False, True), repeat=2))


_ADDED = ("bias", 0), ("mask", -1)  # which of the words of both


def test_biases_and_masks_are_of_all_kinds() -> None:
    """All words, and read in pairs and one by one."""
    biases, masks = ([s.bias.split(" + ")[which].split() for s in _with(name)] for name, which in _ADDED)
    assert {word for _, *words in biases for word in words} == {"fp32", "hides", "turned", "shifted", "whole"}
    assert {word for _, *words in masks for word in words} == {"bool", "turned", "shifted"}
    for d in "bhqk":
        assert {d in dims for dims, *_ in biases} == {False, True}
    for (name, _), each in zip(_ADDED, (biases, masks), strict=True):
        is_paired = [
            (s.room[1] if s.packed else s.sk) % 2 == 0 and "k" in dims and {"turned", "shifted"}.isdisjoint(words)
            for s, (dims, *words) in zip(_with(name), each, strict=True)
        ]
        found = {(s.family, paired) for s, paired in zip(_with(name), is_paired, strict=True)}
        assert found == set(itertools.product(("sm80", "sm90"), (False, True)))


def test_keys_are_interleaved() -> None:
    """Counted again from the plans, with all that such a forward may have."""
    variants = []
    for spec in (s for name, s in CASES.items() if name.startswith("chunks-")):
        plan = plan_call(spec.problem(), emulated.small_device(spec.arch), family="sm90", paired_bias=CHUNKS)
        variants.append(plan.launches[-1].variant)
    assert {v.dtype for v in variants} == {"bf16", "fp16"}
    assert {v.constants["block_n"] for v in variants} == {64, 96}
    met = {name: {bool(v.constants[name]) for v in variants} for name in variants[0].constants}
    assert met["interleaves_keys"] == {True}
    without = {name for name, values in met.items() if values == {False}}
    assert without == {
        "packed", "mask", "masked_bias", "bias_of_keys", "dropout", "block_mask", "bias_beside_mods", "mods", "paged",
        "whole_pages", "of_whole", "split_keys", "clocks",
    }  # fmt: skip


def test_slopes_meet_everything() -> None:
    """Counted again from the specs: every value of every axis, alone and with a softcap, dense and packed."""
    rows = covering.capped()
    specs = [CASES[f"alibi-{i}"] for i in range(len(rows))]
    assert {s for s in ALONE.values() if s.alibi and not s.sink} == {*specs, *covering.UNSEEN.values()}
    for axis in covering.AXES:
        if hasattr(Spec, axis) and axis not in ("sq", "sk", "batch", "scale"):
            assert {getattr(s, axis) for s in specs} == set(covering.AXES[axis]), axis
    assert {(s.family, s.d) for s in specs} == set(covering.AXES["kernel"])
    assert {int(np.sign(s.factor)) for s in specs} == {-1, 0, 1}
    assert {(s.alibi, bool(s.packed)) for s in specs} == set(itertools.product((1, 2), (False, True)))
    assert {(s.alibi, s.softcap is None) for s in specs} >= {(1, True), (2, True), (2, False)}


def test_sinks_meet_everything() -> None:
    """Counted again from the specs: every value of every axis; alone, with slopes, packed, and with ranges of keys."""
    rows = covering.capped()
    specs = [CASES[f"sink-{i}"] for i in range(len(rows))]
    assert {s for s in ALONE.values() if s.sink} == set(specs)
    for axis in covering.AXES:
        if hasattr(Spec, axis) and axis not in ("sq", "sk", "batch", "scale"):
            assert {getattr(s, axis) for s in specs} == set(covering.AXES[axis]), axis
    assert {(s.family, s.d) for s in specs} == set(covering.AXES["kernel"])
    assert {row["mask"] for row in rows} == set(covering.AXES["mask"])
    assert {int(np.sign(s.factor)) for s in specs} == {-1, 0, 1}
    kinds = {(s.alibi > 0, bool(s.packed), bool(s.ranges)) for s in specs}
    assert kinds >= {(False, False, False), (True, False, False), (False, True, False), (False, False, True)}
    assert {bool(np.isneginf(x)) for s in specs for x in draw(s).features.sink} == {False, True}


def test_mods_meet_everything() -> None:
    """Counted again from the specs: each mod, and learned ones in both families beside what goes with mods."""
    assert {s.mods for s in CASES.values()} == {"", *modding.MODS}
    learned = [s for s in CASES.values() if s.mods_given is not None and s.mods_given.learned]
    assert {(s.family, s.mods) for s in learned} == set(itertools.product(("sm80", "sm90"), modding.LEARNED))
    assert {bool(s.packed) for s in learned} == {s.d > 128 for s in learned} == {False, True}
    together = [f for f in features.FEATURES if f != "mods" and features.together(frozenset((f, "mods")))]
    assert all(any(OF_SPEC[feature](s) for s in learned) for feature in together)


@pytest.mark.needs("g++")
@pytest.mark.parametrize(("family", "d"), [("sm80", 64), ("sm90", 64), ("sm90", 200)])
def test_a_cap_that_no_score_comes_near(family: str, d: int) -> None:
    """Judged as if there were none; of lse, which fp32 stores, the rounding of c tanh would show."""
    spec = Spec(family=family, d=d, sq=70, sk=200, causal=True, heads=2, softcap=1000.0, scale=0.02, mode="any")
    x = draw(spec)
    out, _, *grads = run.WHERE["emulator"](spec, x)
    judge = Oracle(dataclasses.replace(spec, softcap=None).problem(), *x)
    exact_lse = oracle.forward(spec, x)[1].exact
    comparisons = judge.judge_forward(out, exact_lse.astype(np.float32)) + judge.judge_backward(*grads[:3])
    assert all(c.passed for c in comparisons), "\n".join(map(str, comparisons))


def test_what_is_not_legal_is_little() -> None:
    illegal = {
        (a, x, b, y)
        for a, b in itertools.combinations(covering.AXES, 2)
        for x, y in itertools.product(covering.AXES[a], covering.AXES[b])
        if not covering.is_legal({a: x, b: y})
    }
    memory = {
        ("kernel", kernel, name, how)
        for kernel in covering.AXES["kernel"]
        for name in ("q", "k", "v", "dout")
        for how in ("misaligned", "one_head")
        if kernel[0] == "sm90"
    }
    assert illegal == memory | {("mask", "full", "values", "hidden")}


def test_rows_mean_what_they_say() -> None:
    """Rows that see nothing, keys that nobody sees, and the family, are there where a row says so."""
    for i, row in enumerate(covering.rows()):
        spec = CASES[f"pair-{i}"]
        empty = sum(first == end for first, end in spec.visible)
        assert empty > 0 if row["mask"] == "empty" else row["mask"] != "full" or empty == 0
        assert (spec.scale is None or spec.scale > 0) == (row["scale"] == "+")
        device = emulated.small_device(spec.arch, spec.sms)
        tma = row["kernel"][0] == "sm90"
        plan = plan_call(spec.problem(), device, tma=tma, family=spec.family)
        assert isinstance(plan.launches[0].variant, ForwardSm90) == tma


def test_persistent_blocks_see_many_tiles() -> None:
    """At least 35 a block, in each kernel that draws tiles: fewer leave some faults of a queue unseen."""
    most: dict[type, int] = {}
    for spec in CASES.values():
        if spec.family != "sm80" and not spec.packed:
            device = emulated.small_device(spec.arch, spec.sms)
            for backward in (False, True):
                for launch in plan_call(spec.problem(), device, backward=backward).launches:
                    if launch.variant.persistent:
                        kind = type(launch.variant)
                        most[kind] = max(most.get(kind, 0), launch.tiles // max(1, launch.grid))
    assert set(most) == {ForwardSm90, BackwardDkvSm90, BackwardDqSm90}
    assert all(count >= 35 for count in most.values()), most
