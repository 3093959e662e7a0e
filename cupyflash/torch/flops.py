"""What torch's FlopCounterMode counts of the operators: all products, masked or not, as of torch's own attention.

The forward has two products of matrices, one as wide as q and one as v; the backward three and two. Packed sequences
count by their lengths, which are read (a GPU is waited for); where there are none to read, as of FakeTensors, by equal
ones.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..operands import BACKWARD, FORWARD, Pass
from . import ops


def _count(which: Pass, products: tuple[int, int], *values: Any) -> int:
    arrays, options, _ = ops.read_by_name(which, values)
    packed = "cu_seqlens_q" in arrays
    sizes: dict[str, int] = {}
    for name in ("q", "k", "v"):
        dims = ops.dims_of(which.rows[name], options.layout, packed)
        sizes |= dict(zip(dims, arrays[name].shape, strict=True))
    pairs = _pairs(arrays, sizes) if packed else sizes["batch"] * sizes["seqlen_q"] * sizes["seqlen_k"]
    of_q, of_v = products
    return int(2 * pairs * sizes["heads_q"] * (of_q * sizes["head_dim"] + of_v * sizes["head_dim_v"]))


def _pairs(arrays: dict[str, Tensor], sizes: dict[str, int]) -> int:
    """How many pairs of a query and a key of its sequence there are."""
    cu_q = arrays["cu_seqlens_q"]
    if type(cu_q) is not Tensor or cu_q.device.type == "meta":
        return sizes["total_q"] * sizes["total_k"] // max(1, cu_q.shape[0] - 1)
    lengths_q = cu_q.diff().tolist()
    lengths_k = arrays["seqused_k"] if "seqused_k" in arrays else arrays.get("cu_seqlens_k", cu_q).diff()
    return sum(a * b for a, b in zip(lengths_q, lengths_k.tolist(), strict=True))


def _forward(*values: Any, **_: Any) -> int:
    return _count(FORWARD, (1, 1), *values)


def _backward(*values: Any, **_: Any) -> int:
    return _count(BACKWARD, (3, 2), *values)


def _register() -> None:
    log = logging.getLogger("torch.utils.flop_counter")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns where Triton is missing, which is nothing to our callers
    try:
        from torch.utils.flop_counter import flop_registry, register_flop_formula
    finally:
        log.setLevel(level)
    for operator, count in ((torch.ops.cupyflash.forward, _forward), (torch.ops.cupyflash.backward, _backward)):
        register_flop_formula(operator, get_raw=True)(count)
        flop_registry.setdefault(operator, count)  # torch 2.4 registers overloads and looks for operators


_register()
