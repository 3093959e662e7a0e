"""A call on the CPU path: from arrays in host memory, by the names of the table of arrays, to `cpu.call` and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.adapters import Native
from ..block_mask import BlockMask
from ..cpu import call as cpu
from ..cpu.features import Features
from ..operands import BACKWARD, FORWARD, GRADIENT, INPUT, Pass
from ..options import Options
from ..problem import Problem
from ..sequences import Sequences
from .passes import WITH_LSE


def compute(
    which: Pass,
    library: Native,
    arrays: Mapping[str, Any],
    problem: Problem,
    options: Options,
    lengths: Sequences | None,
    wanted: tuple[str, ...],
) -> Sequence[Any]:
    """What a pass makes of arrays that were checked; whatever it can make, it makes.

    Args:
        lengths: where packed sequences lie and which keys count, in NumPy arrays.
    """
    names = tuple(arrays)

    def bshd(name: str, x: np.ndarray) -> np.ndarray:
        return x.swapaxes(-3, -2) if options.layout == "bhsd" and which.rows[name].has_layout else x

    plain = {name: bshd(name, library.to_numpy(x)) for name, x in arrays.items() if name not in Sequences._fields}
    own = {name: plain.pop(name, None) for name in which.names(INPUT, where=lambda row: not row.feature)}
    of_mods = tuple(plain.pop(name) for name in names if which.rows[name].free)
    of = _features(plain, of_mods, problem, lengths, wanted)
    made = which.made(names, wanted if which is BACKWARD else WITH_LSE)
    run: Callable[..., tuple[Any, ...]] = cpu.forward if which is FORWARD else cpu.backward
    found = dict(zip(made, run(**own, problem=problem, of=of), strict=True))
    with np.errstate(over="ignore"):
        for name, x in found.items():
            if which.uses[name].role == GRADIENT and which.rows[name].feature:
                like = library.to_numpy(arrays[which.rows[name].like])
                found[name] = x.astype(like.dtype, copy=False)
    return [library.from_numpy(_contiguous(bshd(name, x))) for name, x in found.items()]


def _features(
    arrays: dict[str, Any],
    of_mods: tuple[Any, ...],
    problem: Problem,
    sequences: Sequences | None,
    wanted: tuple[str, ...],
) -> Features:
    """Those of a call on the CPU path, of NumPy arrays by the names of the table of arrays."""
    blocks = None
    if "block_tiles" in arrays:
        tiles, bits = (np.asarray(arrays.pop(name)) for name in ("block_tiles", "block_bits"))
        longest = problem.max_seqlen_q, problem.max_seqlen_k
        blocks = BlockMask(tiles, bits, *(longest if problem.packed else (problem.seqlen_q, problem.seqlen_k)))
    return Features(**arrays, mod_arrays=of_mods, block_mask=blocks, sequences=sequences, wanted=wanted)


def _contiguous(x: np.ndarray) -> np.ndarray:
    """In C order; one of no dimensions keeps them."""
    return np.ascontiguousarray(x).reshape(x.shape)
