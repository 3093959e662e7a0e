"""The arrays on a device that say where sequences lie: made, or checked before anything changes, and written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.adapters import TORCH, Native, place
from ..arrays.libraries import library_of
from ..errors import ArgumentError


def lasting(library: Native) -> AbstractContextManager[Any]:
    """Within it, new arrays can be written at any time: torch's of inference_mode could not be outside of it."""
    return sys.modules["torch"].inference_mode(False) if library is TORCH else nullcontext()


class Tables:
    """Those of the calls of a cache.

    Attributes:
        library, like: whose arrays they are, and one of them on their device.
        columns: of a block table.
    """

    def __init__(self, library: Native, like: Any, columns: int) -> None:
        self.library, self.like, self.columns = library, like, columns

    def ready(self, into: Any, sequences: int, *, listed: bool) -> dict[str, Any]:
        """Arrays for so many sequences, new ones or `into`; `listed`: with the counts of each.

        Raises:
            ArgumentError: `into` is not what such a call returned.
        """
        shapes = {"block_table": (sequences, self.columns), "cache_seqlens": (sequences,)}
        if listed:
            shapes["cu_seqlens_q"] = (sequences + 1,)
        if into is None:
            with lasting(self.library):
                table = {"block_table": self.library.full(shapes.pop("block_table"), 0, self.like)}
                return table | {name: self.library.empty(shape, "int32", self.like) for name, shape in shapes.items()}
        if not isinstance(into, dict):
            raise ArgumentError(
                f"into: expected None or what a call for {sequences} sequences returned, got "
                f"{type(into).__module__}.{type(into).__qualname__}"
            )
        if set(into) != set(shapes):
            raise ArgumentError(
                f"into: expected {', '.join(shapes)}, as such a call for {sequences} sequences returns, got "
                f"{', '.join(map(str, into)) or 'nothing'}; with cu_seqlens_q are those of counts one by one"
            )
        for name, shape in shapes.items():
            self._check(f"into[{name!r}]", into[name], shape, sequences)
        return into

    def write(self, into: Mapping[str, Any], arrays: Mapping[str, NDArray[np.int32]]) -> None:
        """Queued on the current stream; nothing waits. Columns of a table that none of the sequences has stay as they
        are: at page size 1 a table is soon larger than what a step attends to.
        """
        for name, x in arrays.items():
            self.library.put(into[name][:, : x.shape[1]] if x.ndim == 2 else into[name], x)

    def _check(self, name: str, x: Any, shape: tuple[int, ...], sequences: int) -> None:
        found = library_of(name, x)
        if found is not self.library:
            raise ArgumentError(f"{name}: expected an array of {self.library.name}, got one of {found.name}")
        wanted = _shown("int32", shape, self.library.signature(self.like)[3])
        got = _shown(self.library.dtype_name(x.dtype), tuple(x.shape), self.library.signature(x)[3])
        if got != wanted:
            raise ArgumentError(
                f"{name}: expected {wanted}, as such a call for {sequences} sequences returns, got {got}"
            )
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            raise ArgumentError(f"{name}: expected an array that can be written")


def _shown(dtype: str, shape: tuple[int, ...], device: int) -> str:
    return f"{dtype} of shape {shape} on {place(device)}"
