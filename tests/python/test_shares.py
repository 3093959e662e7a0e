"""Groups of query heads that blocks of the backward divide: into how many shares, and what that takes."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from cupyflash.gpu.device import Device
from cupyflash.plan.families import plan_call
from cupyflash.plan.shares import Shares
from cupyflash.problem import Problem

MIB = 1 << 20
# Milliseconds of the backward by the number of shares, batch 1 (H200, 2026-11-24, docs/performance.md), of heads_q,
# heads_k, seqlen, head_dim, causal.
MEASURED = {
    (32, 1, 2048, 128, False): {1: 1.875, 2: 0.976, 4: 0.520, 8: 0.311, 16: 0.333, 32: 0.367},
    (32, 1, 2048, 128, True): {1: 1.962, 2: 1.036, 4: 0.570, 8: 0.329, 16: 0.247, 32: 0.256},
    (32, 4, 2048, 128, False): {1: 0.509, 2: 0.304, 4: 0.318, 8: 0.345},
    (32, 4, 2048, 128, True): {1: 0.561, 2: 0.327, 4: 0.239, 8: 0.237},
    (32, 4, 4096, 128, False): {1: 1.079, 2: 1.099, 4: 1.124, 8: 1.174},
    (32, 4, 4096, 128, True): {1: 1.177, 2: 0.828, 4: 0.745, 8: 0.712},
    (8, 1, 4096, 128, False): {1: 0.952, 2: 0.503, 4: 0.289, 8: 0.308},
    (8, 1, 4096, 128, True): {1: 1.003, 2: 0.553, 4: 0.313, 8: 0.201},
    (32, 8, 4096, 128, True): {1: 0.812, 2: 0.751, 4: 0.705},
    (32, 8, 2048, 128, False): {1: 0.293, 2: 0.321, 4: 0.348},
    (16, 1, 2048, 64, False): {1: 0.907, 2: 0.471, 4: 0.253, 8: 0.145, 16: 0.159},
    (16, 1, 2048, 64, True): {1: 0.896, 2: 0.468, 4: 0.249, 8: 0.142, 16: 0.097},
    (8, 1, 2048, 256, False): {1: 0.487, 2: 0.300, 4: 0.210, 8: 0.229},
    (8, 1, 2048, 256, True): {1: 0.484, 2: 0.298, 4: 0.204, 8: 0.174},
}


def problem(heads_q: int, heads_k: int, seqlen: int, head_dim: int, causal: bool, batch: int = 1) -> Problem:
    window = (None, 0 if causal else None)
    return Problem("bf16", batch, seqlen, seqlen, heads_q, heads_k, head_dim, 0.1, window)


@pytest.mark.parametrize("call", MEASURED, ids=str)
def test_the_choice_is_near_the_best_that_was_measured(call: tuple[int, int, int, int, bool]) -> None:
    h200 = dataclasses.replace(Device.synthetic("sm_90"), sm_count=132)
    took = MEASURED[call]
    assert took[plan_call(problem(*call), h200, backward=True).numbers.shares] <= 1.05 * min(took.values())


@hypothesis.given(
    arch=st.sampled_from(["sm_80", "sm_89", "sm_90", "sm_120"]),
    group=st.integers(1, 40), heads_k=st.integers(1, 9), batch=st.integers(1, 5), seqlen=st.integers(1, 70_000),
    head_dim=st.sampled_from([8, 64, 96, 128, 200, 256]), causal=st.booleans(),
)  # fmt: skip
def test_shares_are_equal_and_bounded(
    arch: str, group: int, heads_k: int, batch: int, seqlen: int, head_dim: int, causal: bool
) -> None:
    p = problem(group * heads_k, heads_k, seqlen, head_dim, causal, batch)
    plan = plan_call(p, Device.synthetic(arch), backward=True)
    assert group % plan.numbers.shares == 0
    sums = [launch.grid for launch in plan.launches if isinstance(launch.variant, Shares)]
    assert len(sums) == (group > 1)
    shapes = [plan.workspace[name][0] for name in ("dk_shares", "dv_shares") if name in plan.workspace]
    if plan.numbers.shares == 1:
        assert shapes == []
        assert sum(sums) == 0
    else:
        assert shapes == [(batch, heads_k * plan.numbers.shares, seqlen, head_dim)] * 2
        assert sum(sums) == -(-seqlen // 16) * heads_k * batch
        assert 4 * sum(map(math.prod, shapes)) <= max(128 * MIB, 2 * batch * seqlen * p.heads_q * head_dim)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("extents", [(0, 100, 5000), (3, 0, 5000), (3, 100, 0)], ids=str)
def test_nothing_is_divided_where_nothing_is_computed(extents: tuple[int, int, int], packed: bool) -> None:
    """Packed rows of no sequence count, too: their shares would take memory."""
    call = Problem("bf16", *extents, 32, 1, 64, 0.1, (None, 0), packed=packed)
    plan = plan_call(call, Device.synthetic("sm_90"), backward=True)
    assert plan.numbers.shares == 1
    assert not any(name.endswith("_shares") for name in plan.workspace)
    assert not any(launch.grid for launch in plan.launches if isinstance(launch.variant, Shares))
