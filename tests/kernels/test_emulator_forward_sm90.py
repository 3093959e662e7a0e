"""The sm90 family's forward on the CPU, against float64: the case table, the shipped variants, and shapes of its own.

Devices have two or three multiprocessors, so that a block computes several tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cupyflash.check.accuracy import Comparison, Oracle
from cupyflash.check.cases import Case
from cupyflash.plan import sm90
from cupyflash.plan.families import FAMILIES
from tests.ahead import Ahead
from tests.emulator import MODES, attention
from tests.emulator.attention import Session, inputs_of, small_device
from tests.emulator.cases import HOPPER_SHAPES, SHIPPED, TABLE, can_use_tma
from tests.emulator.require import require_compiler
from tests.table_turns import not_in
from tests.turns import in_turn

require_compiler()

DTYPES = ("bf16", "fp16")
CASES = {name: case for name, case in (TABLE | SHIPPED).items() if can_use_tma(case)}
WAYS = [("race", 0), ("late", 1)]  # mode, which of a case's dtypes
# What is shipped runs under the race detector alone: warps and copies take their turns as in the other mode.
RUNS = [
    *in_turn([name for name in CASES if name not in SHIPPED], WAYS, spare=not_in("sm90")),
    *(
        pytest.param(name, *way, marks=() if way == WAYS[0] else pytest.mark.thorough)
        for name in CASES
        if name in SHIPPED
        for way in WAYS
    ),
]
HARD = ("outliers", "growing_maxima", "falling_maxima", "large_scores", "overflow")
SATURATED = [
    (name, dtype) for name, case in CASES.items() for dtype in DTYPES if dtype in case.dtypes and case.values in HARD
]
EVERY_MODE = ("causal-d128", "window", "many-tiles", "many-tiles-d256", "growing-maxima", "nan-in-visible-key-causal")


@functools.lru_cache(maxsize=4)
def oracle(case: Case, dtype: str) -> Oracle:
    inputs, problem = inputs_of(case, dtype)
    return Oracle(problem, *inputs)


def check(results: list[Comparison]) -> None:
    wrong = [str(r) for r in results if not r.passed]
    assert not wrong, "\n".join(wrong)


def run(case: Case, dtype: str, mode: str, seed: int, *, backward: bool = False, counter: bool = True) -> None:
    exact = oracle(case, dtype)
    inputs, problem = inputs_of(case, dtype)
    device = small_device("sm_90", 2 + seed % 2)
    session = Session(device, MODES[mode], seed, family="sm90", backward_family="sm80", counter=counter)
    out, lse = session.forward(inputs, problem)
    check(exact.judge_forward(out, lse))
    if backward:
        check(exact.judge_backward(*session.backward(inputs, out, lse, problem)))


def dtype_of(name: str, which: int) -> str:
    dtypes = [dtype for dtype in DTYPES if dtype in CASES[name].dtypes]
    return dtypes[which % len(dtypes)]


def _rehearse(name: str, which: int, **_: object) -> None:
    Session(small_device("sm_90"), MODES["race"], family="sm90").forward(*inputs_of(CASES[name], dtype_of(name, which)))


def _rehearse_gradients(name: str, dtype: str, **_: int) -> None:
    inputs, problem = inputs_of(CASES[name], dtype)
    session = Session(small_device("sm_90"), MODES["late"], family="sm90", backward_family="sm80")
    session.backward(inputs, *session.forward(inputs, problem), problem)


AHEAD, AHEAD_OF_GRADIENTS = Ahead(_rehearse, attention), Ahead(_rehearse_gradients, attention)


@pytest.mark.parametrize(("name", "mode", "which"), RUNS)
def test_case(name: str, mode: str, which: int, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    run(CASES[name], dtype_of(name, which), mode, seed)


@pytest.mark.parametrize("name", HOPPER_SHAPES)
def test_shape(name: str, seed: int) -> None:
    """One mode and one dtype each, in turn."""
    index = list(HOPPER_SHAPES).index(name)
    run(HOPPER_SHAPES[name], DTYPES[index % 2], ("race", "late")[index // 2 % 2], seed)


@pytest.mark.parametrize(("name", "dtype"), SATURATED)
def test_gradients_of_its_results(name: str, dtype: str, seed: int, request: pytest.FixtureRequest) -> None:
    """One key outweighs all others, or maxima grow: the backward recomputes P from lse, and delta from out."""
    assert CASES[name].backward
    AHEAD_OF_GRADIENTS(request)
    run(CASES[name], dtype, "late", seed, backward=True)


def test_an_outlier_on_the_diagonal() -> None:
    """A row that has seen few keys needs its true maximum: else one key's rounded P decides dk."""
    case = Case("outl", "full", 207, 303, 128, heads_q=1, heads_k=1, causal=True, values="outliers")
    inputs, problem = case.inputs("bf16", seed=4), case.problem("bf16")
    session = Session(small_device("sm_90"), MODES["late"], family="sm90", backward_family="sm80")
    out, lse = session.forward(inputs, problem)
    exact = Oracle(problem, *inputs)
    check(exact.judge_forward(out, lse) + exact.judge_backward(*session.backward(inputs, out, lse, problem)))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("race", "late")])
@pytest.mark.parametrize("name", EVERY_MODE)
def test_every_mode(name: str, mode: str, seed: int) -> None:
    run(CASES[name], DTYPES[EVERY_MODE.index(name) % 2], mode, seed)


@pytest.mark.parametrize("mode", ["race", "late", "starve"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (100, 40)}], ids=["causal", "window"])
@pytest.mark.parametrize("head_dim", [head_dim for head_dim, _ in sm90._FORWARD_MASKED])
def test_many_tiles_a_block(head_dim: int, mask: dict[str, Any], mode: str, seed: int) -> None:
    """Whatever the tile: warpgroups that end at different key blocks, one tile after the other."""
    run(Case("many", "full", 197, 261, head_dim, batch=2, heads_q=3, heads_k=3, **mask), "bf16", mode, seed)


@pytest.mark.parametrize("mode", ["race", "late"])
def test_tiles_in_a_fixed_stride(mode: str, seed: int) -> None:
    """Without a counter."""
    run(CASES["many-tiles"], "bf16", mode, seed, counter=False)


def test_results_do_not_depend_on_who_computes_a_tile() -> None:
    """The same bits from any number of blocks, in any order of tiles, warps and copies."""
    case = CASES["growing-maxima-causal"]
    inputs, problem = inputs_of(case, "bf16")
    results = []
    for seed, (mode, blocks) in enumerate((("early", 1), ("late", 2), ("any", 3), ("starve", 132))):
        session = Session(small_device("sm_90", blocks), MODES[mode], seed, family="sm90", counter=seed != 2)
        results.append(np.concatenate([x.view(np.uint8).ravel() for x in session.forward(inputs, problem)]))
    for other in results[1:]:
        assert np.array_equal(results[0], other)


@pytest.mark.parametrize("family", FAMILIES)
def test_lse_is_not_written_where_it_is_not_wanted(family: str) -> None:
    inputs, problem = inputs_of(CASES["causal-d64"], "bf16")
    session = Session(small_device("sm_90"), MODES["race"], family=family)
    out, _ = session.forward(inputs, problem)
    session.wants_lse = False
    again, lse = session.forward(inputs, problem)
    assert np.array_equal(out.view(np.uint16), again.view(np.uint16))
    assert np.isnan(lse).all()
