"""Packed sequences, and those whose keys have ranges, in NumPy: the dense algorithm, one sequence after the other.

Packed arrays are (total, heads, head_dim), lse is (heads_q, total_q).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..problem import Problem
from ..sequences import Part, Sequences, parts
from . import attention

Array = NDArray[Any]


def forward(
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    sequences: Sequences,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    bias: Array | None = None,
    dropout_seed: Array | None = None,
    mask: BlockMask | None = None,
) -> tuple[Array, Array]:
    """`attention.forward` of each sequence by itself. Rows outside of all sequences have out 0 and lse -inf."""
    out, lse = np.zeros(q.shape, q.dtype), np.full(problem.rows, -np.inf, attention.accumulator(q))
    for b, part in enumerate(parts(problem, sequences)):
        found = attention.forward(
            q[part.q],
            k[part.k],
            v[part.k],
            part.problem,
            _of(alibi_slopes, b),
            sink,
            _bias_of(bias, part),
            dropout_seed,
            part.corner,
            None if mask is None else mask.part(b, part.keys),
        )
        out[part.q], lse[part.lse] = found
    return out, lse


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    problem: Problem,
    sequences: Sequences,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    bias: Array | None = None,
    dropout_seed: Array | None = None,
    wanted: tuple[str, ...] = (),
    mask: BlockMask | None = None,
) -> tuple[Array, ...]:
    """`attention.backward` of each sequence by itself; 0 outside of all sequences and for keys that are not used."""
    dq, dk, dv = (np.zeros(x.shape, x.dtype) for x in (q, k, v))
    learned = {"dalibi_slopes": alibi_slopes, "dsink": sink}
    sums = [np.zeros_like(x) for name, x in learned.items() if x is not None and name in wanted]
    dbias = [np.zeros(bias.shape, attention.accumulator(bias))] if bias is not None and "dbias" in wanted else []
    for b, part in enumerate(parts(problem, sequences)):
        dO, Q, K, V, Out = dout[part.q], q[part.q], k[part.k], v[part.k], out[part.q]
        dLSE, added = None if dlse is None else dlse[part.lse], (_of(alibi_slopes, b), sink, _bias_of(bias, part))
        own = None if mask is None else mask.part(b, part.keys)
        of = dO, Q, K, V, Out, lse[part.lse], dLSE, part.problem, *added, dropout_seed, part.corner, wanted, own
        found = attention.backward(*of)
        dq[part.q], dk[part.k], dv[part.k] = found[:3]
        targets = [total if total.ndim == 1 else total[b : b + 1] for total in sums]
        targets += [x for total in dbias if (x := _bias_of(total, part)) is not None]
        for target, one in zip(targets, found[3:], strict=True):
            target += one
    return dq, dk, dv, *sums, *dbias


def _of(slopes: Array | None, b: int) -> Array | None:
    """Those of sequence number b, by itself."""
    return slopes if slopes is None or slopes.ndim == 1 else slopes[b : b + 1]


def _bias_of(bias: Array | None, part: Part) -> Array | None:
    """A view of that of a sequence and the keys that its queries may see; sequences with biases are those of a
    batch."""
    if bias is None:
        return None
    found = bias[..., part.keys] if bias.shape[-1:] != (1,) and bias.ndim > 0 else bias
    return found[part.batch : part.batch + 1] if bias.ndim == 4 and len(bias) != 1 else found
