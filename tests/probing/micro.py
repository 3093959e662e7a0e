"""Runs kernels/hopper_micro.cuh: the small Hopper kernel that stands in for large ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.emulator.launch import EmulatedKernel, Memory, Mode

from . import probe_cpu, probes

ARGS = np.dtype([("key_blocks", "i4"), ("query_blocks", "i4"), ("scale", "f4")])
SMEM_BYTES = 5 * 8192 + 64 + 1024
HEADER = "hopper_micro.cuh"


def run(
    length_q: int, length_k: int, sequences: int, mode: Mode, seed: int = 0, edit: tuple[str, str] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The kernel's result and the exact one; `edit` replaces a text that stands once in the kernel."""
    headers = probes.headers()
    if edit:
        assert headers[HEADER].count(edit[0]) == 1, edit[0]
        headers[HEADER] = headers[HEADER].replace(*edit)
    kernel = EmulatedKernel(f'#include "{HEADER}"\n', headers, "hopper_micro", 900)
    rng = np.random.default_rng(seed)
    lengths = (length_q, length_k, length_k)
    q, k, v = (rng.standard_normal((sequences, n, 64)).astype(np.float16) for n in lengths)
    args = np.zeros((), ARGS)
    args["key_blocks"], args["query_blocks"], args["scale"] = -(-length_k // 64), -(-length_q // 64), 1 / 64
    with Memory() as memory:
        address, o = memory.output("o", q.shape, np.float16)
        addresses = [*(memory.input(n, x) for n, x in zip("qkv", (q, k, v), strict=True)), address]
        maps = [_map(a, x.shape) for a, x in zip(addresses, (q, k, v, q), strict=True)]
        blocks = int(args["query_blocks"]) * sequences
        kernel(blocks, 256, SMEM_BYTES, [*maps, args], mode, seed)
        got = o.astype(np.float64)
    s = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2) / 64).astype(np.float16).astype(np.float64)
    return got, s @ v.astype(np.float64)


def _map(address: int, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    sequences, length, _ = shape
    return probe_cpu.encode(probes.Map("in", 2, (64, length, sequences), (128, 128 * length), (64, 64, 1), 3), address)
