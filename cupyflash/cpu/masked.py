"""Block masks in NumPy: one call for all heads that share a mask, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..problem import Problem

Array = NDArray[Any]
Compute = Callable[..., tuple[Array, ...]]  # of attention or packed
# Of the batch, of the heads of k and of q; what they are by themselves.
_Part = tuple[slice, slice, slice, Problem, BlockMask]


def forward(compute: Compute, mask: BlockMask, problem: Problem, **arrays: Any) -> tuple[Array, Array]:
    """out and lse of a forward of `attention` or `packed`."""
    q = arrays["q"]
    out, lse = np.zeros(q.shape, q.dtype), np.zeros(problem.rows, np.float64 if q.dtype.itemsize == 8 else np.float32)
    for part in _parts(mask, problem):
        b, _, h, one, own = part
        out[b, :, h], lse[b, h] = compute(**_taken(arrays, part), problem=one, mask=own)
    return out, lse


def backward(
    compute: Compute, mask: BlockMask, problem: Problem, wanted: tuple[str, ...], **arrays: Any
) -> tuple[Array, ...]:
    """The gradients of a backward of them."""
    dq, dk, dv = (np.zeros(arrays[name].shape, arrays[name].dtype) for name in "qkv")
    learned = {name: arrays.get(name[1:]) for name in ("dalibi_slopes", "dsink")}
    sums = [np.zeros_like(x) for name, x in learned.items() if x is not None and name in wanted]
    for part in _parts(mask, problem):
        b, h_k, h, one, own = part
        found = compute(**_taken(arrays, part), problem=one, mask=own, wanted=wanted)
        dq[b, :, h], dk[b, :, h_k], dv[b, :, h_k] = found[:3]
        for total, of_part in zip(sums, found[3:], strict=True):
            target = total[..., h] if total.ndim == 1 else total[b, h]
            target += of_part
    return dq, dk, dv, *sums


def _parts(mask: BlockMask, p: Problem) -> Iterator[_Part]:
    """What shares a mask."""
    own_batch, own_heads = mask.own
    group = p.heads_q // p.heads_k
    for b in range(p.batch) if own_batch else (None,):
        for h in range(p.heads_k) if own_heads else (None,):
            of_b = slice(None) if b is None else slice(b, b + 1)
            of_k = slice(None) if h is None else slice(h, h + 1)
            of_q = slice(None) if h is None else slice(h * group, (h + 1) * group)
            one = replace(p, batch=p.batch if b is None else 1, heads_k=p.heads_k if h is None else 1, block_mask=0)
            one = replace(one, heads_q=group * one.heads_k)
            yield of_b, of_k, of_q, one, replace(mask, tiles=mask.tiles[of_b if own_batch else slice(None), of_q])


def _taken(arrays: dict[str, Any], part: _Part) -> dict[str, Any]:
    """The arrays of a part."""
    b, h_k, h, *_ = part
    found = {}
    for name, x in arrays.items():
        if x is None or name == "sequences":
            found[name] = x if x is None or x.kv_range is None else x._replace(kv_range=x.kv_range[b])
        elif name in ("lse", "dlse"):
            found[name] = x[b, h]
        elif name in ("alibi_slopes", "sink"):
            found[name] = x[h] if x.ndim == 1 else x[b, h]
        else:
            found[name] = x[b, :, h_k if name in "kv" else h]
    return found
