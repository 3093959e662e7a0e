"""Many new queries of each sequence over a cache: once theirs is appended, the forward of packed sequences attends.

Which calls take it says plan/prefill.py.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

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
    into: Sequence[Any] | None = None,
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
    return out.reshape(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v), lse_by_sequence(lse, p)


def lse_by_sequence(lse: Any, p: CacheProblem) -> Any:
    """That of packed rows as that of sequences that are not packed."""
    return lse.reshape(p.heads_q, p.batch, p.seqlen_q).swapaxes(0, 1)


class Steps(NamedTuple):
    """0, step, 2 step, ... in int32: what says where packed sequences begin that are all of one length."""

    numbers: int
    step: int

    def array(self, library: Native, like: Any) -> Any:
        """On the device of `like`; queued on the current stream."""
        if self.step == 0:
            return library.full((self.numbers,), 0, like)
        end = self.numbers * self.step
        if library is TORCH:
            torch = sys.modules["torch"]
            return torch.arange(0, end, self.step, dtype=torch.int32, device=like.device)
        if library is CUPY:
            with like.device:
                return sys.modules["cupy"].arange(0, end, self.step, dtype=np.int32)
        return np.arange(0, end, self.step, dtype=np.int32)


def sources(names: Collection[str], p: CacheProblem, way: Way) -> dict[str, str | Steps]:
    """Of each array that the forward is given: what it is made of, the name of an array or the same numbers in every
    call. Of `seqused_k` see `counts_used`.

    Args:
        names: of the arrays that `ready` has.
    """
    p = dequantized(p) if way.dequantized else p
    per_sequence = p.batch + 1
    found: dict[str, str | Steps] = {"q": "q", "k": "k_cache", "v": "v_cache"}
    found["cu_seqlens_q"] = "cu_seqlens_q" if p.packed else Steps(per_sequence, p.seqlen_q)
    if not way.paged:
        found["cu_seqlens_k"] = Steps(per_sequence, p.capacity)
    elif p.seqlen_new != p.seqlen_q:  # else as many are new as queries, and the kernel takes theirs
        found["cu_seqlens_k"] = Steps(per_sequence, p.seqlen_new)
    found["seqused_k"] = "cache_seqlens"
    if way.paged:  # a cache that lies whole is a page of each sequence
        of_pages = "block_table" if "block_table" in names else "cache_batch_idx" if p.chosen else None
        found["block_table"] = of_pages or Steps(p.batch, 1)
    return found | {name: name for name in _FEATURES if name in names}


def counts_used(p: CacheProblem, way: Way) -> bool:
    """Whether `seqused_k` counts new keys, too; by pages the kernel counts them itself (pages.cuh)."""
    return p.seqlen_new > 0 and not way.paged


def used_of(lengths: Any, p: CacheProblem, way: Way) -> Any:
    """`seqused_k` of these cache_seqlens."""
    return lengths.clip(0, p.capacity) + p.seqlen_new if counts_used(p, way) else lengths


def rows_of(library: Native, arrays: Mapping[str, Any], p: CacheProblem, way: Way) -> dict[str, Any]:
    """The arrays that the forward is given; `library`: makes those that hold the same numbers in every call."""
    rows = {
        name: source.array(library, arrays["q"]) if isinstance(source, Steps) else arrays[source]
        for name, source in sources(arrays, p, way).items()
    }
    if not p.packed:
        rows["q"] = rows["q"].reshape(p.batch * p.seqlen_q, p.heads_q, p.head_dim)
    if not way.paged:
        rows |= {x: rows[x].reshape(-1, p.heads_k, d) for x, d in zip("kv", p.widths, strict=True)}
    elif len(rows["block_table"].shape) == 1:
        rows["block_table"] = rows["block_table"].reshape(p.batch, 1)
    return rows | {"seqused_k": used_of(rows["seqused_k"], p, way)}
