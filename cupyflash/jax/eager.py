"""Attention over a cache of JAX arrays, outside of its transforms: on the same memory, by NumPy or CuPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays.adapters import CUPY, NUMPY
from ..arrays.libraries import JAX
from ..cache.checks import CacheOptions
from ..errors import ArgumentError, UnsupportedError
from ..launch import cached


def attention_with_cache(arrays: dict[str, Any], call: CacheOptions) -> tuple[Any, Any]:
    """(out, lse); work on a GPU is waited for.

    Raises:
        ArgumentError: k is given: JAX arrays cannot be written.
        UnsupportedError: one is a tracer.
    """
    for name, x in arrays.items():
        if isinstance(x, jax.core.Tracer):
            raise UnsupportedError(
                f"{name}: attention over a cache is no operation of JAX yet; call it outside of jit, grad and vmap, or "
                "inside give the rows in use to `attention`"
            )
    if "k" in arrays:
        raise ArgumentError(
            "k: expected None, since arrays of JAX cannot be written; append by k_cache.at[b, rows].set(k), in "
            "a jit that donates the cache, and add the new rows to cache_seqlens"
        )
    given = {name: x for name, x in arrays.items() if type(x) is not int}
    if all(device.platform == "cpu" for device in arrays["q"].devices()):
        out, lse = cached.forward(NUMPY, arrays | {name: np.asarray(x) for name, x in given.items()}, call)
        return jnp.asarray(out), jnp.asarray(lse)
    ready = jax.block_until_ready(given)
    found = cached.forward(CUPY, arrays | JAX.adopt(ready), call)
    out, lse = (jax.dlpack.from_dlpack(JAX.give_back(x, arrays["q"])) for x in found)
    return out, lse
