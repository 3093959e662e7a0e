"""What is looked at of the arrays of a call over a cache, by their signatures or by what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.adapters import TORCH, Native, Signature, place
from ..cache.arrays import BY_NAME, CACHE
from ..cache.checks import CacheOptions, make_cache_problem
from ..cache.problem import CacheProblem
from ..cache.values import PLACES
from ..cache.writes import check_rows_apart
from ..errors import ArgumentError


def check(
    library: Native, arrays: Mapping[str, Any], keys: Sequence[tuple[Any, ...]], options: CacheOptions
) -> tuple[CacheProblem, dict[str, Signature]]:
    """All checks of the arrays by their signatures: the problem, and the signatures spelled out."""
    found = dict(zip(arrays, keys, strict=True))
    shapes = {name: tuple(key[0]) for name, key in found.items()}
    problem = make_cache_problem(shapes, {name: library.dtype_name(key[2]) for name, key in found.items()}, options)
    signatures = {name: library.describe(name, key) for name, key in found.items()}
    device = signatures["q"].device
    for name, signature in signatures.items():
        if signature.device != device:
            raise ArgumentError(f"{name}: expected the device of q, {place(device)}, got {place(signature.device)}")
        last = signature.strides[-1] if signature.strides else 1
        if BY_NAME[name].strided and last != 1 and signature.shape[-1] > 1 and 0 not in signature.shape:
            raise ArgumentError(f"{name}: expected a stride of 1 along its last dimension, got {last}; copy it first")
        if problem.seqlen_new and BY_NAME[name].role == CACHE:
            check_rows_apart(name, signature.shape, signature.strides)
    return problem, signatures


def on_their_way(library: Native, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies in host memory of what says where things lie, and the other arrays' places; waits for a GPU."""
    wait = (lambda x: x.cpu()) if library is TORCH else (lambda x: x)
    return {name: library.to_numpy(wait(x)) if name in PLACES else np.empty(0) for name, x in arrays.items()}


def lengths(p: CacheProblem, length: int | None) -> dict[str, np.ndarray]:
    """cache_seqlens of one length for all, in host memory."""
    return {} if length is None else {"cache_seqlens": np.full(p.batch, length, np.int32)}
