"""Many new queries of each sequence over a cache: once theirs is appended, the forward of packed sequences attends.

Attention over a cache has tiles for few rows, which read the keys once and multiply by mma.sync. The forward multiplies
as fast as the GPU can, and pays from some hundred queries a sequence on, where there are tiles enough to fill the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arrays.adapters import CUPY, TORCH, Native, Signature
from ..arrays.steps import steps
from ..cache.checks import CacheOptions
from ..cache.problem import CacheProblem
from ..options import Options
from ..problem import MAX_SEQLEN
from . import run

_QUERIES = 128  # of a sequence, from which on it is tried
_ROWS = 48  # queries of all sequences and heads, for each multiprocessor
_PAIRS = 1 << 25  # of these and keys that there is room for: less is not worth what more launches cost the host
_FEATURES = "kv_range", "alibi_slopes", "sink"


def is_for(library: Native) -> bool:
    """Whether arrays of a library may take this way: those of JAX bring the workspaces that another plan asked for."""
    return library is TORCH or library is CUPY


def suits(p: CacheProblem, sm_count: int) -> bool:
    """Whether a call is one of these on a GPU of so many multiprocessors, where its caches lie as `in_rows` says."""
    if p.packed or p.page_size or p.chosen or p.stored or p.batch_invariant or p.num_splits is not None:
        return False
    rows = p.batch * p.heads_q * p.seqlen_q
    pays = p.seqlen_q >= _QUERIES and rows >= _ROWS * sm_count and rows * p.capacity >= _PAIRS
    return pays and p.slots == p.batch and p.batch * p.capacity <= MAX_SEQLEN


def in_rows(p: CacheProblem, signatures: Mapping[str, Signature]) -> bool:
    """Whether the rows of the caches lie one behind the other, sequence by sequence."""
    caches = (signatures[name] for name in ("k_cache", "v_cache"))
    return all(p.slots == 1 or s.strides[0] == p.capacity * s.strides[1] for s in caches)


def attend(
    library: Native, arrays: Mapping[str, Any], q: Any, p: CacheProblem, options: CacheOptions
) -> tuple[Any, Any]:
    """(out, lse) of a call that `suits`; q: rotated, where it is."""
    used = arrays["cache_seqlens"]
    if p.seqlen_new:
        used = used.clip(0, p.capacity) + p.seqlen_new
    rows = {
        "q": q.reshape(p.batch * p.seqlen_q, p.heads_q, p.head_dim),
        **{name: arrays[f"{name}_cache"].reshape(-1, p.heads_k, p.head_dim) for name in "kv"},
        "cu_seqlens_q": steps(library, p.batch + 1, p.seqlen_q, q),
        "cu_seqlens_k": steps(library, p.batch + 1, p.capacity, q),
        "seqused_k": used,
        **{name: arrays[name] for name in _FEATURES if name in arrays},
    }
    call = Options(options.causal, options.scale, options.window, softcap=options.softcap)
    out, lse = run.forward(library, rows, call)
    assert lse is not None
    by_sequence = lse.reshape(p.heads_q, p.batch, p.seqlen_q).swapaxes(0, 1)
    return out.reshape(p.batch, p.seqlen_q, p.heads_q, p.head_dim), library.contiguous(by_sequence)
