"""Prepare a call on the GPU: from signatures and options to launches that lack only addresses.

Here every fact about the arrays meets the plan: which kernel family their strides allow, and the params struct.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import launch, tensormap
from .arrays import CPU, Native, Signature
from .device import Device
from .errors import ArgumentError
from .kernels import BackwardSm90, ForwardSm90
from .launch import Filled, Prepared, contiguous_strides, fill_problem, fill_strides, pointers_first
from .options import Options
from .params import BWD_PARAMS, FWD_PARAMS
from .plan import FAMILIES, Plan, backward_plan, forward_plan
from .problem import Problem, make_problem

BACKWARD_NAMES = ("q", "k", "v", "out", "dout")


def family() -> str | None:
    """The kernel family that CUPYFLASH_FAMILY insists on, for tests.

    Raises:
        ArgumentError: if the variable has another value.
    """
    wish = os.environ.get("CUPYFLASH_FAMILY") or None
    if wish is not None and wish not in FAMILIES:
        raise ArgumentError(f"CUPYFLASH_FAMILY: expected one of {', '.join(FAMILIES)}, got {wish!r}")
    return wish


def _is_aligned(signatures: Sequence[Signature]) -> bool:
    """Whether every row starts at a multiple of 16 bytes if the array does: 8 elements of 16 bits."""
    return all(s % 8 == 0 for sig in signatures for s, n in zip(sig.strides[:3], sig.shape[:3], strict=True) if n > 1)


def access(signatures: Sequence[Signature], aligned: bool, others: Sequence[Signature] = ()) -> tuple[bool, bool]:
    """(aligned, tma): whether every row of the arrays starts at a multiple of 16 bytes, and whether TMA can read them.

    Args:
        aligned: whether their addresses are multiples of 16.
        others: arrays that no kernel reads by TMA.
    """
    aligned = aligned and _is_aligned([*signatures, *others])
    return aligned, aligned and all(tensormap.readable(s.shape, s.strides) for s in signatures)


def check(
    names: Sequence[str], library: Native, keys: Sequence[tuple[Any, ...]], options: Options
) -> tuple[Problem, list[Signature]]:
    """All checks of q, k, v and what goes with them, by their library's signatures (in this order: q, k, v, then arrays
    shaped like q); returns the problem and the signatures spelled out."""
    dtypes = [library.dtype_name(key[2]) for key in keys]
    problem = make_problem([key[0] for key in keys[:3]], dtypes[:3], **options._asdict())
    shape = tuple(keys[0][0])
    for name, key, dtype in zip(names[3:], keys[3:], dtypes[3:], strict=True):
        if (tuple(key[0]), dtype) != (shape, dtypes[0]):
            raise ArgumentError(
                f"{name}: expected shape {shape} and dtype {dtypes[0]} of q, got {tuple(key[0])} and {dtype}"
            )
    signatures = [library.describe(name, key) for name, key in zip(names, keys, strict=True)]
    q = signatures[0]
    for name, sig in zip(names, signatures, strict=True):
        if sig.device != q.device:
            raise ArgumentError(f"{name}: expected the device of q, {place(q.device)}, got {place(sig.device)}")
        if sig.strides[3] != 1 and sig.shape[3] > 1 and 0 not in sig.shape:
            raise ArgumentError(
                f"{name}: expected a stride of 1 along head_dim, got {sig.strides[3]} elements; "
                "make a contiguous copy first"
            )
    return problem, signatures


def place(device: int) -> str:
    """A device in words."""
    return "the CPU" if device == CPU else f"GPU {device}"


def prepare_forward(
    library: Native,
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    aligned: bool,
    stream: int,
    *,
    clocks: bool = False,
) -> Prepared:
    """A forward of arrays q, k and v.

    Args:
        keys: what the library's `signature` says of them.
        aligned: whether their addresses are multiples of 16.
    """
    problem, signatures = check("qkv", library, keys, options)
    device = Device.of(signatures[0].device)
    aligned, tma = access(signatures, aligned)

    def ready(tma: bool) -> tuple[Plan, Filled | None]:
        plan = forward_plan(problem, device, aligned=aligned, tma=tma, family=family(), clocks=clocks and tma)
        return plan, fill_forward(plan, problem, signatures, options.layout)

    return _prepared(problem, device, ready, tma, stream)


def _prepared(
    problem: Problem, device: Device, ready: Callable[[bool], tuple[Plan, Filled | None]], tma: bool, stream: int
) -> Prepared:
    """What `ready` plans and fills in: with TMA if it can read the arrays and the driver makes tensor maps of them."""
    with device.current():  # drivers encode tensor maps for a thread with a context alone
        plan, filled = ready(tma)
        if filled is None:
            plan, filled = ready(False)
    assert filled is not None
    return Prepared(problem, plan, device, filled, stream)


def fill_forward(plan: Plan, problem: Problem, signatures: Sequence[Signature], layout: str) -> Filled | None:
    """The params of a plan's launch; None if it needs tensor maps and the driver's are not understood."""
    arrays = [*signatures, signatures[0]._replace(strides=contiguous_strides(signatures[0].shape))]
    params = np.zeros((), FWD_PARAMS)
    for name, array in zip("qkvo", arrays, strict=True):
        fill_strides(params, name, array.strides, layout)
    fill_problem(params, problem, plan)
    variant = plan.launches[0].variant
    if not isinstance(variant, ForwardSm90):
        return pointers_first(params)
    rows = (64, variant.block_n, variant.block_n, 64)
    maps = {
        name: (tensormap.TensorMap.of(problem.dtype, array.shape, array.strides, layout, n), i)
        for i, (name, array, n) in enumerate(zip("qkvo", arrays, rows, strict=True))
    }
    return launch.with_tensor_maps(variant.params, params, maps)


def prepare_backward(
    library: Native, keys: Sequence[tuple[Any, ...]], options: Options, aligned: bool, stream: int
) -> Prepared:
    """A backward of arrays q, k, v, out and dout; `aligned`: whether their addresses are multiples of 16."""
    problem, signatures = check(BACKWARD_NAMES, library, keys, options)
    device = Device.of(signatures[0].device)
    q, k, v, out, dout = signatures
    aligned, tma = access([q, k, v, dout], aligned, [out])

    def ready(tma: bool) -> tuple[Plan, Filled | None]:
        plan = backward_plan(problem, device, aligned=aligned, tma=tma, family=family())
        return plan, _fill_backward(plan, problem, signatures, options.layout)

    return _prepared(problem, device, ready, tma, stream)


def _fill_backward(plan: Plan, problem: Problem, signatures: Sequence[Signature], layout: str) -> Filled | None:
    """The params of a plan's launches; None if one needs tensor maps and the driver's are not understood."""
    gradients = [s._replace(strides=contiguous_strides(s.shape)) for s in signatures[:3]]
    arrays = dict(zip(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), [*signatures, *gradients], strict=True))
    params = np.zeros((), BWD_PARAMS)
    for name, array in arrays.items():
        fill_strides(params, name, array.strides, layout)
    fill_problem(params, problem, plan)
    main = plan.launches[1].variant
    if not isinstance(main, BackwardSm90):
        return pointers_first(params)
    names = params.dtype.names or ()
    maps = {
        name: (
            tensormap.TensorMap.of(problem.dtype, arrays[name].shape, arrays[name].strides, layout, n),
            names.index(name),
        )
        for name, n in main.box_rows.items()
    }
    return launch.with_tensor_maps(main.params, params, maps)
