"""Run a call: on the GPU by its plan, on the caller's stream, or on the CPU path."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.adapters import CPU, CUPY, NUMPY, TORCH, Native
from ..arrays.vetting import vet_memory, vet_tensor, vet_tracing
from ..cpu import attention as cpu
from ..errors import ArgumentError, CupyflashError, DeviceError
from ..gpu import device
from ..gpu.device import Device
from ..options import Options
from ..plan.families import GPU_DTYPES, check_supported
from ..problem import Problem
from . import prepared as launch
from .passes import BACKWARD_NAMES
from .prepare import check, place, prepare_backward, prepare_forward, wish

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
    try:
        sq, sk, sv = library.signature(q), library.signature(k), library.signature(v)
        pq, pk, pv = library.pointer(q), library.pointer(k), library.pointer(v)
    except Exception as e:
        raise _unreadable(library, e, q=q, k=k, v=v) from e
    device = sq[3]
    if device == CPU:
        return _forward_host(library, (q, k, v), (sq, sk, sv), options)
    bits = pq | pk | pv
    if bits & 1 or not (pq and pk and pv):
        _check_addresses(library, (pq, pk, pv), q=q, k=k, v=v)
    aligned = bits & 15 == 0
    stream = library.stream(device)
    key = sq, sk, sv, options, aligned, wish()
    call = launch.find(key)
    if call is None:
        _vet_memory(library, q=q, k=k, v=v)
        vet = functools.partial(_vet, library, q=q, k=k, v=v)
        call = launch.keep(key, prepare_forward(library, (sq, sk, sv), options, aligned, stream, vet=vet))
    out, lse, lse_pointer = library.empty_like(q), None, 0
    if want_lse:
        lse = library.empty(call.rows, "fp32", q)
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
    lse = library.empty(call.rows, "fp32", q)
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
    arrays = (q, k, v, out, dout, lse) if dlse is None else (q, k, v, out, dout, lse, dlse)
    try:
        signatures = tuple(map(library.signature, arrays))
        pointers = tuple(map(library.pointer, arrays))
    except Exception as e:
        raise _unreadable(library, e, **_named(arrays)) from e
    device = signatures[0][3]
    if device == CPU:
        return _backward_host(library, arrays, signatures, options)
    bits = pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4]
    if bits & 1 or (pointers[5] | pointers[-1]) & 3 or 0 in pointers:
        _check_addresses(library, pointers, **_named(arrays))
    aligned = bits & 15 == 0
    stream = library.stream(device)
    key = *signatures[:5], options, aligned, wish()
    call = launch.find(key)
    if call is None:
        named = _named(arrays)
        _vet_memory(library, **named)
        vet = functools.partial(_vet, library, **named)
        call = launch.keep(key, prepare_backward(library, signatures[:5], options, aligned, stream, vet=vet))
    lse = _row_vector("lse", lse, signatures[5], library, call.rows, "fp32", device)
    dlse = None if dlse is None else _row_vector("dlse", dlse, signatures[6], library, call.rows, "fp32", device)
    grads = library.empty_like(q), library.empty_like(k), library.empty_like(v)
    work = [library.empty(shape, dtype, q) for shape, dtype in call.workspace.values()]
    results = [library.pointer(x) for x in (*grads, *work)]
    results += (0, 0)  # the last pointers, dq_accum and dq_turn, unless the workspace has them
    row_pointers = library.pointer(lse), 0 if dlse is None else library.pointer(dlse)
    call((*pointers[:5], *row_pointers, *results), stream)
    return grads


def _row_vector(
    name: str, x: Any, key: tuple[Any, ...], library: Native, shape: tuple[int, int, int], dtype: str, ordinal: int
) -> Any:
    """lse or dlse, whose signature is `key`: checked, and on a GPU contiguous."""
    if key[0] != shape or library.dtype_name(key[2]) != dtype or key[3] != ordinal:
        raise ArgumentError(
            f"{name}: expected shape (batch, heads_q, seqlen_q) = {shape}, dtype {dtype}, on {place(ordinal)}; got "
            f"{tuple(key[0])}, {library.dtype_name(key[2])}, on {place(key[3])}"
        )
    return x if ordinal == CPU else library.contiguous(x)


def _named(arrays: Sequence[Any]) -> dict[str, Any]:
    """The arrays of a backward by their arguments' names."""
    return dict(zip((*BACKWARD_NAMES, "lse", "dlse"), arrays, strict=False))


def _unreadable(library: Native, error: Exception, **arrays: Any) -> CupyflashError:
    """The error to raise where a library did not tell an array's shape or address; `vet` may know better why."""
    _vet(library, **arrays)
    return ArgumentError(f"{', '.join(arrays)}: {library.name} does not tell shape and address of one of them: {error}")


def _vet(library: Native, **arrays: Any) -> None:
    if library is TORCH:
        for name, x in arrays.items():
            vet_tensor(name, x)


def _vet_memory(library: Native, **arrays: Any) -> None:
    """What must be looked at in every call that is not as one before."""
    if library is TORCH:
        vet_tracing(next(iter(arrays)))
        for name, x in arrays.items():
            vet_memory(name, x)


def _check_addresses(library: Native, pointers: Sequence[int], **arrays: Any) -> None:
    """Refuse arrays without memory and elements that straddle their own size; empty arrays may lie anywhere."""
    _vet(library, **arrays)
    for (name, x), pointer in zip(arrays.items(), pointers, strict=True):
        size = 4 if name in ("lse", "dlse") else 2
        if 0 not in x.shape and (pointer == 0 or pointer % size):
            raise ArgumentError(f"{name}: expected an address that is a multiple of {size}, got {pointer:#x}; copy it")


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
    library: Native, tensors: tuple[Any, Any, Any], keys: Sequence[tuple[Any, ...]], options: Options
) -> tuple[Any, Any]:
    _vet(library, **dict(zip("qkv", tensors, strict=True)))
    problem, _ = check("qkv", library, keys, options)
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
    library: Native, arrays: Sequence[Any], keys: Sequence[tuple[Any, ...]], options: Options
) -> tuple[Any, Any, Any]:
    _vet(library, **_named(arrays))
    problem, _ = check(BACKWARD_NAMES, library, keys[:5], options)
    rows, dtype = (problem.batch, problem.heads_q, problem.seqlen_q), "fp64" if problem.dtype == "fp64" else "fp32"
    for name, x, key in zip(("lse", "dlse"), arrays[5:], keys[5:], strict=False):
        _row_vector(name, x, key, library, rows, dtype, CPU)
    if _on_gpu(library, problem):
        import cupy

        q, k, v, out, dout, lse, *more = (cupy.asarray(x) for x in arrays)
        dq, dk, dv = (g.get() for g in backward(CUPY, dout, q, k, v, out, lse, more[0] if more else None, options))
        return dq, dk, dv
    q, k, v, out, dout = (_bshd(library.to_numpy(x), options) for x in arrays[:5])
    lse, *more = (library.to_numpy(x) for x in arrays[5:])
    grads = cpu.backward(dout, q, k, v, out, lse, more[0] if more else None, problem)
    dq, dk, dv = (library.from_numpy(np.ascontiguousarray(_bshd(g, options))) for g in grads)
    return dq, dk, dv
