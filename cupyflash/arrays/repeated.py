"""An integer in an array without dimensions, once for each sequence: it stays where it is, and nothing waits for it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .adapters import NUMPY, Native
from .imported import is_instance
from .libraries import FOREIGN, JAX, Foreign

_MOST = 2**31 - 1


def stays(library: Native | Foreign, x: Any, q: Any) -> bool:
    """Whether x, beside arrays of that library such as q, is one of theirs on their device, which need not be read."""
    if library is NUMPY or isinstance(x, (np.ndarray, np.generic)) or not library.owns(x):
        return False
    return library in (JAX, FOREIGN) or x.device == q.device


def is_whole(x: Any) -> bool:
    """Whether an array holds integers, by its dtype."""
    return str(x.dtype).removeprefix("torch.").startswith(("int", "uint"))


def repeated(x: Any, count: int) -> Any:
    """What x holds, so often in int32; instead of a number that wraps, -1 or the largest."""
    if is_instance(x, "torch", "Tensor"):
        return x.long().clamp(-1, _MOST).int().expand(count).contiguous()
    if is_instance(x, "jax", "Array"):
        jnp = sys.modules["jax.numpy"]
        bounds = jnp.iinfo(x.dtype)
        x = jnp.clip(x, max(int(bounds.min), -1), _MOST) if bounds.max > _MOST else x
        return jnp.broadcast_to(x.astype(jnp.int32), (count,))
    with x.device:
        return x.astype(np.int64).clip(-1, _MOST).astype(np.int32).reshape(1).repeat(count)
