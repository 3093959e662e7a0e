"""Problem + device -> plan: which kernels run, on which grid, with which workspace. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device
from .errors import UnsupportedError
from .kernels import Convert, backward_sm90_variants, backward_variants, forward_sm90_variant, forward_variant
from .problem import ITEMSIZE, Problem
from .tiles import round_up
from .variant import Variant

MAX_GRID = 2**31 - 1
GPU_DTYPES = ("fp16", "bf16")
FAMILIES = ("sm80", "sm90")
# K and V that share the L2, without a mask and with one, where mixing more heads evens out the tail:
# docs/performance.md
_SM90_SECTION_BYTES = 4 << 20, 16 << 20
# Up to so many keys, with a mask, it pays that dQ's accumulator need not be cleared (docs/performance.md).
_FIRST_STORES_LIMIT = 4096


@dataclass(frozen=True)
class Launch:
    """One kernel launch; a grid of 0 blocks is left out. `tiles`: of work, which persistent blocks share."""

    variant: Variant
    grid: int
    tiles: int


Workspace = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Plan:
    """The launches of one call, in order, and the workspace arrays they share: name -> (shape, dtype)."""

    launches: tuple[Launch, ...]
    workspace: Workspace
    sections: tuple[int, int]  # heads scheduled together, and the last of them (schedule.cuh)
    first_stores: bool = False  # the first share of each tile of dQ is stored, the others are added (dq_accum.cuh)


def blocks(n: int, size: int) -> int:
    return -(-n // size)


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


def _fitting(problem: Problem, device: Device, bytes_per_head: int) -> int:
    """How many heads are worth mixing: those whose streamed operands fit half of the L2; without a mask just one."""
    return device.l2_bytes // 2 // max(1, bytes_per_head) if problem.masked else 1


def _sections(problem: Problem, device: Device, fitting: int, heads: int, tiles_per_head: int) -> tuple[int, int]:
    """How many heads are scheduled together: `fitting` of them, and in the last section enough to even out the tail.

    With a mask, tiles differ in length. A section starts with its longest tiles, so that the last one ends evenly if it
    has a few for every multiprocessor.
    """
    enough = blocks(2 * device.sm_count, max(1, tiles_per_head)) if problem.masked else 0
    section = max(1, min(heads, fitting))
    return section, min(heads, max(section, enough))


def _checked_grid(name: str, grid: int) -> int:
    if grid > MAX_GRID:
        raise UnsupportedError(f"{name}: expected at most {MAX_GRID} tiles of work, got {grid}; split the batch")
    return grid


def _launch(variant: Variant, tiles: int, device: Device) -> Launch:
    return Launch(variant, min(tiles, device.sm_count) if variant.persistent else tiles, tiles)


def forward_plan(
    problem: Problem,
    device: Device,
    *,
    aligned: bool = True,
    tma: bool | None = None,
    family: str | None = None,
    clocks: bool = False,
) -> Plan:
    """The forward: one launch, no workspace. K and V are streamed, so a group's query heads go together.

    Args:
        aligned: whether every row of q, k and v starts at a multiple of 16 bytes.
        tma: whether TMA can read them; as `aligned` unless given.
        family: one of `FAMILIES` to insist on.
        clocks: the sm90 family's form that records how long each block took.

    Raises:
        UnsupportedError: if the device, the dtype or the family asked for cannot do it.
    """
    check_supported(problem, device)
    use_sm90 = _uses_sm90(problem, device, aligned if tma is None else tma, family)
    group = problem.heads_q // problem.heads_k
    head_bytes = 2 * problem.seqlen_k * problem.head_dim * ITEMSIZE[problem.dtype]
    heads_k = problem.batch * problem.heads_k
    variant: Variant
    if use_sm90:
        variant = forward_sm90_variant(problem, clocks=clocks)
        fitting = _SM90_SECTION_BYTES[problem.masked] // head_bytes
    else:
        variant = forward_variant(problem, device, aligned=aligned)
        fitting = _fitting(problem, device, head_bytes)
    tiles = _checked_grid("q", blocks(problem.seqlen_q, variant.block_m) * problem.heads_q * problem.batch)
    section, last = _sections(problem, device, fitting, heads_k, blocks(problem.seqlen_q, variant.block_m) * group)
    return Plan((_launch(variant, tiles, device),), {}, (section * group, last * group))


def backward_plan(
    problem: Problem,
    device: Device,
    *,
    aligned: bool = True,
    tma: bool | None = None,
    family: str | None = None,
) -> Plan:
    """The backward: delta, main, conversion of dQ; or delta, dK and dV, dQ. Q, dO and a fp32 sum of dQ are streamed.

    Args:
        aligned: whether every row of q, k, v, out and dout starts at a multiple of 16 bytes.
        tma: whether TMA can read q, k, v and dout; as `aligned` unless given.
        family: one of `FAMILIES` to insist on.

    Raises:
        UnsupportedError: if the device, the dtype or the family asked for cannot do it.
    """
    check_supported(problem, device)
    use_sm90 = _uses_sm90(problem, device, aligned if tma is None else tma, family)
    found = backward_sm90_variants(problem) if use_sm90 else backward_variants(problem, device, aligned=aligned)
    delta, main, last = found
    b, sq, hq, hk = problem.batch, problem.seqlen_q, problem.heads_q, problem.heads_k
    m_blocks = blocks(sq, main.block_m)
    query_grid = _checked_grid("q", m_blocks * hq * b)
    key_grid = _checked_grid("k", blocks(problem.seqlen_k, main.block_n) * hk * b)
    last_grid = blocks(sq, last.block_m) * hq * b
    head_bytes = sq * problem.head_dim * (2 * ITEMSIZE[problem.dtype] + 4) * (hq // hk)
    first_stores = use_sm90 and isinstance(last, Convert) and problem.masked and problem.seqlen_k <= _FIRST_STORES_LIMIT
    workspace: Workspace = {"row_stats": ((b, hq, m_blocks * main.block_m, 2), "fp32")}
    if isinstance(last, Convert):
        columns = round_up(problem.head_dim, 16 * last.split_d)
        workspace["dq_accum"] = ((b, hq, m_blocks, main.block_m * columns), "fp32")
        if problem.deterministic or first_stores:
            workspace["dq_turn"] = ((b, hq, m_blocks), "int32")
    return Plan(
        tuple(_launch(v, n, device) for v, n in ((delta, query_grid), (main, key_grid), (last, last_grid))),
        workspace,
        _sections(
            problem, device, _fitting(problem, device, head_bytes), b * hk, blocks(problem.seqlen_k, main.block_n)
        ),
        first_stores,
    )
