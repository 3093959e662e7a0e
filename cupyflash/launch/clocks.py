"""How long the blocks of a kernel lived, for those who tune it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.adapters import Native
from ..gpu.device import Device
from ..options import Options
from .prepare import prepare_forward


def forward_clocks(library: Native, q: Any, k: Any, v: Any, options: Options) -> np.ndarray | None:
    """How long each block of the sm90 family's forward lived: (blocks, 2) of cycles and nanoseconds, int64.

    Runs the profiling form of the kernel, whose results are those of `forward`, and waits for it. None if the call goes
    to another family.
    """
    signatures = [library.signature(x) for x in (q, k, v)]
    pointers = [library.pointer(x) for x in (q, k, v)]
    stream = library.stream(signatures[0][3])
    aligned = all(p % 16 == 0 for p in pointers)
    call = prepare_forward(library, signatures, options, aligned, stream, clocks=True)
    if not call.persistent:
        return None
    import cupy

    out = library.empty_like(q)
    lse = library.empty(call.rows, "fp32", q)
    with cupy.cuda.Device(signatures[0][3]):
        clocks = cupy.zeros((Device.of(signatures[0][3]).sm_count, 2), np.int64)
        cupy.cuda.runtime.deviceSynchronize()
        call((*pointers, library.pointer(out), library.pointer(lse), clocks.data.ptr), stream)
        cupy.cuda.runtime.deviceSynchronize()
        found = clocks.get()
    return found[found[:, 0] > 0]
