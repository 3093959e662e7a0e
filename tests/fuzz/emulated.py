"""Runs a `Spec` on the emulator. The only file here that knows the emulator, and the one to be imported last."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cupyflash.check import cases
from cupyflash.operands import FORWARD, GRADIENT, RESULT
from cupyflash.plan.families import Plan
from cupyflash.problem import Problem
from tests.emulator import MODES, EmulatorError, missing_compiler
from tests.emulator.attention import Session, small_device
from tests.emulator.buffers import Buffers

from .arrays import MEMORY
from .spec import Spec

__all__ = ["MODES", "EmulatorError", "FuzzSession", "missing_compiler", "session"]


@dataclasses.dataclass
class FuzzSession(Session):
    """A run whose results lie in memory as the spec says, and whose tiles are taken in sections as it says."""

    spec: Spec = dataclasses.field(default_factory=Spec)

    def _launch(self, plan: Plan, problem: Problem, buffers: Buffers) -> None:
        results = buffers.which.names(RESULT, GRADIENT, where=lambda row: row.strided)
        memory = {name: getattr(self.spec, buffers.which.rows[name].member) for name in results}
        moved = {name: _move(name, buffers, self.spec, kind) for name, kind in memory.items() if kind != "contiguous"}
        super()._launch(self._in_sections(plan, problem, is_forward=buffers.which is FORWARD), problem, buffers)
        for name, (address, data, view) in moved.items():
            _contiguous_at(address, view)[...] = view
            view.view(np.uint16)[...] = 0xFFFF
            if not (data == 0xFF).all():
                raise EmulatorError(f"{name}: something was written between the rows")

    def _in_sections(self, plan: Plan, problem: Problem, *, is_forward: bool) -> Plan:
        if self.spec.section == 0:
            return plan
        total = (1 if problem.packed else problem.batch) * problem.heads_k
        group = problem.heads_q // problem.heads_k if is_forward else 1
        section = min(self.spec.section, total)
        last = min(section + 1, total) * group
        return dataclasses.replace(plan, numbers=plan.numbers._replace(section=section * group, last_section=last))


def _move(name: str, buffers: Buffers, spec: Spec, kind: str) -> tuple[int, NDArray[np.uint8], NDArray[Any]]:
    """Gives a result other strides; its old address, its bytes and the new view."""
    shape, dtype = buffers.shape[name], cases.NUMPY_DTYPE[spec.dtype]
    like = MEMORY[kind](np.zeros(shape, dtype))
    low, high = np.lib.array_utils.byte_bounds(like)
    old = buffers.address[name]
    buffers.address[name], data = buffers.memory.raw(name, high - low)
    buffers.strides[name] = tuple(stride // like.itemsize for stride in like.strides)
    return old, data, as_strided(data.view(dtype), shape, like.strides)


def _contiguous_at(address: int, like: NDArray[Any]) -> NDArray[Any]:
    import ctypes

    data = np.ctypeslib.as_array((ctypes.c_ubyte * like.nbytes).from_address(address))
    return data.view(like.dtype).reshape(like.shape)


def session(spec: Spec, headers: Mapping[str, str] | None = None) -> FuzzSession:
    """The session of a spec; `headers` replaces some of the kernel sources."""
    family = spec.family or None
    device = small_device(spec.arch, spec.sms)
    backward = family if family != "sm90" else None  # as planned: it does not take every backward
    return FuzzSession(device, MODES[spec.mode], spec.order, headers, family, backward, spec=spec)


def run(spec: Spec, x: cases.Inputs) -> tuple[NDArray[Any], ...]:
    """out, lse, dq, dk, dv; the last three twice, in different orders, where that must make no difference."""
    problem, how = spec.problem(), session(spec)
    out, lse = how.forward(x, problem)
    grads = how.backward(x, out, lse, problem)
    if spec.deterministic:
        grads += dataclasses.replace(how, seed=spec.order + 1).backward(x, out, lse, problem)
    return out, lse, *grads
