"""Run a call: on the GPU by its plan, on the caller's stream, or on the CPU path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import cpu, device, launch
from .arrays import CPU, CUPY, NUMPY, Native, Signature
from .device import Device
from .errors import ArgumentError, DeviceError
from .plan import GPU_DTYPES, check_supported
from .prepare import BACKWARD_NAMES, Options, check, place, prepare_backward, prepare_forward
from .problem import Problem

BACKENDS = ("auto", "cuda", "cpu")


def backend() -> str:
    """ "cuda" or "cpu": where NumPy arrays run, by CUPYFLASH_BACKEND and what this machine has.

    Raises:
        ArgumentError: if the variable has another value.
        DeviceError: if it asks for a GPU and none is usable.
    """
    wish = os.environ.get("CUPYFLASH_BACKEND", "auto")
    if wish not in BACKENDS:
        raise ArgumentError(f"CUPYFLASH_BACKEND: expected one of {', '.join(BACKENDS)}, got {wish!r}")
    if wish == "cuda" and device.count() == 0:
        raise DeviceError(f"CUPYFLASH_BACKEND=cuda: {device.why_none()}")
    if wish == "auto":
        usable = device.count() > 0 and Device.of(0).capability >= device.MIN_CAPABILITY
        return "cuda" if usable else "cpu"
    return wish


def forward(library: Native, q: Any, k: Any, v: Any, options: Options, want_lse: bool = True) -> tuple[Any, Any | None]:
    """(out, lse) of arrays of one native library; out is contiguous, in the caller's layout.

    Where nobody wants lse it may be None: allocating it costs the host as much as allocating out.
    """
    sq, sk, sv = library.signature(q), library.signature(k), library.signature(v)
    device = sq[3]
    if device == CPU:
        return _forward_host(library, (q, k, v), (sq, sk, sv), options)
    pq, pk, pv = library.pointer(q), library.pointer(k), library.pointer(v)
    aligned = (pq | pk | pv) & 15 == 0
    stream = library.stream(device)
    key = sq, sk, sv, options, aligned
    call = launch.find(key) or launch.keep(key, prepare_forward(library, (sq, sk, sv), options, aligned, stream))
    problem = call.problem
    out, lse, lse_pointer = library.empty_like(q), None, 0
    if want_lse:
        lse = library.empty((problem.batch, problem.heads_q, problem.seqlen_q), "fp32", q)
        lse_pointer = library.pointer(lse)
    call((pq, pk, pv, library.pointer(out), lse_pointer, 0), stream)
    return out, lse


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
    lse = library.empty((call.problem.batch, call.problem.heads_q, call.problem.seqlen_q), "fp32", q)
    with cupy.cuda.Device(signatures[0][3]):
        clocks = cupy.zeros((Device.of(signatures[0][3]).sm_count, 2), np.int64)
        cupy.cuda.runtime.deviceSynchronize()
        call((*pointers, library.pointer(out), library.pointer(lse), clocks.data.ptr), stream)
        cupy.cuda.runtime.deviceSynchronize()
        found = clocks.get()
    return found[found[:, 0] > 0]


def backward(
    library: Native, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any | None, options: Options
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of arrays of one native library; contiguous, in the caller's layout."""
    tensors = (q, k, v, out, dout)
    signatures = tuple(library.signature(x) for x in tensors)
    device = signatures[0][3]
    if device == CPU:
        return _backward_host(library, tensors, signatures, lse, dlse, options)
    pointers = [library.pointer(x) for x in tensors]
    aligned = (pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4]) & 15 == 0
    stream = library.stream(device)
    key = *signatures, options, aligned
    call = launch.find(key) or launch.keep(key, prepare_backward(library, signatures, options, aligned, stream))
    lse = _row_vector("lse", library, lse, call.problem, device)
    dlse = None if dlse is None else _row_vector("dlse", library, dlse, call.problem, device)
    grads = library.empty_like(q), library.empty_like(k), library.empty_like(v)
    work = [library.empty(shape, dtype, q) for shape, dtype in call.workspace.values()]
    results = [library.pointer(x) for x in (*grads, *work)]
    results += (0, 0)  # the last pointers, dq_accum and dq_turn, unless the workspace has them
    call((*pointers, library.pointer(lse), 0 if dlse is None else library.pointer(dlse), *results), stream)
    return grads


def _row_vector(name: str, library: Native, x: Any, problem: Problem, ordinal: int) -> Any:
    """lse or dlse: checked, and contiguous."""
    sig = Signature(*library.signature(x))
    shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    dtype = "fp64" if problem.dtype == "fp64" else "fp32"
    if tuple(sig.shape) != shape or library.dtype_name(sig.dtype) != dtype or sig.device != ordinal:
        raise ArgumentError(
            f"{name}: expected shape (batch, heads_q, seqlen_q) = {shape}, dtype {dtype}, on {place(ordinal)}; got "
            f"{tuple(sig.shape)}, {library.dtype_name(sig.dtype)}, on {place(sig.device)}"
        )
    _, heads, length = shape
    return x if sig.strides == (heads * length, length, 1) or ordinal == CPU else library.contiguous(x)


def _bshd(x: np.ndarray, options: Options) -> np.ndarray:
    return x if options.layout == "bshd" else x.swapaxes(1, 2)


def _on_gpu(library: Native, problem: Problem) -> bool:
    """Whether arrays in host memory are copied to the GPU: NumPy's alone, where it has a kernel for them."""
    if library is not NUMPY or backend() == "cpu":
        return False
    if os.environ.get("CUPYFLASH_BACKEND") == "cuda":
        check_supported(problem, Device.of(0))
    return problem.dtype in GPU_DTYPES


def _forward_host(
    library: Native, tensors: tuple[Any, Any, Any], signatures: Sequence[tuple[Any, ...]], options: Options
) -> tuple[Any, Any]:
    problem = check("qkv", library, [Signature(*s) for s in signatures], options)
    if _on_gpu(library, problem):
        import cupy

        q, k, v = (cupy.asarray(x) for x in tensors)
        out, lse = forward(CUPY, q, k, v, options)
        assert lse is not None
        return out.get(), lse.get()
    q, k, v = (_bshd(library.to_numpy(x), options) for x in tensors)
    out, lse = cpu.forward(q, k, v, problem)
    return library.from_numpy(np.ascontiguousarray(_bshd(out, options))), library.from_numpy(lse)


def _backward_host(
    library: Native,
    tensors: tuple[Any, ...],
    signatures: Sequence[tuple[Any, ...]],
    lse: Any,
    dlse: Any | None,
    options: Options,
) -> tuple[Any, Any, Any]:
    problem = check(BACKWARD_NAMES, library, [Signature(*s) for s in signatures], options)
    lse = _row_vector("lse", library, lse, problem, CPU)
    dlse = None if dlse is None else _row_vector("dlse", library, dlse, problem, CPU)
    if _on_gpu(library, problem):
        import cupy

        q, k, v, out, dout, lse = (cupy.asarray(x) for x in (*tensors, lse))
        dlse = None if dlse is None else cupy.asarray(dlse)
        dq, dk, dv = (g.get() for g in backward(CUPY, dout, q, k, v, out, lse, dlse, options))
        return dq, dk, dv
    q, k, v, out, dout = (_bshd(library.to_numpy(x), options) for x in tensors)
    lse, dlse = library.to_numpy(lse), None if dlse is None else library.to_numpy(dlse)
    grads = cpu.backward(dout, q, k, v, out, lse, dlse, problem)
    dq, dk, dv = (library.from_numpy(np.ascontiguousarray(_bshd(g, options))) for g in grads)
    return dq, dk, dv
