"""The arrays of each framework as `verify` needs them: made from NumPy with the same strides, poisoned, on streams.

A framework is an object with the methods of `Framework`; what one cannot do (streams without a GPU, say) is in `can`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .memory import Array, cupy_poisoned, flatten, freed_full_of_nan


class Framework:
    """NumPy, and the interface of the others."""

    name = "numpy"

    def __init__(self, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu

    @property
    def can(self) -> frozenset[str]:
        """Which of "stream", "graph", "poison", "autograd" there are."""
        return frozenset({"poison"})

    def from_numpy(self, x: Array) -> Any:
        """An array with the values and, where the framework has them, the strides of `x`."""
        return x

    def to_numpy(self, x: Any) -> Array:
        """A copy in host memory, any dtype."""
        return np.array(x)

    def write(self, target: Any, source: Any) -> None:
        """Overwrite an array on the current stream."""
        target[...] = source

    def synchronize(self) -> None:
        """Wait for the GPU; raises what went wrong there."""

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        """New memory is full of NaN inside, as far as the framework allows it."""
        if self.on_gpu:
            with cupy_poisoned():
                yield
        else:
            freed_full_of_nan()
            yield

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """A new stream is current inside; all work before and all work inside is waited for. Without a GPU: nothing."""
        yield

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """A new stream, current inside; nothing is waited for. For those that can "stream"."""
        raise NotImplementedError

    def mark(self) -> Callable[[], bool]:
        """Whether all that is queued on the current stream until now is done, asked when it is called."""
        raise NotImplementedError

    def graph(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture `work` into a CUDA graph; return its replay and what `work` returned."""
        raise NotImplementedError


class CupyFramework(Framework):
    """CuPy arrays on the current GPU."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        super().__init__(on_gpu=True)
        self.cupy = cupy

    @property
    def can(self) -> frozenset[str]:
        return frozenset({"stream", "graph", "poison"})

    def from_numpy(self, x: Array) -> Any:
        flat = flatten(x)
        kind = np.dtype(np.uint8) if x.dtype.name == "float8_e4m3fn" else x.dtype  # which CuPy does not have
        memory = self.cupy.asarray(flat.elements.view(kind))
        strides = tuple(s * x.itemsize for s in flat.strides)
        view = memory[flat.offset :]
        return self.cupy.ndarray(x.shape, kind, memptr=view.data, strides=strides)

    def to_numpy(self, x: Any) -> Array:
        return np.array(self.cupy.asnumpy(x))

    def write(self, target: Any, source: Any) -> None:
        target.data.copy_from_device_async(source.data, source.nbytes)

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        self.synchronize()
        with self.stream() as stream:
            yield
            stream.synchronize()

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        stream: contextlib.AbstractContextManager[Any] = self.cupy.cuda.Stream(non_blocking=True)
        return stream

    def mark(self) -> Callable[[], bool]:
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record()
        return lambda: bool(event.done)

    def graph(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        stream = self.cupy.cuda.get_current_stream()
        stream.begin_capture(self.cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            results = work()
        finally:
            captured = stream.end_capture()
        return lambda: captured.launch(stream), results


class TorchFramework(Framework):
    """Torch tensors on the current GPU, or on the CPU."""

    name = "torch"

    def __init__(self, on_gpu: bool) -> None:
        import torch

        super().__init__(on_gpu)
        self.torch = torch
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def can(self) -> frozenset[str]:
        return frozenset({"stream", "graph", "poison", "autograd"} if self.on_gpu else {"poison", "autograd"})

    def from_numpy(self, x: Array) -> Any:
        flat = flatten(x)
        elements = flat.elements
        if elements.dtype.name == "bfloat16":  # torch does not read NumPy's extension dtypes
            memory = self.torch.from_numpy(elements.view(np.int16)).view(self.torch.bfloat16)
        elif elements.dtype.name == "float8_e4m3fn":
            memory = self.torch.from_numpy(elements.view(np.uint8)).view(self.torch.float8_e4m3fn)
        else:
            memory = self.torch.from_numpy(elements)
        return self.torch.as_strided(memory.to(self.device), x.shape, flat.strides, flat.offset)

    def to_numpy(self, x: Any) -> Array:
        x = x.detach().cpu()
        if x.dtype == self.torch.bfloat16:
            import ml_dtypes

            return np.array(x.contiguous().view(self.torch.int16).numpy()).view(ml_dtypes.bfloat16)
        if x.dtype == self.torch.float8_e4m3fn:
            return np.array(x.view(self.torch.uint8).numpy())
        return np.array(x.numpy())

    def write(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def synchronize(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        """Torch fills empty tensors with NaN while deterministic algorithms are asked for."""
        before = self.torch.are_deterministic_algorithms_enabled()
        self.torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            self.torch.use_deterministic_algorithms(before)

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        if not self.on_gpu:
            yield
            return
        self.synchronize()
        with self.stream():
            yield
            self.torch.cuda.current_stream().synchronize()

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        stream: contextlib.AbstractContextManager[Any] = self.torch.cuda.stream(self.torch.cuda.Stream())
        return stream

    def mark(self) -> Callable[[], bool]:
        event = self.torch.cuda.Event()
        event.record()
        return lambda: bool(event.query())

    def graph(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.torch.cuda.current_stream()):
            results = work()
        return graph.replay, results


class JaxFramework(Framework):
    """JAX arrays on the default device; they are always contiguous."""

    name = "jax"

    def __init__(self, on_gpu: bool) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs some of the GPU's memory
        import jax

        super().__init__(on_gpu)
        self.jax = jax
        self.device = jax.devices("gpu" if on_gpu else "cpu")[0]

    def from_numpy(self, x: Array) -> Any:
        from cupyflash.jax.op import with_x64

        with with_x64():  # else fp64 cases would be fp32 ones
            return self.jax.device_put(np.ascontiguousarray(x), self.device)

    def synchronize(self) -> None:
        self.jax.effects_barrier()


def make(name: str, on_gpu: bool) -> Framework:
    """The framework of that name; ImportError if it is not installed."""
    if name == "cupy":
        return CupyFramework()
    if name == "torch":
        return TorchFramework(on_gpu)
    if name == "jax":
        return JaxFramework(on_gpu)
    return Framework(on_gpu)
