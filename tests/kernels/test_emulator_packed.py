"""Packed sequences on the CPU, in both families, beyond the table of cases: lengths that contradict each other or the
arrays, rows that belong to no sequence, orders, and where a sequence lies.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Case, Inputs
from tests.ahead import Ahead
from tests.emulator import MODES, EmulatorError, attention
from tests.emulator.attention import Session, inputs_of, small_device
from tests.emulator.cases import TABLE
from tests.emulator.require import require_compiler
from tests.packed_lengths import WRONG, given, three
from tests.planted.mutants import Bug
from tests.planted.mutants_packed import CLAMPS, LANES, MANY_TILES
from tests.turns import in_turn

require_compiler()

FAMILIES = ("sm80", "sm90")
ORDERS = ("packed-zero-queries-or-keys", "packed-forty-short", "packed-mqa-deterministic", "packed-gqa-softcap-d256")


def everything(how: Session, case: Case, inputs: Inputs, dtype: str = "bf16") -> list[np.ndarray]:
    """out, lse, dq, dk and dv."""
    problem = case.problem(dtype)
    out, lse = how.forward(inputs, problem)
    return [out, lse, *how.backward(inputs, out, lse, problem)]


def contradict(family: str, case: Case, wrong: str) -> None:
    """Both passes, with lengths that do."""
    x = case.inputs("bf16").having(sequences=given(*WRONG[wrong]))
    everything(Session.of_family(family, "any"), case, x)


AHEAD = Ahead(
    lambda family, head_dim, wrong, option: contradict(family, three(head_dim, **{option: True}), wrong), attention
)


@pytest.mark.parametrize(("wrong", "option"), in_turn(WRONG, [("causal",), ("deterministic",)]))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_that_contradict(
    family: str, head_dim: int, wrong: str, option: str, request: pytest.FixtureRequest
) -> None:
    """Nothing outside of a buffer is touched, no input is written, and it ends: the emulator reports all else.

    Sequences may overlap, and then several blocks write the same rows: that is no race to be found here.
    """
    AHEAD(request)
    contradict(family, three(head_dim, **{option: True}), wrong)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_lengths_that_contradict_where_first_shares_are_stored(wrong: str, deterministic: bool) -> None:
    """Nobody waits for ever for a share of dQ: the GPU is large enough for key blocks to wait for each other."""
    case = three(128, deterministic=deterministic)
    inputs, problem = case.inputs("bf16").having(sequences=given(*WRONG[wrong])), case.problem("bf16")
    how = Session(small_device("sm_90", 64), replace(MODES["any"], resident=8), backward_family="sm90")
    how.backward(inputs, inputs.q, np.zeros(problem.rows, np.float32), problem)


ADDED: tuple[dict[str, Any], ...] = (
    {"bias": "bhqk + bk bool", "causal": True}, {"mask": "tiles_of_heads", "deterministic": True},
)  # fmt: skip


AHEAD_OF_SCORES = Ahead(
    lambda wrong, family, added: contradict(family, three(64, heads_q=4, **added), wrong), attention
)


@pytest.mark.parametrize(("wrong", "family", "added"), in_turn(WRONG, [(f, x) for x in ADDED for f in FAMILIES]))
def test_lengths_that_contradict_arrays_of_scores(
    wrong: str, family: str, added: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """The same: sequences may be longer than a bias or a mask, and take the lists of others."""
    AHEAD_OF_SCORES(request)
    contradict(family, three(64, heads_q=4, **added), wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_sequences_that_contradict(family: str, rng: np.random.Generator) -> None:
    """More than the 31 that one round of the search for a tile's sequence takes."""
    batch, total_q, total_k = 70, 150, 190
    case = Case("many", "full", total_q, total_k, 64, batch, 1, 1, lengths_q=(0,) * batch, lengths_k=(0,) * batch)
    inputs, problem = case.inputs("bf16"), case.problem("bf16")
    for _ in range(4):
        q, k = (rng.integers(-20, total + 20, batch + 1).tolist() for total in (total_q, total_k))
        x = inputs.having(sequences=given(q, k, rng.integers(-3, 9, batch).tolist()))
        how = Session.of_family(family, "any")
        out, lse = how.forward(x, problem)
        how.backward(x, out, lse, problem)


@pytest.mark.parametrize("bug", [None, *MANY_TILES], ids=["", "planted"])
def test_lengths_of_more_tiles_than_there_is_room_for(bug: Bug | None) -> None:
    """Sequences that lie over each other have more tiles of keys than others; a list of tiles keeps its end."""
    batch, total = 8, 261
    case = Case("over", "full", total, total, 128, batch, 1, 1, lengths_q=(0,) * batch, lengths_k=(0,) * batch)
    over = [total * (b % 2) for b in range(batch + 1)]
    inputs, problem = case.inputs("bf16").having(sequences=given(over, over, None)), case.problem("bf16")
    how = Session(small_device("sm_90"), MODES["any"], headers=bug.headers() if bug else None)
    out, lse = how.forward(inputs, problem)
    with pytest.raises(EmulatorError, match=bug.finds) if bug else contextlib.nullcontext():
        how.backward(inputs, out, lse, problem)


@pytest.mark.parametrize(("mode", "order"), [("race", 1), ("race", 2), ("starve", 3), ("race lanes", 4)])
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_orders(family: str, name: str, mode: str, order: int, seed: int) -> None:
    case = TABLE[name]
    inputs, problem = inputs_of(case, "bf16")
    exact = Oracle(problem, *inputs)
    out, lse, *grads = everything(Session.of_family(family, mode, seed=seed + order), case, inputs)
    verdicts = exact.judge_forward(out, lse) + exact.judge_backward(*grads)
    assert all(v.passed for v in verdicts), "\n".join(str(v) for v in verdicts if not v.passed)


@pytest.mark.parametrize("bug", LANES, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_of_lanes_is_reported(bug: Bug) -> None:
    inputs, problem = inputs_of(TABLE[bug.case], "bf16")
    with pytest.raises(EmulatorError, match=bug.finds):
        Session.of_family(bug.family, "race lanes", headers=bug.headers()).forward(inputs, problem)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_belong_to_no_sequence(family: str, head_dim: int) -> None:
    """And keys that are not used: zeros and -inf, to the bit, whatever the arrays hold there."""
    case = Case(
        "outside", "full", 140, 160, head_dim, 2, 4, 2, lengths_q=(33, 0), lengths_k=(70, 20), used_k=(41, 20),
        values="nan_outside", causal=True,
    )  # fmt: skip
    out, lse, dq, dk, dv = everything(Session.of_family(family), case, case.inputs("bf16"))
    assert not out[33:].astype(np.float32).any()
    assert not dq[33:].astype(np.float32).any()
    assert np.isneginf(lse[:, 33:]).all()
    for grad in (dk, dv):
        assert grad[:41].astype(np.float32).any(axis=(1, 2)).all()
        assert not grad[41:].astype(np.float32).any()


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}], ids=["plain", "causal-softcap"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_the_same_bits_wherever_it_lies(family: str, head_dim: int, options: dict[str, Any]) -> None:
    """Tiles start with the first row of each sequence, so that who lies beside it makes no difference."""
    n, m = 131, 170
    rng = np.random.default_rng(head_dim)
    own = [rng.standard_normal((rows, 2, head_dim)).astype(np.float16) for rows in (n, m, m, n)]
    found = []
    for before, after in (((0, 0), (0, 0)), ((7, 35), (66, 3)), ((64, 128), (1, 70))):
        lengths = tuple(zip(before, (n, m), after, strict=True))
        case = Case("place", "full", *map(sum, lengths), head_dim, 3, lengths_q=lengths[0], lengths_k=lengths[1],
                    deterministic=True, **options)  # fmt: skip
        inputs = case.inputs("fp16", seed=before[0])
        at = [slice(first, first + rows) for first, rows in zip(before, (n, m), strict=True)]
        for x, mine, rows in zip(inputs[:4], own, (at[0], at[1], at[1], at[0]), strict=True):
            x[rows] = mine
        out, lse, dq, dk, dv = everything(Session.of_family(family, "any", seed=before[0]), case, inputs, "fp16")
        found.append([out[at[0]], lse[:, at[0]], dq[at[0]], dk[at[1]], dv[at[1]]])
    for other in found[1:]:
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found[0], other, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("bug", CLAMPS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_missing_clamp_is_reported(bug: Bug) -> None:
    case = three(64, causal=True)
    inputs, problem = case.inputs("bf16").having(sequences=given(*WRONG[bug.case])), case.problem("bf16")
    session = Session(small_device(bug.arch), MODES["any"], headers=bug.headers())
    with pytest.raises(EmulatorError, match=bug.finds):
        session.backward(inputs, *session.forward(inputs, problem), problem)
