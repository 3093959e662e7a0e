"""Attention to different keys, put together: `combine`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .arrays.adapters import NUMPY, TORCH, Native
from .arrays.imported import constant_in_programs, torch_itself
from .arrays.libraries import JAX, Foreign, common_library, library_of
from .errors import ArgumentError
from .problem import DTYPES


def combine(outs: Any, lses: Any) -> tuple[Any, Any]:
    """What attention to all keys gives, from what attention to each part of them gave.

        lse = ln(sum_i exp(lse_i))              out = sum_i exp(lse_i - lse) out_i

    Softmax over a union of disjoint sets of keys (Milakov and Gimelshein 2018, section 3.1; FlashDecoding, Dao et al.
    2023). For a cache and a shared prefix of it, keys on several GPUs, or attention to a prompt once for many queries.
    A sink counts once: give it to one of the parts.

    Args:
        outs: of each part ``(batch, seqlen_q, heads_q, head_dim)`` or packed ``(total_q, heads_q, head_dim)``, as all
            functions here return it: a sequence of arrays, or one array with the parts as first dimension. Of any
            library and floating dtype; partial results in fp32 lose nothing on the way.
        lses: of each ``(batch, heads_q, seqlen_q)`` or ``(heads_q, total_q)``, in fp32 (fp64 for fp64): likewise.

    Returns:
        (out, lse), in the shapes and dtypes of one part; where those of outs differ, in what is computed with: fp32, or
        fp64 if one of them is. Rounded once. A part whose lse is -inf counts for nothing, whatever its out is; where
        all are, out is 0 and lse -inf. Differentiable in PyTorch and JAX, as often as one likes, and inside jit and
        torch.compile: made of their own operations.

    Raises:
        ArgumentError: an argument is wrong; the message says which and how to fix it.

    Example:
        >>> import numpy as np
        >>> from cupyflash import attention
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 128, 8, 64))
        >>> parts = [attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(50), slice(50, None))]
        >>> out, lse = combine(*zip(*parts))
        >>> bool(np.allclose(out, attention(q, k, v)))
        True
    """
    named_outs, named_lses = _named("outs", outs), _named("lses", lses)
    named = {**named_outs, **named_lses}  # which torch 2.4 compiles
    library = common_library(**named)
    if library is TORCH:
        for name, x in named.items():
            if x.layout is not torch_itself().strided:
                raise ArgumentError(f"{name}: expected a dense tensor, got layout {x.layout}; give x.to_dense()")
    if isinstance(library, Foreign) and library is not JAX and library.name != TORCH.name:
        found = combine(*(_adopted(library, x) for x in (outs, lses)))
        first = next(iter(named.values()))
        return library.give_back(found[0], first), library.give_back(found[1], first)
    of_outs, of_lses = ({part: _dtype(library, x) for part, x in some.items()} for some in (named_outs, named_lses))
    accumulate = _check_dtypes(of_outs, of_lses)
    if isinstance(outs, (tuple, list)) and len(set(of_outs.values())) > 1:
        outs = [_cast(_namespace(library), x, accumulate) for x in outs]
    if isinstance(lses, (tuple, list)) and len(set(of_lses.values())) > 1:
        lses = [_cast(_namespace(library), x, accumulate) for x in lses]
    _check_devices(library, named)
    o, l = (_stacked(library, x) for x in (outs, lses))  # noqa: E741 the paper's names
    _check_shapes(tuple(o.shape), tuple(l.shape))
    if library is NUMPY:
        with np.errstate(invalid="ignore"):  # inf - inf: an lse of inf, which NaN follows from
            return _combined(library, o, l, accumulate)
    return _combined(library, o, l, accumulate)


def _check_devices(library: Native | Foreign, named: Mapping[str, Any]) -> None:
    """Refuse tensors of several devices, which torch would refuse without a name."""
    if library is TORCH:
        (first, x), *others = named.items()
        for name, y in others:
            if y.device != x.device:
                raise ArgumentError(f"{name}: expected the device of {first}, {x.device}, got {y.device}")


def _combined(library: Native | Foreign, outs: Any, lses: Any, accumulate: str) -> tuple[Any, Any]:
    """Both with the parts as first dimension. No derivative passes where a part counts for nothing."""
    xp = _namespace(library)
    l = _cast(xp, lses, accumulate)  # noqa: E741
    hidden = l == -xp.inf
    m = _constant(library, xp.amax(l, 0))
    shift = xp.where(m == -xp.inf, 0.0, m)
    weights = xp.where(hidden, 0.0, xp.exp(xp.where(hidden, 0.0, l - shift[None])))
    total = weights.sum(0)
    none = hidden.all(0)
    total = xp.where(none, 1.0, total)
    by_row, seen = ((x.swapaxes(-1, -2))[..., None] for x in (weights / total[None], ~hidden))
    out = (by_row * xp.where(seen, _cast(xp, outs, accumulate), 0.0)).sum(0)
    lse = xp.where(none, -xp.inf, shift + xp.log(total))
    return _like(xp, out, outs), _like(xp, lse, lses)


def _namespace(library: Native | Foreign) -> Any:
    """The module with a library's functions; whoever has an array of it has imported it."""
    if library.name == TORCH.name:
        return torch_itself()
    return sys.modules["jax.numpy" if library is JAX else library.name]


def _constant(library: Native | Foreign, x: Any) -> Any:
    """x, whose derivative does not count."""
    if library is JAX:
        return sys.modules["jax"].lax.stop_gradient(x)
    return x.detach() if library.name == TORCH.name else x


def _cast(xp: Any, x: Any, dtype: str) -> Any:
    kind = getattr(xp, dtype)
    return x.to(kind) if xp.__name__ == TORCH.name else x.astype(kind)


def _like(xp: Any, x: Any, like: Any) -> Any:
    return x.to(like.dtype) if xp.__name__ == TORCH.name else x.astype(like.dtype)


def _named(name: str, x: Any) -> dict[str, Any]:
    """One array, or several by number; refuses what is neither."""
    if isinstance(x, (tuple, list)):
        if not x:
            raise ArgumentError(f"{name}: expected at least one array, got none")
        return {f"{name}[{i}]": part for i, part in enumerate(x)}
    library_of(name, x)
    return {name: x}


def _adopted(library: Foreign, x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return [library.adopt({"outs": part})["outs"] for part in x]
    return library.adopt({"outs": x})["outs"]


def _stacked(library: Native | Foreign, x: Any) -> Any:
    """Several arrays as one with a dimension more."""
    if not isinstance(x, (tuple, list)):
        return x
    shapes = {tuple(part.shape) for part in x}
    if len(shapes) > 1:
        raise ArgumentError(f"outs, lses: expected parts of one shape each, got {sorted(shapes)}")
    return _namespace(library).stack(list(x))


def _dtype(library: Native | Foreign, x: Any) -> str:
    return _torch_dtype(x.dtype) if library.name == TORCH.name else NUMPY.dtype_name(np.dtype(x.dtype))


@constant_in_programs
def _torch_dtype(dtype: Any) -> str:
    return TORCH.dtype_name(dtype)


def _check_dtypes(outs: Mapping[str, str], lses: Mapping[str, str]) -> str:
    """The dtype of sums; `outs`, `lses`: the dtype of each array by its name."""
    for name, found in outs.items():
        if found not in DTYPES:
            raise ArgumentError(f"{name}: expected a floating-point dtype ({', '.join(DTYPES)}), got {found}")
    wide = "fp64" if "fp64" in [*outs.values()] else "fp32"
    for name, found in lses.items():
        own = outs.get(name.replace("lses", "outs"), wide)
        if found != wide and (found != "fp32" or own == "fp64" or name == "lses"):
            beside = ", ".join(sorted(set(outs.values())))
            raise ArgumentError(
                f"{name}: expected {wide}, beside outs of {beside}, got {found}; with return_lse=True the functions "
                "here return it so"
            )
    return "float64" if wide == "fp64" else "float32"


def _check_shapes(outs: Sequence[int], lses: Sequence[int]) -> None:
    if len(outs) not in (4, 5) or outs[0] == 0:
        raise ArgumentError(
            "outs: expected one or more parts (batch, seqlen_q, heads_q, head_dim) or (total_q, heads_q, head_dim), "
            f"got shape {tuple(outs)} with the parts as first dimension"
        )
    *batch, rows, heads, _ = outs
    if tuple(lses) != (*batch, heads, rows):
        raise ArgumentError(
            f"lses: expected shape {(*batch, heads, rows)}, that of outs with heads before rows and without head_dim, "
            f"got {tuple(lses)}; with return_lse=True the functions here return it so"
        )
