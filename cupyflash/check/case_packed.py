"""What the arrays of packed cases hold: the values of dense ones, and NaN where a sequence must not look."""

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
    inside_q, inside_k = np.zeros(p.seqlen_q, bool), np.zeros(p.seqlen_k, bool)
    for rows, keys, _ in parts(p, sequences):
        inside_q[rows], inside_k[keys] = True, True
    q[:, ~inside_q], dout[:, ~inside_q], k[:, ~inside_k], v[:, ~inside_k] = (np.nan,) * 4


def nan_in_neighbours(tensors: Tensors, p: Problem, sequences: Sequences) -> None:
    """Every second sequence is all NaN: a tile that holds rows of two must not let it over."""
    q, k, v, dout = tensors
    for rows, keys, _ in list(parts(p, sequences))[1::2]:
        q[:, rows], dout[:, rows], k[:, keys], v[:, keys] = (np.nan,) * 4


def nan_at_borders(tensors: Tensors, p: Problem, sequences: Sequences) -> None:
    """The first and last row of every second sequence are NaN, in turn in k, v, q and dout alone."""
    q, k, v, dout = tensors
    for number, (rows, keys, _) in enumerate(list(parts(p, sequences))[1::2]):
        x, part = ((k, keys), (v, keys), (q, rows), (dout, rows))[number % 4]
        x[:, part][:, [0, -1]] = np.nan


_PACKED_VALUES = (nan_outside, nan_in_neighbours, nan_at_borders)
PACKED_VALUES: dict[str, Callable[[Tensors, Problem, Sequences], None]] = {f.__name__: f for f in _PACKED_VALUES}


def draw_packed(values: str, rng: Rng, p: Problem, sequences: Sequences) -> Tensors:
    """(q, k, v, dout) as (1, total, heads, head_dim), by a name of `VALUES` or `PACKED_VALUES`."""
    tensors = VALUES["normal" if values in PACKED_VALUES else values](rng, replace(p, batch=1, packed=False))
    if values in PACKED_VALUES:
        PACKED_VALUES[values](tensors, p, sequences)
    return tensors
