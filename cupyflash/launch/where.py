"""Where NumPy arrays are computed, if nobody says so: on the GPU, copied there and back, or on the CPU path.

Copies cost O(seqlen), attention O(seqlen^2), so it is the GPU but for calls that give much more than they compute with:
a few keys of a long cache (`kv_range`), a large table of which mods read little. A wrong choice for the CPU would cost
seconds, one for the GPU some milliseconds; so the GPU's way is taken at the least that it can take, the CPU's at what
one thread took, and that has to be `SURE` times faster.

The choice depends on the call alone, not on what is compiled or warm already, nor on cores: equal calls give equal
bits. So the first call of a process pays for CUDA and the compiler, however small it is, as calls on GPU arrays do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..cpu.tiles import scores_of
from ..operands import BACKWARD, Pass
from ..problem import ITEMSIZE, Problem
from ..sequences import Sequences
from .pieces import without_repeats

# The GPU's way at its fastest, on the host of an H200 (2026-11-23).
GPU_CALL_S = 150e-6  # a forward on 64 tokens takes 172 at the least
BUS_BYTES_S = 30e9  # `staging` has 26 at the most; older buses have half of it or a quarter
SURE = 2.0  # how much faster the CPU path must seem


class Rates(NamedTuple):
    """What the CPU path takes: one thread of an AMD EPYC, NumPy 2.4 with OpenBLAS 0.3.31 (2026-11-23).

    Attributes:
        call_s: of a call, and of each sequence or head that is computed by itself.
        element_s: to convert an element to fp32 or back, by dtype. Gradients below fp16's normal range take longest.
        score_s: of a score beside its FLOPs.
        feature_s: of a score with all that can be added to one; dropout and mods are most of it.
        flops_s: FLOPs a second.
    """

    call_s: float
    element_s: dict[str, float]
    score_s: float
    feature_s: float
    flops_s: float


_FORWARD = Rates(0.15e-3, {"fp16": 3e-9, "bf16": 1e-9, "fp32": 0.0}, 3e-9, 60e-9, 50e9)
_BACKWARD = Rates(0.20e-3, {"fp16": 65e-9, "bf16": 4e-9, "fp32": 0.0}, 5e-9, 90e-9, 50e9)


class Sizes(NamedTuple):
    """How much the CPU path has to do: parts by themselves, rows of q, keys that count, scores of all heads."""

    parts: int
    rows: int
    keys: int
    scores: int


class Estimate(NamedTuple):
    """Seconds: at least, on the GPU, and about, on the CPU path."""

    gpu_s: float
    cpu_s: float

    @property
    def on_gpu(self) -> bool:
        return SURE * self.cpu_s >= self.gpu_s


def sizes_of(p: Problem, sequences: Sequences | None = None) -> Sizes:
    """Those of a call whose sequences lie where these NumPy arrays say; without, where its arrays are."""
    parts = p.batch * p.heads_k if p.block_mask > 1 else 1
    if sequences is None:
        return Sizes(parts, p.batch * p.seqlen_q, p.batch * p.seqlen_k, scores_of(p))
    cu_q, cu_k, used, ranges = (None if x is None else np.asarray(x, np.int64) for x in sequences)
    rows = np.full(p.batch, p.seqlen_q) if cu_q is None else np.diff(cu_q)
    keys = np.full(p.batch, p.seqlen_k) if cu_k is None else np.diff(cu_k) if used is None else used
    if ranges is not None:
        keys = np.maximum(0, np.minimum(keys, ranges[:, 1]) - np.maximum(0, ranges[:, 0]))
    scores = p.heads_q * int(np.dot(rows, keys))
    return Sizes(max(parts, p.batch), int(rows.sum()), int(keys.sum()), scores)


def copied_bytes(p: Problem, *, backward: bool) -> int:
    """Of q, k, v, out and lse; in the backward also of dout and the gradients of q, k and v."""
    rows, keys = (n if p.packed else p.batch * n for n in (p.seqlen_q, p.seqlen_k))
    width = ITEMSIZE[p.dtype] * sum(p.widths)
    of_q, of_k = (n * heads * width for n, heads in ((rows, p.heads_q), (keys, p.heads_k)))
    lse = 4 * rows * p.heads_q
    return 2 * of_q + 2 * of_k + lse if backward else of_q + of_k + lse


def estimate(p: Problem, sizes: Sizes, more_bytes: int = 0, *, backward: bool) -> Estimate:
    """What a call takes in either place.

        gpu_s = GPU_CALL_S + bytes / BUS_BYTES_S
        cpu_s = parts * call_s + elements * element_s + scores * (FLOPs of one / flops_s + score_s + feature_s)

    with the elements of q, k, v and out that take part, and of their gradients, and 2 (head_dim + head_dim_v) FLOPs a
    score, in the backward 6 head_dim + 4 head_dim_v. The GPU's own work is left out, feature_s too where nothing is
    added to scores.

    Args:
        more_bytes: of the arrays that features bring.
    """
    rates = _BACKWARD if backward else _FORWARD
    elements = sum(p.widths) * (sizes.rows * p.heads_q + sizes.keys * p.heads_k) * (2 if backward else 1)
    has_more = p.bias is not None or p.mods or p.dropout or p.alibi or p.softcap is not None or p.block_mask
    flops = 6 * p.head_dim + 4 * p.head_dim_v if backward else 2 * sum(p.widths)
    score_s = flops / rates.flops_s + rates.score_s + rates.feature_s * bool(has_more)
    return Estimate(
        GPU_CALL_S + (copied_bytes(p, backward=backward) + more_bytes) / BUS_BYTES_S,
        sizes.parts * rates.call_s + elements * rates.element_s[p.dtype] + sizes.scores * score_s,
    )


def worth_the_gpu(
    which: Pass, arrays: Mapping[str, np.ndarray], p: Problem, lengths: Sequences | None, wanted: tuple[str, ...]
) -> bool:
    """Whether a call with these NumPy arrays, by the names of the table of arrays, is not slower by way of the GPU.

    What features bring is as large as its gradients: where these are wanted, either place reads and writes all of it.
    """
    if which is BACKWARD and wanted:
        return True
    more_bytes = sum(without_repeats(x).nbytes for name, x in arrays.items() if which.rows[name].feature)
    return estimate(p, sizes_of(p, lengths), more_bytes, backward=which is BACKWARD).on_gpu
