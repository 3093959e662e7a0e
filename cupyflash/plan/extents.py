"""Extents: the numbers of a call, and what its plan chooses for them once its kernels are known.

It is done for every call with lengths not seen before: a few microseconds of arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import UnsupportedError
from ..gpu.device import Device
from ..problem import ITEMSIZE, Problem
from .kernels import Backward, BackwardSm90, Convert
from .tiles import round_up
from .variant import Variant

MAX_GRID = 2**31 - 1
# K and V that share the L2, without a mask and with one, where mixing more heads evens out the tail:
# docs/performance.md
_SM90_SECTION_BYTES = 4 << 20, 16 << 20
# Up to so many keys, with a mask, it pays that dQ's accumulator need not be cleared (docs/performance.md).
_FIRST_STORES_LIMIT = 4096

Workspace = dict[str, tuple[tuple[int, ...], str]]


class Extents(NamedTuple):
    """The numbers of a problem that decide no kernel, but that there are none of 0."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int

    @classmethod
    def of(cls, problem: Problem) -> Extents:
        return cls(problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_k)


def kind_of(problem: Problem) -> Problem:
    """The problem with other numbers where they decide no kernel: the same for all that have the same kernels.

    What a feature adds to a problem counts, unless it is replaced here.
    """
    window = (None, None) if not problem.masked else (None, 0) if problem.causal else (1, 1)
    scale = 1.0 if problem.scale > 0 else 0.0
    return replace(problem, batch=1, seqlen_q=1, seqlen_k=1, heads_q=1, heads_k=1, scale=scale, window=window)


class Numbers(NamedTuple):
    """What the plan chooses for some extents.

    Attributes:
        tiles: of work, for each launch.
        workspace: the arrays that the launches share: name -> (shape, dtype).
        sections: heads scheduled together, and the last of them (schedule.cuh).
        first_stores: the first share of each tile of dQ is stored, the others are added (dq_accum.cuh).
    """

    tiles: tuple[int, ...]
    workspace: Workspace
    sections: tuple[int, int]
    first_stores: bool = False


def blocks(n: int, size: int) -> int:
    return -(-n // size)


def _checked_grid(name: str, grid: int) -> int:
    if grid > MAX_GRID:
        raise UnsupportedError(f"{name}: expected at most {MAX_GRID} tiles of work, got {grid}; split the batch")
    return grid


@dataclass(frozen=True)
class Kernels:
    """The kernels of a call, in launch order, whatever its extents; `is_sm90`: of that family."""

    variants: tuple[Variant, ...]
    is_sm90: bool
    dtype: str
    head_dim: int
    masked: bool
    deterministic: bool
    device: Device

    def numbers(self, extents: Extents) -> Numbers:
        """What is chosen for a call of these extents.

        Raises:
            UnsupportedError: if it has too many tiles of work.
        """
        raise NotImplementedError

    def grid(self, variant: Variant, tiles: int) -> int:
        """How many blocks compute so many tiles."""
        return min(tiles, self.device.sm_count) if variant.persistent else tiles

    def _fitting(self, bytes_per_head: int) -> int:
        """How many heads are worth mixing: those whose streamed operands fit half of the L2; without a mask just 1."""
        return self.device.l2_bytes // 2 // max(1, bytes_per_head) if self.masked else 1

    def _sections(self, fitting: int, heads: int, tiles_per_head: int) -> tuple[int, int]:
        """How many heads are scheduled together: `fitting` of them, and at last enough to even out the tail.

        With a mask, tiles differ in length. A section starts with its longest tiles, so that the last one ends evenly
        if it has a few for every multiprocessor.
        """
        enough = blocks(2 * self.device.sm_count, max(1, tiles_per_head)) if self.masked else 0
        section = max(1, min(heads, fitting))
        return section, min(heads, max(section, enough))


class ForwardKernels(Kernels):
    """One launch, no workspace. K and V are streamed, so a group's query heads go together."""

    def numbers(self, extents: Extents) -> Numbers:
        batch, seqlen_q, seqlen_k, heads_q, heads_k = extents
        m_blocks, group = blocks(seqlen_q, self.variants[0].block_m), heads_q // heads_k
        head_bytes = 2 * seqlen_k * self.head_dim * ITEMSIZE[self.dtype]
        fitting = _SM90_SECTION_BYTES[self.masked] // head_bytes if self.is_sm90 else self._fitting(head_bytes)
        tiles = _checked_grid("q", m_blocks * heads_q * batch)
        section, last = self._sections(fitting, batch * heads_k, m_blocks * group)
        return Numbers((tiles,), {}, (section * group, last * group))


class BackwardKernels(Kernels):
    """Delta, main, conversion of dQ; or delta, dK and dV, dQ. Q, dO and a fp32 sum of dQ are streamed."""

    def numbers(self, extents: Extents) -> Numbers:
        _, main, last = self.variants
        assert isinstance(main, Backward | BackwardSm90)
        b, sq, sk, hq, hk = extents
        m_blocks, n_blocks = blocks(sq, main.block_m), blocks(sk, main.block_n)
        query_grid = _checked_grid("q", m_blocks * hq * b)
        key_grid = _checked_grid("k", n_blocks * hk * b)
        last_grid = blocks(sq, last.block_m) * hq * b
        head_bytes = sq * self.head_dim * (2 * ITEMSIZE[self.dtype] + 4) * (hq // hk)
        workspace: Workspace = {"row_stats": ((b, hq, m_blocks * main.block_m, 2), "fp32")}
        first_stores = False
        if isinstance(last, Convert):
            first_stores = self.is_sm90 and self.masked and sk <= _FIRST_STORES_LIMIT
            columns = round_up(self.head_dim, 16 * last.split_d)
            workspace["dq_accum"] = ((b, hq, m_blocks, main.block_m * columns), "fp32")
            if self.deterministic or first_stores:
                workspace["dq_turn"] = ((b, hq, m_blocks), "int32")
        sections = self._sections(self._fitting(head_bytes), b * hk, n_blocks)
        return Numbers((query_grid, key_grid, last_grid), workspace, sections, first_stores)
