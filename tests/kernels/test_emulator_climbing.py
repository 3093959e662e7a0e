"""The Hopper forward where maxima grow from key block to key block, on the CPU: against float64, with planted bugs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy.typing import NDArray

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Case, Inputs
from tests.ahead import Ahead
from tests.emulator import attention
from tests.emulator.attention import Session
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_climbing import CLIMBING

require_compiler()

CASES = {
    "some-stay": Case("some-stay", "full", 16, 4096, 64),
    "some-stay-far": Case("some-stay-far", "full", 16, 4096, 64),
    "up-to-0": Case("up-to-0", "full", 64, 256, 64),
    "by-14": Case("by-14", "full", 64, 400, 64),
    "large-scale": Case("large-scale", "full", 16, 512, 64, scale=1e38),
    "largest-scores": Case("largest-scores", "full", 16, 512, 64, scale=9e-38),
    "bias": Case("bias-climbs", "full", 70, 840, 64, bias="qk", values="growing_maxima"),
    "bias-causal": Case("bias-climbs-causal", "full", 640, 700, 128, bias="qk", values="growing_maxima", causal=True),
    "bias-tiles": Case(
        "bias-climbs-tiles", "full", 70, 1000, 64, bias="qk", mask="everything", values="growing_maxima"
    ),
}
DTYPES = {"up-to-0": "fp16", "by-14": "fp16"}


def _two_columns(x: Inputs, q: list[NDArray], k: list[NDArray]) -> Inputs:
    """q and k of these columns and of zeros; a column is of rows."""
    new = [np.zeros(a.shape) for a in (x.q, x.k)]
    for whole, columns in zip(new, (q, k), strict=True):
        for i, column in enumerate(columns):
            whole[..., i] = np.broadcast_to(column, whole.shape[1])[None, :, None]
    return x._replace(q=new[0].astype(x.q.dtype), k=new[1].astype(x.k.dtype))


@functools.cache
def inputs_of(name: str) -> Inputs:
    """In "some-stay" every second query has scores that climb, the others' are all the same; in "up-to-0" scores of -44
    precede those of -5; in "by-14" they climb by that much from block to block; in "large-scale" and "largest-scores"
    those of each row's second half are the larger ones."""
    x = CASES[name].inputs(DTYPES.get(name, "bf16"))
    keys, queries = np.arange(x.k.shape[1]), np.arange(x.q.shape[1]) % 2
    second_half = np.where(keys < len(keys) // 2, -1.0, 1.0)
    rng = np.random.default_rng(0)
    if name.startswith("some-stay"):
        each, same = (4.0, 498.0) if name.endswith("far") else (2.0, 91.0)
        x = _two_columns(x, [1.0 - queries, same * queries], [each * 8 * (keys // 64), np.float64(same)])
        x.v[..., 0] = (keys / len(keys))[None, :, None]
    elif name == "up-to-0":
        ones, noise = 1 + 0.01 * rng.random(len(queries)), rng.standard_normal(len(queries))
        x = _two_columns(
            x, [ones, noise], [8 * np.where(keys < 128, -44.0, -5.0), 0.5 * rng.standard_normal(len(keys))]
        )
    elif name == "by-14":
        noise = rng.standard_normal(len(queries)), rng.standard_normal(len(keys))
        x = _two_columns(x, [np.float64(1), noise[0]], [8 * 14.0 * (keys // 64), noise[1]])
    elif name == "large-scale":
        x = _two_columns(
            x,
            [np.float64(1e-18), 1e-19 * rng.standard_normal(len(queries))],
            [1e-19 * second_half, 1e-20 * rng.standard_normal(len(keys))],
        )
    elif name == "largest-scores":
        x = _two_columns(x, [np.float64(1e19)], [2.2e19 * second_half])
    return x


@functools.cache
def oracle(name: str) -> Oracle:
    return Oracle(CASES[name].problem(DTYPES.get(name, "bf16")), *inputs_of(name))


def wrong(name: str, bug: Bug | None = None) -> list[str]:
    """What the forward gets wrong, and what the backward makes of scores that are far from 0."""
    exact, x = oracle(name), inputs_of(name)
    session = Session.of_family("sm90", headers=bug.headers() if bug else None)
    session.backward_family = "sm80"
    out, lse = session.forward(x, exact.problem)
    found = exact.judge_forward(out, lse)
    if name == "some-stay-far":
        found += exact.judge_backward(*session.backward(x, out, lse, exact.problem))
    return [str(c) for c in found if not c.passed]


AHEAD = Ahead(wrong, attention)
AHEAD_OF_BUGS = Ahead(lambda bug: wrong(bug.case, bug), attention)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong_without_bugs(name: str, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    assert not wrong(name)


@pytest.mark.parametrize("bug", CLIMBING, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug, request: pytest.FixtureRequest) -> None:
    AHEAD_OF_BUGS(request)
    assert wrong(bug.case, bug)
