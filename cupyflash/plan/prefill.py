"""Many new queries over a cache: which calls take the forward of packed sequences, and how it finds the keys.

Attention over a cache has tiles for few rows, which read the keys once and multiply by mma.sync. The forward multiplies
as fast as the GPU can, whatever is added to scores, and pays from 33 queries a sequence on, where there are tiles, or
parts of their keys, to fill the GPU.

Caches of 8 bits are written before as rows of q's dtype (kernels_cu/decode/dequantize.cuh), scales multiplied in: the
forward needs no scales then, neither of heads nor of pages, and is as good as over a cache of that dtype. Scales on
scores and on P, as attention over a cache has them, would spare a rounding, but not the rows: TMA and wgmma take two
bytes an element.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..bias import room_of_mask
from ..cache.problem import CacheProblem
from ..gpu.device import Device
from ..operand import MASK_TILE
from ..problem import HALF, KEY_BLOCK, MAX_SEQLEN, Problem
from .kernels import LEAST_QUERIES, LEAST_QUERIES_OF_8_BITS, PAGE_UNIT, least_queries
from .spec import Spec
from .splits import may_divide

# The forward takes calls with at least so many queries of all sequences and heads for each multiprocessor (measured by
# both ways of the same calls: docs/performance.md, "From how many queries on"). By TMA, times how many heads share one
# of k, whose rows the kernels for few have in one tile:
_ROWS_OF_GROUPS = 8
# Else as many as there are keys by so many, since a block takes all of them; no more than a bound, which is lower where
# a sequence has so many queries.
_KEYS_A_ROW, _KEYS_A_ROW_OF_FP32 = 40, 16
_MOST_ROWS, _MOST_ROWS_OF_LONG, _LONG = 100, 60, 256
# Of packed sequences, of long keys that cannot be divided, of caches of 8 bits, and of what is added without TMA; where
# blocks divide keys. But for packed ones by TMA also so many pairs of these and of keys that there is room for.
_ROWS, _ROWS_OF_PARTS = 30, 8
_PAIRS = 1 << 24
_MANY_OF_PACKED = 128  # queries that one sequence of a packed call can have, at least
_MANY_BY_ELEMENT = 96  # queries of a sequence beside a bias, a mask or mods, where TMA is not used
_FEW_ROWS, _MANY_KEYS = 128, 8192  # rows for each multiprocessor that are a tile or less, beside so many keys
_ROW_BYTES = 1 << 30  # that rows of q's dtype may take beside a cache of 8 bits, of which they are twice its size
_COLUMNS = 16  # of 8 bits that are read at a time


class Lie(NamedTuple):
    """How the arrays of a call lie.

    Attributes:
        in_rows: the rows of the caches lie one behind the other, sequence by sequence.
        aligned: all rows of q and of the caches start at multiples of 16 bytes.
        tma: TMA can read them.
        whole_table: the block table, if there is one, is contiguous.
    """

    in_rows: bool = True
    aligned: bool = True
    tma: bool = True
    whole_table: bool = True


class Way(NamedTuple):
    """How a call takes the forward.

    Attributes:
        paged: it reads keys by a table of pages; a cache without pages has one of its length for each sequence.
        beside: it takes the sequences of many queries alone, beside attention over a cache, which takes the others.
        dequantized: it reads rows of q's dtype that stand for a cache of 8 bits, as `dequantized` has them.
    """

    paged: bool = False
    beside: bool = False
    dequantized: bool = False

    def left(self, p: CacheProblem) -> CacheProblem:
        """What is left to attention over a cache."""
        return replace(p, most_queries=least_queries(self.dequantized) - 1) if self.beside else p


def way_of(
    p: CacheProblem, device: Device, lie: Lie, family: str | None = None, of_8_bits: bool = False
) -> Way | None:  # fmt: skip
    """That of a call; None: it takes attention over a cache alone.

    Args:
        family: that the user insists on.
        of_8_bits: whether its cache stands for one of 8 bits.
    """
    if 0 in (p.batch, p.slots):  # no keys, whatever room there is: the forward has no place to read
        return None
    if p.stored:
        if p.seqlen_q < LEAST_QUERIES_OF_8_BITS:
            return None
        way = way_of(dequantized(p), device, lie._replace(in_rows=True, whole_table=True), family, of_8_bits=True)
        fits = 2 * dequantized(p).slots * p.capacity * p.heads_k * sum(p.widths) <= _ROW_BYTES
        is_read = lie.aligned and not any(d % _COLUMNS for d in p.widths)
        return way._replace(dequantized=True) if way and fits and is_read else None
    if p.batch_invariant or p.num_splits is not None or p.batch * p.capacity > MAX_SEQLEN:
        return None
    # Packed, nobody here knows how many queries each has: at least one may have many where the others have one.
    if p.seqlen_q < (_MANY_OF_PACKED + p.batch - 1 if p.packed else LEAST_QUERIES):
        return None
    rows = _rows(p)
    is_plain = not (p.packed or p.chosen or p.page_size) and lie.in_rows and p.slots == p.batch
    by_tma = device.capability == (9, 0) and family in (None, "sm90") and lie.tma and p.dtype in HALF
    if p.block_mask and p.bias:  # a call has one room for both, which need not be that of either
        return None
    reads_pages = lie.aligned and lie.whole_table and (p.page_size or 0) % PAGE_UNIT == 0
    # Where keys are divided (splits.py), that is worth more than reading rows by a table costs.
    divides = rows <= _FEW_ROWS * device.sm_count and p.capacity >= _MANY_KEYS and may_divide(p)
    if p.by_element and not (by_tma or p.packed) and p.seqlen_q < _MANY_BY_ELEMENT:
        return None
    of_sm = rows / device.sm_count
    if not _is_worth_it(p, of_sm, rows * p.capacity, by_tma, reads_pages and divides, of_8_bits):
        return None
    if reads_pages and (by_tma or divides or p.block_mask or p.masks_alone or not is_plain):
        return Way(paged=True, beside=p.packed)
    return Way() if is_plain and not p.block_mask else None


def _rows(p: CacheProblem) -> int:
    """Queries of all heads; packed, of one sequence that may have them all."""
    return (1 if p.packed else p.batch) * p.heads_q * p.seqlen_q


def _is_worth_it(p: CacheProblem, rows: float, pairs: int, by_tma: bool, divides: bool, of_8_bits: bool) -> bool:
    """Whether a forward of so many rows for each multiprocessor, and so many pairs, is faster than the kernels for few
    queries.

    Args:
        divides: whether blocks divide the keys, as they do by TMA wherever they may.
    """
    undivided = p.capacity > _MANY_KEYS and not may_divide(p)
    if by_tma and not (of_8_bits or undivided):
        return rows >= _ROWS if p.packed else rows * p.group >= _ROWS_OF_GROUPS
    if by_tma or p.packed or divides or p.by_element or of_8_bits:
        in_parts = may_divide(p) and (by_tma or divides) and not p.packed
        return rows >= (_ROWS_OF_PARTS if in_parts else _ROWS) and pairs >= _PAIRS
    is_half = p.dtype in HALF
    most = _MOST_ROWS_OF_LONG if is_half and p.seqlen_q >= _LONG else _MOST_ROWS
    return rows >= max(_ROWS_OF_GROUPS / 2, min(most, p.capacity / (_KEYS_A_ROW if is_half else _KEYS_A_ROW_OF_FP32)))


def dequantized(p: CacheProblem) -> CacheProblem:
    """A call over a cache of 8 bits as one over rows of q's dtype: whole sequences, one behind the other; packed, as
    many as can have many queries."""
    slots = min(p.batch, p.seqlen_q // LEAST_QUERIES_OF_8_BITS) if p.packed else p.batch
    return replace(p, stored="", scale_dims=0, page_size=None, chosen=False, slots=slots)


def problem_of(p: CacheProblem, way: Way) -> Problem:
    """What the forward is asked for by a call of that way."""
    p = dequantized(p) if way.dequantized else p
    room = p.max_seqlen_q, p.capacity if p.bias else MAX_SEQLEN
    if p.block_mask:
        room = (MASK_TILE * p.mask_tiles,) * 2
    elif way.paged and p.masks_alone:
        room = room_of_mask(*room)
    rows = p.seqlen_q if p.packed else p.batch * p.seqlen_q
    return Problem(
        p.dtype, p.batch, rows, p.batch * p.capacity, p.heads_q, p.heads_k, p.head_dim, p.scale, p.window,
        head_dim_v=p.head_dim_v, softcap=p.softcap, packed=True, alibi=p.alibi, kv_range=p.kv_range, sink=p.sink,
        page_size=(p.page_size or p.capacity) if way.paged else 0, pages=p.slots if way.paged else 0,
        whole_pages=way.paged and (p.pages_per_sequence < 2 or (p.page_size or 0) % KEY_BLOCK == 0),
        bias=p.bias, block_mask=p.block_mask, mods=p.mods, mod_shapes=p.mod_shapes, max_seqlen_q=room[0],
        max_seqlen_k=room[1], of_8_bits=way.dequantized and way.paged,
    )  # fmt: skip


def spec_of(p: CacheProblem, way: Way, lie: Lie, family: str | None = None, paired_bias: int = 0) -> Spec:
    """That of the forward which such a call takes; `paired_bias`: as of `Spec.of`."""
    return Spec.of(problem_of(p, way), aligned=lie.aligned, tma=lie.tma, family=family, paired_bias=paired_bias)
