"""Attention over a cache of tensors: at once, or where torch looks on by operators that it sees.

`torch.ops.cupyflash.attention_with_cache` reads the caches, `append_to_cache` also writes them, in place. Their schemas
follow from the table of arrays, as those of `ops` do. There are no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arrays.adapters import TORCH
from ..cache.arrays import CACHE, CACHE_ARRAYS, RESULT
from ..cache.checks import CacheOptions
from ..errors import UnsupportedError
from ..launch import cached, cached_checks, last_cached
from ..operand import MOD_ARRAYS
from .followed import are_transforms_active, is_compiling, is_followed
from .ops import LIBRARY, SYMBOLS
from .vetting import vet_dual

_INPUTS = tuple(row for row in CACHE_ARRAYS if row.role != RESULT)
_OPTIONS = (
    ("causal", "bool"),
    ("scale", "float?"),
    ("window_left", "SymInt?"),
    ("window_right", "SymInt?"),
    ("softcap", "float?"),
    ("rotary_interleaved", "bool"),
    ("num_splits", "SymInt?"),
    ("batch_invariant", "bool"),
    ("mods", "str"),
    ("length", "SymInt?"),  # of all sequences, where there is no cache_seqlens
)


def attention_with_cache(
    arrays: dict[str, Any], options: CacheOptions, length: int | torch.SymInt | None = None, want_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(out, lse); the caches are written where there is a k.

    Args:
        length: in place of cache_seqlens.
        want_lse: else it may be None.

    Raises:
        UnsupportedError: a gradient is asked for, or a transform of torch.func.
    """
    if torch.is_grad_enabled():
        _refuse_gradients(arrays)
    if not is_compiling():
        if not is_followed():
            return cached.forward(TORCH, arrays, options, length, want_lse=want_lse)
        vet_dual({name: x for name, x in arrays.items() if isinstance(x, Tensor)})
    if not is_compiling() and are_transforms_active():
        raise UnsupportedError(
            "q: attention over a cache has no rule for the transforms of torch.func; call it outside"
        )
    op = APPEND_OP if "k" in arrays else READ_OP
    out, lse = op(*[arrays.get(row.name) for row in _INPUTS], *_flat(options), length)
    return out, lse


def again(
    arrays: Mapping[str, Any], options: CacheOptions, length: int | None, want_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """`attention_with_cache` of arrays like those of the last call of its kind; None: somebody must look at them."""
    if is_compiling() or is_followed():
        return None
    return last_cached.again(cached.calls.last, arrays, options, length, want_lse)


def _refuse_gradients(arrays: Mapping[str, Any]) -> None:
    for name, x in arrays.items():
        if isinstance(x, Tensor) and x.requires_grad:
            name = "mod_arrays" if name in MOD_ARRAYS else name
            raise UnsupportedError(
                f"{name}: expected a tensor without requires_grad, since attention over a cache has no gradients; "
                f"call under torch.no_grad(), give {name}.detach(), or use `attention`"
            )


def _flat(options: CacheOptions) -> tuple[Any, ...]:
    causal, scale, window, *others = options
    return causal, scale, *(window or (None, None)), *others


def _read(values: Sequence[Any]) -> tuple[dict[str, Any], CacheOptions, int | None]:
    """The inverse of what the operators are called with."""
    arrays = {row.name: x for row, x in zip(_INPUTS, values, strict=False) if x is not None}
    causal, scale, left, right, *others, length = values[len(_INPUTS) :]
    window = None if left is None and right is None else (left, right)
    return arrays, CacheOptions(causal, scale, window, *others), length


def _run(*values: Any) -> tuple[Tensor, Tensor]:
    return cached.forward(TORCH, *_read(values))


def _fake(*values: Any) -> tuple[Tensor, Tensor]:
    """What the operators return, by shapes and dtypes alone; where all numbers are known they are checked."""
    arrays, options, _ = _read(values)
    q = arrays["q"]
    if not any(isinstance(n, SYMBOLS) for n in (*_flat(options), *(n for x in arrays.values() for n in x.shape))):
        cached_checks.check(TORCH, arrays, [TORCH.signature(x) for x in arrays.values()], options)
    *batch, rows, heads, _ = q.shape
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:-1], arrays["v_cache"].shape[-1]))
    return out, q.new_empty((*batch, heads, rows), dtype=dtype)


def _schema(name: str, writes: bool) -> str:
    arrays, marks = [], iter("ab")
    for row in _INPUTS:
        mark = f"({next(marks)}!)" if writes and row.role == CACHE else ""
        optional = row.optional and not (writes and row.name in "kv")
        arrays.append(f"Tensor{mark}{'?' * optional} {row.name}")
    options = [f"{kind} {option}" for option, kind in _OPTIONS]
    return f"{name}({', '.join([*arrays, *options])}) -> (Tensor out, Tensor lse)"


def _define(name: str, writes: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    LIBRARY.define(_schema(name, writes), tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, _run, key)
    torch.library.register_fake(f"cupyflash::{name}", _fake, lib=LIBRARY)
    return getattr(torch.ops.cupyflash, name).default


READ_OP, APPEND_OP = _define("attention_with_cache", False), _define("append_to_cache", True)
