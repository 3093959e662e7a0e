"""The kernels' own functions of fp32, by the emulator's exact instructions; what a GPU's make of them is in
`tests/gpu/test_gpu_mods.py`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from cupyflash.plan.variant import kernel_sources
from tests import elementary
from tests.emulator import MODES
from tests.emulator.launch import EmulatedKernel, Memory
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_mods import ELEMENTARY

require_compiler()
BLOCKS = 64
QUOTIENTS = ["quotient", *(f"quotient by {b}" for b in elementary.NUMBERS)]
FINDS = {"quotient": QUOTIENTS[:1], "quotients": QUOTIENTS, "tangent": ["tangent"]}


def wrong(headers: Mapping[str, str], number: int = 0) -> list[str]:
    """Which functions are, of these headers in place of their own; `number`: the bug that is alive."""
    kernel = EmulatedKernel(elementary.SOURCE, {**kernel_sources(), **headers}, elementary.NAME, 900, planted=number)
    x, y = elementary.given(BLOCKS)
    with Memory() as memory:
        shape = (2 + len(elementary.NUMBERS), x.size)
        inputs = [memory.input(name, a) for name, a in (("x", x), ("y", y))]
        address, out = memory.output("out", shape, np.float32)
        kernel(BLOCKS, elementary.THREADS, 0, [np.uint64(a) for a in (*inputs, address)], MODES["early"], 0)
        return [found.partition(":")[0] for found in elementary.wrong(x, y, out)]


def test_functions_against_float64() -> None:
    assert wrong({}) == []


@pytest.mark.parametrize("bug", ELEMENTARY, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_found(bug: Bug) -> None:
    planted = bug.headers()
    assert wrong(planted, planted.number) == FINDS[bug.case]
