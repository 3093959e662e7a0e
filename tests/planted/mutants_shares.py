# ruff: noqa: E501 (a bug a line)
"""Bugs planted where a group's query heads are divided: what becomes of marked statements."""

from __future__ import annotations

from functools import partial

from .markers import change, without
from .mutants import Bug

OUTSIDE = r"RACE|outside|out of bounds|in no buffer"

_bug = partial(Bug, sm_count=40)  # which has room for several shares

BACKWARD_SHARES = (
    _bug("K and V of the first head for all", change("head-of-k-share", "key_head / shares(p)", "0"), "gqa", r"RACE, write after write: buffer 'd[kv]'"),
    _bug("rows of a share behind the last key", change("float-rows-that-exist", "i >= rows", "false"), "mqa", OUTSIDE),
    _bug("columns of a share behind its row", change("float-columns-that-exist", "col0 + 8 * j < kColumns", "true"), "shares-d144", OUTSIDE),
    _bug("shares of all heads in one place", change("share-of-its-head", "+ key_head", "+ 0"), "mqa", r"RACE, write after write: .*shares\.cuh:\d+"),
    _bug("every other column of a share", change("share-left", "{x, y}", "{x, 0.f}"), "mqa"),
    _bug("one share left out", change("all-shares", "i < p.shares", "i < p.shares - 1"), "mqa"),
    _bug("NaN of hidden keys let through to a sum of shares", change("dk-and-dv-finite-shares", "!ptx::vote_all(stage_rows<T>(rows, 0, sum, col0))", "stage_rows<T>(rows, 0, sum, col0); false"), "nan-in-queries-of-shares"),
    _bug("sum of shares written before all lanes have repaired it", without("shares-repaired-by-the-warp"), "nan-in-queries-of-shares", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    _bug("K handed back while warps multiply by it", without("shared-operand-read"), "shares-d200", r"RACE, ", arch="sm_90", sm_count=4),
)  # fmt: skip
