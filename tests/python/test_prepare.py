"""Prepared params: every address that a call hands over has its places in the struct, in both families."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.arrays.adapters import Signature
from cupyflash.gpu import tensormap
from cupyflash.gpu.device import Device
from cupyflash.launch import passes
from cupyflash.launch.prepared import contiguous_strides
from cupyflash.plan import families as plan
from cupyflash.problem import Problem, make_problem

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
    return found | ({fields[f"map_{name}"][1] // 8} if f"map_{name}" in fields else set())


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_forward_addresses(head_dim: int, family: str) -> None:
    problem, signatures = call(head_dim)
    chosen = plan.plan_call(problem, Device.synthetic("sm_90"), family=family)
    filled = passes.fill(passes.FORWARD, chosen, problem, signatures[:3], "bshd")
    assert filled is not None
    for i, name in enumerate(("q", "k", "v", "o", "lse")):
        assert {word for word, index in filled.writes if index == i} == places(filled.params.dtype, name), name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_backward_addresses(head_dim: int, family: str, deterministic: bool) -> None:
    problem, signatures = call(head_dim, deterministic)
    chosen = plan.plan_call(problem, Device.synthetic("sm_90"), backward=True, family=family)
    filled = passes.fill(passes.BACKWARD, chosen, problem, signatures, "bshd")
    assert filled is not None
    names = ("q", "k", "v", "o", "dout", "lse", "dlse", "dq", "dk", "dv", "row_stats", "dq_accum", "dq_turn")
    for i, name in enumerate(names):
        assert {word for word, index in filled.writes if index == i} == places(filled.params.dtype, name), name
    assert list(chosen.workspace) == list(names[10 : 10 + len(chosen.workspace)])  # in the order of the pointers


def test_a_driver_with_other_maps_gets_no_params(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "address_slot", lambda tensor: None)
    problem, signatures = call(64)
    chosen = plan.plan_call(problem, Device.synthetic("sm_90"))
    assert passes.fill(passes.FORWARD, chosen, problem, signatures[:3], "bshd") is None
