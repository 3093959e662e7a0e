"""The params of attention over a cache: a plan's struct that lacks addresses only, and where these go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..cache.arrays import BY_NAME
from ..cache.problem import CacheProblem
from ..gpu.tensormap import BOX_COLUMNS, BoxMap
from ..operand import MOD_ARRAYS, MOD_LIMIT
from ..plan.decode_kernels import DecodeTile
from ..plan.decode_shares import DecodePlan
from ..plan.params import UNBOUNDED
from ..plan.params_decode import APPEND_PARAMS, DECODE_PARAMS, DEQUANTIZE_PARAMS
from ..plan.prefill import dequantized
from ..problem import MAX_SEQLEN
from .passes import score_steps

Strides = Sequence[int]  # in elements
# The names of arrays (cache/arrays.py) -> of their pointers; those of rotated queries stand for q.
DECODE_MEMBERS = {
    "q": "q", "rotated_q": "q", "out": "o", "lse": "lse", "k_cache": "k", "v_cache": "v",
    "cache_seqlens": "cache_seqlens", "block_table": "block_table", "cache_batch_idx": "cache_batch_idx",
    "cu_seqlens_q": "cu_seqlens_q", "alibi_slopes": "alibi_slopes", "kv_range": "kv_range", "sink": "sink",
    "k_scale": "k_scale", "v_scale": "v_scale", "partial_o": "partial_o", "partial_ml": "partial_ml", "bias": "bias",
    "mask": "mask", "block_tiles": "block_tiles", "block_bits": "block_bits", **{name: name for name in MOD_ARRAYS},
}  # fmt: skip
APPEND_MEMBERS = {
    "q": "q", "k": "k", "v": "v", "k_cache": "k_cache", "v_cache": "v_cache", "rotated_q": "rotated_q",
    "rotary_cos": "cos", "rotary_sin": "sin", "cache_seqlens": "cache_seqlens", "block_table": "block_table",
    "cache_batch_idx": "cache_batch_idx", "cu_seqlens_q": "cu_seqlens_q", "k_scale": "k_scale", "v_scale": "v_scale",
}  # fmt: skip
DEQUANTIZE_MEMBERS = {
    name: name
    for name in (
        "k_cache", "v_cache", "k_rows", "v_rows", "slots", "cache_seqlens", "block_table", "cache_batch_idx",
        "cu_seqlens_q", "k_scale", "v_scale",
    )
}  # fmt: skip


def strides_of(shapes: Mapping[str, Sequence[int]], strides: Mapping[str, Strides]) -> dict[str, tuple[int, ...]]:
    """Those of the arrays of a call, as what fills the structs takes them: of what broadcasts to scores, along their
    four dimensions."""
    return {
        name: score_steps(shapes[name], steps) if BY_NAME[name].broadcasts else tuple(steps)
        for name, steps in strides.items()
    }


class Batched(NamedTuple):
    """Strides as the structs have them."""

    batch: int
    row: int
    head: int

    @classmethod
    def of(cls, strides: Strides) -> Batched:
        """Those of an array (batch, rows, heads, head_dim), or of a packed one, which is a batch of one."""
        return cls(*strides[:3]) if len(strides) == 4 else cls(0, *strides[:2])


def _fill_cache(params: np.ndarray, p: CacheProblem, strides: Mapping[str, Strides], names: Mapping[str, str]) -> None:
    """What both structs say of the problem and of where its arrays lie; `names`: of their strides -> of the arrays."""
    problem = params["problem"]
    for name in ("batch", "seqlen_q", "heads_q", "heads_k", "scale"):
        problem[name] = getattr(p, name)
    problem["seqlen_k"], problem["softcap"] = p.capacity if p.slots else 0, p.softcap or 0
    left, right = p.window
    problem["window_left"] = UNBOUNDED if left is None else left
    problem["window_right"] = UNBOUNDED if right is None else right
    for member, name in names.items():
        params[f"{member}_stride"] = tuple(Batched.of(strides[name]))
    params["places"], params["scale_stride"] = p.slots, p.heads_k if p.scale_dims == 2 else 0
    if p.page_size is not None:
        params["page_size"], params["table_stride"] = p.page_size, strides["block_table"][0]


def fill(p: CacheProblem, plan: DecodePlan, strides: Mapping[str, Strides]) -> np.ndarray:
    """The struct of the main kernel and of the one behind it, without tensor maps and addresses.

    Args:
        strides: of q, out, k_cache, v_cache, block_table, bias and mask, as `strides_of` has them.
    """
    params = np.zeros((), DECODE_PARAMS)
    _fill_cache(params, p, strides, {"q": "q", "o": "out", "k": "k_cache", "v": "v_cache"})
    for name, number in plan.shares.items():
        params["shares"][name] = number
    params["appended"], params["alibi"] = p.seqlen_new, p.alibi
    params["most_queries"] = MAX_SEQLEN if p.most_queries is None else p.most_queries
    for name in ("bias", "mask"):
        if name in strides:
            params[f"{name}_stride"] = tuple(strides[name])
    for name, shape in zip(MOD_ARRAYS, p.mod_shapes, strict=False):
        params[f"{name}_lengths"] = (*shape, 1, 1, 1, 1)[:MOD_LIMIT]
    params["max_seqlen_q"], params["max_seqlen_k"] = p.max_seqlen_q, p.capacity
    params["block_mask"], params["mask_tiles"] = p.block_mask, p.mask_tiles
    return params


def fill_append(p: CacheProblem, strides: Mapping[str, Strides]) -> np.ndarray:
    """That of the kernel that appends, without addresses; `strides`: of q, k, v, the caches and block_table."""
    params = np.zeros((), APPEND_PARAMS)
    _fill_cache(params, p, strides, {name: name for name in ("q", "k", "v", "k_cache", "v_cache")})
    params["problem"]["seqlen_q"] = p.seqlen_new
    params["rotary_dim"], params["rotary_positions"] = p.rotary_dim, p.rotary_positions
    params["interleaved"], params["tables_fp32"] = p.rotary_interleaved, p.rotary_dtype == "fp32"
    return params


def fill_dequantize(p: CacheProblem, strides: Mapping[str, Strides]) -> np.ndarray:
    """That of the kernel that dequantizes, without addresses; `strides`: of the caches and block_table."""
    params = np.zeros((), DEQUANTIZE_PARAMS)
    _fill_cache(params, p, strides, {name: name for name in ("k_cache", "v_cache")})
    params["appended"] = p.seqlen_new
    return params


def dequantized_rows(p: CacheProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """What it writes: name -> (shape, dtype)."""
    rows = dequantized(p).slots, p.capacity, p.heads_k
    found = {f"{x}_rows": ((*rows, d), p.dtype) for x, d in zip("kv", p.widths, strict=True)}
    return found | ({"slots": ((p.batch, 1), "int32")} if p.packed else {})


def workspace(p: CacheProblem, plan: DecodePlan) -> dict[str, tuple[tuple[int, ...], str]]:
    """What the main kernel leaves to the one behind it: name -> (shape, dtype)."""
    if plan.combine is None:
        return {}
    return {"partial_o": ((plan.places, p.head_dim_v), "fp32"), "partial_ml": ((plan.places, 2), "fp32")}


def box_map(p: CacheProblem, tile: DecodeTile, head_dim: int, strides: Strides, capacity: int | None = None) -> BoxMap:
    """How TMA sees a cache of that head_dim, 8-bit elements two at a time. Of 256 bytes each half is an index of its
    own dimension. `capacity`: in place of the problem's."""
    row_bytes, rows = head_dim * p.itemsize, p.page_size or capacity or p.capacity
    line = min(BOX_COLUMNS, row_bytes // 2)
    chunks = row_bytes // (2 * line)
    sizes = (line, rows, chunks, p.heads_k, p.slots)
    slot, row, head = (p.itemsize * step for step in strides[:3])
    steps = ((row, rows), (128, chunks), (head, p.heads_k), (slot, p.slots))
    # The stride of a dimension of size 1 says nothing, but the driver checks it.
    return BoxMap(
        p.dtype, sizes, tuple(step if n > 1 else 16 for step, n in steps), (line, tile.box_rows, chunks, tile.pair, 1)
    )


def words_of(dtype: np.dtype[np.void], members: Mapping[str, str] = DECODE_MEMBERS) -> dict[str, tuple[int, ...]]:
    """The words of 64 bits in a struct that arrays' addresses go to; a struct may have that of the members inside."""
    start, places = plain_of(dtype)
    return {name: ((start + places[member][1]) // 8,) for name, member in members.items()}


def plain_of(dtype: np.dtype[np.void]) -> tuple[int, Any]:
    """Where the struct of the members begins in one that has it inside, or is it; its fields."""
    fields: Any = dtype.fields
    inner, start = fields["plain"][:2] if "plain" in fields else (dtype, 0)
    return start, inner.fields
