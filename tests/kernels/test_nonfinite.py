"""inf and NaN behind small weights: what the README promises, over gaps in score, masks and dtypes.

A weight of exp(-gap) is 0 in the element type from a gap of 17 (fp16) or 92 (bf16) on, in fp32 from 103, in float64
from 745. Results are inf where float64's weight is not 0, and NaN where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import NUMPY_DTYPE, Inputs
from cupyflash.cpu import attention as cpu
from cupyflash.problem import Problem, Window

GAPS = (0.0, 4.0, 12.0, 18.0, 25.0, 60.0, 86.0, 95.0, 110.0, 400.0, 700.0, 900.0)  # below the row's maximum
WINDOWS: dict[str, Window] = {"dense": (None, None), "causal": (None, 0), "window": (90, 30)}
WHERE = ("v", "dout", "k and v")
Runner = Callable[[Inputs, Problem], tuple[Any, ...]]


def inputs(dtype: str, window: Window, where: str) -> tuple[Inputs, Problem]:
    """inf, -inf and NaN in v or dout, one a column, where weights have these gaps, and in columns of several.

    Scores are `q[0] * k[0]` and small noise: key 11 i + 3 lies `GAPS[i]` below the others for queries whose q[0] is 1,
    and among them for one query in three, whose q[0] is 0.
    """
    problem = Problem(dtype, 1, 130, 150, 2, 1, 32, 1.0, window)
    rng = np.random.default_rng(len(where))
    q, k, v, dout = (
        0.1 * rng.standard_normal((1, n, h, 32))
        for n, h in ((problem.seqlen_q, 2), (problem.seqlen_k, 1), (problem.seqlen_k, 1), (problem.seqlen_q, 2))
    )
    q[..., 0], k[..., 0] = 1, 0
    q[:, ::3, :, 0] = 0
    special = 11 * np.arange(len(GAPS)) + 3
    k[0, special, 0, 0] = [-gap for gap in GAPS]
    values = (np.inf, -np.inf, np.nan)
    if where == "v":
        for i, key in enumerate(special):
            v[0, key, 0, i] = values[i % 3] if i % 4 else np.inf
        v[0, special[4], 0, 20], v[0, special[5], 0, 20] = np.inf, -np.inf
        v[0, special[2], 0, 21], v[0, special[11], 0, 21] = np.inf, np.inf
    elif where == "dout":
        for i, query in enumerate(range(5, 125, 11)):
            dout[0, query, i % 2, i] = values[i % 3] if i % 4 else np.inf
        dout[0, 40, 0, 20], dout[0, 41, 0, 20] = np.inf, -np.inf
    else:
        q[..., 1] = np.abs(q[..., 1]) + 0.5
        k[0, special[3], 0, 1], v[0, special[3], 0, 1] = -np.inf, np.inf  # a weight of exactly 0
    to = NUMPY_DTYPE[dtype]
    return Inputs(q.astype(to), k.astype(to), v.astype(to), dout.astype(to), None), problem


def check(run: Runner, dtype: str, window: Window, where: str) -> None:
    given, problem = inputs(dtype, window, where)
    exact = Oracle(problem, *given)
    out, lse, *gradients = run(given, problem)
    wrong = [str(c) for c in exact.judge_forward(out, lse) + exact.judge_backward(*gradients) if not c.passed]
    assert not wrong, "\n".join(wrong)


def on_cpu(given: Inputs, problem: Problem) -> tuple[Any, ...]:
    out, lse = cpu.forward(given.q, given.k, given.v, problem)
    return out, lse, *cpu.backward(given.dout, given.q, given.k, given.v, out, lse, None, problem)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", NUMPY_DTYPE)
def test_cpu_path(dtype: str, window: str, where: str) -> None:
    check(on_cpu, dtype, WINDOWS[window], where)


@pytest.mark.needs("g++")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_kernels(family: str, dtype: str, window: str, where: str) -> None:
    from emulator import MODES
    from emulator.attention import Session, small_device

    def run(given: Inputs, problem: Problem) -> tuple[Any, ...]:
        session = Session(small_device("sm_90"), MODES["race"], family=family, backward_family=family)
        out, lse = session.forward(given, problem)
        return out, lse, *session.backward(given, out, lse, problem)

    check(run, dtype, WINDOWS[window], where)
