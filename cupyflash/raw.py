"""A compiled kernel of the forward, for those who launch kernels themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import options
from .compile import jit
from .errors import ArgumentError, DeviceError
from .gpu import device
from .gpu.device import ARCHS, Device
from .launch.filled import fill_plain, fill_problem
from .launch.passes import contiguous_strides
from .operands import FORWARD
from .plan.extents import Extents
from .plan.families import kernels_of, plan_of
from .plan.params import FWD_PARAMS
from .plan.spec import Spec
from .problem import DTYPES, make_problem


class RawKernel(NamedTuple):
    """A kernel and how it is launched.

    Attributes:
        symbol: its name in the cubin.
        arch: what it was compiled for.
        cubin: the ELF file.
        registers: of a thread.
        grid, threads: blocks, and threads of a block, along x. Where out is empty, no blocks: nothing is to be
            launched.
        smem_bytes: dynamic shared memory of a block; beyond 48 KiB the function must be allowed to take it.
        params: its only argument, by value: ``FwdParams`` of ``kernels_cu/attention/params.cuh``, filled in but for the
            addresses of q, k, v, o and lse, which are 0. Those are multiples of 16; lse may stay 0.
    """

    symbol: str
    arch: str
    cubin: bytes
    registers: int
    grid: int
    threads: int
    smem_bytes: int
    params: np.ndarray


def raw_kernel(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    *,
    dtype: str = "bf16",
    causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    layout: str = "bshd",
    softcap: float | None = None,
    arch: str | None = None,
) -> RawKernel:
    """The kernel that computes `attention` of contiguous arrays of these shapes, and all that its launch needs.

    It is of the sm80 family, which runs on every GPU from Turing on; calls of `attention` on Hopper take another.

    Args:
        q_shape, k_shape: of q and out, and of k and v; lse is ``(batch, heads_q, seqlen_q)`` in fp32.
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        causal, scale, window, layout, softcap: as `attention` takes them.
        arch: such as ``"sm_90"``, with no GPU needed; that of the current GPU by default.

    Raises:
        ArgumentError, UnsupportedError, CompileError: as `attention`.
        DeviceError: if there is no GPU and no arch.

    Example:
        >>> kernel = raw_kernel((2, 256, 8, 64), (2, 256, 8, 64), causal=True, arch="sm_80")
        >>> kernel.grid, kernel.threads, kernel.cubin[:4]
        (32, 128, b'\\x7fELF')
    """
    if arch is None and not device.count():
        raise DeviceError(f'arch: expected one, such as "sm_90", where there is no usable GPU; {device.why_none()}')
    gpu = Device.of(device.current()()) if arch is None else Device.synthetic(options.choice("arch", arch, ARCHS))
    q_shape, k_shape = _shape("q_shape", q_shape), _shape("k_shape", k_shape)
    dtype = options.choice("dtype", dtype, DTYPES)
    call = options.make_options(causal=causal, scale=scale, window=window, layout=layout, softcap=softcap)
    shapes = {"q": q_shape, "k": k_shape, "v": k_shape, "out": q_shape}
    problem = make_problem([q_shape, k_shape, k_shape], [dtype] * 3, **call._asdict())
    kernels = kernels_of(Spec.of(problem, tma=False, family="sm80"), gpu)
    plan = plan_of(kernels, Extents.of(problem))
    (launch,) = plan.launches
    params = np.zeros((), FWD_PARAMS)
    arrays = {name: (shape, contiguous_strides(shape)) for name, shape in shapes.items()}
    fill_plain(params, FORWARD.rows, arrays, call.layout)
    fill_problem(params, FORWARD, problem, plan)
    cubin, variant = jit.compile_kernel(launch.variant, gpu.arch), launch.variant
    return RawKernel(
        cubin.symbol, cubin.arch, cubin.data, cubin.registers, launch.grid, variant.threads, variant.smem_bytes, params
    )


def _shape(name: str, x: Any) -> tuple[int, ...]:
    """That of an array, which cannot have any other."""
    try:
        sizes = tuple(options.whole(name, n, "integers") for n in x)
    except TypeError:
        sizes = ()
    if len(sizes) != 4:
        raise ArgumentError(f"{name}: expected 4 integers, got {x!r:.60}")
    if min(sizes, default=0) < 0:
        raise ArgumentError(f"{name}: expected integers from 0 on, got {sizes}")
    return sizes
