"""`bench`: which share of the tensor cores' cycles our forward uses, and at which clock it runs."""

from __future__ import annotations

import numpy as np

from cupyflash.arrays import adapters as arrays
from cupyflash.launch import clocks
from cupyflash.options import Options

from .clocks import Clock, CupyClock, TorchClock, Work
from .decode_cell import AnyCell, DecodeCell
from .timing import WARM_UP, sustained_ms
from .work import Bench

FLOPS_PER_CYCLE = 4096  # of one multiprocessor in fp16 and bf16, sm_90: 989.4 TFLOP/s / (132 * 1.83 GHz), data sheet
LIBRARIES: dict[type[Clock], arrays.Native] = {TorchClock: arrays.TORCH, CupyClock: arrays.CUPY}


def utilisation(flops: float, cycles: np.ndarray, nanoseconds: np.ndarray) -> tuple[float, float]:
    """(percent, GHz): FLOPs over what the tensor cores could do while the blocks lived, and the clock meanwhile.

    Args:
        flops: of the whole launch.
        cycles, nanoseconds: ``(blocks,)``, how long each block lived; one block a multiprocessor at a time.
    """
    lived = float(np.sum(cycles, dtype=np.float64))
    return 100 * flops / (FLOPS_PER_CYCLE * lived), lived / float(np.sum(nanoseconds, dtype=np.float64))


def profile(bench: Bench, cell: AnyCell, work: Work) -> tuple[float, float] | None:
    """`utilisation` of our forward, once `work` has warmed the chip up; None where no kernel counts cycles."""
    library = LIBRARIES.get(type(bench.clock))
    if library is None or isinstance(cell, DecodeCell) or cell.packed or cell.brings_arrays:
        return None
    q, k, v, _ = bench.inputs(cell)
    sustained_ms([work], bench.clock, WARM_UP)
    cycles = clocks.forward_clocks(library, q, k, v, Options(**cell.options))
    return None if cycles is None else utilisation(cell.flops("fwd"), cycles[:, 0], cycles[:, 1])
