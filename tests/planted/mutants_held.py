# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what the sm80 family does on Turing alone: tiles that threads hold in registers before they store them,
and dQ in parts."""

from __future__ import annotations

from functools import partial

from .markers import change, postpone, without
from .mutants import Bug

_bug = partial(Bug, arch="sm_75")
_OUTSIDE = r"out of bounds"

FORWARD_HELD = (
    _bug("held: K never stored", without("k-held"), "dense-d64"),
    _bug("held: K stored when others may read it", postpone("k-held", behind="k-landed-held"), "dense-d128", r"RACE, "),
    _bug("held: V stored when others may read it", postpone("v-held", behind="v-landed-held"), "causal-d128", r"RACE, "),
    _bug("held: rows that do not exist", change("rows-that-exist-held", "row0 + row < n_rows &&", ""), "dense-d64", _OUTSIDE),
    _bug("held: columns that do not exist", change("rows-that-exist-held", "(kValidCols == kCols || col < kValidCols)", "true"), "dense-d40", _OUTSIDE),
)  # fmt: skip

BACKWARD_HELD = (
    _bug("held: Q and dO stored when others may read them", postpone("queries-held", behind="q-and-do-landed"), "dense-d64", r"RACE, "),
    _bug("held: delta in the place of lse", change("statistics-held", "lse, delta", "delta, lse"), "dense-d128"),
    _bug("held: dO read with the strides of Q", change("strides-of-do-held", "p.dout_stride, head", "p.q_stride, head"), "broadcast-dout", _OUTSIDE),
    _bug("parts of dQ from the first columns of K", change("columns-of-k-for-dq-sm80", "+ col", ""), "dense-d256"),
    _bug("parts of dQ in the place of the first", change("dq-added", ", col)", ", 0)"), "causal-d256"),
)  # fmt: skip
