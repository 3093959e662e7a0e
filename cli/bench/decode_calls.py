"""One call of each contestant of `bench --decode`, on arrays of its own."""

from __future__ import annotations

import functools
from typing import Any

from cupyflash import api, kvcache, varlen

from .cell import OURS, SM80
from .clocks import Work
from .decode_arrays import arrays, as_dense, cu_seqlens
from .decode_cell import COPY, PARTS, WIDE, DecodeCell
from .family import by_family
from .flex import flex_over_cache
from .lengths import DENSE
from .reading import read_both
from .sdpa import BACKENDS, sdpa
from .work import Bench


def call_of(bench: Bench, name: str, cell: DecodeCell) -> Work:
    """A function of no arguments.

    Raises:
        NotImplementedError: a peer lacks what the cell asks for.
    """
    if name == SM80:
        return by_family(SM80, call_of(bench, OURS, cell))
    if name in (OURS, WIDE):
        cell = cell.read_by(name)
        return functools.partial(kvcache.attention_with_cache, **arrays(bench, cell), **options(cell))
    own = {COPY: read_both, DENSE: _dense, PARTS: _parts}
    return own[name](bench, cell) if name in own else _peer(bench, name, cell)


def options(cell: DecodeCell) -> dict[str, Any]:
    """Those of ours that are no arrays."""
    window = None if cell.window is None else (cell.window, None)
    found = {"causal": True, "window": window, "softcap": cell.softcap}
    return found | {"block_mask": cell.mask()} if cell.block_mask else found


def _dense(bench: Bench, cell: DecodeCell) -> Work:
    """`attention` of the same arrays, which knows no cache; of different lengths `attention_varlen`."""
    if cell.page:
        raise NotImplementedError(f"{DENSE}, our own call without a cache, has no pages")
    if cell.block_mask:
        raise NotImplementedError(f"{DENSE} has block masks whose queries count from its own first")
    given = arrays(bench, cell.read_by(DENSE))
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    brought = {name: given[name] for name in ("alibi_slopes", "sink", "kv_range") if name in given}
    if not (cell.ragged or cell.chunk):
        return functools.partial(api.attention, q, k, v, **options(cell), **brought)
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    lengths = {
        "cu_seqlens_q": cu_seqlens(bench, cell.queries),
        "cu_seqlens_k": cu_seqlens(bench, [cell.capacity] * cell.batch),
        "seqused_k": given["cache_seqlens"],
    }
    return functools.partial(varlen.attention_varlen, q, k, v, **lengths, **options(cell), **brought)


def _parts(bench: Bench, cell: DecodeCell) -> Work:
    """All sequences but the last in one call, and the last one, whose queries are more, in another."""
    if not cell.chunk:
        raise NotImplementedError(f"{PARTS} are two calls in place of one whose sequences differ in queries")
    given, last = arrays(bench, cell), cell.batch - 1
    row, q = last * cell.seqlen_q, given["q"]
    queries = q[:row].reshape(last, cell.seqlen_q, *q.shape[1:]), q[row:].reshape(1, cell.chunk, *q.shape[1:])
    own = {"cache_seqlens", "kv_range", "block_table"} | (set() if cell.page else {"k_cache", "v_cache"})
    calls = []
    for q, sequences in zip(queries, (slice(last), slice(last, None)), strict=True):
        part = {name: x[sequences] if name in own else x for name, x in given.items() if name != "cu_seqlens_q"}
        calls.append(functools.partial(kvcache.attention_with_cache, **(part | {"q": q}), **options(cell)))
    return lambda: [call() for call in calls]


def _peer(bench: Bench, name: str, cell: DecodeCell) -> Work:
    if lacks := peers_lack(name, cell):
        raise NotImplementedError(lacks)
    given = arrays(bench, cell.read_by(name))
    if name == "flex":
        return functools.partial(
            flex_over_cache(cell, str(given["q"].device)), *(given[x] for x in ("q", "k_cache", "v_cache"))
        )
    return functools.partial(sdpa(name, as_dense(cell), {}), *(given[x] for x in ("q", "k_cache", "v_cache")))


def peers_lack(name: str, cell: DecodeCell) -> str:
    """What of a call a peer has not; "" if it has all."""
    if name == "flex":
        return "" if cell.is_plain else "flex is timed over a cache with one query a sequence and a block mask at most"
    if name not in BACKENDS:
        return f"{name} is not timed over a cache"
    wanted = {"lengths": cell.ragged or cell.chunk, "pages": cell.page,
              "windows, but for an explicit mask": cell.window is not None, "softcap": cell.softcap is not None,
              "ALiBi": cell.alibi, "sinks": cell.sink, "ranges of keys": cell.kv_range,
              "block masks": cell.block_mask,
              "causal mask at the bottom right": cell.seqlen_q > 1}  # fmt: skip
    lacks = next((what for what, is_asked in wanted.items() if is_asked), "")
    return lacks and f"torch's scaled_dot_product_attention has no {lacks}"
