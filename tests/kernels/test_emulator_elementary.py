"""The kernels' own functions of fp32, by the emulator's exact instructions; what a GPU's make of them is in
`tests/gpu/test_gpu_mods.py`."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.plan.variant import kernel_sources
from tests import elementary
from tests.emulator import MODES
from tests.emulator.launch import EmulatedKernel, Memory
from tests.emulator.require import require_compiler

require_compiler()
BLOCKS = 64


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("", ""), []),
        (("fmaf(left, r, q) : q", "fmaf(left, r, q) : fmaf(left, r, q)"), ["quotient"]),
        (("? fmaf(left, r, q)", "? q"), ["quotient", *(f"quotient by {b}" for b in elementary.NUMBERS)]),
        (("< 0.7f", "< 1.f"), ["tangent"]),
        (("< 0.7f", "< 0.1f"), ["tangent"]),
    ],
    ids=["as-it-is", "not-finite", "not-rounded", "series-too-far", "series-too-near"],
)
def test_functions_against_float64(edit: tuple[str, str], expected: list[str]) -> None:
    """As they are, and with a bug planted."""
    headers = dict(kernel_sources())
    header = headers["tile/elementary.cuh"]
    assert not edit[0] or header.count(edit[0]) == 1
    headers["tile/elementary.cuh"] = header.replace(*edit) if edit[0] else header
    kernel = EmulatedKernel(elementary.SOURCE, headers, elementary.NAME, 900)
    x, y = elementary.given(BLOCKS)
    with Memory() as memory:
        shape = (2 + len(elementary.NUMBERS), x.size)
        inputs = [memory.input(name, a) for name, a in (("x", x), ("y", y))]
        address, out = memory.output("out", shape, np.float32)
        kernel(BLOCKS, elementary.THREADS, 0, [np.uint64(a) for a in (*inputs, address)], MODES["early"], 0)
        found = elementary.wrong(x, y, out)
    assert [x.split(":")[0] for x in found] == expected
