"""Runs a call over a cache that takes the forward, on the emulator: append, rows of 8-bit caches, attention beside it,
forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from cupyflash.arrays.adapters import NUMPY
from cupyflash.cache.problem import CacheProblem
from cupyflash.launch.prefill import ready, rows_of
from cupyflash.operands import FORWARD
from cupyflash.plan.prefill import Way, problem_of

from .attention import Session, small_device
from .decode import CacheSession
from .launch import MODES

Array = NDArray[Any]


@dataclasses.dataclass
class PrefillSession:
    """One run of one call.

    Attributes:
        family: the kernels' family.
        headers: patched kernel sources by file name; the others are as shipped.
        splits: into how many parts keys are divided, in place of what the plan finds for so few.
    """

    mode: str = "race"
    seed: int = 0
    headers: Mapping[str, str] | None = None
    family: str = "sm90"
    splits: int = 1

    def run(self, arrays: Mapping[str, Array], p: CacheProblem) -> tuple[Array, Array, Array, Array]:
        """out, lse, and the caches after the append. Each row is written by one of both, or by none."""
        way = Way(paged=True, beside=p.packed, dequantized=p.stored != "")
        how: dict[str, Any] = {"attends": way.beside, "dequantizes": way.dequantized, "headers": self.headers}
        device = small_device("sm_90" if self.family == "sm90" else "sm_80", 4)
        beside = CacheSession(device, MODES[self.mode], self.seed, **how)
        out, lse, k_cache, v_cache = beside.run(arrays, way.left(p))
        after = ready({**arrays, "k_cache": k_cache, "v_cache": v_cache}, beside.shared, p, way)
        forward = Session.of_family(self.family, self.mode, seed=self.seed, headers=self.headers)
        with patch("cupyflash.plan.splits.key_splits", lambda *_: self.splits):
            made = forward._run(FORWARD, rows_of(NUMPY, after, p, way), problem_of(p, way))
        found, found_lse = made["out"], made["lse"]
        if not p.packed:
            by_sequence = found_lse.reshape(p.heads_q, p.batch, p.seqlen_q).swapaxes(0, 1)
            return found.reshape(*p.rows_q, p.head_dim_v), by_sequence, k_cache, v_cache
        writes = [~np.isnan(x.astype(np.float32)).all(axis=(1, 2)) for x in (out, found)]
        assert not (writes[0] & writes[1]).any(), "rows written twice"
        return np.where(writes[1][:, None, None], found, out), np.where(writes[1], found_lse, lse), k_cache, v_cache
