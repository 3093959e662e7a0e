"""The public functions. Each is a signature, a docstring, and a few lines that hand the arrays on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import options
from .arrays.adapters import TORCH
from .arrays.imported import is_tensor
from .arrays.libraries import JAX, Foreign, common_library_of_all, common_library_of_three
from .errors import UnsupportedError
from .gradients import Gradients as Gradients
from .gradients import wanted_of as wanted_of
from .launch import run
from .options import Options, Window, make_options
from .seeds import adopted_seed, with_seed


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
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
    """Exact attention in O(seqlen) memory.

        out = softmax(score, over the keys each query sees) v
        lse = ln(sum(exp(score), over the keys each query sees))
        score = scale * q k^T, or softcap * tanh(scale * q k^T / softcap),
                less alibi_slopes[head] * abs(i + seqlen_k - seqlen_q - j) for query i and key j, plus bias

    With a sink, softmax and lse count exp(sink[head]) among those of the scores.

    Computed by tiles with an online softmax (FlashAttention, Dao et al. 2022; FlashAttention-2, Dao 2023).

    Args:
        q: ``(batch, seqlen_q, heads_q, head_dim)``: a CuPy, NumPy, PyTorch or JAX array, or any other with
            ``__dlpack__``. fp16, bf16 or fp32 on the GPU (on Turing fp16); also fp64 on the CPU. head_dim is a multiple
            of 8 up to 256. Of strides the last must be 1. A subclass counts as the plain array it is (parameters,
            memory maps); one with rules of its own (masks, units) is refused, except torch's DTensor and FakeTensor.
        k, v: ``(batch, seqlen_k, heads_k, head_dim)``, of q's library, dtype and device. heads_q is a multiple of
            heads_k: query head h uses key head ``h // (heads_q // heads_k)``. v, and so out, may have another head_dim.
        causal: query i sees keys up to ``i + seqlen_k - seqlen_q`` (aligned at the bottom right).
        scale: factor of the scores, a finite number; ``head_dim ** -0.5`` by default.
        window: ``(left, right)``, integers or None: query i sees keys from ``i + seqlen_k - seqlen_q - left`` to
            ``i + seqlen_k - seqlen_q + right``; None is unbounded, negative bounds shift the window. A bound of -1
            warns once, since to flash-attn it means unbounded.
        layout: ``"bshd"`` as above, or ``"bhsd"`` for ``(batch, heads, seqlen, head_dim)``; results have the same.
        deterministic: make the gradients bitwise reproducible, at some cost; the forward always is.
        softcap: what no score's magnitude exceeds, 0.001 to 1000 (50 in Gemma 2, 30 in Grok-1); None for no cap.
        alibi_slopes: ``(heads_q,)`` or ``(batch, heads_q)``, fp32 (fp64 for fp64 input), of q's library and device, any
            strides: the slopes of ALiBi (Press et al. 2022). Distances count from the bottom right, as masks do. On
            PyTorch tensors that require grad, they are learned.
        kv_range: ``(batch, 2)``, int32, of q's library and device: the queries of sequence b see none but the keys
            ``kv_range[b, 0]`` to ``kv_range[b, 1]``, those that are not padding, left or right. causal and window stay
            where they are, aligned by seqlen_q and seqlen_k: with causal, query i of a batch padded on the left sees
            keys ``kv_range[b, 0]`` to i. Blocks of keys beyond are not read. None: all keys.
        sink: ``(heads_q,)``, fp32 (fp64 for fp64 input), of q's library and device, any strides: a logit of each head
            that the softmax's denominator counts as the score of one more key whose v is 0 (attention sinks, as gpt-oss
            has them). -inf is none. On PyTorch tensors that require grad, and in JAX, they are learned.
        bias: added to the scores, of any shape that broadcasts to ``(batch, heads_q, seqlen_q, seqlen_k)``, whatever
            the layout of q; of q's dtype, or fp32 beside 16 bits; of q's library and device, any strides. It is read
            where it lies and never expanded. -inf hides a key, whatever k and v hold there; a query whose scores are
            all -inf sees none. (Keys that are hidden by -inf are still computed: causal, window and kv_range leave
            them out.) On PyTorch tensors that require grad, and in JAX, it is learned.
        mask: of bool, likewise: True where a key is visible; tiles of 64 by 64 without any are not computed, but
            beside a `block_mask`. Beside one, or a bias, what it gives is as by a bias of -inf.
        dropout_p: the probability with which each element of the softmax is dropped, from 0 on and below 1, counted in
            steps of 2^-15; what is kept is multiplied by 1 / (1 - dropout_p). lse is that without dropout.
        dropout_seed: what decides, by sequence, head, query and key alone, which elements are dropped (Philox-4x32): an
            integer; an int64 array on q's device of one element or two, a seed and an offset, read when the kernels
            run, so that a CUDA graph can advance it; or, in JAX, a key of jax.random. None draws one, with PyTorch from
            its generator, another at each replay of a graph; with NumPy and CuPy from NumPy's global one, which
            `attention_backward` cannot know; JAX needs one.
        block_mask: a `BlockMask`, which `cupyflash.masks` makes, or one of torch's flex_attention: which keys each
            query sees, beside what causal, window and kv_range hide; tiles as of a mask. Batch and heads may share it.
        score_mod: what becomes of each score, between softcap and ALiBi, before a bias: a C++ expression of ``score``,
            ``b``, ``h``, ``q``, ``k`` (sequence, head of q, query, key) and of `mod_arrays`, such as
            ``"score + table[h, max(0, q - k)]"``, or a Python function of these, as FlexAttention takes them, which is
            called with symbols: ``lambda score, b, h, q, k: score - abs(q - k)``. It becomes part of the kernel, and so
            does its derivative by the score. -inf, whatever the score, hides a key.
        mask_mod: whether a key is visible, likewise, of ``b``, ``h``, ``q``, ``k``; tiles as of a mask, where that has
            them and their bits have room (docs/mods.md). Keys that a score_mod hides are computed.
        mod_arrays: the arrays that mods read, by name, of q's library and device: fp32, fp64, fp16, bf16, int32, int64
            or bool, 1 to 4 dimensions, at most 4 of them. An index beyond an array counts as the nearest in it. A
            function brings those that its closure or module holds. On PyTorch tensors that require grad, floats that
            score_mod reads are learned.
        return_lse: return ``(out, lse)`` instead of out.

    Options are taken by their value: a NumPy scalar or a 0-d array of any library (one on a GPU is waited for) counts
    as the number or bool in it.

    Returns:
        out, of q's shape, dtype, library and device, a plain contiguous array; with `return_lse` also lse,
        ``(batch, heads_q, seqlen_q)`` in fp32 (fp64 for fp64 input). A query that sees no key gives 0 and -inf, or the
        sink.
        GPU work is queued on the library's current stream, and nothing waits for it, except for NumPy arrays and for
        libraries that are reached through DLPack. On PyTorch tensors that require grad, and in JAX, inside jit too, out
        and lse are differentiable, once. Under torch's autocast q, k and v are cast as those of its own attention are.

    Raises:
        ArgumentError: an argument is wrong; the message says which and how to fix it. A kv_range beyond the keys, or
            that ends before it starts, is found where the arrays are in host memory, and on a GPU with
            ``CUPYFLASH_DEBUG=1`` in the environment, which then waits for it. Else the kernels clamp it.
        UnsupportedError: no kernel, GPU or compiler for it; or a tracer, a transform or a derivative (second, forward
            mode, of scale) that would get a wrong answer. (JAX refuses forward mode by a TypeError of its own.)
        CompileError: NVRTC refused a kernel.

    Example:
        >>> import numpy as np
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 128, 8, 64), dtype=np.float32)
        >>> attention(q, k, v, causal=True).shape
        (1, 128, 8, 64)
    """
    call = make_options(causal, scale, window, layout, deterministic, softcap, dropout_p)
    bounds = call.window
    if bounds is not None and -1 in bounds:
        options.warn_of_minus_one(bounds)
    want_lse = return_lse if type(return_lse) is bool else options.flag("return_lse", return_lse)
    arrays = {"q": q, "k": k, "v": v}
    if alibi_slopes is not None:
        arrays["alibi_slopes"] = alibi_slopes
    if kv_range is not None:
        arrays["kv_range"] = kv_range
    if sink is not None:
        arrays["sink"] = sink
    if bias is not None:
        arrays["bias"] = bias
    if mask is not None:
        arrays["mask"] = mask
    if block_mask is not None:
        call = with_mask(arrays, call, block_mask)
    if score_mod is not None or mask_mod is not None or mod_arrays is not None:
        call = with_mods(arrays, call, score_mod, mask_mod, mod_arrays)
    out, lse = forward(arrays, call, want_lse, dropout_seed)
    return (out, lse) if want_lse else out


def with_mods(arrays: dict[str, Any], call: Any, score_mod: Any, mask_mod: Any, mod_arrays: Any) -> Any:
    """The options of any call with these mods, whose arrays join the others by the names of the table of arrays."""
    from .mods import given

    if type(arrays["q"]).__name__ == "DTensor":
        raise UnsupportedError("score_mod: expected none for DTensors, whose parts do not know where they lie")
    if is_tensor(type(arrays["q"])):
        door_of_torch().vet_mods(score_mod, mask_mod)
    text, brought = given.bind(score_mod, mask_mod, mod_arrays, arrays["q"])
    arrays.update(brought)
    return call._replace(mods=text)


def with_mask(arrays: dict[str, Any], call: Options, block_mask: Any) -> Options:
    """The options of a call with this block mask, whose arrays join the others by the names of the table of arrays."""
    from . import mask_arrays

    return call._replace(tall=mask_arrays.join(block_mask, arrays, call.layout))


def forward(arrays: dict[str, Any], call: Options, want_lse: bool, seed: Any = None) -> tuple[Any, Any]:
    """(out, lse) of arrays of any library, by the names of the table of arrays; `seed`: of dropout, as it was given."""
    library = common_library_of_three(*arrays.values()) if len(arrays) == 3 else common_library_of_all(arrays)
    arrays = with_seed(arrays, library, call, seed, draw=True) if call.dropout_p else arrays
    if library is TORCH:
        return door_of_torch().attention(arrays, call, want_lse)
    if library is JAX:
        from .jax import op

        return op.attention_of(arrays, call, want_lse)
    if isinstance(library, Foreign):
        out, lse = forward(library.adopt(arrays), call, want_lse, adopted_seed(library, seed))
        return library.give_back(out, arrays["q"]), library.give_back(lse, arrays["q"]) if want_lse else None
    return run.forward(library, arrays, call, want_lse)


def door_of_torch() -> Any:
    """Our module that takes tensors. Imported here and not kept: a program of torch.compile that sees a variable change
    is compiled again. Costs 0.2 us."""
    import cupyflash.torch.autograd

    return cupyflash.torch.autograd


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
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
    """Gradients of `attention`, by recomputing the probabilities from lse, in O(seqlen) memory.

        P = exp(score - lse),  dv = P^T dout,  dS = P * (dout v^T - rowsum(dout * out) + dlse),
        dq = scale * dS k,  dk = scale * dS^T q

    with P multiplied by 0 where it was dropped and else by 1 / (1 - dropout_p) in dv, and dout v^T likewise;
    with ``dS * (1 - tanh(scale * q k^T / softcap)^2)`` for dS in dq and dk where there is a softcap, and where there is
    a score_mod times its derivative; and if wanted ``dalibi_slopes = -sum(dS * abs(i + seqlen_k - seqlen_q - j))``,
    ``dsink = -sum(exp(sink - lse) * (rowsum(dout * out) - dlse))``, ``dbias = dS``, summed where bias is broadcast, and
    of an element of mod_arrays ``sum(dS * d score_mod / d read)`` over all reads of it

    (FlashAttention-2, Dao 2023, algorithm 2).

    Args:
        dout: gradient of the loss with respect to out, of out's shape and dtype.
        q, k, v, kv_range, block_mask, score_mod, mask_mod, mod_arrays: the inputs of the forward.
        out, lse: its results, as `attention(..., return_lse=True)` gave them.
        dlse: gradient of the loss with respect to lse, ``(batch, heads_q, seqlen_q)``; None is zero.
        causal, scale, window, layout, softcap: as in the forward, and converted as there.
        deterministic: bitwise reproducible gradients.
        alibi_slopes, sink, bias, mask, dropout_p, dropout_seed: as in the forward; the seed must be given.
        gradients_of: the optional arrays, one or several names, whose gradients are wanted too: ``"alibi_slopes"``,
            ``"sink"``, ``"bias"``, and names of mod_arrays that are of floats. The latter are summed up atomically on a
            GPU, and not there with deterministic.

    Returns:
        Gradients(dq, dk, dv), contiguous, of the shapes, dtype, library and device of q, k, v; 0 for queries and
        keys that take no part. Those of `gradients_of` are its attributes, ``dalibi_slopes``, ``dsink``, ``dbias`` and,
        by their names there, ``dmod_arrays``, each of the shape and dtype of its array.

    Raises:
        ArgumentError, UnsupportedError, CompileError: as `attention`.

    Example:
        >>> import numpy as np
        >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 128, 8, 64), dtype=np.float32)
        >>> out, lse = attention(q, k, v, return_lse=True)
        >>> attention_backward(dout, q, k, v, out, lse).dq.shape
        (1, 128, 8, 64)
    """
    call = make_options(causal, scale, window, layout, deterministic, softcap, dropout_p)
    bounds = call.window
    if bounds is not None and -1 in bounds:
        options.warn_of_minus_one(bounds)
    arrays = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    if not (dlse is alibi_slopes is kv_range is sink is bias is mask is None):
        brought = {"dlse": dlse, "alibi_slopes": alibi_slopes, "kv_range": kv_range, "sink": sink}
        brought.update({"bias": bias, "mask": mask})
        arrays.update({name: x for name, x in brought.items() if x is not None})
    if block_mask is not None:
        call = with_mask(arrays, call, block_mask)
    if score_mod is not None or mask_mod is not None or mod_arrays is not None:
        call = with_mods(arrays, call, score_mod, mask_mod, mod_arrays)
    wanted = wanted_of(gradients_of, arrays, call.mods)
    return Gradients.of(backward(arrays, call, wanted, dropout_seed), call.mods)


def backward(arrays: dict[str, Any], call: Options, wanted: tuple[str, ...], seed: Any = None) -> dict[str, Any]:
    """The gradients by name, of arrays of any library, by the names of the table of arrays; `seed` as in `forward`."""
    library = common_library_of_all(arrays)
    arrays = with_seed(arrays, library, call, seed, draw=False)
    if library is TORCH:
        return door_of_torch().backward(arrays, call, wanted)
    if library is JAX:
        from .jax import op

        return op.backward_of(arrays, call, wanted)
    if isinstance(library, Foreign):
        grads = backward(library.adopt(arrays), call, wanted, adopted_seed(library, seed))
        return {name: library.give_back(x, arrays["q"]) for name, x in grads.items()}
    return run.backward(library, arrays, call, wanted)
