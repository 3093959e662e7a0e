"""The public functions. Each is a signature, a docstring, and a few lines that hand the arrays on."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import device, jit, run
from .arrays import TORCH
from .device import Device
from .errors import DeviceError
from .libraries import Foreign, common_library
from .plan import backward_plan, forward_plan
from .prepare import Options
from .problem import Window, make_problem
from .variant import Variant


class Gradients(NamedTuple):
    """Gradients with respect to q, k and v, of their shapes and dtypes."""

    dq: Any
    dk: Any
    dv: Any


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
    return_lse: bool = False,
) -> Any:
    """Exact attention in O(seqlen) memory.

        out = softmax(scale * q k^T, over the keys each query sees) v
        lse = ln(sum(exp(scale * q k^T), over the keys each query sees))

    Computed by tiles with an online softmax (FlashAttention, Dao et al. 2022; FlashAttention-2, Dao 2023).

    Args:
        q: ``(batch, seqlen_q, heads_q, head_dim)``: a CuPy, NumPy, PyTorch or JAX array, or any other with
            ``__dlpack__``. fp16 or bf16 on the GPU; also fp32 and fp64 on the CPU. head_dim is a multiple of 8 up to
            256. Any strides are fine as long as the last is 1.
        k, v: ``(batch, seqlen_k, heads_k, head_dim)``, of q's library, dtype and device. heads_q is a multiple of
            heads_k: query head h uses key head ``h // (heads_q // heads_k)``.
        causal: query i sees keys up to ``i + seqlen_k - seqlen_q`` (aligned at the bottom right).
        scale: factor of the scores; ``head_dim ** -0.5`` by default.
        window: ``(left, right)``: query i sees keys from ``i + seqlen_k - seqlen_q - left`` to
            ``i + seqlen_k - seqlen_q + right``; None is unbounded, negative bounds shift the window.
        layout: ``"bshd"`` as above, or ``"bhsd"`` for ``(batch, heads, seqlen, head_dim)``; results have the same.
        deterministic: make the gradients bitwise reproducible, at some cost; the forward always is.
        return_lse: return ``(out, lse)`` instead of out.

    Returns:
        out, of q's shape, dtype, library and device, contiguous; with `return_lse` also lse,
        ``(batch, heads_q, seqlen_q)`` in fp32 (fp64 for fp64 input). A query that sees no key gives 0 and -inf.
        GPU work is queued on the library's current stream, and nothing waits for it, except for NumPy arrays and for
        libraries that are reached through DLPack (JAX). On PyTorch tensors that require grad, out and lse are
        differentiable.

    Raises:
        ArgumentError: an argument is wrong; the message says which and how to mend it.
        UnsupportedError: no kernel, GPU or compiler for it.
        CompileError: NVRTC refused a kernel.

    Example:
        >>> import numpy as np
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 128, 8, 64), dtype=np.float32)
        >>> attention(q, k, v, causal=True).shape
        (1, 128, 8, 64)
    """
    options = Options(causal, scale, window, layout, deterministic)
    out, lse = _forward(q, k, v, options, return_lse)
    return (out, lse) if return_lse else out


def _forward(q: Any, k: Any, v: Any, options: Options, want_lse: bool) -> tuple[Any, Any]:
    library = common_library(q=q, k=k, v=v)
    if library is TORCH:
        return _torch_attention()(q, k, v, options, want_lse)
    if isinstance(library, Foreign):
        adopted = (library.adopt("q", q), library.adopt("k", k), library.adopt("v", v))
        out, lse = _forward(*adopted, options, want_lse)
        return library.give_back(out), library.give_back(lse) if want_lse else None
    return run.forward(library, q, k, v, options, want_lse)


@functools.cache
def _torch_attention() -> Any:
    from . import torch

    return torch.attention


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
) -> Gradients:
    """Gradients of `attention`, by recomputing the probabilities from lse, in O(seqlen) memory.

        P = exp(scale * q k^T - lse),  dv = P^T dout,  dS = P * (dout v^T - rowsum(dout * out) + dlse),
        dq = scale * dS k,  dk = scale * dS^T q

    (FlashAttention-2, Dao 2023, algorithm 2).

    Args:
        dout: gradient of the loss with respect to out, of out's shape and dtype.
        q, k, v: the inputs of the forward.
        out, lse: its results, as `attention(..., return_lse=True)` gave them.
        dlse: gradient of the loss with respect to lse, ``(batch, heads_q, seqlen_q)``; None is zero.
        causal, scale, window, layout: as in the forward.
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
    options = Options(causal, scale, window, layout, deterministic)
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        named["dlse"] = dlse
    library = common_library(**named)
    if not isinstance(library, Foreign):
        return Gradients(*run.backward(library, dout, q, k, v, out, lse, dlse, options))
    native = {name: library.adopt(name, x) for name, x in named.items()}
    grads = attention_backward(**native, **options._asdict())
    return Gradients(*(library.give_back(g) for g in grads))


def warmup(
    *,
    dtypes: Iterable[str] = ("bf16", "fp16"),
    head_dims: Iterable[int] = (64, 128),
    causal: Iterable[bool] = (False, True),
    window: bool = False,
    backward: bool = True,
    deterministic: bool = False,
    devices: Iterable[int] | None = None,
) -> list[str]:
    """Compile and load kernels ahead of time, so that no later call does (before a CUDA graph is captured, say).

    Args:
        dtypes: ``"bf16"`` and ``"fp16"``.
        head_dims: sizes to prepare.
        causal: prepare calls with causal=False, True, or both.
        window: also prepare calls with a window.
        backward: also prepare `attention_backward`.
        deterministic: prepare the deterministic backward instead of the fast one.
        devices: CUDA ordinals; all usable GPUs by default.

    Returns:
        The symbols of the kernels that are ready now, in all devices' order.

    Raises:
        DeviceError: if there is no usable GPU.
        ArgumentError, UnsupportedError, CompileError: as `attention`.

    Example:
        >>> warmup(head_dims=[128], dtypes=["bf16"], causal=[True])    # doctest: +SKIP
        ['fwd_sm80_bf16_d128_...', ...]
    """
    ordinals = list(range(device.count())) if devices is None else list(devices)
    if not ordinals:
        raise DeviceError(f"devices: expected a usable GPU to prepare kernels for; {device.why_none()}")
    windows: list[tuple[bool, Window | None]] = [(c, None) for c in causal]
    if window:
        windows.append((False, (1, 1)))
    ready = []
    for ordinal in ordinals:
        dev = Device.of(ordinal)
        variants: dict[Variant, None] = {}
        for dtype in dtypes:
            for head_dim in head_dims:
                for is_causal, bounds in windows:
                    problem = make_problem(
                        [(1, 1, 1, head_dim)] * 3, [dtype] * 3,
                        causal=is_causal, window=bounds, deterministic=deterministic,
                    )  # fmt: skip
                    plans = [forward_plan(problem, dev)] + ([backward_plan(problem, dev)] if backward else [])
                    variants.update({launch.variant: None for plan in plans for launch in plan.launches})
        ready += [kernel.variant.symbol for kernel in jit.load_all(variants, dev)]
    return ready
