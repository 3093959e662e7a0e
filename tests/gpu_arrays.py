"""NumPy arrays as GPU arrays of a library, with the same strides and the same alignment."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np


def on_gpu(x: np.ndarray, library: str) -> Any:
    """`x` on the current GPU as a "cupy" or "torch" array: equal values, strides, and address modulo 16 bytes."""
    item = x.itemsize
    offset = x.ctypes.data % 16 // item if x.size else 0
    strides = tuple(s // item for s in x.strides)
    if x.dtype == ml_dtypes.float8_e4m3fn and library == "cupy":
        return on_gpu(x.view(np.uint8), library)  # CuPy has no other
    length = offset + 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) if x.size else 1
    flat = np.zeros(length, x.dtype)
    np.lib.stride_tricks.as_strided(flat[offset:], x.shape, x.strides)[...] = x
    if library == "cupy":
        import cupy

        return cupy.lib.stride_tricks.as_strided(cupy.asarray(flat)[offset:], x.shape, x.strides)
    import torch

    from cupyflash.arrays.adapters import TORCH

    return torch.as_strided(TORCH.from_numpy(flat).cuda(), x.shape, strides, offset)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """An error for each call of torch's that waits for the GPU."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(work: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of what torch tensors go through in `work`, warmed up on another stream, and what it leaves."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


def to_numpy(x: Any) -> np.ndarray:
    """A CuPy, torch or NumPy array as NumPy."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "get"):
        return x.get()
    from cupyflash.arrays.adapters import TORCH

    return TORCH.to_numpy(x.cpu())


def relative(a: Any, b: Any) -> float:
    """How far a tensor is from another, as a part of it."""
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm())
