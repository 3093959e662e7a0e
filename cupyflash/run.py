"""Run a call: on the GPU by its plan, on the caller's stream, or on the CPU path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import cpu, device, launch
from .arrays import CPU, CUPY, NUMPY, Native, Signature
from .device import Device
from .errors import ArgumentError, DeviceError
from .launch import Prepared, contiguous_strides, fill_problem, fill_strides
from .plan import GPU_DTYPES, backward_plan, check_supported, forward_plan
from .problem import Problem, make_problem

BACKENDS = ("auto", "cuda", "cpu")


class Options(NamedTuple):
    """The options of a call, as given."""

    causal: bool = False
    scale: float | None = None
    window: Any = None
    layout: str = "bshd"
    deterministic: bool = False


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


def _is_aligned(signatures: Sequence[Signature]) -> bool:
    """Whether every row starts at a multiple of 16 bytes if the array does: 8 elements of 16 bits."""
    return all(s % 8 == 0 for sig in signatures for s, n in zip(sig.strides[:3], sig.shape[:3], strict=True) if n > 1)


def check(names: Sequence[str], library: Native, signatures: Sequence[Signature], options: Options) -> Problem:
    """All checks of q, k, v and what goes with them (in this order: q, k, v, then arrays shaped like q)."""
    dtypes = [library.dtype_name(s.dtype) for s in signatures]
    problem = make_problem([s.shape for s in signatures[:3]], dtypes[:3], **options._asdict())
    q = signatures[0]
    for name, sig, dtype in zip(names, signatures, dtypes, strict=True):
        if sig.device != q.device:
            raise ArgumentError(f"{name}: expected the device of q, {_place(q)}, got {_place(sig)}")
        if sig.strides[3] != 1 and sig.shape[3] > 1 and 0 not in sig.shape:
            raise ArgumentError(
                f"{name}: expected a stride of 1 along head_dim, got {sig.strides[3]} elements; "
                "make a contiguous copy first"
            )
        if name in ("out", "dout") and (tuple(sig.shape), dtype) != (tuple(q.shape), dtypes[0]):
            raise ArgumentError(
                f"{name}: expected shape {tuple(q.shape)} and dtype {dtypes[0]} of q, "
                f"got {tuple(sig.shape)} and {dtype}"
            )
    return problem


def _place(signature: Signature) -> str:
    return "the CPU" if signature.device == CPU else f"GPU {signature.device}"


def forward(library: Native, q: Any, k: Any, v: Any, options: Options) -> tuple[Any, Any]:
    """(out, lse) of arrays of one native library; out is contiguous, in the caller's layout."""
    sq, sk, sv = library.signature(q), library.signature(k), library.signature(v)
    device = sq[3]
    if device == CPU:
        return _forward_host(library, (q, k, v), (sq, sk, sv), options)
    pq, pk, pv = library.pointer(q), library.pointer(k), library.pointer(v)
    aligned = (pq | pk | pv) & 15 == 0
    stream = library.stream(device)
    key = sq, sk, sv, options, aligned
    call = launch.find(key) or launch.keep(key, _prepare_forward(library, (sq, sk, sv), options, aligned, stream))
    problem = call.problem
    out = library.empty_like(q)
    lse = library.empty((problem.batch, problem.heads_q, problem.seqlen_q), "fp32", q)
    call((pq, pk, pv, library.pointer(out), library.pointer(lse)), stream)
    return out, lse


def _prepare_forward(
    library: Native, keys: Sequence[tuple[Any, ...]], options: Options, aligned: bool, stream: int
) -> Prepared:
    signatures = [Signature(*key) for key in keys]
    problem = check("qkv", library, signatures, options)
    dev = Device.of(signatures[0].device)
    plan = forward_plan(problem, dev, aligned=aligned and _is_aligned(signatures))
    params = np.zeros((), plan.launches[0].variant.params)
    for name, sig in zip("qkv", signatures, strict=True):
        fill_strides(params, name, sig.strides, options.layout)
    fill_strides(params, "o", contiguous_strides(signatures[0].shape), options.layout)
    fill_problem(params, problem, plan.section)
    return Prepared(problem, plan, dev, params, stream)


_BACKWARD_NAMES = ("q", "k", "v", "out", "dout")


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
    call = launch.find(key) or launch.keep(key, _prepare_backward(library, signatures, options, aligned, stream))
    lse = _row_vector("lse", library, lse, call.problem, device)
    dlse = None if dlse is None else _row_vector("dlse", library, dlse, call.problem, device)
    grads = library.empty_like(q), library.empty_like(k), library.empty_like(v)
    work = [library.empty(shape, dtype, q) for shape, dtype in call.workspace.values()]
    results = [library.pointer(x) for x in (*grads, *work)]
    call((*pointers, library.pointer(lse), 0 if dlse is None else library.pointer(dlse), *results), stream)
    return grads


def _row_vector(name: str, library: Native, x: Any, problem: Problem, ordinal: int) -> Any:
    """lse or dlse: checked, and contiguous."""
    sig = Signature(*library.signature(x))
    shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    dtype = "fp64" if problem.dtype == "fp64" else "fp32"
    if tuple(sig.shape) != shape or library.dtype_name(sig.dtype) != dtype or sig.device != ordinal:
        place = "the CPU" if ordinal == CPU else f"GPU {ordinal}"
        raise ArgumentError(
            f"{name}: expected shape (batch, heads_q, seqlen_q) = {shape}, dtype {dtype}, on {place}; got "
            f"{tuple(sig.shape)}, {library.dtype_name(sig.dtype)}, on {_place(sig)}"
        )
    _, heads, length = shape
    return x if sig.strides == (heads * length, length, 1) or ordinal == CPU else library.contiguous(x)


def _prepare_backward(
    library: Native, keys: Sequence[tuple[Any, ...]], options: Options, aligned: bool, stream: int
) -> Prepared:
    signatures = [Signature(*key) for key in keys]
    problem = check(_BACKWARD_NAMES, library, signatures, options)
    dev = Device.of(signatures[0].device)
    plan = backward_plan(problem, dev, aligned=aligned and _is_aligned(signatures))
    params = np.zeros((), plan.launches[0].variant.params)
    for name, sig in zip(("q", "k", "v", "o", "dout"), signatures, strict=True):
        fill_strides(params, name, sig.strides, options.layout)
    for name, sig in zip(("dq", "dk", "dv"), signatures, strict=False):
        fill_strides(params, name, contiguous_strides(sig.shape), options.layout)
    fill_problem(params, problem, plan.section)
    return Prepared(problem, plan, dev, params, stream)


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
    problem = check(_BACKWARD_NAMES, library, [Signature(*s) for s in signatures], options)
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
