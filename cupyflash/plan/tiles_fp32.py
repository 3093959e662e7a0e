"""The sm80 family's tiles for fp32, whose elements take twice the shared memory and each product six of bf16
(tile/fp32.cuh)."""

from __future__ import annotations

import functools
from typing import TypeVar

from ..gpu.device import Device
from ..problem import MAX_HEAD_DIM, Problem
from .spec import Spec
from .tiles_sm80 import BackwardTile, ForwardTile, has_room, is_plain

_T = TypeVar("_T", bound="ForwardTile | BackwardTile")
Table = tuple[tuple[int, _T], ...]

# (largest head_dim, tile), the first that is as wide. Chosen by time on an H200 at head_dim 64, 128 and 256, 2026-11-27
# (docs/performance.md). 32 rows a warp, or warps that share rows, split each fragment for twice as many products.
_FORWARD = (
    (64, ForwardTile(128, 32, 4, 2, 2)),
    (128, ForwardTile(128, 64, 8, 2, 1, split_d=2)),
    (256, ForwardTile(128, 32, 8, 2, 1, split_d=2)),
)
_BACKWARD = (
    (64, BackwardTile(64, 64, 4, 1, 2, split_d=2)),
    (128, BackwardTile(64, 64, 8, 1, 1, split_d=4)),
    (256, BackwardTile(64, 32, 8, 1, 1, split_d=4, dq_parts=2)),
)
# Where that does not fit, or what scores bring takes registers, the first match that fits.
_FORWARD_NARROW = (
    (128, ForwardTile(64, 32, 4, 2, 2)),
    (128, ForwardTile(64, 32, 4, 2, 1)),
    (256, ForwardTile(64, 16, 4, 2, 1)),
    (256, ForwardTile(32, 16, 2, 2, 1)),
)
_BACKWARD_NARROW = (
    (64, BackwardTile(32, 64, 4, 1, 2)),
    (64, BackwardTile(32, 64, 4, 1, 1)),
    (128, BackwardTile(32, 32, 4, 1, 1, split_d=2)),
    (256, BackwardTile(32, 32, 4, 1, 1, split_d=2, dq_parts=2)),
    (256, BackwardTile(32, 16, 2, 1, 1, split_d=2, dq_parts=2)),
)


def _choose(best: Table[_T], others: Table[_T], spec: Spec, device: Device) -> _T | None:
    """The best one for heads as wide, if it has room, and the registers; else the first of the others."""
    own: list[_T] = [tile for limit, tile in best if spec.widest <= limit][:1] if is_plain(spec) else []
    found = [*own, *(tile for limit, tile in others if spec.widest <= limit)]
    return next((tile for tile in found if has_room(tile, spec, device)), None)


def forward_tile(spec: Spec, device: Device) -> ForwardTile:
    """That of a forward."""
    tile = _choose(_FORWARD, _FORWARD_NARROW, spec, device)
    assert tile is not None  # the last one fits every GPU
    return tile


@functools.cache
def widest_backward(device: Device) -> int:
    """The largest head_dim with a backward."""
    found = (Spec.of(Problem("fp32", 1, 1, 1, 1, 1, d, 1.0), tiles_fit=True) for d in range(MAX_HEAD_DIM, 0, -8))
    return next(spec.head_dim for spec in found if backward_tile(spec, device))


def backward_tile(spec: Spec, device: Device) -> BackwardTile | None:
    """That of a backward; None where a block has less shared memory than heads as wide need."""
    return _choose(_BACKWARD, _BACKWARD_NARROW, spec, device)
