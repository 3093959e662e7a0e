"""The params of a kernel over a cache, from which the driver reads them at each launch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from .cached_params import plain_of


class Block:
    """A params struct that the driver reads, and the words in it that addresses go to."""

    def __init__(self, params: np.ndarray, words: Mapping[str, tuple[int, ...]], order: Sequence[str]) -> None:
        """`order`: the names of the arrays whose addresses a call gets."""
        self.params = params
        self._writes = [(word, i) for i, name in enumerate(order) for word in words.get(name, ())]
        self._slots = memoryview(params.reshape(1).view(np.uint64).data)
        self._numbers = memoryview(params.reshape(1).view(np.int32).data)
        start = params.ctypes.data
        plain, fields = plain_of(params.dtype)
        self._one_length = (plain + fields["one_length"][1]) // 4
        self._pointers = (ctypes.c_void_p * 2)(start, start + plain)
        self.whole = ctypes.addressof(self._pointers)
        self.plain = self.whole + ctypes.sizeof(ctypes.c_void_p)

    def write(self, addresses: Sequence[int], length: int | None) -> None:
        for slot, i in self._writes:
            self._slots[slot] = addresses[i]
        if length is not None:
            self._numbers[self._one_length] = length
