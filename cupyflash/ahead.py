"""Kernels compiled and loaded before a call needs them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import options
from .bias import WHOLE, Bias
from .cache.checks import STORED
from .cache.problem import CacheProblem
from .compile import jit
from .errors import ArgumentError, DeviceError
from .gpu import device
from .gpu.device import Device
from .mods.description import read
from .options import Options, Window
from .plan.decode import variants_over_cache
from .plan.families import GPU_DTYPES, kernels_of, variants_of_calls
from .plan.shipped_cache import usual
from .plan.spec import CHUNKS, LEARNED, ONE_ROW, PAIRS, Spec
from .plan.variant import Variant
from .problem import check_head_dim, make_problem

_PADDING = (True, False, False, True)  # a mask that is read by element where sequences are packed
_CACHE_DTYPES = ("int8", "float8_e4m3fn")


def warmup(
    *,
    dtypes: str | Iterable[str] | None = None,
    head_dims: int | Iterable[int] = (64, 128),
    head_dim_v: int | None = None,
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
    cache_dtype: str | None = None,
    block_mask: bool = False,
    score_mod: Any = None,
    mask_mod: Any = None,
    mod_arrays: Mapping[str, Any] | None = None,
    devices: int | Iterable[int] | None = None,
) -> list[str]:
    """Compile and load kernels ahead of time, so that no later call does (before a CUDA graph is captured, say).

    Args:
        dtypes: of ``"bf16"``, ``"fp16"`` and ``"fp32"``; by default those of 16 bits that the device has.
        head_dims: sizes to prepare, one or several.
        head_dim_v: of v; by default as q and k.
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
            contiguous or in pages of 16; each with the other options that it takes.
        cache_dtype: of a cache of 8 bits, ``"int8"`` or ``"float8_e4m3fn"``, with a scale a head, or a page and head.
        block_mask: prepare calls with a block mask (any) instead of those without.
        score_mod, mask_mod, mod_arrays: as `attention` takes them: prepare calls with these mods instead of those
            without, with arrays that are all fixed and, unless deterministic, all learned.
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
    asked = () if dtypes is None else options.several("dtypes", dtypes, _dtype)
    sizes = _sizes(head_dims, head_dim_v)
    masks: list[tuple[bool, Window | None]] = [(c, None) for c in options.several("causal", causal, options.flag)]
    masks += [(False, (1, 1))] * options.flag("window", window)
    has_dropout, has_bias = options.flag("dropout", dropout), options.flag("bias", bias)
    call = Options(
        deterministic=options.flag("deterministic", deterministic),
        softcap=1.0 if options.flag("softcap", softcap) else None,
        dropout_p=0.1 * has_dropout,
    )
    form: dict[str, Any] = {"sequences": 1 if options.flag("packed", packed) else None, "dropout": int(has_dropout)}
    form |= {"alibi": int(options.flag("alibi", alibi)), "kv_range": options.flag("kv_range", kv_range)}
    form |= {"sink": options.flag("sink", sink), "block_mask": int(options.flag("block_mask", block_mask))}
    if score_mod is not None or mask_mod is not None or mod_arrays is not None:
        call, form["mod_shapes"] = _with_mods(call, score_mod, mask_mod, mod_arrays)
    both, over_cache = options.flag("backward", backward), options.flag("with_cache", with_cache)
    stored = "" if cache_dtype is None else STORED[options.choice("cache_dtype", cache_dtype, _CACHE_DTYPES)]
    _check_with_cache(over_cache, stored, call)
    ready = []
    for ordinal in _ordinals(devices):
        dev = Device.of(ordinal)
        names = dev.halves if dtypes is None else asked
        if over_cache:
            found: list[Iterable[Variant]] = [
                variants_over_cache(x, dev, aligned=True, tma=True)
                for p in usual(names, sizes.items(), stored, form["block_mask"])
                for x in _over_cache(p, call, form, has_bias, [bounds for _, bounds in masks if bounds])
            ]
        else:
            asked_for = itertools.product(sizes.items(), masks, (False, True) if form["block_mask"] else (False,))
            calls = [(call._replace(causal=c, window=bounds, tall=tall), *of) for of, (c, bounds), tall in asked_for]
            found = [_variants(dtype, *x, form, has_bias, both, dev) for dtype in names for x in calls]
        wanted = dict.fromkeys(itertools.chain(*found))
        ready += [kernel.variant.symbol for kernel in jit.load_all(wanted, dev)]
    return ready


def _sizes(head_dims: Any, head_dim_v: Any) -> dict[int, int]:
    """Each head_dim of q and k, with that of v."""
    sizes = options.several("head_dims", head_dims, options.whole)
    of_v = None if head_dim_v is None else options.whole("head_dim_v", head_dim_v)
    for size in sizes:
        check_head_dim("head_dims", size)
    if of_v is not None:
        check_head_dim("head_dim_v", of_v)
    return {size: of_v or size for size in sizes}


def _dtype(name: str, x: Any) -> str:
    return options.choice(name, x, GPU_DTYPES)


def _with_mods(
    call: Options, score_mod: Any, mask_mod: Any, mod_arrays: Any
) -> tuple[Options, tuple[tuple[int, ...], ...]]:
    """The options with these mods, and the shapes of the arrays that they read."""
    from .mods import given

    text, arrays = given.bind(score_mod, mask_mod, mod_arrays)
    return call._replace(mods=text), tuple(tuple(x.shape) for x in arrays.values())


def _check_with_cache(over_cache: bool, stored: str, call: Options) -> None:
    """Refuse what attention over a cache does not have, and what it alone has."""
    if stored and not over_cache:
        raise ArgumentError("cache_dtype: expected None without with_cache=True")
    for name, given in (("dropout", call.dropout_p > 0), ("deterministic", call.deterministic)):
        if over_cache and given:
            raise ArgumentError(f"{name}: expected False together with with_cache, which has no such option")


def _over_cache(
    p: CacheProblem, call: Options, form: Mapping[str, Any], has_bias: bool, windows: list[Window]
) -> Iterator[CacheProblem]:
    """A usual call over a cache with these options, causal and with windows."""
    features = {name: form[name] for name in ("alibi", "kv_range", "sink", "mod_shapes") if name in form}
    features |= {"softcap": call.softcap, "mods": call.mods}
    if form["sequences"]:
        features |= {"packed": True, "seqlen_q": p.batch, "seqlen_new": p.batch}
    for window in (p.window, *windows):
        for bias in dict.fromkeys(bias for bias, _ in biases_of(p.dtype, has_bias)):
            yield replace(p, **features, window=window, bias=bias)


def _variants(
    dtype: str,
    call: Options,
    head_dim: int,
    of_v: int,
    form: Mapping[str, Any],
    has_bias: bool,
    backward: bool,
    dev: Device,
) -> Iterator[Variant]:
    """Of the forward, and of the backward, with fixed and learned arrays, with as many heads of k as of q and fewer."""
    rows = (1,) if form["sequences"] else (1, 1)
    k, v = (*rows, 1, head_dim), (*rows, 1, of_v)
    for heads_q, (added, paired) in itertools.product((1, 2), biases_of(dtype, has_bias)):
        problem = make_problem([(*rows, heads_q, head_dim), k, v], [dtype] * 3, **call._asdict(), **form, bias=added)
        yield from kernels_of(Spec.of(problem, paired_bias=paired), dev).variants
        of_mods = () if problem.deterministic else read(problem.mods).learned  # which are summed up in no order
        can_learn = problem.alibi or problem.sink or has_bias or of_mods
        for learned in (False, True)[: backward * (1 + bool(can_learn))]:
            known: dict[str, Any] = dict.fromkeys(LEARNED, learned) | {"paired_bias": paired}
            known["dmods"] = of_mods if learned else ()
            yield from variants_of_calls(problem, dev, **known)


def biases_of(dtype: str, has_bias: bool) -> tuple[tuple[Bias | None, int], ...]:
    """What kernels know of biases beside arrays of a dtype, and how they lie (`Access`); None: there is none."""
    if not has_bias:
        return ((None, 0),)
    numbers = dict.fromkeys((dtype, "fp32"))
    masks = WHOLE, _PADDING
    forms = *map(Bias, numbers), *(Bias("bool", own) for own in masks)
    forms = *forms, *(Bias(kind, beside=own) for kind in numbers for own in masks)
    return tuple((form, paired) for form in forms for paired in (CHUNKS, PAIRS, ONE_ROW, 0))


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
