"""Kernels compiled and loaded before a call needs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import options
from .compile import jit
from .errors import ArgumentError, DeviceError
from .gpu import device
from .gpu.device import Device
from .options import Options, Window
from .plan.decode import variants_over_cache
from .plan.families import GPU_DTYPES, kernels_of, variants_of_calls
from .plan.shipped_cache import usual
from .plan.spec import Spec
from .plan.variant import Variant
from .problem import Bias, check_head_dim, make_problem


def warmup(
    *,
    dtypes: str | Iterable[str] = ("bf16", "fp16"),
    head_dims: int | Iterable[int] = (64, 128),
    causal: bool | Iterable[bool] = (False, True),
    window: bool = False,
    backward: bool = True,
    deterministic: bool = False,
    softcap: bool = False,
    packed: bool = False,
    alibi: bool = False,
    kv_range: bool = False,
    sink: bool = False,
    bias: bool = False,
    dropout: bool = False,
    with_cache: bool = False,
    block_mask: bool = False,
    devices: int | Iterable[int] | None = None,
) -> list[str]:
    """Compile and load kernels ahead of time, so that no later call does (before a CUDA graph is captured, say).

    Args:
        dtypes: ``"bf16"``, ``"fp16"``, or both.
        head_dims: sizes to prepare, one or several.
        causal: prepare calls with causal=False, True, or both.
        window: also prepare calls with a window.
        backward: also prepare `attention_backward`.
        deterministic: prepare the deterministic backward instead of the fast one.
        softcap: prepare calls with a softcap (any) instead of those without.
        packed: prepare `attention_varlen` (of any lengths) instead of `attention`.
        alibi: prepare calls with slopes, fixed and learned, instead of those without.
        kv_range: prepare calls with a kv_range (any) instead of those without.
        sink: prepare calls with sinks, fixed and learned, instead of those without.
        dropout: prepare calls with dropout (any) instead of those without.
        bias: prepare calls with a mask or a bias, of q's dtype or fp32, fixed and learned, of any strides, or both,
            instead of those without.
        with_cache: prepare `attention_with_cache` instead of `attention`: one query a sequence, causal, rows appended,
            contiguous or in pages of 16; none of the options above.
        block_mask: prepare calls with a block mask (any) instead of those without.
        devices: CUDA ordinals, one or several; all usable GPUs by default.

    Returns:
        The symbols of the kernels that are ready now, in all devices' order.

    Raises:
        DeviceError: if there is no usable GPU.
        ArgumentError, UnsupportedError, CompileError: as `attention`.

    Example:
        >>> warmup(head_dims=[128], dtypes=["bf16"], causal=[True])    # doctest: +SKIP
        ['fwd_sm80_bf16_d128_...', ...]
    """
    names = options.several("dtypes", dtypes, lambda name, x: options.choice(name, x, GPU_DTYPES))
    sizes = options.several("head_dims", head_dims, options.whole)
    for size in sizes:
        check_head_dim("head_dims", size)
    masks: list[tuple[bool, Window | None]] = [(c, None) for c in options.several("causal", causal, options.flag)]
    if options.flag("window", window):
        masks.append((False, (1, 1)))
    both, fixed = options.flag("backward", backward), options.flag("deterministic", deterministic)
    cap = 1.0 if options.flag("softcap", softcap) else None
    form: dict[str, Any] = {"sequences": 1 if options.flag("packed", packed) else None}
    form |= {"alibi": int(options.flag("alibi", alibi)), "kv_range": options.flag("kv_range", kv_range)}
    form |= {"sink": options.flag("sink", sink), "block_mask": int(options.flag("block_mask", block_mask))}
    form["dropout"] = int(options.flag("dropout", dropout))
    cached = tuple(usual(names, sizes)) if options.flag("with_cache", with_cache) else ()
    ready, has_bias = [], options.flag("bias", bias)
    for ordinal in _ordinals(devices):
        dev = Device.of(ordinal)
        variants: dict[Variant, None] = {}
        for over_cache in cached:
            variants.update(dict.fromkeys(variants_over_cache(over_cache, dev, aligned=True, tma=True)))
        for dtype in names if not cached else ():
            for size in sizes:
                for is_causal, bounds in masks:
                    call = Options(
                        causal=is_causal,
                        window=bounds,
                        deterministic=fixed,
                        softcap=cap,
                        dropout_p=0.1 * form["dropout"],
                    )
                    shape = (1, 1, size) if form["sequences"] else (1, 1, 1, size)
                    for added, paired in biases_of(dtype, has_bias):
                        problem = make_problem([shape] * 3, [dtype] * 3, **call._asdict(), **form, bias=added)
                        spec = Spec.of(problem, paired_bias=paired)
                        variants.update(dict.fromkeys(kernels_of(spec, dev).variants))
                        for learned in (False, True)[: both + both * (form["alibi"] or form["sink"] or has_bias)]:
                            known = dict.fromkeys(("dalibi", "dsink", "dbias"), learned) | {"paired_bias": paired}
                            variants.update(dict.fromkeys(variants_of_calls(problem, dev, **known)))
        ready += [kernel.variant.symbol for kernel in jit.load_all(variants, dev)]
    return ready


def biases_of(dtype: str, has_bias: bool) -> tuple[tuple[Bias | None, bool], ...]:
    """What kernels know of biases beside arrays of a dtype, and whether they are read in pairs; None: there is none."""
    if not has_bias:
        return ((None, False),)
    numbers = dict.fromkeys((dtype, "fp32"))
    forms = *map(Bias, numbers), Bias("bool"), *(Bias(kind, masked=True) for kind in numbers)
    return tuple((form, paired) for form in forms for paired in (True, False))


def _ordinals(devices: Any) -> tuple[int, ...]:
    """The GPUs to prepare kernels for."""
    wanted = None if devices is None else options.several("devices", devices, options.whole)
    found = device.count()
    if not found:
        raise DeviceError(f"devices: expected a usable GPU to prepare kernels for; {device.why_none()}")
    for ordinal in wanted or ():
        if not 0 <= ordinal < found:
            raise ArgumentError(f"devices: expected ordinals from 0 to {found - 1}, got {ordinal}")
    return wanted or tuple(range(found))
