"""inf and NaN behind small weights: what the README promises, over gaps in score, masks and dtypes.

A weight of exp(-gap) is 0 in the element type from a gap of 17 (fp16) or 92 (bf16) on, in fp32 from 103, in float64
from 745. Results are inf where float64's weight is not 0, and NaN where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import NUMPY_DTYPE, Inputs
from cupyflash.cpu import attention as cpu
from cupyflash.problem import Problem, Window
from tests.ahead import Ahead
from tests.emulator import MODES, attention
from tests.fuzz import run
from tests.fuzz.arrays import draw
from tests.fuzz.spec import Spec
from tests.planted.mutants import Bug
from tests.planted.mutants_repair import REPAIRED, REPAIRED_FORWARD

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


def in_emulator(family: str, given: Inputs, problem: Problem) -> tuple[Any, ...]:
    session = attention.Session(attention.small_device("sm_90"), MODES["race"], family=family, backward_family=family)
    out, lse = session.forward(given, problem)
    return out, lse, *session.backward(given, out, lse, problem)


AHEAD = Ahead(
    lambda family, dtype, window, where: in_emulator(family, *inputs(dtype, WINDOWS[window], where)), attention
)


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
def test_kernels(family: str, dtype: str, window: str, where: str, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    check(functools.partial(in_emulator, family), dtype, WINDOWS[window], where)


FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.5},
    "softcap": {"softcap": 50.0, "scale": 1.0},
    "bias": {"bias": "hqk", "sink": True, "alibi": 1},
    "sink": {"sink": True, "d": 136},
    "mods": {"mods": "capped", "bias": "hqk"},
    "documents": {"mods": "documents", "bias": "hqk"},
}
# x where 1 - tanh(x)^2 is small: as r (1 - r), r = 1 / (1 + e^2x), it is 0 in fp32 from -9 on; in float64 from 19.1 on.
STEEP = (3, -3, 6, -6, 9, -9, 12, -12, 15, -15, 18, -18, 21, -21, 30, -30)


def featured(name: str, family: str) -> tuple[Spec, Inputs]:
    """An inf in dO, and beside it what lse and delta of a query do not tell.

    dropout: a query whose P is NaN, but dropped for half of the keys, where dv is inf. softcap: inf in q, whose scores
    are finite, and keys far beyond the softcap. bias: NaN in dO of a query from which a bias hides all keys, and to
    which a sink gives a finite lse. sink, bias: inf in q, whose scores are all -inf, and a sink's finite lse. mods,
    documents: inf in q, whose scores a mod of scores makes finite, and NaN in a bias where a mod hides.
    """
    spec = Spec(family=family, sq=70, sk=70, group=2, causal=True, seed=3, **FEATURES[name])
    x = draw(spec)
    x.dout[0, 30, 0, 3] = np.inf
    if name == "dropout":
        x.q[0, 20, 1, 2] = np.nan
        x.dout[0, 20, 1, 5] = np.inf  # 0 * inf where it is dropped, too
    elif name == "softcap":
        x.q[...] *= 0.01
        x.k[...] *= 0.01
        x.q[..., 0] = 1
        x.k[0, 3:67:4, 0, 0] = [50 * t for t in STEEP]
        x.q[0, 20, 1, 2] = np.inf
        x.dout[0, 60, 1, 4] = -np.inf
    else:
        x.k[..., 0] = np.abs(x.k[..., 0]) + 0.5
        x.q[0, 24, 1, 0] = -np.inf
    if x.features.bias is not None:
        x.features.bias[:, 20] = -np.inf
        x.dout[0, 20, 1, 3] = np.nan
        if spec.mods == "capped":
            x.features.bias[:, np.add.outer(np.arange(70), np.arange(70)) % 5 == 0] = np.nan
        elif spec.mods_given is not None:
            document = spec.mods_given.mod_arrays["document"][:, np.minimum(np.arange(70), 49)]
            x.features.bias[:, (document[:, :, None] != document[:, None]).all(axis=0)] = np.nan
    return spec, x


@pytest.mark.parametrize(
    "where",
    [
        "cpu",
        pytest.param("emulator", marks=pytest.mark.needs("g++")),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("name", FEATURES)
def test_reasons_that_meet(name: str, family: str, where: str) -> None:
    spec, x = featured(name, family)
    results = run.WHERE[where](spec, x)
    exact = Oracle(spec.problem(), *x)
    wrong = run.verdicts(spec, x, results)
    wrong += [str(c) for c in exact.judge_backward(*results[2:5]) if not c.passed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.needs("g++")
@pytest.mark.parametrize("bug", REPAIRED, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_caught(bug: Bug) -> None:
    from tests.fuzz.emulated import session

    spec, x = featured(bug.case, bug.family)
    exact, how = Oracle(spec.problem(), *x), session(spec, bug.headers())
    forward = (a.astype(b) for a, b in zip(exact.forward, (spec.numpy_dtype, np.float32), strict=True))
    with np.errstate(all="ignore"):
        gradients = how.backward(x, *forward, spec.problem())
    assert not all(c.passed for c in exact.judge_backward(*gradients))


@pytest.mark.needs("g++")
@pytest.mark.parametrize("bug", REPAIRED_FORWARD, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_caught_forward(bug: Bug) -> None:
    from tests.fuzz.emulated import session

    spec, x = featured(bug.case, bug.family)
    found = session(spec, bug.headers()).forward(x, spec.problem())
    assert not all(c.passed for c in Oracle(spec.problem(), *x).judge_forward(*found))
