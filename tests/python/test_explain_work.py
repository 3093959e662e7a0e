"""What `cupyflash explain` computes: pairs, bytes, and the blocks that fit an SM."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupyflash.arrays.adapters import Signature
from cupyflash.cli.explain import work as explain_work
from cupyflash.gpu.device import Device
from cupyflash.plan.shipped import shipped
from cupyflash.problem import Problem

WINDOWS = ((None, None), (None, 0), (0, 0), (3, None), (None, -4), (5, -2), (-3, 9), (7, 40), (None, 100), (-50, None))


def test_visible_pairs() -> None:
    for n, m in itertools.product((0, 1, 5, 33), repeat=2):
        for window in WINDOWS:
            problem = Problem("bf16", 1, n, m, 1, 1, 64, 1.0, window)
            expected = sum(end - first for first, end in map(problem.visible, range(n)))
            assert explain_work.visible_pairs(problem) == expected, (n, m, window)


def test_long_sequences_take_no_time() -> None:
    n = 2**29
    assert explain_work.visible_pairs(Problem("bf16", 1, n, n, 1, 1, 64, 1.0, (None, 0))) == n * (n + 1) // 2


def test_distinct_bytes() -> None:
    x = np.zeros((2, 7, 1, 64), np.float16)
    strides = tuple(s // 2 for s in np.broadcast_to(x, (2, 7, 5, 64)).strides)
    assert explain_work.distinct_bytes(Signature((2, 7, 5, 64), strides, "fp16", 0), 2) == x.nbytes


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_as_many_blocks_fit_as_the_tiles_are_made_for(arch: str) -> None:
    """The launch bound caps the registers; shared memory and threads leave room for as many."""
    gpu = Device.synthetic(arch)
    for v in shipped(gpu):
        most = 65536 // (v.threads * v.tile.blocks_per_sm) // 8 * 8
        assert min(explain_work.resident_blocks(v, gpu, most).values()) >= v.tile.blocks_per_sm, v.symbol
