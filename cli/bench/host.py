"""What a forward with lengths that no call had before costs the host: `bench --host`."""

from __future__ import annotations

import statistics
import time

from cupyflash import api

from .cell import Cell
from .work import Bench, TorchBench


def new_lengths_us(bench: Bench, name: str, cell: Cell, calls: int = 20, rounds: int = 5) -> float:
    """Microseconds of host time for a call whose pair of lengths is new: the median of the rounds.

    The cell's lengths are the longest, and none is below half of them: some peers have no kernel for the shortest. A
    quarter of their product must be `calls * rounds` at least.
    """
    attention = bench.attention(name, cell) if isinstance(bench, TorchBench) else api.attention
    q, k, v, _ = bench.inputs(cell)
    half = cell.seqlen // 2
    pairs = [(cell.seqlen - i // half, cell.seqlen - i % half) for i in range(calls * rounds)]
    samples = []
    for start in range(0, len(pairs), calls):
        arrays = [(q[:, :m], k[:, :n], v[:, :n]) for m, n in pairs[start : start + calls]]
        bench.clock.synchronize()
        begin = time.perf_counter()
        for x in arrays:
            attention(*x)
        samples.append((time.perf_counter() - begin) / calls * 1e6)
    bench.clock.synchronize()
    return statistics.median(samples)
