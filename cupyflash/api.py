"""The public functions. Each is a signature, a docstring, and a few lines that hand the arrays on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import options
from .arrays.adapters import TORCH
from .arrays.libraries import Foreign, common_library, common_library_of_three
from .launch import run
from .operands import BACKWARD
from .options import Options, Window, make_options


class _Required(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


class Gradients(_Required):
    """Gradients with respect to q, k and v, of their shapes and dtypes; those of optional arrays are attributes."""

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Gradients:
        """Gradients by their names in the table of arrays."""
        found = cls(*(named[name] for name in cls._fields))
        for name in named.keys() - set(cls._fields):
            setattr(found, name, named[name])
        return found


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
    return_lse: bool = False,
) -> Any:
    """Exact attention in O(seqlen) memory.

        out = softmax(score, over the keys each query sees) v
        lse = ln(sum(exp(score), over the keys each query sees))
        score = scale * q k^T, or softcap * tanh(scale * q k^T / softcap)

    Computed by tiles with an online softmax (FlashAttention, Dao et al. 2022; FlashAttention-2, Dao 2023).

    Args:
        q: ``(batch, seqlen_q, heads_q, head_dim)``: a CuPy, NumPy, PyTorch or JAX array, or any other with
            ``__dlpack__``. fp16 or bf16 on the GPU; also fp32 and fp64 on the CPU. head_dim is a multiple of 8 up to
            256. Any strides are fine as long as the last is 1. A subclass counts as the plain array it is (parameters,
            memory maps); one with rules of its own (masks, units) is refused, except torch's DTensor and FakeTensor.
        k, v: ``(batch, seqlen_k, heads_k, head_dim)``, of q's library, dtype and device. heads_q is a multiple of
            heads_k: query head h uses key head ``h // (heads_q // heads_k)``.
        causal: query i sees keys up to ``i + seqlen_k - seqlen_q`` (aligned at the bottom right).
        scale: factor of the scores, a finite number; ``head_dim ** -0.5`` by default.
        window: ``(left, right)``, integers or None: query i sees keys from ``i + seqlen_k - seqlen_q - left`` to
            ``i + seqlen_k - seqlen_q + right``; None is unbounded, negative bounds shift the window. A bound of -1
            warns once, since to flash-attn it means unbounded.
        layout: ``"bshd"`` as above, or ``"bhsd"`` for ``(batch, heads, seqlen, head_dim)``; results have the same.
        deterministic: make the gradients bitwise reproducible, at some cost; the forward always is.
        softcap: what no score's magnitude exceeds, 0.001 to 1000 (50 in Gemma 2, 30 in Grok-1); None for no cap.
        return_lse: return ``(out, lse)`` instead of out.

    Options are taken by their value: a NumPy scalar or a 0-d array of any library (one on a GPU is waited for) counts
    as the number or bool in it.

    Returns:
        out, of q's shape, dtype, library and device, a plain contiguous array; with `return_lse` also lse,
        ``(batch, heads_q, seqlen_q)`` in fp32 (fp64 for fp64 input). A query that sees no key gives 0 and -inf.
        GPU work is queued on the library's current stream, and nothing waits for it, except for NumPy arrays and for
        libraries that are reached through DLPack (JAX). On PyTorch tensors that require grad, out and lse are
        differentiable, once; under autocast q, k and v are cast as those of torch's own attention are.

    Raises:
        ArgumentError: an argument is wrong; the message says which and how to fix it.
        UnsupportedError: no kernel, GPU or compiler for it; or a tracer, a transform or a derivative (second, forward
            mode, of scale) that would get a wrong answer.
        CompileError: NVRTC refused a kernel.

    Example:
        >>> import numpy as np
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 128, 8, 64), dtype=np.float32)
        >>> attention(q, k, v, causal=True).shape
        (1, 128, 8, 64)
    """
    call = make_options(causal, scale, window, layout, deterministic, softcap)
    bounds = call.window
    if bounds is not None and -1 in bounds:
        options.warn_of_minus_one(bounds)
    want_lse = return_lse if type(return_lse) is bool else options.flag("return_lse", return_lse)
    out, lse = _forward(q, k, v, call, want_lse)
    return (out, lse) if want_lse else out


def _forward(q: Any, k: Any, v: Any, call: Options, want_lse: bool) -> tuple[Any, Any]:
    library = common_library_of_three(q, k, v)
    if library is TORCH:
        return door_of_torch().attention({"q": q, "k": k, "v": v}, call, want_lse)
    if isinstance(library, Foreign):
        adopted = library.adopt({"q": q, "k": k, "v": v})
        out, lse = _forward(**adopted, call=call, want_lse=want_lse)
        return library.give_back(out, q), library.give_back(lse, q) if want_lse else None
    return run.forward(library, {"q": q, "k": k, "v": v}, call, want_lse)


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
) -> Gradients:
    """Gradients of `attention`, by recomputing the probabilities from lse, in O(seqlen) memory.

        P = exp(score - lse),  dv = P^T dout,  dS = P * (dout v^T - rowsum(dout * out) + dlse),
        dq = scale * dS k,  dk = scale * dS^T q

    with ``dS * (1 - tanh(scale * q k^T / softcap)^2)`` for dS where there is a softcap

    (FlashAttention-2, Dao 2023, algorithm 2).

    Args:
        dout: gradient of the loss with respect to out, of out's shape and dtype.
        q, k, v: the inputs of the forward.
        out, lse: its results, as `attention(..., return_lse=True)` gave them.
        dlse: gradient of the loss with respect to lse, ``(batch, heads_q, seqlen_q)``; None is zero.
        causal, scale, window, layout, softcap: as in the forward, and converted as there.
        deterministic: bitwise reproducible gradients.

    Returns:
        Gradients(dq, dk, dv), contiguous, of the shapes, dtype, library and device of q, k, v.

    Raises:
        ArgumentError, UnsupportedError, CompileError: as `attention`.

    Example:
        >>> import numpy as np
        >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 128, 8, 64), dtype=np.float32)
        >>> out, lse = attention(q, k, v, return_lse=True)
        >>> attention_backward(dout, q, k, v, out, lse).dq.shape
        (1, 128, 8, 64)
    """
    call = make_options(causal, scale, window, layout, deterministic, softcap)
    bounds = call.window
    if bounds is not None and -1 in bounds:
        options.warn_of_minus_one(bounds)
    return Gradients.of(_backward({"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse}, call))


def _backward(named: dict[str, Any], call: Options) -> dict[str, Any]:
    given = {name: x for name, x in named.items() if x is not None or name not in BACKWARD.optional}
    library = common_library(**given)
    if library is TORCH:
        return door_of_torch().backward(given, call)
    if isinstance(library, Foreign):
        grads = _backward(library.adopt(given), call)
        return {name: library.give_back(x, named["q"]) for name, x in grads.items()}
    return run.backward(library, given, call)
