# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what ranges of keys bring."""

from __future__ import annotations

from functools import partial

from .markers import change, without
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")
_COUNTS = "return static_cast<ptx::u32>(ki - start_k) < static_cast<ptx::u32>(end_k - start_k)"

FORWARD_RANGE = (
    Bug("keys before the range seen", change("key-in-range", _COUNTS, "return ki < end_k"), "range-left-causal"),
    Bug("keys behind the range seen", change("key-in-range", _COUNTS, "return ki >= start_k"), "range-right-d128"),
    _sm90("keys before the range seen on Hopper", change("key-in-range", _COUNTS, "return ki < end_k"), "range-left-causal"),
    Bug("range of a sequence that is none", without("no-range-outside"), "packed-range-outside-d256", r"load at .*kv_range|buffer"),
)  # fmt: skip

BACKWARD_RANGE = (
    Bug("blocks of keys before the range visited", change("blocks-that-count", "k0 + N > start_k", "true"), "range-deterministic", r"DEADLOCK"),
    Bug("first share of dQ from a block before the range", change("first-key", "max(start(), qi + lower)", "max(0, qi + lower)"), "range-deterministic", r"DEADLOCK"),
    Bug("blocks of no visible key take a turn", change("visits-of-no-key", "!mask.some_count(k0)", "false"), "range-deterministic", r"DEADLOCK"),
    _sm90("blocks of keys before the range visited on Hopper", change("first-key", "max(start(), qi + lower)", "max(0, qi + lower)"), "range-deterministic", r"DEADLOCK"),
)  # fmt: skip

# With ranges that contradict, as tests/kernels/test_emulator_range.py has them.
CLAMPED_RANGE = (
    Bug("range begins before the keys", change("range-within-the-keys", "max(0, from)", "from"), ""),
    Bug("range ends behind the keys", change("range-within-the-keys", "min(this->seqlen_k, to)", "to"), ""),
    Bug("range that ends before it starts", change("no-key-in-range", "first < end", "true"), ""),
)  # fmt: skip
