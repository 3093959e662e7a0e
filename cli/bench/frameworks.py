"""Whose arrays `bench` times."""

from __future__ import annotations

import importlib.util

from .work import Bench, TorchBench


def make(framework: str | None, on_gpu: bool) -> Bench:
    """The framework asked for; unless one is, torch where it sees the device, else CuPy or NumPy."""
    if framework is None:
        framework = "torch" if _torch_sees(on_gpu) else "cupy" if on_gpu else "numpy"
    if framework == "torch":
        return TorchBench(on_gpu)
    if framework == "jax":
        from .jax_work import JaxBench

        return JaxBench(on_gpu)
    if framework == "cupy":
        from .cupy_work import CupyBench

        return CupyBench()
    if on_gpu:
        from .numpy_work import NumpyOnGpu

        return NumpyOnGpu()
    return Bench()


def _torch_sees(on_gpu: bool) -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return not on_gpu or bool(torch.cuda.is_available())
