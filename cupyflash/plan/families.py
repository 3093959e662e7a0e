"""Problem + device -> plan: which kernels run, on which grid, with which workspace. Pure arithmetic.

`forward_kernels` and `backward_kernels` choose the kernels, for which lengths do not matter. The plan of one problem
adds what `extents.py` chooses for its lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError
from ..gpu.device import Device
from ..problem import Problem
from .extents import BackwardKernels, Extents, ForwardKernels, Kernels, Workspace
from .kernels import backward_sm90_variants, backward_variants, forward_sm90_variant, forward_variant
from .variant import Variant

GPU_DTYPES = ("fp16", "bf16")
FAMILIES = ("sm80", "sm90")


@dataclass(frozen=True)
class Launch:
    """One kernel launch; a grid of 0 blocks is left out. `tiles`: of work, which persistent blocks share."""

    variant: Variant
    grid: int
    tiles: int


@dataclass(frozen=True)
class Plan:
    """The launches of one call, in order, and the `Numbers` chosen for it."""

    launches: tuple[Launch, ...]
    workspace: Workspace
    sections: tuple[int, int]
    first_stores: bool = False


def check_supported(problem: Problem, device: Device) -> None:
    """Refuse what no kernel of this device can do."""
    if device.capability < (8, 0):
        raise UnsupportedError(
            f"{device.name} has compute capability {device.capability[0]}.{device.capability[1]}; the GPU kernels need "
            "8.0 (Ampere) or newer. Set CUPYFLASH_BACKEND=cpu and pass NumPy arrays to run on the CPU"
        )
    if problem.dtype not in GPU_DTYPES:
        raise UnsupportedError(
            f"q: {problem.dtype} has no GPU kernel yet, expected fp16 or bf16; cast q, k and v, "
            "or pass arrays that live on the CPU"
        )


def why_not_sm90(problem: Problem, device: Device, *, tma: bool = True) -> str | None:
    """Why the sm90 family cannot take a problem; None if it can. `tma`: whether TMA can read its arrays."""
    if device.capability != (9, 0):
        return (
            f"it needs compute capability 9.0 exactly, {device.name} has {device.capability[0]}.{device.capability[1]}"
        )
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        return "nothing is to be computed"
    if not tma:
        return "TMA reads rows at multiples of 16 bytes, and no dimension with a stride of 0"
    return None


def _uses_sm90(problem: Problem, device: Device, tma: bool, family: str | None) -> bool:
    """Which family computes a problem; UnsupportedError if it is not the one asked for."""
    reason = why_not_sm90(problem, device, tma=tma)
    if family == "sm90" and reason:
        raise UnsupportedError(f"CUPYFLASH_FAMILY=sm90: {reason}; unset it to let the library choose")
    return reason is None and family != "sm80"


def plan_of(kernels: Kernels, extents: Extents) -> Plan:
    """The plan of a call of these extents."""
    numbers = kernels.numbers(extents)
    launches = (Launch(v, kernels.grid(v, n), n) for v, n in zip(kernels.variants, numbers.tiles, strict=True))
    return Plan(tuple(launches), numbers.workspace, numbers.sections, numbers.first_stores)


def forward_kernels(
    problem: Problem,
    device: Device,
    *,
    aligned: bool = True,
    tma: bool | None = None,
    family: str | None = None,
    clocks: bool = False,
) -> ForwardKernels:
    """The kernel of the forward; arguments and errors as of `forward_plan`."""
    check_supported(problem, device)
    use_sm90 = _uses_sm90(problem, device, aligned if tma is None else tma, family)
    variant: Variant
    if use_sm90:
        variant = forward_sm90_variant(problem, clocks=clocks)
    else:
        variant = forward_variant(problem, device, aligned=aligned)
    facts = problem.dtype, problem.head_dim, problem.masked, problem.deterministic
    return ForwardKernels((variant,), use_sm90, *facts, device)


def backward_kernels(
    problem: Problem,
    device: Device,
    *,
    aligned: bool = True,
    tma: bool | None = None,
    family: str | None = None,
) -> BackwardKernels:
    """The kernels of the backward; arguments and errors as of `backward_plan`."""
    check_supported(problem, device)
    use_sm90 = _uses_sm90(problem, device, aligned if tma is None else tma, family)
    found = backward_sm90_variants(problem) if use_sm90 else backward_variants(problem, device, aligned=aligned)
    facts = problem.dtype, problem.head_dim, problem.masked, problem.deterministic
    return BackwardKernels(found, use_sm90, *facts, device)


def forward_plan(
    problem: Problem,
    device: Device,
    *,
    aligned: bool = True,
    tma: bool | None = None,
    family: str | None = None,
    clocks: bool = False,
) -> Plan:
    """The forward's plan.

    Args:
        aligned: whether every row of q, k and v starts at a multiple of 16 bytes.
        tma: whether TMA can read them; as `aligned` unless given.
        family: one of `FAMILIES` to insist on.
        clocks: the sm90 family's form that records how long each block took.

    Raises:
        UnsupportedError: if the device, the dtype or the family asked for cannot do it.
    """
    kernels = forward_kernels(problem, device, aligned=aligned, tma=tma, family=family, clocks=clocks)
    return plan_of(kernels, Extents.of(problem))


def backward_plan(
    problem: Problem,
    device: Device,
    *,
    aligned: bool = True,
    tma: bool | None = None,
    family: str | None = None,
) -> Plan:
    """The backward's plan.

    Args:
        aligned: whether every row of q, k, v, out and dout starts at a multiple of 16 bytes.
        tma: whether TMA can read q, k, v and dout; as `aligned` unless given.
        family: one of `FAMILIES` to insist on.

    Raises:
        UnsupportedError: if the device, the dtype or the family asked for cannot do it.
    """
    kernels = backward_kernels(problem, device, aligned=aligned, tma=tma, family=family)
    return plan_of(kernels, Extents.of(problem))
