"""The sm90 family's backward on the CPU, against float64: the case table and the shipped variants that it takes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Case
from cupyflash.plan.extents import Extents
from cupyflash.plan.families import kernels_of
from cupyflash.plan.spec import Spec
from tests.ahead import Ahead
from tests.emulator import MODES, attention
from tests.emulator.attention import Session, inputs_of, small_device
from tests.emulator.cases import SHIPPED, TABLE
from tests.emulator.require import require_compiler
from tests.table_turns import learns, not_in, taken_backward
from tests.turns import in_turn

require_compiler()

TESTED_MODES = ("race", "late")


CASES = {name: case for name, case in (TABLE | SHIPPED).items() if taken_backward(case)}
# What is shipped runs under the race detector; also in the other mode, in which warps and copies take the same turns,
# where there is something to learn.
SHIPPED_RUNS = [
    pytest.param(name, mode, marks=() if mode == "race" or learns(case) else pytest.mark.thorough)
    for name, case in CASES.items()
    if name in SHIPPED
    for mode in TESTED_MODES
]
IN_TURN = in_turn(
    [name for name in CASES if name not in SHIPPED], [(mode,) for mode in TESTED_MODES], spare=not_in("sm90")
)


@functools.lru_cache(maxsize=4)
def oracle(name: str, dtype: str) -> Oracle:
    inputs, problem = inputs_of(CASES[name], dtype)
    return Oracle(problem, *inputs)


def dtype_of(name: str, mode: str) -> str:
    """One each, in turn."""
    index = list(CASES).index(name) + TESTED_MODES.index(mode)
    dtype = ("bf16", "fp16")[index % 2]
    return dtype if dtype in CASES[name].dtypes else CASES[name].dtypes[0]


def session_of(name: str, mode: str, seed: int = 0) -> Session:
    """Slopes and sinks that are learned under the race detector, and fixed ones."""
    device, how = small_device("sm_90"), MODES[mode]
    if CASES[name].heads_k == 1:  # room for shares, and all blocks run at a time, as the plan counts on
        device, how = small_device("sm_90", 32), replace(how, resident=32)
    return Session(device, how, seed, backward_family="sm90", learns=mode == "race")


def _rehearse(name: str, mode: str, **_: int) -> None:
    inputs, problem = inputs_of(CASES[name], dtype_of(name, mode))
    lse = np.zeros(problem.rows, np.float32)
    session_of(name, mode).backward(inputs, inputs.q, lse, problem)


AHEAD = Ahead(_rehearse, attention)


@pytest.mark.parametrize(("name", "mode"), IN_TURN + SHIPPED_RUNS)
def test_case(name: str, mode: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    exact = oracle(name, dtype_of(name, mode))
    inputs, problem = inputs_of(CASES[name], dtype_of(name, mode))
    results = exact.judge_backward(*session_of(name, mode, seed).backward(inputs, *exact.plain_forward, problem))
    wrong = [str(r) for r in results if not r.passed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("mode", ["race", "starve"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (100, 40)}], ids=["causal", "window"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(64, None), (128, None), (136, None), (256, None), (160, 72)], ids=str
)
def test_many_tiles_a_block(head_dim: int, head_dim_v: int | None, mask: dict[str, Any], mode: str, seed: int) -> None:
    """Warpgroups that visit different tiles of a masked problem, in blocks that compute several."""
    case = Case("many", "full", 197, 261, head_dim, heads_q=4, heads_k=2, head_dim_v=head_dim_v, **mask)
    inputs, problem = inputs_of(case, "bf16")
    exact = Oracle(problem, *inputs)
    session = Session(small_device("sm_90"), MODES[mode], seed, backward_family="sm90")
    results = exact.judge_backward(*session.backward(inputs, *exact.plain_forward, problem))
    assert all(r.passed for r in results), "\n".join(map(str, results))


@pytest.mark.parametrize("mode", ["race", "any", "starve", "late"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(("head_dim", "seqlen_q"), [(64, 517), (64, 130), (128, 300)])
def test_key_blocks_that_begin_at_different_tiles(
    head_dim: int, seqlen_q: int, deterministic: bool, mode: str, seed: int
) -> None:
    seqlen_k = {64: 700, 128: 500}[head_dim]
    _judge_turned(mode, seed, seqlen_q, seqlen_k, head_dim, deterministic=deterministic)


@pytest.mark.parametrize("mode", ["race", "any", "starve", "late"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_key_blocks_that_begin_at_different_tiles_of_a_narrow_v(deterministic: bool, mode: str, seed: int) -> None:
    _judge_turned(mode, seed, 300, 500, 192, head_dim_v=128, deterministic=deterministic)


def _judge_turned(mode: str, seed: int, *dims: int, **options: Any) -> None:
    """Four of a head, which all run."""
    case = Case("turned", "full", *dims, heads_q=4, heads_k=2, **options)
    inputs, problem = inputs_of(case, "bf16")
    gpu = small_device("sm_90", 64)
    kernels = kernels_of(Spec.of(problem, backward=True), gpu)
    assert kernels.numbers(Extents.of(problem)).first_stores
    exact = Oracle(problem, *inputs)
    session = Session(gpu, replace(MODES[mode], resident=4), seed, backward_family="sm90")
    results = exact.judge_backward(*session.backward(inputs, *exact.plain_forward, problem))
    assert all(r.passed for r in results), "\n".join(map(str, results))


@pytest.mark.parametrize("mode", ["race", "any", "starve", "late"])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"heads_q": 2, "dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_key_blocks_of_packed_sequences(head_dim: int, options: dict[str, Any], mode: str, seed: int) -> None:
    """Of those with few keys, which begin at different tiles, and of one with many; some have no queries or keys."""
    lengths = {"lengths_q": (130, 0, 70, 200, 65), "lengths_k": (500, 90, 1100, 0, 300)}
    case = Case("turned", "full", 465, 1990, head_dim, **{"batch": 5, "heads_q": 4, "heads_k": 2} | lengths | options)
    inputs, problem = inputs_of(case, "bf16")
    gpu = small_device("sm_90", 64)
    numbers = kernels_of(Spec.of(problem, backward=True), gpu).numbers(Extents.of(problem))
    assert min(lengths["lengths_k"]) < numbers.first_stores <= max(lengths["lengths_k"])
    exact = Oracle(problem, *inputs)
    session = Session(gpu, replace(MODES[mode], resident=8), seed, backward_family="sm90")
    results = exact.judge_backward(*session.backward(inputs, *exact.plain_forward, problem))
    assert all(r.passed for r in results), "\n".join(map(str, results))


@pytest.mark.parametrize("what", ["lse", "dout"])
@pytest.mark.parametrize("name", ["causal-d64", "causal-d128", "window"])
def test_what_is_nan_by_right_is_not_recomputed(name: str, what: str) -> None:
    """Row by row, by one warp each, that would take a diverged model very long."""
    inputs, problem = inputs_of(CASES[name], "bf16")
    out, lse = oracle(name, "bf16").plain_forward

    def shuffles(lse: np.ndarray, dout: np.ndarray) -> int:
        session = Session(small_device("sm_90"), MODES["race"], backward_family="sm90")
        dq, _, _ = session.backward(inputs._replace(dout=dout), out, lse, problem)
        assert np.isnan(dq.astype(np.float32)).all() == (np.isnan(lse).all() or np.isnan(dout[0, 0, 0, 0]))
        return session.collectives

    spoiled = {"lse": lse, "dout": inputs.dout}
    finite = shuffles(**spoiled)
    spoiled[what] = np.full_like(spoiled[what], np.nan)
    assert shuffles(**spoiled) < 4 * finite  # of these small tiles (seen: 1.8 to 2.6); else 10 to 40
