"""Small NumPy arrays in the library and on the device of a caller's array, kept where they are put."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from . import torch_private
from .imported import is_instance, is_tensor, torch_itself


def placed(name: str, x: np.ndarray, like: Any, kept: MutableMapping[Any, Any]) -> Any:
    """A copy of x in the library of `like` and on its device; x itself where that is NumPy's, `Produced` where it is
    none that we know.

    Args:
        name: by which it is kept, and not by what it is: a program of torch.compile would be one for each.
        kept: what was placed before; work on a GPU is ordered behind the copy on any stream, since it waits for it.
    """
    key: tuple[Any, ...]
    if is_instance(like, "torch", "Tensor"):
        key = name, like.device
        if key in kept and type(like).__name__ != "FakeTensor":
            return kept[key]
        made = _of_torch(x, like.device)
        if is_tensor(type(made)):
            kept[key] = made
        return made
    if is_instance(like, "jax", "Array"):
        return _of_jax(name, x, like, kept)
    if isinstance(like, np.ndarray):
        return x
    found = _of_cupy(name, x, int(like.__dlpack_device__()[1]), kept) if _is_on_gpu(like) else x
    return found if is_instance(like, "cupy", "ndarray") else Produced(found)


class Produced:
    """An array as one of no library that we know: what callers who have such arrays mix with theirs."""

    def __init__(self, x: Any) -> None:
        self._x, self.shape, self.dtype = x, x.shape, x.dtype

    def __dlpack__(self, **how: Any) -> Any:
        return self._x.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()


def _of_cupy(name: str, x: np.ndarray, device: int, kept: MutableMapping[Any, Any]) -> Any:
    import cupy

    key = name, "cupy", device
    if key not in kept:
        with cupy.cuda.Device(device):
            kept[key] = cupy.asarray(x)
            cupy.cuda.get_current_stream().synchronize()
    return kept[key]


def _of_torch(x: np.ndarray, device: Any) -> Any:
    """Out of sight of transforms and inference_mode, since calls outside of them get it later; a FakeTensor where one
    is asked for."""
    torch = torch_itself()
    if torch.compiler.is_dynamo_compiling():
        return torch.from_numpy(x.copy()).to(device)
    with torch.inference_mode(False), torch_private.without_transforms():
        return torch.from_numpy(x.copy()).to(device)


def _of_jax(name: str, x: np.ndarray, like: Any, kept: MutableMapping[Any, Any]) -> Any:
    """On all devices of an array that was put on some; else on the default one, whence JAX takes it anywhere: where a
    program is traced, as a constant of it."""
    jax, where = sys.modules["jax"], None
    if not isinstance(like, jax.core.Tracer) and getattr(like, "committed", True):
        if isinstance(like.sharding, jax.sharding.NamedSharding):
            where = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
        elif len(like.sharding.device_set) == 1:
            where = like.sharding
    key = name, "jax", where
    if key not in kept:
        with jax.ensure_compile_time_eval():
            kept[key] = jax.device_put(x, where)
    return kept[key]


def _is_on_gpu(x: Any) -> bool:
    return hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged
