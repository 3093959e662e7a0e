"""Run a call: on the GPU by its plan, on the caller's stream, or on the CPU path."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..arrays.adapters import CPU, CUPY, NUMPY, Native, place
from ..arrays.readable import check_addresses, unreadable, vet_all, vet_new
from ..cpu import attention as cpu
from ..errors import ArgumentError, DeviceError, UnsupportedError
from ..gpu import device
from ..gpu.device import Device
from ..options import Options
from ..plan.families import GPU_DTYPES, check_supported
from ..problem import Problem
from ..sequences import Sequences
from . import prepared as launch
from .packed import vet_lengths
from .passes import BACKWARD_NAMES
from .prepare import check, prepare_backward, prepare_forward, wish

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


def forward(
    library: Native,
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    want_lse: bool = True,
    sequences: Sequences | None = None,
) -> tuple[Any, Any | None]:
    """(out, lse) of arrays of one native library; out is contiguous, in the caller's layout. Packed with `sequences`.

    Where nobody wants lse it may be None: allocating it costs the host as much as allocating out.
    """
    try:
        sq, sk, sv = library.signature(q), library.signature(k), library.signature(v)
        pq, pk, pv = library.pointer(q), library.pointer(k), library.pointer(v)
    except Exception as e:
        raise unreadable(library, e, q=q, k=k, v=v) from e
    device = sq[3]
    if device == CPU:
        return _forward_host(library, (q, k, v), (sq, sk, sv), options, sequences)
    if sequences is not None:
        _refuse_packed("qkv", library, (sq, sk, sv), options, sequences)
    bits = pq | pk | pv
    if bits & 1 or not (pq and pk and pv):
        check_addresses(library, (pq, pk, pv), q=q, k=k, v=v)
    aligned = bits & 15 == 0
    stream = library.stream(device)
    key = sq, sk, sv, options, aligned, wish()
    call = launch.find(key)
    if call is None:
        vet_new(library, q=q, k=k, v=v)
        vet = functools.partial(vet_all, library, q=q, k=k, v=v)
        call = launch.keep(key, prepare_forward(library, (sq, sk, sv), options, aligned, stream, vet=vet))
    out, lse, lse_pointer = library.empty_like(q), None, 0
    if want_lse:
        lse = library.empty(call.rows, "fp32", q)
        lse_pointer = library.pointer(lse)
    call((pq, pk, pv, library.pointer(out), lse_pointer, 0), stream)
    return out, lse


def backward(
    library: Native,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any | None,
    options: Options,
    sequences: Sequences | None = None,
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of arrays of one native library; contiguous, in the caller's layout. Packed with `sequences`."""
    arrays = (q, k, v, out, dout, lse) if dlse is None else (q, k, v, out, dout, lse, dlse)
    try:
        signatures = tuple(map(library.signature, arrays))
        pointers = tuple(map(library.pointer, arrays))
    except Exception as e:
        raise unreadable(library, e, **_named(arrays)) from e
    device = signatures[0][3]
    if device == CPU:
        return _backward_host(library, arrays, signatures, options, sequences)
    if sequences is not None:
        _refuse_packed(BACKWARD_NAMES, library, signatures[:5], options, sequences)
    bits = pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4]
    if bits & 1 or (pointers[5] | pointers[-1]) & 3 or 0 in pointers:
        check_addresses(library, pointers, **_named(arrays))
    aligned = bits & 15 == 0
    stream = library.stream(device)
    key = *signatures[:5], options, aligned, wish()
    call = launch.find(key)
    if call is None:
        named = _named(arrays)
        vet_new(library, **named)
        vet = functools.partial(vet_all, library, **named)
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


def _refuse_packed(
    names: Sequence[str], library: Native, keys: Sequence[tuple[Any, ...]], options: Options, sequences: Sequences
) -> NoReturn:
    """There are no kernels for packed sequences."""
    problem, _ = check(names, library, keys, options, sequences)
    if os.environ.get("CUPYFLASH_DEBUG") == "1":
        vet_lengths(library, sequences, problem)
    raise UnsupportedError("cu_seqlens_q: packed sequences have no GPU kernel yet; move the arrays to the CPU")


def _row_vector(
    name: str, x: Any, key: tuple[Any, ...], library: Native, shape: tuple[int, ...], dtype: str, ordinal: int
) -> Any:
    """lse or dlse, whose signature is `key`: checked, and on a GPU contiguous."""
    if key[0] != shape or library.dtype_name(key[2]) != dtype or key[3] != ordinal:
        words = "(batch, heads_q, seqlen_q)" if len(shape) == 3 else "(heads_q, total_q)"
        raise ArgumentError(
            f"{name}: expected shape {words} = {shape}, dtype {dtype}, on {place(ordinal)}; got "
            f"{tuple(key[0])}, {library.dtype_name(key[2])}, on {place(key[3])}"
        )
    return x if ordinal == CPU else library.contiguous(x)


def _named(arrays: Sequence[Any]) -> dict[str, Any]:
    """The arrays of a backward by their arguments' names."""
    return dict(zip((*BACKWARD_NAMES, "lse", "dlse"), arrays, strict=False))


def _bshd(x: np.ndarray, options: Options) -> np.ndarray:
    return x if options.layout == "bshd" else x.swapaxes(-3, -2)


def _on_gpu(library: Native, problem: Problem) -> bool:
    """Whether arrays in host memory are copied to the GPU: NumPy's alone, where it has a kernel for them."""
    if library is not NUMPY or backend() == "cpu":
        return False
    if os.environ.get("CUPYFLASH_BACKEND") == "cuda":
        check_supported(problem, Device.of(0))
    return problem.dtype in GPU_DTYPES


def _forward_host(
    library: Native,
    tensors: tuple[Any, Any, Any],
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    sequences: Sequences | None,
) -> tuple[Any, Any]:
    vet_all(library, **dict(zip("qkv", tensors, strict=True)), **({} if sequences is None else sequences.named()))
    problem, _ = check("qkv", library, keys, options, sequences)
    lengths = None if sequences is None else vet_lengths(library, sequences, problem)
    if _on_gpu(library, problem):
        import cupy

        q, k, v = (cupy.asarray(x) for x in tensors)
        out, lse = forward(CUPY, q, k, v, options, True, _to_gpu(lengths))
        assert lse is not None
        return out.get(), lse.get()
    q, k, v = (_bshd(library.to_numpy(x), options) for x in tensors)
    out, lse = cpu.forward(q, k, v, problem) if lengths is None else cpu.forward_packed(q, k, v, problem, lengths)
    return library.from_numpy(np.ascontiguousarray(_bshd(out, options))), library.from_numpy(lse)


def _backward_host(
    library: Native,
    arrays: Sequence[Any],
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    sequences: Sequences | None,
) -> tuple[Any, Any, Any]:
    vet_all(library, **_named(arrays), **({} if sequences is None else sequences.named()))
    problem, _ = check(BACKWARD_NAMES, library, keys[:5], options, sequences)
    dtype = "fp64" if problem.dtype == "fp64" else "fp32"
    for name, x, key in zip(("lse", "dlse"), arrays[5:], keys[5:], strict=False):
        _row_vector(name, x, key, library, problem.rows, dtype, CPU)
    lengths = None if sequences is None else vet_lengths(library, sequences, problem)
    if _on_gpu(library, problem):
        import cupy

        q, k, v, out, dout, lse, *more = (cupy.asarray(x) for x in arrays)
        dlse = more[0] if more else None
        dq, dk, dv = backward(CUPY, dout, q, k, v, out, lse, dlse, options, _to_gpu(lengths))
        return dq.get(), dk.get(), dv.get()
    q, k, v, out, dout = (_bshd(library.to_numpy(x), options) for x in arrays[:5])
    lse, *more = (library.to_numpy(x) for x in arrays[5:])
    given = dout, q, k, v, out, lse, more[0] if more else None, problem
    grads = cpu.backward(*given) if lengths is None else cpu.backward_packed(*given, lengths)
    dq, dk, dv = (library.from_numpy(np.ascontiguousarray(_bshd(g, options))) for g in grads)
    return dq, dk, dv


def _to_gpu(lengths: Sequences | None) -> Sequences | None:
    import cupy

    return lengths and Sequences.of(**{name: cupy.asarray(x) for name, x in lengths.named().items()})
