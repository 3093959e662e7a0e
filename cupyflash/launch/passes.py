"""The two passes, forward and backward: which arrays each has, and how its params struct is filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..arrays.adapters import Signature
from ..gpu import tensormap
from ..gpu.tensormap import TensorMap
from ..plan.extents import Extents, Kernels
from ..plan.families import Plan
from ..plan.params import BWD_PARAMS, FWD_PARAMS
from ..plan.sm90 import BackwardSm90, ForwardSm90
from ..plan.variant import Variant
from ..problem import Problem
from .prepared import Filled, contiguous_strides, fill_problem, fill_strides, pointers_first, with_tensor_maps
from .template import Steps, Template

BACKWARD_NAMES = ("q", "k", "v", "out", "dout")


class Pass(NamedTuple):
    """What the forward and the backward differ in.

    Attributes:
        names: of the arguments with strides.
        arrays: all arrays that have strides in the params struct: the arguments, then contiguous results.
        like: of each of `arrays`, whose lengths it has.
        each: from what q has and what k has, what each of `arrays` has.
    """

    names: tuple[str, ...]
    arrays: tuple[str, ...]
    like: str
    each: Callable[[tuple[Any, Any]], Sequence[Any]]


def _each(like: str) -> Callable[[tuple[Any, Any]], Sequence[Any]]:
    """`Pass.each`, of `Pass.like`."""
    return itemgetter(*("qk".index(name) for name in like))


FORWARD = Pass(("q", "k", "v"), ("q", "k", "v", "o"), "qkkq", _each("qkkq"))
BACKWARD = Pass(BACKWARD_NAMES, ("q", "k", "v", "o", "dout", "dq", "dk", "dv"), "qkkqqqkk", _each("qkkqqqkk"))


def steps_of(which: Pass, signatures: Sequence[tuple[Any, ...]], layout: str, extents: Extents) -> list[Steps]:
    """From one row, head and sequence to the next, of all arrays."""
    row, head = (1, 2) if layout == "bshd" else (2, 1)
    found = [(strides[row], strides[head], strides[0]) for _, strides, _, _ in signatures]
    d = signatures[0][0][3]
    for like in which.like[len(found) :]:
        seqlen, heads = (extents[1], extents[3]) if like == "q" else (extents[2], extents[4])
        apart = (heads * d, d) if layout == "bshd" else (d, seqlen * d)
        found.append((*apart, seqlen * heads * d))
    return found


def _boxes(variants: Iterable[Variant]) -> dict[str, int]:
    """The rows of the boxes that TMA moves of each array; none in the sm80 family."""
    for variant in variants:
        if isinstance(variant, ForwardSm90):
            return {"q": 64, "k": variant.block_n, "v": variant.block_n, "o": 64}
        if isinstance(variant, BackwardSm90):
            return variant.box_rows
    return {}


def fill(which: Pass, plan: Plan, problem: Problem, signatures: Sequence[Signature], layout: str) -> Filled | None:
    """The params of a plan's launches; None if one needs tensor maps and the driver's are not understood."""
    results = {"q": signatures[0].shape, "k": signatures[1].shape}
    arrays = [(s.shape, s.strides) for s in signatures]
    arrays += [(results[x], contiguous_strides(results[x])) for x in which.like[len(arrays) :]]
    params = np.zeros((), FWD_PARAMS if which is FORWARD else BWD_PARAMS)
    for name, (_, strides) in zip(which.arrays, arrays, strict=True):
        fill_strides(params, name, strides, layout)
    fill_problem(params, problem, plan)
    variants = [launch.variant for launch in plan.launches]
    boxes, names = _boxes(variants), params.dtype.names or ()
    if not boxes:
        return pointers_first(params)
    maps = {
        name: (
            TensorMap.of(problem.dtype, *arrays[which.arrays.index(name)], layout, rows),
            names.index(name),
        )
        for name, rows in boxes.items()
    }
    return with_tensor_maps(next(v.params for v in variants if v.params is not params.dtype), params, maps)


def template_of(which: Pass, kernels: Kernels, filled: Filled) -> Template | None:
    """What the params of other calls of the spec are made from; None if the driver's tensor maps are not understood."""
    boxes = _boxes(kernels.variants)
    forms = {rows: tensormap.understand(kernels.dtype, kernels.head_dim, rows) for rows in set(boxes.values())}
    maps = {}
    for name, rows in boxes.items():
        form = forms[rows]
        if form is None:
            return None
        maps[name] = form, TensorMap(kernels.dtype, (kernels.head_dim, 1, 1, 1), (16, 16, 16), rows)
    return Template(filled.params, which.arrays, maps)
