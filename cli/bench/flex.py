"""FlexAttention, compiled, as a peer of `bench`: each feature as the function that it takes for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from .. import block_masks
from . import peers as bench_peers
from .cell import Cell
from .mods import MODS, MaskMod, ScoreMod


def flex_is_missing() -> bool:
    """Whether this torch has no flex_attention."""
    return not bench_peers.has("torch.nn.attention.flex_attention")


def flex(cell: Cell, device: str, given: Mapping[str, Any]) -> Callable[[Any, Any, Any], Any]:
    """(q, k, v) -> out in bshd, with what `Bench.brought` made. The block mask is made here; the first call compiles.
    Sinks scale out, by lse.
    """
    if cell.dropout:
        raise NotImplementedError("flex_attention has no dropout")
    import torch
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask

    # What a compiled backward saved is kept, so that one graph can be run back many times.
    config.donated_buffer = False
    compiled = _compiled()
    modded = with_mod(tanh_cap(cell.softcap), cell.mod, given.get("mod_arrays"))
    score = with_bias(with_slopes(modded, given.get("alibi_slopes")), given.get("bias"))
    options: dict[str, Any] = {"score_mod": score, "enable_gqa": cell.heads_k != cell.heads}
    if (mask := seen(cell, device, given)) is not None:
        dims = cell.mask + "b" * bool(cell.padded)
        own = [n if d in dims else None for d, n in (("b", cell.batch), ("h", cell.heads))]
        options["block_mask"] = create_block_mask(mask, *own, cell.seqlen, cell.seqlen, device=device)
    sinks = given.get("sink")

    def with_sinks(q: Any, k: Any, v: Any) -> Any:
        out, lse = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options, **_with_lse())
        lse = getattr(lse, "lse", lse)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)).transpose(1, 2)  # type: ignore[index]

    return _in_bshd(compiled, options) if sinks is None else with_sinks


def flex_over_cache(cell: Any, device: str) -> Callable[[Any, Any, Any], Any]:
    """The same of one query, that of the last row, to all keys of a cache: of a `DecodeCell`."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    options: dict[str, Any] = {"enable_gqa": cell.heads_k != cell.heads}
    if cell.block_mask:
        last = slice(cell.capacity - 1, cell.capacity)
        shown = torch.from_numpy(cell.mask().sees(last, slice(0, cell.capacity))[0, 0, 0]).to(device)
        options["block_mask"] = create_block_mask(
            lambda b, h, q, k: shown[k], None, None, 1, cell.capacity, device=device
        )
    return _in_bshd(_compiled(), options)


def _compiled() -> Callable[..., Any]:
    """Each cell has functions of its own, and torch compiles one for eight of them at most."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    found: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return found


def _in_bshd(compiled: Callable[..., Any], options: Mapping[str, Any]) -> Callable[[Any, Any, Any], Any]:
    def peer(q: Any, k: Any, v: Any) -> Any:
        return compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options).transpose(1, 2)

    return peer


def _with_lse() -> dict[str, Any]:
    """What asks flex_attention for lse, too: before torch 2.9 another argument."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    return {"return_aux": module.AuxRequest(lse=True)} if hasattr(module, "AuxRequest") else {"return_lse": True}


def visible(cell: Cell) -> MaskMod | None:
    """(batch, head, query, key) -> whether the query sees the key, of numbers or tensors; None where all do."""
    window = cell.window
    if window is None:
        return (lambda b, h, q, k: k <= q) if cell.causal else None
    if cell.causal:
        return lambda b, h, q, k: (k <= q) & (k >= q - window)
    return lambda b, h, q, k: k >= q - window


def seen(cell: Cell, device: str, given: Mapping[str, Any]) -> MaskMod | None:
    """The same with what a mask, a range of keys and a block mask hide."""
    of_arrays = _of_mask(given.get("mask")), _of_ranges(given.get("kv_range"))
    shown = MODS[cell.mod].shown if cell.mod else None
    mods = [x for x in (visible(cell), *of_arrays, _of_blocks(cell, device), shown) if x is not None]
    if not mods:
        return None

    def every(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = mods[0](b, h, q, k)
        for mod in mods[1:]:
            found = found & mod(b, h, q, k)
        return found

    return mods[0] if len(mods) == 1 else every


def at(x: Any) -> MaskMod:
    """(batch, head, query, key) -> the element of an array that broadcasts."""
    own = [n != 1 for n in x.shape]

    def element(b: Any, h: Any, q: Any, k: Any) -> Any:
        return x[tuple(i if is_own else i * 0 for i, is_own in zip((b, h, q, k), own, strict=True))]

    return element


def _of_mask(mask: Any | None) -> MaskMod | None:
    return None if mask is None else at(mask)


def _of_ranges(ranges: Any | None) -> MaskMod | None:
    return None if ranges is None else lambda b, h, q, k: (k >= ranges[b, 0]) & (k < ranges[b, 1])


def _of_blocks(cell: Cell, device: str) -> MaskMod | None:
    """Looked up by blocks where they are random, else by elements: an array of booleans, seqlen by seqlen."""
    if not cell.block_mask:
        return None
    import torch

    if cell.block_mask in block_masks.NAMED:
        elements = torch.from_numpy(block_masks.make(cell.block_mask, cell.seqlen, cell.seqlen).of(0, 0)).to(device)
        return lambda b, h, q, k: elements[q, k]
    blocks = block_masks.random_blocks(float(cell.block_mask), cell.seqlen, cell.seqlen)
    there = torch.from_numpy(blocks).to(device)
    return lambda b, h, q, k: there[q // block_masks.BLOCK, k // block_masks.BLOCK]


def with_mod(capped: ScoreMod | None, name: str, arrays: Mapping[str, Any] | None) -> ScoreMod | None:
    """(score, batch, head, query, key) -> what a mod of `MODS` makes of the capped score; as it was without one."""
    function = MODS[name].function if name else None
    if function is None:
        return capped
    mod, cap = function(arrays or {}), capped or (lambda score, b, h, q, k: score)
    return lambda score, b, h, q, k: mod(cap(score, b, h, q, k), b, h, q, k)


def with_slopes(capped: ScoreMod | None, slopes: Any | None) -> ScoreMod | None:
    """(score, batch, head, query, key) -> the capped score less ALiBi's; as it was without slopes."""
    if slopes is None:
        return capped
    cap = capped or (lambda score, b, h, q, k: score)
    return lambda score, b, h, q, k: cap(score, b, h, q, k) - slopes[h] * (q - k).abs()


def with_bias(scored: ScoreMod | None, bias: Any | None) -> ScoreMod | None:
    """The same with a bias added."""
    if bias is None:
        return scored
    before, element = scored or (lambda score, b, h, q, k: score), at(bias)
    return lambda score, b, h, q, k: before(score, b, h, q, k) + element(b, h, q, k)


def tanh_cap(softcap: float | None) -> ScoreMod | None:
    """(score, batch, head, query, key) -> softcap * tanh(score / softcap); None without a softcap."""
    if softcap is None:
        return None
    return lambda score, b, h, q, k: softcap * (score / softcap).tanh()
