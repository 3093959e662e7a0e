"""The kernel that makes ranges of keys from padding masks: its parameters, and the one variant there is."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .params import COMMON_DTYPES, Field, Struct, dtype_of
from .variant import Variant

KEY_RANGE = Struct(
    "KeyRangeParams",
    (
        Field("shown", "const void *", "[batch, keys], a byte each: 0 is padding; null: nothing is"),
        Field("first_at", "const long long *", "[1]: the place of the one query; null: first"),
        Field("ranges", "int *", "[batch, 2]"),
        Field("broken", "int *", "becomes 1 where keys that count have others between them"),
        Field("shown_stride", "long long", "from one sequence to the next"),
        Field("keys", "int"),
        Field("used", "int", "of them; those behind do not count"),
        Field("first", "int"),
        Field("left", "int"),
        Field("right", "int", "of the window around the one query, or kUnbounded; several queries: both are"),
    ),
)
KEY_RANGE_PARAMS: np.dtype[np.void] = dtype_of(KEY_RANGE, COMMON_DTYPES)


@dataclass(frozen=True)
class KeyRangesTile:
    """A block takes a sequence."""

    warps: int = 32
    blocks_per_sm: int = 1

    @property
    def block_m(self) -> int:
        return 1

    @property
    def name(self) -> str:
        return f"w{self.warps}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """Three words of each warp."""
        return 12 * self.warps


@dataclass(frozen=True)
class KeyRanges(Variant):
    """key_ranges.cuh, which has nothing to do with elements."""

    folder, header, function, params_name, params = (
        "any", "key_ranges", "key_ranges", "KeyRangeParams", KEY_RANGE_PARAMS,
    )  # fmt: skip
    dtype: str = "fp16"  # which every GPU has
    head_dim: int = 0
    tile: KeyRangesTile = KeyRangesTile()

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        return {"warps": self.tile.warps}

    @functools.cached_property
    def symbol(self) -> str:
        return f"{self.header}_{self.tile.name}"


KEY_RANGES = KeyRanges()
