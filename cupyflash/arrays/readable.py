"""Whether arrays of a native library can be read where they say: asked where a call is new or something went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ArgumentError, CupyflashError
from .adapters import TORCH, Native
from .vetting import vet_memory, vet_tensor, vet_tracing


def unreadable(library: Native, error: Exception, arrays: Mapping[str, Any]) -> CupyflashError:
    """The error to raise where a library did not tell an array's shape or address; `vet_all` may know better why."""
    vet_all(library, arrays)
    return ArgumentError(f"{', '.join(arrays)}: {library.name} does not tell shape and address of one of them: {error}")


def vet_all(library: Native, arrays: Mapping[str, Any]) -> None:
    if library is TORCH:
        for name, x in arrays.items():
            vet_tensor(name, x)


def vet_new(library: Native, arrays: Mapping[str, Any]) -> None:
    """What must be looked at in every call that is not as one before."""
    if library is TORCH:
        vet_tracing(next(iter(arrays)))
        vet_lengths(arrays)


def vet_lengths(arrays: Mapping[str, Any]) -> None:
    """The part of it for tensors of which no more than lengths and strides is new."""
    for name, x in arrays.items():
        # Most lie as a whole from their memory's start on. Those without an address have been found by it (find.py).
        if x.nbytes > x.untyped_storage().nbytes() or x.storage_offset() or not x.is_contiguous():
            vet_memory(name, x)


def check_addresses(library: Native, pointers: Sequence[int], arrays: Mapping[str, Any]) -> None:
    """Refuse arrays without memory and elements that straddle their own size; empty arrays may lie anywhere."""
    vet_all(library, arrays)
    for (name, x), pointer in zip(arrays.items(), pointers, strict=True):
        if 0 not in x.shape and (pointer == 0 or pointer % x.itemsize):
            raise ArgumentError(
                f"{name}: expected an address that is a multiple of {x.itemsize}, got {pointer:#x}; copy it"
            )
