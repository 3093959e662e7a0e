"""Attention of new queries to a cache of keys and values: `attention_with_cache`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import options
from .api import with_mods
from .arrays.adapters import TORCH
from .arrays.imported import is_tensor, shape_of
from .arrays.libraries import JAX, Foreign, common_library_of_all
from .cache.checks import CacheOptions, make_cache_options
from .cache.lengths import one_length
from .launch import cached
from .mask_arrays import join_cache
from .options import Window


def attention_with_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    k: Any | None = None,
    v: Any | None = None,
    block_table: Any | None = None,
    cache_batch_idx: Any | None = None,
    cu_seqlens_q: Any | None = None,
    rotary_cos: Any | None = None,
    rotary_sin: Any | None = None,
    rotary_interleaved: bool = False,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    kv_range: Any | None = None,
    sink: Any | None = None,
    bias: Any | None = None,
    mask: Any | None = None,
    block_mask: Any | None = None,
    score_mod: str | Callable[..., Any] | None = None,
    mask_mod: str | Callable[..., Any] | None = None,
    mod_arrays: Mapping[str, Any] | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention of some new queries to a cache of keys and values, to which their own are appended first.

        k_cache, v_cache of sequence b, rows cache_seqlens[b] and on = rotated k[b], v[b]        where k is given
        keys = cache_seqlens[b] + seqlen_new
        out[b] = attention(rotated q[b], its first `keys` rows of k_cache, of v_cache)           as by `attention`

    What a token costs is reading the keys that count once: query heads that share a head of k are rows of one tile, and
    the keys of a sequence are split among the GPU (FlashDecoding, Dao et al. 2023), by lengths that stay on the device.

    Args:
        q: ``(batch, seqlen_q, heads_q, head_dim)``, or with `cu_seqlens_q` ``(total_q, heads_q, head_dim)``: one query
            a sequence or some hundred. A library, dtype and head_dim that `attention` takes; NumPy arrays are computed
            on the CPU. On a GPU in memory of its own, not in a cache that this call appends to; so k and v.
        k_cache, v_cache: ``(batch, capacity, heads_k, head_dim)``, or with `block_table` the pages of a pool,
            ``(pages, page_size, heads_k, head_dim)``, of any page size: arrays like q, with any strides but along the
            last dimension (a cache ``(batch, heads, capacity, head_dim)`` is given as ``x.swapaxes(1, 2)``). v_cache
            may have another head_dim (MLA: 128 beside 192), which then is that of v and of out. What they hold behind
            the rows in use has no effect, NaN included. Or both of 8 bits with scales: int8 or float8_e4m3fn, for which
            uint8 is taken, too, as its bits (CuPy has no such dtype).
        cache_seqlens: ``(batch,)``, int32, of q's device: how many rows of each sequence are in use, those that are
            appended not counted; or one integer for all, which may be an array without dimensions.
        k, v: ``(batch, seqlen_new, heads_k, head_dim)``: rows to append, in place, v bit by bit; with `cu_seqlens_q`
            packed as q is. JAX arrays cannot be written: of them the caches after the append are returned.
        block_table: ``(batch, pages_per_sequence)``, int32: row r of sequence b lies in page
            ``block_table[b, r // page_size]``. Sequences may share pages that none of them writes. Entries behind the
            last page in use may hold anything.
        cache_batch_idx: ``(batch,)``, int32: which sequence of the caches belongs to each of q, none to two where
            k is given; not with pages.
        cu_seqlens_q: ``(batch + 1,)``, int32: queries of different numbers lie one behind the other, as in
            `attention_varlen`: prefill of some sequences and decoding of others in one call.
        rotary_cos, rotary_sin: ``(positions, rotary_dim / 2)``, in q's dtype or fp32: turn the first rotary_dim columns
            of k and q by their position, ``cache_seqlens[b] + i`` for row i (Su et al. 2021), in fp32, on their way.
            Positions that the tables lack are not turned. They need as many new keys as queries.
        rotary_interleaved: pairs are columns 2i and 2i + 1 (GPT-J); else i and i + rotary_dim / 2 (GPT-NeoX, Llama).
        causal: query i sees keys up to ``i + keys - seqlen_q``: the last query sees all, aligned at the bottom right.
        scale, window, softcap, alibi_slopes, sink: as in `attention`, with keys for seqlen_k.
        kv_range: ``(batch, 2)``, int32: the queries of sequence b see none but the keys ``kv_range[b, 0]`` to
            ``kv_range[b, 1]`` of those that count; for a cache padded on the left.
        bias: added to the scores, of any shape that broadcasts to ``(batch, heads_q, seqlen_q, capacity)``, or with
            `cu_seqlens_q` ``(batch, heads_q, max_seqlen_q, capacity)``, with room for the longest sequence's queries;
            capacity is the rows that a sequence can have, of pages page_size * pages_per_sequence. Element ``[b, h, i,
            j]`` belongs to query i of sequence b and to row j of that sequence, wherever it lies. Of q's dtype, or fp32
            beside 16 bits; of q's library and device, any strides. It is read where it lies, for the keys that count
            alone, and never expanded. -inf hides a key, whatever k and v hold there; a query whose scores are all -inf
            sees none. (Keys that are hidden so are still read: causal, window, kv_range and block_mask leave them out.)
        mask: of bool, likewise: True where a key is visible. Beside a bias it is as a bias of -inf.
        block_mask: which keys each query sees, by blocks: a mask that `cupyflash.masks` makes, or torch's, as in
            `attention`, for n queries and n keys, n at least the capacity. A query counts by the row at which it
            stands, ``keys - seqlen_q + i`` for query i: so one mask, that of the whole sequence, serves each step;
            above row 0 no key is seen. 64 keys of which no query of a tile sees any are not read. As with a `mask`, a
            query whose visible scores are all -inf sees none.
        score_mod, mask_mod, mod_arrays: as in `attention`, of sequence b and head h of q. q counts the queries of the
            sequence in this call, from 0, and k the rows of the sequence. (The row of the query itself is ``q + keys -
            seqlen_q``; what a mod must know of that it reads from an array, as in ``"k <= first[b] + q"``.)
        k_scale, v_scale: ``(heads_k,)``, or ``(slots, heads_k)`` with the first dimension of the caches, a page or a
            sequence, fp32, where the caches are of 8 bits: row r of head h in slot s is ``k_scale[s, h] * k_cache[s, r,
            h]``. New rows are divided by the scales in fp32, after their rotation, and rounded to the nearest number
            that can be stored, of two to the even one; larger ones to the largest (127, -128 or 448). NaN stays NaN in
            e4m3 and becomes 0 in int8.
        num_splits: into how many parts the keys of each sequence are split; None: as is best. Results differ by
            rounding.
        batch_invariant: what a sequence gives does not depend, bit by bit, on the others in the batch.
        return_lse: return ``(out, lse)`` instead of out.

    Returns:
        out, of q's shape (its head_dim that of v_cache), dtype, library and device, a plain contiguous array; with
        `return_lse` also lse, ``(batch, heads_q, seqlen_q)`` or packed ``(heads_q, total_q)`` in fp32 (fp64 for fp64
        input), which `combine` takes. A query that sees no key gives 0 and -inf, or the sink. With k and v of JAX
        ``(out, k_cache, v_cache)``, or ``(out, lse, k_cache, v_cache)``: a jit that donates the caches appends in
        place. GPU work is queued on the library's current stream and nothing waits for it; lengths, tables and ranges
        are read on the device, so a CUDA graph can be replayed with others. There are no gradients.

    Raises:
        ArgumentError: an argument is wrong; the message says which and how to fix it. Lengths beyond the capacity,
            numbers of pages and sequences that the cache does not have, and rows appended where another sequence
            appends or has some, are found where the arrays are in host memory, and on a GPU with
            ``CUPYFLASH_DEBUG=1`` in the environment, which then waits for them. Else the kernels clamp numbers: nothing
            beyond the arrays is read or written, and rows that do not fit are not appended.
        UnsupportedError: as `attention`; a tensor that requires grad; derivatives and vmap of JAX.
        CompileError: NVRTC refused a kernel.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> k_cache, v_cache = np.zeros((2, 4, 128, 2, 64), np.float32)
        >>> lengths = np.array([0, 3, 100, 127], np.int32)
        >>> q = rng.standard_normal((4, 1, 8, 64), dtype=np.float32)
        >>> k, v = rng.standard_normal((2, 4, 1, 2, 64), dtype=np.float32)
        >>> attention_with_cache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, causal=True).shape
        (4, 1, 8, 64)
        >>> bool((v_cache[2, 100] == v[2, 0]).all())
        True
    """
    call = make_cache_options(causal, scale, window, softcap, rotary_interleaved, num_splits, batch_invariant)
    if call.window is not None and -1 in call.window:
        options.warn_of_minus_one(call.window)
    want_lse = return_lse if type(return_lse) is bool else options.flag("return_lse", return_lse)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if type(cache_seqlens) is not int:
        arrays["cache_seqlens"] = cache_seqlens
    if k is not None:
        arrays["k"] = k
    if v is not None:
        arrays["v"] = v
    if block_table is not None:
        arrays["block_table"] = block_table
    if cache_batch_idx is not None:
        arrays["cache_batch_idx"] = cache_batch_idx
    if cu_seqlens_q is not None:
        arrays["cu_seqlens_q"] = cu_seqlens_q
    if rotary_cos is not None:
        arrays["rotary_cos"] = rotary_cos
    if rotary_sin is not None:
        arrays["rotary_sin"] = rotary_sin
    if alibi_slopes is not None:
        arrays["alibi_slopes"] = alibi_slopes
    if kv_range is not None:
        arrays["kv_range"] = kv_range
    if sink is not None:
        arrays["sink"] = sink
    if k_scale is not None or v_scale is not None:
        arrays |= {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    if bias is not None:
        arrays["bias"] = bias
    if mask is not None:
        arrays["mask"] = mask
    if block_mask is not None:
        join_cache(block_mask, arrays)
    if score_mod is not None or mask_mod is not None or mod_arrays is not None:
        call = with_mods(arrays, call, score_mod, mask_mod, mod_arrays)
    out, lse, *caches = _forward(arrays, call, None if "cache_seqlens" in arrays else cache_seqlens, want_lse)
    found = (out, lse, *caches) if want_lse else (out, *caches)
    return found if len(found) > 1 else out


def _forward(arrays: dict[str, Any], call: CacheOptions, length: int | None, want_lse: bool) -> tuple[Any, ...]:
    """(out, lse) of arrays of any library, by the names and in the order of `CACHE_ARRAYS`; of JAX's the caches too.

    Args:
        length: in place of cache_seqlens, where that is an int.
        want_lse: else lse may be None.
    """
    if is_tensor(type(arrays["q"])):
        import cupyflash.torch.cached

        found = cupyflash.torch.cached.again(arrays, call, length, want_lse)
        if found is not None:
            return found
    lengths = arrays["cache_seqlens"] if length is None else length
    if type(lengths) is int or (lengths is not None and shape_of(lengths) == ()):
        others = {name: x for name, x in arrays.items() if name != "cache_seqlens"}
        library = common_library_of_all(others)
        lengths = one_length(library, lengths, others)
        if type(lengths) is int:
            arrays, length = others, lengths
        else:
            arrays["cache_seqlens"] = lengths
    else:
        library = common_library_of_all(arrays)
    if library is JAX:
        from .jax import cached as of_jax

        return of_jax.attention_with_cache(arrays, call, length)
    if isinstance(library, Foreign):
        out, lse = _forward(library.adopt(arrays), call, length, want_lse)
        given_back = [None if x is None else library.give_back(x, arrays["q"]) for x in (out, lse)]
        return tuple(given_back)
    if library is TORCH:
        import cupyflash.torch.cached

        return cupyflash.torch.cached.attention_with_cache(arrays, call, length, want_lse)
    return cached.forward(library, arrays, call, length, want_lse=want_lse)
