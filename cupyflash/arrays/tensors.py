"""PyTorch tensors, as `adapters` has the arrays of other libraries; torch is not imported here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from . import torch_private
from .imported import is_instance
from .signature import CPU, FULL_NAMES, Signature

# What makes tensors, of which arguments each, and on which GPU; a NamedTuple would take longer to read.
Forms = tuple[Callable[..., Any], Sequence[tuple[Any, ...]], int]
Making = tuple[Callable[..., Any], Mapping[str, Any], int]
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class Torch:
    """PyTorch tensors. The attribute reads below are the cheapest that torch offers: this is the hot path."""

    name = "torch"
    allocates = True
    compares = True

    def __reduce__(self) -> str:
        """As of `Numpy`."""
        return "TORCH"

    @functools.cached_property
    def _dtypes(self) -> dict[str, Any]:
        torch = sys.modules["torch"]
        kinds = FULL_NAMES | {name: name for name in ("int32", "int8", "float8_e4m3fn")}
        return {name: getattr(torch, kind) for name, kind in kinds.items()}

    @functools.cached_property
    def _names(self) -> dict[Any, str]:
        return {dtype: name for name, dtype in self._dtypes.items() if name != "int32"}

    @functools.cached_property
    def _quick(self) -> tuple[Any, Any]:
        torch = sys.modules["torch"]
        return torch.empty_like, torch.Tensor.data_ptr

    @functools.cached_property
    def _raw_stream(self) -> Any:
        return torch_private.raw_stream()

    def owns(self, x: Any) -> bool:
        return is_instance(x, "torch", "Tensor")

    def signature(self, x: Any) -> tuple[Any, ...]:
        return x.shape, x.stride(), x.dtype, x.get_device() if x.is_cuda else CPU

    def describe(self, name: str, signature: tuple[Any, ...]) -> Signature:
        return tuple.__new__(Signature, signature)  # Signature(...) takes twice as long

    def dtype_name(self, dtype: Any) -> str:
        return self._names.get(dtype) or str(dtype).removeprefix("torch.")

    def cast(self, label: str, dtype: str) -> str:
        return f"{label}.to(torch.{FULL_NAMES.get(dtype, dtype)})"

    def pointer(self, x: Any) -> int:
        return x.data_ptr()

    def pointers(self, arrays: Iterable[Any]) -> list[int]:
        """The `pointer` of each."""
        return [*map(self._quick[1], arrays)]

    def look(self, arrays: Iterable[Any]) -> tuple[list[tuple[Any, ...]], list[int]]:
        keys, pointers = [], []
        for x in arrays:
            keys.append((x.shape, x.stride(), x.dtype, x.get_device() if x.is_cuda else CPU))
            pointers.append(x.data_ptr())
        return keys, pointers

    def comparison(
        self, arrays: Collection[Any], sizes: list[list[int | None]] | None = None,
        strides: list[list[int | None]] | None = None,
    ) -> Callable[..., bool] | None:  # fmt: skip
        """Of other arrays, True only where the `signature` of each is that of one of these; None: there is no such.

        Args:
            sizes, strides: of each array, None where others may have any.
        """
        return torch_private.comparison(arrays, sizes, strides)

    def make(self, likes: Sequence[str], made: Sequence[tuple[Sequence[int], str]], arrays: Mapping[str, Any]) -> Any:
        empty_like, found = self._quick[0], []
        for name in likes:
            x = arrays[name]
            found.append(empty_like(x) if x.is_contiguous() else self.empty_like(x))
        if made:
            new, dtypes = arrays["q"].new_empty, self._dtypes
            found += [new(shape, dtype=dtypes[dtype]) for shape, dtype in made]
        return found

    def forms(
        self, likes: Sequence[str], made: Sequence[tuple[Sequence[int], str]], arrays: Mapping[str, Any]
    ) -> Forms:
        """To make others like them takes one function for all shapes and dtypes, a third of what it takes to say what
        they are; where it runs for the first time after the core slept, less."""
        q, dtypes = arrays["q"], self._dtypes
        kinds = [(tuple(arrays[name].shape), arrays[name].dtype) for name in likes]
        kinds += [(tuple(shape), dtypes[dtype]) for shape, dtype in made]
        make = torch_private.empty_strided(q.device.type)
        if make is None:
            tensors = [_without_memory(q.new_empty(shape, dtype=dtype)) for shape, dtype in kinds]
            return self._quick[0], [(x,) for x in tensors], q.get_device()
        meta = sys.modules["torch"].empty
        arguments = [(shape, meta(shape, device="meta").stride(), dtype) for shape, dtype in kinds]
        return make, arguments, q.get_device()

    def making(self, x: Any) -> Making | None:
        """What makes tensors, dtypes by name, that of x by "", and where x is: for the `forms` of such as lie beside x;
        None: this torch has no such function."""
        make = torch_private.empty_strided(x.device.type)
        return None if make is None else (make, {**self._dtypes, "": x.dtype}, x.get_device())

    def make_like(self, forms: Forms, pointers: list[int]) -> list[Any]:
        make, arguments, device = forms
        found = []
        for one in arguments:
            x = make(*one)
            found.append(x)
            pointers.append(x.data_ptr())
        if x.get_device() != device:  # another GPU is current
            with sys.modules["torch"].cuda.device(device):
                found = [make(*one) for one in arguments]
            pointers[-len(found) :] = self.pointers(found)
        return found

    def empty_like(self, x: Any) -> Any:
        torch = sys.modules["torch"]
        if x.is_contiguous():  # asking costs less than naming the format
            return torch.empty_like(x)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        return like.new_empty(shape, dtype=self._dtypes[dtype])

    def full(self, shape: Sequence[int], value: int, like: Any) -> Any:
        return like.new_full(shape, value, dtype=self._dtypes["int32"])

    def put(self, x: Any, values: np.ndarray) -> None:
        x.copy_(self.from_numpy(values), non_blocking=True)  # CUDA has taken the values when this returns

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def stream(self, device: int) -> int:
        return self._raw_stream(device)

    def to_numpy(self, x: Any) -> np.ndarray:
        torch = sys.modules["torch"]
        x = x.detach()
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if x.dtype == torch.float8_e4m3fn:
            return x.view(torch.uint8).numpy().view(_E4M3)
        return x.numpy()

    def from_numpy(self, x: np.ndarray) -> Any:
        torch = sys.modules["torch"]
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == _E4M3:
            return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(x)


def _without_memory(x: Any) -> Any:
    """Of tensors of which others are made it has given its own back before there is another: a large call needs no more
    than it has."""
    x.untyped_storage().resize_(0)
    return x


TORCH = Torch()
