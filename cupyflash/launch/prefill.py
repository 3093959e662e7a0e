"""Many new queries of each sequence over a cache: once theirs is appended, the forward of packed sequences attends.

Which calls take it says plan/prefill.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.adapters import CUPY, TORCH, Native, Signature
from ..cache.checks import CacheOptions
from ..cache.problem import CacheProblem
from ..gpu import tensormap
from ..operand import MOD_ARRAYS
from ..options import Options
from ..plan.prefill import Lie, Way, dequantized
from . import run
from .alignment import access_to_cache
from .passes import is_contiguous

_FEATURES = "kv_range", "alibi_slopes", "sink", "bias", "mask", "block_tiles", "block_bits", *MOD_ARRAYS


def lie_of(p: CacheProblem, signatures: Mapping[str, Signature], aligned: bool) -> Lie:
    """How arrays of these signatures lie; `aligned`: q and the caches lie at multiples of 16 bytes."""
    caches = [signatures[name] for name in ("k_cache", "v_cache")]
    in_rows = all(p.slots == 1 or s.strides[0] == p.capacity * s.strides[1] for s in caches)
    access = access_to_cache(signatures, aligned, p.itemsize)
    shape, strides, *_ = signatures["q"]
    lies_in_rows = p.packed or p.batch == 1 or strides[0] == shape[1] * strides[1]
    reads_q = lies_in_rows and tensormap.readable((1, *shape[-3:]), (0, *strides[-3:]))
    table = signatures.get("block_table")
    whole = table is None or is_contiguous(table.shape, table.strides)
    return Lie(in_rows, access["aligned"], access["aligned"] and access["tma"] and reads_q, whole)


def ready(arrays: Mapping[str, Any], made: Sequence[Any], p: CacheProblem, way: Way) -> dict[str, Any]:
    """The arrays that are attended to, after all launches before the forward.

    Args:
        made: what these launches share: q rotated, where it is, and rows of q's dtype, where they stand for the caches,
            packed with the slots of sequences among them.
    """
    found, rest = dict(arrays), iter(made)
    if p.rotary_dim:
        found["q"] = next(rest)
    if way.dequantized:
        found |= {"k_cache": next(rest), "v_cache": next(rest)}
        found.pop("block_table", None)
        if p.packed:
            found["block_table"] = next(rest)
    return found


def attend(
    library: Native, arrays: Mapping[str, Any], p: CacheProblem, options: CacheOptions, way: Way,
    into: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) of a call of that way.

    Args:
        arrays: as `ready` has them.
        into: out and lse of a packed call, of which those of some sequences are written.
    """
    out, lse = run.forward(library, rows_of(library, arrays, p, way), options_of(options, way), into=into)
    assert lse is not None
    if p.packed:
        return out, lse
    out, lse = by_sequence(out, lse, p)
    return out, library.contiguous(lse)


def options_of(options: CacheOptions, way: Way) -> Options:
    """What the forward is asked for."""
    plain = Options(options.causal, options.scale, options.window, softcap=options.softcap, mods=options.mods)
    return plain._replace(of_8_bits=way.dequantized and way.paged)


def by_sequence(out: Any, lse: Any, p: CacheProblem) -> tuple[Any, Any]:
    """The results of packed rows as those of sequences that are not packed."""
    rows = lse.reshape(p.heads_q, p.batch, p.seqlen_q).swapaxes(0, 1)
    return out.reshape(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v), rows


def rows_of(library: Native, arrays: Mapping[str, Any], p: CacheProblem, way: Way) -> dict[str, Any]:
    """The arrays that the forward is given; `library`: makes those that hold the same numbers in every call."""
    p, q = dequantized(p) if way.dequantized else p, arrays["q"]
    rows = {"q": q if p.packed else q.reshape(p.batch * p.seqlen_q, p.heads_q, p.head_dim)}
    rows |= _by_table(library, arrays, p, q) if way.paged else _in_rows(library, arrays, p, q)
    return rows | {name: arrays[name] for name in _FEATURES if name in arrays}


def _in_rows(library: Native, arrays: Mapping[str, Any], p: CacheProblem, q: Any) -> dict[str, Any]:
    """The caches as packed keys, of which as many count as are used by now."""
    used = arrays["cache_seqlens"]
    if p.seqlen_new:
        used = used.clip(0, p.capacity) + p.seqlen_new
    return {
        **{x: arrays[f"{x}_cache"].reshape(-1, p.heads_k, d) for x, d in zip("kv", p.widths, strict=True)},
        "cu_seqlens_q": _steps(library, p.batch + 1, p.seqlen_q, q),
        "cu_seqlens_k": _steps(library, p.batch + 1, p.capacity, q),
        "seqused_k": used,
    }


def _by_table(library: Native, arrays: Mapping[str, Any], p: CacheProblem, q: Any) -> dict[str, Any]:
    """The caches as they are, in pages; the kernel counts used keys and new ones together (pages.cuh)."""
    found = {name: arrays[f"{name}_cache"] for name in "kv"}
    found["cu_seqlens_q"] = arrays["cu_seqlens_q"] if p.packed else _steps(library, p.batch + 1, p.seqlen_q, q)
    if not p.seqlen_new:
        found["cu_seqlens_k"] = library.full((p.batch + 1,), 0, q)
    elif p.seqlen_new != p.seqlen_q:
        found["cu_seqlens_k"] = _steps(library, p.batch + 1, p.seqlen_new, q)
    found["seqused_k"] = arrays["cache_seqlens"]
    table = arrays.get("block_table")
    if table is None:
        table = arrays["cache_batch_idx"] if p.chosen else _steps(library, p.batch, 1, q)
        table = table.reshape(p.batch, 1)
    return found | {"block_table": table}


def _steps(library: Native, count: int, step: int, like: Any) -> Any:
    """0, step, 2 step, ... in int32, on the device of `like`; queued on the current stream."""
    end = count * step
    if library is TORCH:
        torch = sys.modules["torch"]
        return torch.arange(0, end, step, dtype=torch.int32, device=like.device)
    if library is CUPY:
        with like.device:
            return sys.modules["cupy"].arange(0, end, step, dtype=np.int32)
    return np.arange(0, end, step, dtype=np.int32)
