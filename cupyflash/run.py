"""Run a call: on the GPU by its plan, on the caller's stream, or on the CPU path.

A GPU call is prepared once for each combination of signatures and options (checked, planned, kernels loaded,
parameters filled in but for the addresses) and kept: a later call with equal signatures allocates its results, writes
the addresses and launches.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import cpu, device, jit
from .arrays import CPU, CUPY, NUMPY, Native, Signature
from .device import Device
from .errors import ArgumentError, DeviceError
from .params import UNBOUNDED
from .plan import GPU_DTYPES, Plan, backward_plan, check_supported, forward_plan
from .problem import Problem, make_problem

BACKENDS = ("auto", "cuda", "cpu")
_MAX_PREPARED = 4096  # calls kept; lengths that change at every call would otherwise fill the memory
_thread = threading.local()


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


class _Arguments:
    """One kernel argument, the params struct: its bytes, and the pointer array that the driver reads."""

    def __init__(self, template: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(template, len(template))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._bytes))
        self.slots = memoryview(self._bytes).cast("B").cast("Q")  # the struct begins with its pointers
        self.address = ctypes.addressof(self._pointers)


class _Prepared:
    """The launches of one call on one device, ready but for the addresses of the arrays."""

    def __init__(self, problem: Problem, plan: Plan, device: Device, params: np.ndarray, stream: int) -> None:
        from cupy.cuda import runtime

        kernels = [jit.load(launch.variant, device, stream) for launch in plan.launches]
        self._launches = [
            (kernel.function, launch.grid, 1, 1, launch.variant.threads, 1, 1, launch.variant.smem_bytes)
            for kernel, launch in zip(kernels, plan.launches, strict=True)
            if launch.grid > 0
        ]
        self.problem = problem
        self.workspace = plan.workspace
        self.device = device.ordinal
        self._template = params.tobytes()
        self._free: list[_Arguments] = []  # a block is taken while its launch is written: threads never share one
        self._launch = jit.launcher()
        self._get_device, self._set_device = runtime.getDevice, runtime.setDevice

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on `stream`; `addresses` in the order of the struct's pointers."""
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = _Arguments(self._template)
        slots = arguments.slots
        for i, address in enumerate(addresses):
            slots[i] = address
        current = self._get_device()
        if current != self.device or not hasattr(_thread, "has_context"):
            self._set_device(self.device)  # also gives a new thread its CUDA context
            _thread.has_context = True
        try:
            for launch in self._launches:
                self._launch(*launch, stream, arguments.address, 0)
        finally:
            if current != self.device:
                self._set_device(current)
            self._free.append(arguments)


_prepared: dict[tuple[Any, ...], _Prepared] = {}


def _lookup(key: tuple[Any, ...], prepare: Callable[[], _Prepared]) -> _Prepared:
    try:
        found = _prepared.get(key)
    except TypeError:  # a window given as a list, say: the checks decide
        return prepare()
    if found is None:
        found = prepare()
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = found
    return found


def _fill_problem(params: np.ndarray, problem: Problem, section: int) -> None:
    """The run-time facts of `params.cuh`'s Problem."""
    p = params["problem"]
    for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "scale"):
        p[name] = getattr(problem, name)
    left, right = problem.window
    p["window_left"] = UNBOUNDED if left is None else left
    p["window_right"] = UNBOUNDED if right is None else right
    p["section"] = section


def _fill_strides(params: np.ndarray, name: str, strides: Sequence[int], layout: str) -> None:
    row, head = (1, 2) if layout == "bshd" else (2, 1)
    params[f"{name}_stride"] = strides[0], strides[row], strides[head]


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int, int]:
    _, a, b, c = shape
    return a * b * c, b * c, c, 1


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
    if sq.device == CPU:
        return _forward_host(library, (q, k, v), (sq, sk, sv), options)
    pq, pk, pv = library.pointer(q), library.pointer(k), library.pointer(v)
    aligned = (pq | pk | pv) & 15 == 0
    stream = library.stream(sq.device)
    prepared = _lookup(
        (sq, sk, sv, options, aligned), lambda: _prepare_forward(library, (sq, sk, sv), options, aligned, stream)
    )
    problem = prepared.problem
    out = library.empty_like(q)
    lse = library.empty((problem.batch, problem.heads_q, problem.seqlen_q), "fp32", q)
    prepared((pq, pk, pv, library.pointer(out), library.pointer(lse)), stream)
    return out, lse


def _prepare_forward(
    library: Native, signatures: tuple[Signature, ...], options: Options, aligned: bool, stream: int
) -> _Prepared:
    problem = check("qkv", library, signatures, options)
    dev = Device.of(signatures[0].device)
    plan = forward_plan(problem, dev, aligned=aligned and _is_aligned(signatures))
    params = np.zeros((), plan.launches[0].variant.params)
    for name, sig in zip("qkv", signatures, strict=True):
        _fill_strides(params, name, sig.strides, options.layout)
    _fill_strides(params, "o", _contiguous_strides(signatures[0].shape), options.layout)
    _fill_problem(params, problem, plan.section)
    return _Prepared(problem, plan, dev, params, stream)


_BACKWARD_NAMES = ("q", "k", "v", "out", "dout")


def backward(
    library: Native, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any | None, options: Options
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of arrays of one native library; contiguous, in the caller's layout."""
    tensors = (q, k, v, out, dout)
    signatures = tuple(library.signature(x) for x in tensors)
    if signatures[0].device == CPU:
        return _backward_host(library, tensors, signatures, lse, dlse, options)
    pointers = [library.pointer(x) for x in tensors]
    aligned = (pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4]) & 15 == 0
    stream = library.stream(signatures[0].device)
    prepared = _lookup(
        (*signatures, options, aligned), lambda: _prepare_backward(library, signatures, options, aligned, stream)
    )
    lse = _row_vector("lse", library, lse, prepared.problem, signatures[0].device)
    dlse = None if dlse is None else _row_vector("dlse", library, dlse, prepared.problem, signatures[0].device)
    grads = library.empty_like(q), library.empty_like(k), library.empty_like(v)
    work = {name: library.empty(shape, dtype, q) for name, (shape, dtype) in prepared.workspace.items()}
    prepared(
        (
            *pointers,
            library.pointer(lse),
            0 if dlse is None else library.pointer(dlse),
            *(library.pointer(g) for g in grads),
            *(library.pointer(w) for w in work.values()),
        ),
        stream,
    )
    return grads


def _row_vector(name: str, library: Native, x: Any, problem: Problem, ordinal: int) -> Any:
    """lse or dlse: checked, and contiguous."""
    sig = library.signature(x)
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
    library: Native, signatures: tuple[Signature, ...], options: Options, aligned: bool, stream: int
) -> _Prepared:
    problem = check(_BACKWARD_NAMES, library, signatures, options)
    dev = Device.of(signatures[0].device)
    plan = backward_plan(problem, dev, aligned=aligned and _is_aligned(signatures))
    params = np.zeros((), plan.launches[0].variant.params)
    for name, sig in zip(("q", "k", "v", "o", "dout"), signatures, strict=True):
        _fill_strides(params, name, sig.strides, options.layout)
    for name, sig in zip(("dq", "dk", "dv"), signatures, strict=False):
        _fill_strides(params, name, _contiguous_strides(sig.shape), options.layout)
    _fill_problem(params, problem, plan.section)
    return _Prepared(problem, plan, dev, params, stream)


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
    library: Native, tensors: tuple[Any, Any, Any], signatures: tuple[Signature, ...], options: Options
) -> tuple[Any, Any]:
    problem = check("qkv", library, signatures, options)
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
    signatures: tuple[Signature, ...],
    lse: Any,
    dlse: Any | None,
    options: Options,
) -> tuple[Any, Any, Any]:
    problem = check(_BACKWARD_NAMES, library, signatures, options)
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
