"""The operators `torch.ops.cupyflash.forward` and `backward`: what torch.compile, export and modes see of a call.

Each returns all results that its pass ever makes. A result that a call does not make is an empty tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arrays.adapters import TORCH
from ..arrays.imported import constant_in_programs
from ..launch import run
from ..launch.checks import check
from ..operands import BACKWARD, FORWARD, Operand, Pass
from ..options import Options
from . import inductor
from .arguments import OPTIONS as OPTIONS
from .arguments import arguments as arguments
from .arguments import flat as flat
from .arguments import has_more
from .arguments import names_of as names_of
from .arguments import options_of as options_of
from .arguments import read as read
from .arguments import read_by_name as read_by_name
from .arguments import results_of as results_of
from .arguments import schema as schema

_LSE = ("lse",)
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_results_of = functools.cache(results_of)  # which dynamo does not see through


@functools.lru_cache(maxsize=256)
def _look_up(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    of = tuple([BACKWARD.gradient_of.get(name, "") for name in names])
    return of, tuple([i for i, name in enumerate(of) if name in BACKWARD.optional])


@constant_in_programs
def gradients_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names of these arrays' gradients, "" for those that have none; the numbers of those made only if wanted."""
    return _look_up(names)


def forward(arrays: Mapping[str, Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) by the operator."""
    values = arguments(FORWARD, arrays, options, whole=True)
    out, lse = operator(FORWARD, values)(*values)
    return out, lse


def backward(arrays: Mapping[str, Tensor], options: Options, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """The gradients by name, by the operator."""
    values = arguments(BACKWARD, arrays, options, wanted, whole=True)
    found = dict(zip(results_of(BACKWARD), operator(BACKWARD, values)(*values), strict=True))
    return {name: found[name] for name in BACKWARD.made(arrays, wanted)}


# ---- What they do ----


def compute_forward(arrays: dict[str, Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """What the operator does, without it."""
    out, lse = run.forward(TORCH, arrays, options)
    return out, lse


def compute_backward(arrays: dict[str, Tensor], options: Options, wanted: tuple[str, ...]) -> tuple[Tensor, ...]:
    """What the operator does, without it."""
    if arrays["dout"].stride(-1) != 1:  # an expanded gradient, as of out.sum(), which compiled code does not see
        arrays["dout"] = arrays["dout"].contiguous()
    return all_of(BACKWARD, run.backward(TORCH, arrays, options, wanted), arrays["q"])


def _forward(*values: Any) -> tuple[Tensor, Tensor]:
    arrays, options, _ = read_by_name(FORWARD, values)
    return compute_forward(arrays, options)


def _backward(*values: Any) -> tuple[Tensor, ...]:
    return compute_backward(*read_by_name(BACKWARD, values))


def all_of(which: Pass, found: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, ...]:
    """What an operator returns: an empty tensor for each result that is not there."""
    return tuple([found[name] if name in found else like.new_empty(0) for name in _results_of(which)])


def _fake(which: Pass) -> Callable[..., tuple[Tensor, ...]]:
    """What it returns, by shapes, dtypes and strides alone; all results are contiguous.

    Where all numbers are known they are checked as in a call. Symbolic ones are not asked, since each question narrows
    what the traced program is good for: the call itself checks them. How many dimensions there are is always known.
    """

    def fake(*values: Any) -> tuple[Tensor, ...]:
        for op in operators(which):
            inductor.ready(which, op)
        arrays, options, wanted = read_by_name(which, values)
        numbers = *flat(options), *(n for x in arrays.values() for n in x.shape)
        if _lacks_dims(which, arrays, options.layout) or not any(isinstance(n, SYMBOLS) for n in numbers):
            signatures = [TORCH.signature(x) for x in arrays.values()]
            check(which, tuple(arrays), TORCH, signatures, options)
        made = which.made(arrays, (*_LSE, *wanted) if which is FORWARD else wanted)
        found = {name: _empty(which.rows[name], arrays, options.layout) for name in made}
        return all_of(which, found, arrays["q"])

    return fake


def _lacks_dims(which: Pass, arrays: Mapping[str, Tensor], layout: str) -> bool:
    """Whether q, k or v has not as many dimensions as it should."""
    packed = "cu_seqlens_q" in arrays
    return any(arrays[name].dim() != len(dims_of(which.rows[name], layout, packed)) for name in "qkv")


def _empty(row: Operand, arrays: Mapping[str, Tensor], layout: str) -> Tensor:
    """A result of a call."""
    q = arrays["q"]
    if row.width:
        return q.new_empty((*arrays[row.like].shape[:-1], arrays[row.width].shape[-1]))
    if row.like:
        return torch.empty_like(arrays[row.like], memory_format=torch.contiguous_format)
    packed = "cu_seqlens_q" in arrays
    sizes = dict(zip(dims_of(FORWARD.rows["q"], layout, packed), q.shape, strict=True))
    shape = [sizes[d] for d in (row.packed if packed else row.dims)]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(shape, dtype=dtype)


def dims_of(row: Operand, layout: str, packed: bool) -> list[str]:
    """The names of an array's dimensions in the caller's layout."""
    dims = list(row.packed if packed else row.dims)
    if layout == "bhsd" and row.has_layout:
        dims[-3:-1] = dims[-2], dims[-3]
    return dims


# ---- Their registration ----

LIBRARY = torch.library.Library("cupyflash", "DEF")  # lives as long as this module, and the operators as long as it


def _define(which: Pass, function: Callable[..., Any]) -> None:
    for more, name in enumerate(overloads(which)):
        LIBRARY.define(schema(which, bool(more)), tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, function, key)
        torch.library.register_fake(f"cupyflash::{name}", _fake(which), lib=LIBRARY)


def overloads(which: Pass) -> tuple[str, str]:
    """The names of a pass's operator and of its overload `more`."""
    return which.name, f"{which.name}.more"


def operators(which: Pass) -> tuple[Any, Any]:
    """They themselves."""
    both = getattr(torch.ops.cupyflash, which.name)
    return both.default, both.more


def operator(which: Pass, values: Sequence[Any]) -> Any:
    """The one that takes these arguments."""
    plain, more = operators(which)
    return more if has_more(which, values) else plain  # torch 2.11's compiler takes no bool as an index


_define(FORWARD, _forward)
_define(BACKWARD, _backward)
FORWARD_OP, BACKWARD_OP = torch.ops.cupyflash.forward.default, torch.ops.cupyflash.backward.default
