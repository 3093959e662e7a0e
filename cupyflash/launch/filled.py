"""The params of a call: filled in for its arrays and its plan, all but the addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..gpu import tensormap
from ..gpu.forms import Form, understand
from ..gpu.tensormap import TensorMap
from ..operand import MOD_LIMIT
from ..operands import Number, Operand, Pass
from ..plan.extents import Extents, Kernels
from ..plan.families import Plan
from ..plan.params import PROBLEM, SCHEDULE, UNBOUNDED, params_of
from ..problem import Problem
from .passes import Given, contiguous_strides, score_steps
from .template import Template

Arrays = Mapping[str, tuple[Sequence[int], Sequence[int]]]  # name -> shape, strides in elements


class Filled(NamedTuple):
    """A params struct that lacks addresses only.

    Attributes:
        words: of 64 bits in the struct, into which an array's address goes, by the array's name.
        defaults: of arrays that may not be given, those that then stand for them.
        plain_bytes: where the struct without tensor maps begins, which some launches of a call take.
    """

    params: np.ndarray
    words: Mapping[str, tuple[int, ...]]
    defaults: Mapping[str, str]
    plain_bytes: int = 0


def fill_problem(params: np.ndarray, which: Pass, problem: Problem, plan: Plan) -> None:
    """The run-time facts of `params.cuh`'s Problem and Schedule, and the numbers of features."""
    p = params["problem"]
    for name in (*Extents._fields, "scale"):
        if name in PROBLEM.fields:  # type: ignore[operator]
            p[name] = getattr(problem, name)
    p["softcap"] = problem.softcap or 0
    left, right = problem.window
    p["window_left"] = UNBOUNDED if left is None else left
    p["window_right"] = UNBOUNDED if right is None else right
    for name in SCHEDULE.names or ():
        params["schedule"][name] = getattr(plan.numbers, name)
    for row in which.brought:
        if isinstance(row, Number):
            params[row.name] = plan.chosen(row.name) if row.planned else getattr(problem, row.name) or 0


def fill_plain(params: np.ndarray, rows: Mapping[str, Operand], arrays: Arrays, layout: str) -> None:
    """The strides of all arrays that have some in the struct."""
    for name, (shape, strides) in arrays.items():
        if rows[name].broadcasts:
            params[f"{rows[name].member}_stride"] = score_steps(shape, strides)
        if rows[name].free:
            params[f"{rows[name].member}_lengths"] = (*shape, 1, 1, 1, 1)[:MOD_LIMIT]
        if rows[name].strided:
            row, head, batch = rows[name].axes(layout)
            of_batch = strides[batch] if shape[batch] > 1 else 0
            params[f"{rows[name].member}_stride"] = of_batch, strides[row], strides[head]


def words_of(which: Pass, dtype: np.dtype[np.void], slots: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Where the address of each array of the pass goes; `slots`: its word in the array's tensor map."""
    fields: Any = dtype.fields
    inner, start = fields["plain"][:2] if "plain" in fields else (dtype, 0)
    plain: Any = inner.fields
    found = {}
    for name, row in which.rows.items():
        words = [(start + plain[row.member][1]) // 8] if row.member in plain else []
        words += [fields[row.member][1] // 8] if row.hopper and row.member in fields else []
        words += [fields[f"map_{row.member}"][1] // 8 + slots[name]] if name in slots else []
        found[name] = tuple(words)
    return found


def arrays_of(given: Given, signatures: Sequence[tuple[Any, ...]]) -> Arrays:
    """Shape and strides of the arrays given and of the results that are shaped like them."""
    found = {name: (s[0], s[1]) for name, s in zip(given.names, signatures, strict=True)}
    rows = given.which.rows
    for name in (name for name in (*given.made, *given.shaped) if rows[name].like):
        shape = found[rows[name].like][0]
        shape = (*shape[:-1], found[rows[name].width][0][-1]) if rows[name].width else shape
        found[name] = shape, contiguous_strides(shape)
    return found


def fill(
    given: Given, plan: Plan, problem: Problem, signatures: Sequence[tuple[Any, ...]], layout: str
) -> Filled | None:
    """The params of a plan's launches; None if one needs tensor maps and the driver's are not understood.

    Args:
        signatures: of the arrays given, strides in elements.
    """
    which, arrays = given.which, arrays_of(given, signatures)
    plain, hopper = params_of(which)
    params = np.zeros((), plain)
    fill_plain(params, which.rows, arrays, layout)
    fill_problem(params, which, problem, plan)
    boxes = which.boxes(launch.variant for launch in plan.launches)
    if not boxes:
        return Filled(params, words_of(which, plain, {}), which.defaults)
    whole, slots = np.zeros((), hopper), {}
    whole["plain"] = params
    for name, box in boxes.items():
        tensor = TensorMap.of(problem.dtype, *arrays[name], layout, *box)
        slot, words = tensormap.address_slot(tensor), tensormap.encode(tensor, tensormap.ANYWHERE)
        if slot is None or words is None:
            return None
        whole[f"map_{which.rows[name].member}"], slots[name] = words, slot
    fields: Any = hopper.fields
    return Filled(whole, words_of(which, hopper, slots), which.defaults, fields["plain"][1])


def template_of(given: Given, kernels: Kernels, filled: Filled) -> Template | None:
    """What the params of other calls of the spec are made from; None if the driver's tensor maps are not understood."""
    boxes, rows = given.which.boxes(kernels.variants), given.which.rows
    spec, forms, maps = kernels.spec, dict[Any, Form | None](), {}
    for name, box in boxes.items():
        width = (rows[name].dims[3] == "head_dim_v" and spec.head_dim_v) or spec.head_dim
        if (width, box) not in forms:
            forms[width, box] = understand(spec.dtype, width, *box)
        form = forms[width, box]
        if form is None:
            return None
        maps[rows[name].member] = form, TensorMap(spec.dtype, (width, 1, 1, 1), (16, 16, 16), *box)
    strided, broadcast = ([rows[name].member for name in names] for names in (given.strided, given.broadcast))
    return Template(filled.params, strided, broadcast, maps)
