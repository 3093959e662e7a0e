"""What shapes of work the sm80 family's blocks take on Turing, which has 64 KiB of shared memory and no cp.async.

Those of head_dim 64 and 128 were chosen by time, of calls without features, on an H200 with as little, and Turing's
instructions (``tools.as_gpu --ptx``), 2026-11-26 (docs/performance.md). The others are what fits and compiles without
spills.
"""

from __future__ import annotations

from dataclasses import replace

from ..gpu.device import Device
from .spec import Spec
from .tiles_sm80 import BackwardTile, ForwardTile, fits

# The first that fits. 16 rows a warp leave registers for every feature.
_FORWARD = (
    ForwardTile(256, 64, 8, 2, 1, q_in_regs=True),
    *(ForwardTile(128, keys, 8, 2, 1) for keys in (64, 48, 32)),
    *(ForwardTile(64, keys, 4, 2, 1) for keys in (64, 32, 16)),
)
_BACKWARD = (
    (64, BackwardTile(32, 128, 8, 1, 1)),
    (64, BackwardTile(32, 64, 4, 1, 1)),
    (128, BackwardTile(32, 64, 8, 1, 1, split_d=2)),
    (256, BackwardTile(32, 32, 4, 1, 1, split_d=2)),
)
_LAST = BackwardTile(32, 16, 2, 1, 1, split_d=2)


def forward_tile(spec: Spec, device: Device) -> ForwardTile:
    """32 rows a warp, with Q, leave no registers for what is read by element. Tiles of a block mask have no whole
    blocks of 48."""
    may_be_tall = not (spec.bias or spec.dropout or spec.block_mask or spec.unaligned)
    fitting = (tile for tile in _FORWARD if fits(tile, spec, device))
    return next(t for t in fitting if (t.block_m <= 128 or may_be_tall) and not (t.block_n == 48 and spec.block_mask))


def backward_tiles(spec: Spec) -> tuple[tuple[int, BackwardTile], ...]:
    """(largest head_dim, tile). With a block mask, dQ in parts takes more registers than it saves."""
    last = _LAST if spec.block_mask else replace(_LAST, dq_parts=2)
    return *_BACKWARD[spec.block_mask > 0 :], (256, last)
