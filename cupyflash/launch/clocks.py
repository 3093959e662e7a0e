"""How long the blocks of a kernel lived, for those who tune it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.adapters import Native
from ..gpu.device import Device
from ..operands import FORWARD
from ..options import Options
from .alignment import aligned_at
from .passes import given_of
from .prepare import prepare


def forward_clocks(library: Native, q: Any, k: Any, v: Any, options: Options) -> np.ndarray | None:
    """How long each block of the sm90 family's forward lived: (blocks, 2) of cycles and nanoseconds, int64.

    Runs the profiling form of the kernel, whose results are those of `forward`, and waits for it. None if the call goes
    to another family.
    """
    arrays = {"q": q, "k": k, "v": v}
    signatures = [library.signature(x) for x in arrays.values()]
    pointers = {name: library.pointer(x) for name, x in arrays.items()}
    ordinal = signatures[0][3]
    stream = library.stream(ordinal)
    aligned = aligned_at(FORWARD, pointers, pointers.values())
    given = given_of(FORWARD, tuple(arrays), ("clocks",))
    call = prepare(given, library, signatures, options, aligned, stream)
    if not call.persistent:
        return None
    import cupy

    out = library.empty_like(q)
    with cupy.cuda.Device(ordinal):
        clocks = cupy.zeros((Device.of(ordinal).sm_count, 2), np.int64)
        cupy.cuda.runtime.deviceSynchronize()
        pointers |= {"out": library.pointer(out), "clocks": clocks.data.ptr}
        call([pointers[name] for name in call.order], stream)
        cupy.cuda.runtime.deviceSynchronize()
        found = clocks.get()
    return found[found[:, 0] > 0]
