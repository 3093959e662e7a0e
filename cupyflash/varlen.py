"""Packed sequences of any lengths: `attention_varlen` and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import api, options
from .api import Gradients, wanted_of
from .errors import FROM_ELSEWHERE, ArgumentError
from .options import Options, Window, make_options
from .sequences import Sequences


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Any | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    kv_range: Any | None = None,
    sink: Any | None = None,
    bias: Any | None = None,
    mask: Any | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Any | None = None,
    block_mask: Any | None = None,
    score_mod: str | Callable[..., Any] | None = None,
    mask_mod: str | Callable[..., Any] | None = None,
    mod_arrays: Mapping[str, Any] | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention of sequences of any lengths that lie one behind the other, without padding.

        rows_q = cu_seqlens_q[b] to cu_seqlens_q[b + 1]
        rows_k = cu_seqlens_k[b] to cu_seqlens_k[b + 1], or the first seqused_k[b] of them
        out[rows_q] = attention(q[rows_q], k[rows_k], v[rows_k])    for each sequence b

    Each sequence is attention of its own, computed as by `attention` (FlashAttention-2, Dao 2023): masks are aligned at
    the bottom right by its own lengths, those of rows_q and rows_k.

    Args:
        q: ``(total_q, heads_q, head_dim)``, of the libraries and dtypes that `attention` takes.
        k, v: ``(total_k, heads_k, head_dim)``, of q's library, dtype and device; v, and so out, may have another
            head_dim.
        cu_seqlens_q: ``(batch + 1,)``, int32, of q's library and device: 0, and the lengths added up. Any
            sequence may be empty, and rows may be left over behind the last.
        cu_seqlens_k: the same for the rows of k and v; None if they are those of q. total_k is then total_q.
        max_seqlen_q, max_seqlen_k: the longest lengths, as other libraries ask for them; not needed and not used.
        seqused_k: ``(batch,)``, int32: how many keys of each sequence count, the first ones; None: all.
        causal, scale, window, deterministic, softcap, return_lse: as in `attention`.
        alibi_slopes: as in `attention`, where batch is the number of sequences; distances count by each one's lengths.
        layout: ``"bshd"`` as above, or ``"bhsd"`` for ``(heads, total, head_dim)``; results have the same.
        kv_range: ``(batch, 2)``, int32: as in `attention`, counted from each sequence's own first key; of the keys that
            count. Masks stay aligned by the lengths without it.
        sink: ``(heads_q,)``: as in `attention`, that of all sequences.
        bias, mask: as in `attention`, of any shape that broadcasts to ``(batch, heads_q, max_seqlen_q, max_seqlen_k)``
            with room for the longest sequence's queries and keys that count: query i and key j of sequence b, each
            counted from the sequence's own first, have ``bias[b, h, i, j]``. (1, heads_q, n, n) are T5's biases of
            relative positions. Where both have a length, it is the same. What a bias has beyond a sequence is not read,
            and has a gradient of 0.
        block_mask: as in `attention`, with room for the longest sequence likewise: of each sequence, or of all.
        dropout_p, dropout_seed, score_mod, mask_mod, mod_arrays: as in `attention`; queries and keys count within each
            sequence.

    Returns:
        out, of q's shape, dtype, library and device, a plain contiguous array; with `return_lse` also lse,
        ``(heads_q, total_q)`` in fp32 (fp64 for fp64 input). A query that sees no key gives 0 and -inf, or the
        sink; one that belongs to no sequence gives 0 and -inf. On PyTorch tensors that require grad, out and lse are
        differentiable, once.

    Raises:
        ArgumentError: an argument is wrong; the message says which and how to fix it. Lengths that decrease, reach
            beyond the rows or do not start with 0 are found where the arrays are in host memory, and on a GPU with
            ``CUPYFLASH_DEBUG=1`` in the environment, which then waits for them. Else the kernels clamp them: nothing
            beyond the arrays is read or written, and the results are of no use. So are sequences for which a bias or a
            mask has no room found; else nothing is added to scores beyond a bias, and what a mask hides there is open.
        UnsupportedError, CompileError: as `attention`.

    Example:
        >>> import numpy as np
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 100, 8, 64), dtype=np.float32)
        >>> cu_seqlens = np.array([0, 60, 60, 93], np.int32)  # of 60, 0 and 33 rows; the last 7 belong to none
        >>> attention_varlen(q, k, v, cu_seqlens, causal=True).shape
        (100, 8, 64)
    """
    call = make_options(causal, scale, window, layout, deterministic, softcap, dropout_p)
    _check_habits(call, max_seqlen_q, max_seqlen_k)
    want_lse = options.flag("return_lse", return_lse)
    arrays = {"q": q, "k": k, "v": v, **_places(cu_seqlens_q, cu_seqlens_k, seqused_k, kv_range)}
    brought = {"alibi_slopes": alibi_slopes, "sink": sink, "bias": bias, "mask": mask}
    arrays.update({name: x for name, x in brought.items() if x is not None})
    _check_totals(arrays, cu_seqlens_k is None, call.layout)
    if block_mask is not None:
        call = api.with_mask(arrays, call, block_mask)
    if score_mod is not None or mask_mod is not None or mod_arrays is not None:
        call = api.with_mods(arrays, call, score_mod, mask_mod, mod_arrays)
    out, lse = api.forward(arrays, call, want_lse, dropout_seed)
    return (out, lse) if want_lse else out


def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Any | None = None,
    dlse: Any | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    kv_range: Any | None = None,
    sink: Any | None = None,
    bias: Any | None = None,
    mask: Any | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Any | None = None,
    block_mask: Any | None = None,
    score_mod: str | Callable[..., Any] | None = None,
    mask_mod: str | Callable[..., Any] | None = None,
    mod_arrays: Mapping[str, Any] | None = None,
    gradients_of: str | Iterable[str] = (),
) -> Gradients:
    """Gradients of `attention_varlen`: those of `attention_backward` for each sequence.

    (FlashAttention-2, Dao 2023, algorithm 2).

    Args:
        dout: gradient of the loss with respect to out, of out's shape and dtype.
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, kv_range: the inputs of the forward.
        out, lse: its results, as `attention_varlen(..., return_lse=True)` gave them.
        max_seqlen_q, max_seqlen_k: not needed and not used.
        dlse: gradient of the loss with respect to lse, ``(heads_q, total_q)``; None is zero.
        causal, scale, window, layout, softcap: as in the forward.
        deterministic: bitwise reproducible gradients.
        block_mask, score_mod, mask_mod, mod_arrays: the forward's.
        alibi_slopes, sink, bias, mask, dropout_p, dropout_seed, gradients_of: as in `attention_backward`.

    Returns:
        Gradients(dq, dk, dv), contiguous, of the shapes, dtype, library and device of q, k, v; 0 for rows that belong
        to no sequence and keys that are not used. Those of `gradients_of` are its attributes.

    Raises:
        ArgumentError, UnsupportedError, CompileError: as `attention_varlen`.

    Example:
        >>> import numpy as np
        >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 100, 8, 64), dtype=np.float32)
        >>> cu_seqlens = np.array([0, 60, 100], np.int32)
        >>> out, lse = attention_varlen(q, k, v, cu_seqlens, return_lse=True)
        >>> attention_varlen_backward(dout, q, k, v, out, lse, cu_seqlens).dk.shape
        (100, 8, 64)
    """
    call = make_options(causal, scale, window, layout, deterministic, softcap, dropout_p)
    _check_habits(call, max_seqlen_q, max_seqlen_k)
    arrays = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    brought = {"dlse": dlse, "alibi_slopes": alibi_slopes, "sink": sink, "bias": bias, "mask": mask}
    arrays.update({name: x for name, x in brought.items() if x is not None})
    arrays.update(_places(cu_seqlens_q, cu_seqlens_k, seqused_k, kv_range))
    _check_totals(arrays, cu_seqlens_k is None, call.layout)
    if block_mask is not None:
        call = api.with_mask(arrays, call, block_mask)
    if score_mod is not None or mask_mod is not None or mod_arrays is not None:
        call = api.with_mods(arrays, call, score_mod, mask_mod, mod_arrays)
    wanted = wanted_of(gradients_of, arrays, call.mods)
    return Gradients.of(api.backward(arrays, call, wanted, dropout_seed), call.mods)


def _places(cu_seqlens_q: Any, *others: Any) -> dict[str, Any]:
    """What says where sequences lie and which keys count, by name; cu_seqlens_q whatever it is."""
    return {"cu_seqlens_q": cu_seqlens_q, **Sequences.of(cu_seqlens_q, *others).named()}


def _check_habits(call: Options, max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """What users of other libraries may have meant otherwise, or given for nothing."""
    if call.window is not None and -1 in call.window:
        options.warn_of_minus_one(call.window)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length is not None and options.whole(name, length, "an integer or None") < 0:
            raise ArgumentError(f"{name}: expected an integer of at least 0 or None, got {length}; it may be left out")


def _check_totals(arrays: dict[str, Any], alike: bool, layout: str) -> None:
    """Refuse arrays of different totals whose sequences are said to lie alike."""
    axis = 0 if layout == "bshd" else 1
    try:
        q, k = tuple(arrays["q"].shape), tuple(arrays["k"].shape)
    except FROM_ELSEWHERE:
        raise
    except Exception:  # `run` knows what is wrong with them
        return
    if alike and len(q) == len(k) == 3 and q[axis] != k[axis]:
        raise ArgumentError(
            f"cu_seqlens_k: expected an array, since k has {k[axis]} rows and q has {q[axis]}; without it the "
            "sequences of k lie as those of q"
        )
