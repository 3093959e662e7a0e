"""Prepared params: every address that a call hands over has its places in the struct, in both families."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.arrays.adapters import Signature
from cupyflash.gpu import tensormap
from cupyflash.gpu.device import Device
from cupyflash.launch import filled as filled_params
from cupyflash.launch import passes
from cupyflash.launch.passes import contiguous_strides
from cupyflash.operands import BACKWARD, FORWARD, WORKSPACE, Pass
from cupyflash.plan import families as plan
from cupyflash.problem import Problem, make_problem

NAMES = ("q", "k", "v", "out", "dout")
Q, K = (2, 300, 4), (2, 310, 2)  # batch, seqlen, heads


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose tensor maps are the address and 15 zeros."""
    monkeypatch.setattr(tensormap, "encode", lambda tensor, address: np.array([address] + 15 * [0], np.uint64))


def call(head_dim: int, deterministic: bool = False) -> tuple[Problem, list[Signature]]:
    """A problem, and the signatures of q, k, v, out and dout."""
    shapes = [(*lengths, head_dim) for lengths in (Q, K, K, Q, Q)]
    signatures = [Signature(shape, contiguous_strides(shape), "bf16", 0) for shape in shapes]
    return make_problem(shapes[:3], ["bf16"] * 3, causal=True, deterministic=deterministic), signatures


def places(params: np.dtype[np.void], name: str) -> set[int]:
    """The words that hold an array's address: its map's first, and its pointer."""
    fields = params.fields or {}
    if "plain" not in fields:
        return {fields[name][1] // 8} if name in fields else set()
    plain, start = fields["plain"][:2]
    found = {(start + plain.fields[name][1]) // 8} if plain.fields and name in plain.fields else set()
    return found | {fields[x][1] // 8 for x in (name, f"map_{name}") if x in fields}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
@pytest.mark.parametrize("which", [FORWARD, BACKWARD], ids=lambda which: which.name)
def test_addresses(which: Pass, head_dim: int, family: str, deterministic: bool) -> None:
    """Of every array that the pass has; and the plan's workspaces are what the table says of them."""
    problem, signatures = call(head_dim, deterministic)
    given = passes.given_of(which, NAMES[: 3 if which is FORWARD else 5])
    chosen = plan.plan_call(problem, Device.synthetic("sm_90"), backward=which is BACKWARD, family=family)
    filled = filled_params.fill(given, chosen, problem, signatures[: len(given.names)], "bshd")
    assert filled is not None
    for name, row in which.rows.items():
        assert set(filled.words[name]) == places(filled.params.dtype, row.member), name
    for name, (shape, dtype) in chosen.workspace.items():
        row = which.rows[name]
        assert (which.uses[name].role, row.dtype, len(row.dims)) == (WORKSPACE, dtype, len(shape)), name


def test_a_driver_with_other_maps_gets_no_params(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "address_slot", lambda tensor: None)
    problem, signatures = call(64)
    chosen = plan.plan_call(problem, Device.synthetic("sm_90"))
    assert filled_params.fill(passes.given_of(FORWARD, NAMES[:3]), chosen, problem, signatures[:3], "bshd") is None
