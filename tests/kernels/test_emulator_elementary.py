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
KNOWN = [f"x^{b} known" for b in elementary.KNOWN if abs(b) != 0.5]
FINDS = {
    "quotients": QUOTIENTS,
    "logs": ["log", "log2"],
    "roots": ["x^0.5 known", "x^-0.5 known"],
    "slopes of powers": [
        "slope of x^0.75 of subnormals", *(f"slope of x^{b}" for b in elementary.POWERS),
        *(f"slope of x^{b} known" for b in (0.5, 0.75, 1.5)),
    ],
    "powers": ["power of subnormals", *KNOWN],
    "powers of subnormals": ["power of subnormals", "slope of x^0.75 of subnormals"],
    "powers beyond 2": ["x^2.75 known", "x^3.75 known"],
    "constants": [f"slope of a constant's {of}" for of in ("square", "root")],
    "reciprocals": [
        "slope of log of subnormals", "slope of log of large numbers", "slope of x^0.75 of subnormals",
    ],
}  # fmt: skip


def wrong(headers: Mapping[str, str], number: int = 0) -> list[str]:
    """Which functions are, of these headers in place of their own; `number`: the bug that is alive."""
    kernel = EmulatedKernel(elementary.SOURCE, {**kernel_sources(), **headers}, elementary.NAME, 900, planted=number)
    x, y = elementary.given(BLOCKS)
    with Memory() as memory:
        shape = (len(elementary.FUNCTIONS), x.size)
        inputs = [memory.input(name, a) for name, a in (("x", x), ("y", y))]
        address, out = memory.output("out", shape, np.float32)
        kernel(BLOCKS, elementary.THREADS, 0, [np.uint64(a) for a in (*inputs, address)], MODES["early"], 0)
        return [found.partition(":")[0] for found in elementary.wrong(x, y, out, most=6)]


def test_functions_against_float64() -> None:
    assert wrong({}) == []


@pytest.mark.parametrize("bug", ELEMENTARY, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_found(bug: Bug) -> None:
    planted = bug.headers()
    assert wrong(planted, planted.number) == FINDS.get(bug.case, [bug.case])
