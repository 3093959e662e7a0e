"""One length for all sequences of a call: an integer that the host knows, or an array without dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import options
from ..arrays.adapters import Native
from ..arrays.libraries import JAX, Foreign
from ..arrays.repeated import is_whole, repeated, stays
from ..errors import ArgumentError
from ..problem import MAX_SEQLEN
from .shapes import check_dims

_WHAT = "an int32 array or an integer"


def one_length(library: Native | Foreign, x: Any, arrays: Mapping[str, Any]) -> Any:
    """cache_seqlens as an int, or as an array where it lies beside q: to read it might wait for a GPU. One with a
    length for each sequence, or, of a library whose arrays are adopted, as it is.

    Args:
        x: what is given, an integer or an array without dimensions.
        arrays: the others.

    Raises:
        ArgumentError: it is no integer, or no cache can be that long.
    """
    if type(x) is not int and stays(library, x, arrays["q"]):
        if library is not JAX and isinstance(library, Foreign):
            return x
        if not is_whole(x):
            raise ArgumentError(f"cache_seqlens: expected {_WHAT}, got {x.dtype} of shape ()")
        return repeated(x, batch_of(arrays))
    length = x if type(x) is int else options.whole("cache_seqlens", x, _WHAT)
    if not 0 <= length <= MAX_SEQLEN:
        raise ArgumentError(f"cache_seqlens: expected 0 to {MAX_SEQLEN}, got {length}")
    return length


def batch_of(arrays: Mapping[str, Any]) -> int:
    """How many sequences a call has, by the arrays that say so.

    Raises:
        ArgumentError: q, or cu_seqlens_q, has not the dimensions that it must have.
    """
    name = "cu_seqlens_q" if "cu_seqlens_q" in arrays else "q"
    shape = arrays[name].shape
    check_dims(name, shape, arrays)
    return shape[0] if name == "q" else max(shape[0] - 1, 0)
