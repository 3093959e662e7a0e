"""What the arrays hold of packed cases and of those whose keys have ranges: the values of others, and NaN where a
sequence must not look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..problem import Problem
from ..sequences import Sequences, parts
from .case_inputs import VALUES, Rng, Tensors


def nan_outside(tensors: Tensors, p: Problem, sequences: Sequences) -> None:
    """Rows outside of all sequences and keys that are not used are NaN; every result is finite."""
    q, k, v, dout = tensors
    inside_q, inside_k = np.zeros(q.shape[:2], bool), np.zeros(k.shape[:2], bool)
    for part in parts(p, sequences):
        inside_q[part.batch, part.rows], inside_k[part.batch, part.keys] = True, True
    q[~inside_q], dout[~inside_q], k[~inside_k], v[~inside_k] = (np.nan,) * 4


def nan_in_neighbours(tensors: Tensors, p: Problem, sequences: Sequences) -> None:
    """Every second sequence is all NaN: a tile that holds rows of two must not let it over."""
    q, k, v, dout = tensors
    for b, rows, keys, *_ in list(parts(p, sequences))[1::2]:
        q[b, rows], dout[b, rows], k[b, keys], v[b, keys] = (np.nan,) * 4


def nan_at_borders(tensors: Tensors, p: Problem, sequences: Sequences) -> None:
    """The first and last row of every second sequence are NaN, in turn in k, v, q and dout alone."""
    q, k, v, dout = tensors
    for number, (b, rows, keys, *_) in enumerate(list(parts(p, sequences))[1::2]):
        x, part = ((k, keys), (v, keys), (q, rows), (dout, rows))[number % 4]
        x[b, part][[0, -1]] = np.nan


_PACKED_VALUES = (nan_outside, nan_in_neighbours, nan_at_borders)
PACKED_VALUES: dict[str, Callable[[Tensors, Problem, Sequences], None]] = {f.__name__: f for f in _PACKED_VALUES}


def draw_packed(values: str, rng: Rng, p: Problem, sequences: Sequences) -> Tensors:
    """(q, k, v, dout), packed as (1, total, heads, head_dim), by a name of `VALUES` or `PACKED_VALUES`."""
    p_whole = replace(p, batch=1, packed=False) if p.packed else p
    tensors = VALUES["normal" if values in PACKED_VALUES else values](rng, p_whole)
    if values in PACKED_VALUES:
        PACKED_VALUES[values](tensors, p, sequences)
    return tensors
