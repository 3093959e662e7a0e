"""The race detector where threads access shared memory by pieces of different sizes: it keeps one record of 16 bytes
while all take them at once, and else one of each 4.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupyflash.plan.variant import kernel_sources
from tests.emulator import MODES, EmulatedKernel, EmulatorError
from tests.emulator.require import require_compiler

require_compiler()

IN_ORDER = replace(MODES["race"], scheduler=MODES["early"].scheduler)
STEPS = {
    "write 16": "ptx::st_shared_v4_b32({at}, ptx::U128{{}});",
    "read 16": "ptx::ld_shared_v4_b32({at});",
    "write 4": "ptx::st_shared_b32({at}, 1);",
    "read 4": "ptx::ld_shared_b32({at});",
    "barrier": "ptx::bar_sync();",
}


def run(*steps: tuple[int, str, int]) -> None:
    """Steps of some threads: which one, what, and at which byte; thread -1: all. Of warps the first comes first, but
    behind a barrier the last one does, which has released it.
    """
    body = ""
    for thread, what, at in steps:
        step = STEPS[what].format(at=f"ptx::dynamic_smem() + {at}")
        body += f"    if ({thread} < 0 || ptx::thread_index() == {thread}) {step}\n"
    source = f'#include "hw/ptx.cuh"\nextern "C" __global__ void k() {{\n{body}}}\n'
    EmulatedKernel(source, kernel_sources(), "k")(1, 128, 64, [], IN_ORDER)


ALL = (-1, "barrier", 0)


@pytest.mark.parametrize("second", ["read 4", "read 16", "write 4", "write 16"])
@pytest.mark.parametrize("at", [16, 20, 28])
def test_after_a_write_of_16_bytes(at: int, second: str) -> None:
    """At any place of the 16."""
    first, at = (0, "write 16", 16), 16 if second.endswith("16") else at
    with pytest.raises(EmulatorError, match=f"RACE, {second.split()[0]} after write: shared memory \\+ {at},"):
        run(first, (32, second, at))
    run(first, ALL, (32, second, at))


@pytest.mark.parametrize("write", ["write 16", "write 4"])
@pytest.mark.parametrize("between", [(), ((64, "read 4", 20),)], ids=["whole", "apart"])
def test_after_reads_of_16_bytes(between: tuple[tuple[int, str, int], ...], write: str) -> None:
    """Each is remembered, however many, also once the line has come apart."""
    readers, at = (96, 0, 32), 16 if write == "write 16" else 24
    before = ((0, "write 16", 16), ALL, *((thread, "read 16", 16) for thread in readers), *between)
    with pytest.raises(EmulatorError, match=rf"RACE, write after read: shared memory \+ {at},") as caught:
        run(*before, (64, write, at))
    assert all(f"after thread {thread} " in str(caught.value) for thread in readers)
    run(*before, ALL, (64, write, at))


def test_pieces_of_a_line_are_apart() -> None:
    """A write of 4 bytes is no race with one of the others, and is one with the whole."""
    begin = (0, "write 16", 16), ALL
    run(*begin, (32, "write 4", 20), (64, "write 4", 24), (96, "read 4", 28))
    with pytest.raises(EmulatorError, match=r"RACE, read after write: shared memory \+ 24,"):
        run(*begin, (32, "write 4", 24), (64, "read 16", 16))
    with pytest.raises(EmulatorError, match=r"RACE, write after write: shared memory \+ 24,"):
        run(*begin, (32, "write 4", 24), (64, "write 16", 16))
    with pytest.raises(EmulatorError, match=r"RACE, write after read: shared memory \+ 24,"):
        run(*begin, (32, "read 4", 24), (64, "read 16", 16), (64, "write 4", 24))
    run(*begin, (32, "write 4", 24), ALL, (64, "write 16", 16), ALL, (96, "read 4", 20), (32, "read 16", 16))
