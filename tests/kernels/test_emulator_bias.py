"""Bugs planted in what a bias brings are reported: `planted/mutants_bias.py`; and its gradient repeats bitwise."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Case, Inputs
from tests.ahead import Ahead
from tests.emulator import EmulatorError, attention
from tests.emulator.attention import Session
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_bias import BACKWARD_BIAS, FIXED_BIAS, FORWARD_BIAS

require_compiler()


def _case(name: str, bias: str, **more: Any) -> Case:
    shape = {"batch": 2, "heads_q": 2, "heads_k": 1, **more}
    return Case(f"bias-{name}", "full", 70, 132, 64, **shape, bias=bias)


def _packed(name: str, bias: str, **more: Any) -> Case:
    lengths = {"lengths_q": (35, 1, 70, 9), "lengths_k": (40, 5, 101, 71)}
    shape = {"batch": 4, "heads_q": 2, "heads_k": 1, **lengths, **more}
    return Case(f"bias-{name}", "full", 120, 220, 64, **shape, bias=bias)


ROOM = 50, 90  # queries and keys that the arrays of "short" have of each sequence, of which one has more
CASES = {
    "pairs": _case("pairs", "bhqk", causal=True, heads_q=4, heads_k=2),
    "wide": _case("wide", "hqk fp32"),
    "turned": _case("turned", "qk turned"),
    "hides": _case("hides", "qk hides", dlse=True),
    "nan-hidden": _case("nan-hidden", "qk hides"),
    "scores-of--inf": _case("scores-of--inf", "hqk", dlse=True),
    "as-low": Case("bias-as-low", "full", 70, 264, 64, 1, 2, 2, bias="qk fp32"),
    "masks-inf": Case(
        "bias-masks-inf", "full", 70, 133, 64, 2, 2, 1, bias="qk fp32 masks", values="inf_in_visible_key"
    ),
    "masks-inf-sink": Case(
        "bias-masks-inf-sink",
        "full",
        70,
        133,
        64,
        2,
        2,
        1,
        bias="qk fp32 masks",
        values="inf_in_visible_key",
        sink=True,
    ),
    "no-keys": Case("bias-no-keys", "full", 70, 40, 64, 2, 2, 1, bias="qk", causal=True, sink=True),
    "keys": _case("keys", "k fp32", dlse=True),
    "many": _case("many", "k fp32", batch=3, heads_q=6, heads_k=2),
    "columns": _case("columns", "bhk", heads_q=3),
    "row-alibi": Case(
        "bias-row-alibi", "full", 75, 133, 128, 2, 4, 2, bias="bk", softcap=2.0, alibi=1, sink=True, window=(70, 30)
    ),
    "row-masked": _case("row-masked", "bk + k bool", mask="stripes", heads_q=4, heads_k=2, causal=True),
    "row-hides": Case("bias-row-hides", "full", 140, 201, 40, 2, 3, 1, bias="bhk hides", dlse=True),
    "row-dropout": _case("row-dropout", "k", dropout_p=0.2),
    "row-wide": Case("bias-row-wide", "full", 70, 133, 256, 1, 2, 1, bias="bk", causal=True),
    "wide-heads": Case("bias-wide-heads", "full", 140, 132, 256, 1, 2, 1, bias="hqk"),
    "odd": Case("bias-odd", "full", 70, 133, 64, 2, 2, 1, bias="hqk"),
    "queries": _case("queries", "bq", dlse=True),
    "both": _case("both", "hqk + bk bool", mask="stripes", dlse=True),
    "packed": _packed("packed", "bhqk", heads_q=4),
    "chunks": Case("bias-chunks", "full", 201, 200, 64, 2, 4, 2, bias="bhqk", causal=True, dlse=True),
    "chunks-hides": Case("bias-chunks-hides", "full", 140, 264, 40, 1, 2, 2, bias="hqk hides", window=(70, 30)),
    "chunks-wide": Case("bias-chunks-wide", "full", 128, 200, 64, 2, 2, 1, bias="hqk fp32", causal=True),
    "chunks-alibi": Case(
        "bias-chunks-alibi", "full", 75, 264, 128, 2, 2, bias="bhqk", softcap=2.0, alibi=1, sink=True, window=(70, 30)
    ),
    "chunks-climbing": Case("bias-chunks-climbing", "full", 75, 328, 64, 1, 2, 2, bias="hqk", values="growing_maxima"),
    "chunks-far": Case("bias-chunks-far", "full", 75, 328, 64, 1, 2, 2, bias="hqk far"),
    "chunks-nan-hidden": Case("bias-chunks-nan-hidden", "full", 70, 200, 128, 2, 2, 1, bias="qk hides"),
    "chunks-tiles": Case(
        "bias-chunks-tiles", "full", 201, 456, 64, 1, 4, 2, bias="hqk + bqk bool tiles", causal=True, dlse=True
    ),
    "chunks-tiles-climbing": Case(
        "bias-chunks-tiles-climbing",
        "full",
        200,
        392,
        128,
        1,
        2,
        1,
        bias="hqk + qk bool tiles",
        values="growing_maxima",
    ),
    "chunks-mods": Case("bias-chunks-mods", "full", 130, 264, 64, 1, 2, 1, bias="hqk", mods="capped"),
    "packed-mask": _packed("packed-mask", "bk bool", dlse=True),
    "packed-shared": _packed("packed-shared", "hqk"),
    "short": _packed("short", "hqk + bk bool", causal=True),
}


AS_LOW = range(16, 32)  # a warp's queries


@functools.cache
def inputs_of(name: str) -> Inputs:
    """In "nan-hidden", also of chunks, a key that no query sees is NaN, and one that every second query sees; in
    "scores-of--inf" one query, whose keys no bias hides, has scores of -inf alone; in "no-keys" a value is NaN, and the
    first queries, which see none, share a tile with others that see it; in "short" nothing is added beyond `ROOM`; in
    "as-low" the scores of `AS_LOW` are all the same, which times log2(e) is rounded away from 0."""
    x = CASES[name].inputs("bf16")
    bias, mask = x.features.bias, x.features.mask
    if name == "short":
        assert bias is not None
        assert mask is not None
        bias[:, ROOM[0] :] = bias[..., ROOM[1] :] = 0
        mask[2] = True  # of the one that has more queries, from which nothing is hidden behind them
    if name.endswith("nan-hidden"):
        assert bias is not None
        bias[:, 37] = -np.inf
        bias[::2, 90] = -np.inf
        x.k[:, [37, 90]], x.v[:, [37, 90]] = np.nan, np.nan
    if name == "no-keys":
        x.v[:, 5] = np.nan
    if name == "as-low":
        assert bias is not None
        bias[AS_LOW] = -9 * 2.0**96
    if name == "scores-of--inf":
        x.k[..., 0] = np.abs(x.k[..., 0].astype(np.float32)) + 0.5
        x.q[:, 5, :, 0] = -np.inf
    return x


@functools.cache
def oracle(name: str) -> Oracle:
    return Oracle(CASES[name].problem("bf16"), *inputs_of(name))


def wrong(name: str, *, backward: bool, family: str = "sm80", **more: Any) -> list[str]:
    """What the kernels get wrong; unless they `learns`, of the gradients of q, k and v alone."""
    x, exact, session = inputs_of(name), oracle(name), Session.of_family(family, **more)
    problem = exact.problem
    if name == "short":
        problem = replace(problem, max_seqlen_q=ROOM[0], max_seqlen_k=ROOM[1])
        bias, mask = (a[..., : ROOM[0], : ROOM[1]].copy() for a in (x.features.bias, x.features.mask))
        x = x.having(bias=bias, mask=mask)
    if backward:
        grads = session.backward(x, *exact.plain_forward, problem)
        if name == "short":
            whole = exact.plain_backward[-1].copy()
            whole[:, : ROOM[0], : ROOM[1]] = grads[-1]
            grads = *grads[:-1], whole
        found = (
            exact.judge_backward(*grads) if session.learns else exact.judge_backward(*grads, *exact.plain_backward[3:])
        )
    else:
        out, lse = session.forward(x, problem)
        found = exact.judge_forward(out, lse)
        if name == "as-low":  # which are means of v; the rule allows for what fp32 is known to lose of such scores
            return [f"row {i}" for i in AS_LOW if np.abs(out[0, i] - x.v[0].mean(0, np.float32)).max() > 0.01]
    return [str(c) for c in found if not c.passed]


def planted(bug: Bug) -> list[str]:
    more = {"learns": False} if bug in FIXED_BIAS else {}
    return wrong(bug.case, backward=bug not in FORWARD_BIAS, family=bug.family, headers=bug.headers(), **more)


AHEAD, AHEAD_OF_BUGS = Ahead(wrong, attention), Ahead(planted, attention)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong_without_bugs(name: str, family: str, backward: bool, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    assert not wrong(name, backward=backward, family=family)


@pytest.mark.parametrize("name", ["chunks", "chunks-hides", "chunks-tiles", "pairs", "wide", "packed-mask", "both"])
def test_nothing_is_wrong_of_a_fixed_bias(name: str) -> None:
    """Whose backward has other tiles on Hopper."""
    assert not wrong(name, backward=True, family="sm90", learns=False)


@pytest.mark.parametrize("bug", FORWARD_BIAS + BACKWARD_BIAS + FIXED_BIAS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug, request: pytest.FixtureRequest) -> None:
    AHEAD_OF_BUGS(request)
    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            planted(bug)
    else:
        assert planted(bug)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("name", ["pairs", "keys", "queries"])
def test_the_gradient_repeats_bitwise(name: str, family: str) -> None:
    """Deterministic or not, in any order of blocks and warps."""
    x, exact, found = inputs_of(name), oracle(name), []
    for mode, seed in (("early", 0), ("any", 1), ("lanes", 2)):
        session = Session.of_family(family, mode, seed=seed)
        found.append(session.backward(x, *exact.plain_forward, exact.problem)[-1])
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
