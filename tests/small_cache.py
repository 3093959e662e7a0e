"""A small call of attention over a cache, for tests of what is around it."""

from __future__ import annotations

from typing import Any

import numpy as np


def small(rng: np.random.Generator, dtype: Any = np.float32, **more: Any) -> dict[str, Any]:
    """Three sequences in a cache of 20 rows, one query and one new key each."""
    found: dict[str, Any] = {"q": rng.standard_normal((3, 1, 4, 16)).astype(dtype)}
    found["k_cache"], found["v_cache"] = rng.standard_normal((2, 3, 20, 2, 16)).astype(dtype)
    found["cache_seqlens"] = np.array([0, 7, 19], np.int32)
    found["k"], found["v"] = rng.standard_normal((2, 3, 1, 2, 16)).astype(dtype)
    return found | more
