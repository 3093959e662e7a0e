"""What an array looks like to a launch, but for its address."""

from __future__ import annotations

from typing import Any, NamedTuple

CPU = -1  # the device of arrays in host memory
FULL_NAMES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
}  # of dtypes, as libraries have them


def place(device: int) -> str:
    """A device in words."""
    return "the CPU" if device == CPU else f"GPU {device}"


class Signature(NamedTuple):
    """All that a launch depends on but the address: a library's `signature`, spelled out by its `describe`.

    The hot path compares signatures as the plain tuples that the libraries return, and describes them only when a call
    is new.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: Any  # the library's own object
    device: int  # CUDA ordinal, or CPU
