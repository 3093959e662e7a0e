# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what the forward over a cache brings: cases are those of tests/kernels/test_emulator_prefill.py."""

from __future__ import annotations

from .markers import change, without
from .mutants import Bug

PAGES = (
    Bug("pages in their own order", change("page-of-the-row", "p.block_table[entry]", "entry"), "pages"),
    Bug("new keys do not count", change("keys-with-the-new-ones-paged", "used + edge(b + 1) - edge(b)", "used"), "pages"),
    Bug("pages are whole columns of the next", change("chunks-of-a-page", "rows.from_chunk(c).base", "rows.base"), "pages-of-48-d128"),
    Bug("stage of pages filled while it is read", without("stage-empty-paged"), "chosen-d256", "more arrivals|RACE"),
    Bug("rows of the table behind the keys that count", change("keys-that-count-paged", "brings && key < tile.sequence.seqlen_k", "brings"), "pages", r"load at .*block_table|buffer"),
    Bug("tiles of whole rows counted as the rest", change("whole-tiles-first", "is_whole ? index.block : index.block - whole", "index.block"), "chosen-d256", "RACE|FAILED|NaN"),
    Bug("few queries computed twice", change("few-queries-left-out", "rows < V::kLeastQueries ? 0 : rows", "rows"), "mixed", "written twice"),
    Bug("many queries computed twice", without("many-queries-left-out"), "mixed", "written twice"),
)  # fmt: skip

CLAMPED_PAGES = (
    Bug("page that is none", change("page-within-the-array", "max(0, min(at.page, p.pages - 1))", "at.page"), "", r"load at|memory fault"),
)  # fmt: skip
