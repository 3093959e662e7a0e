"""The sm80 family: mma.sync, cp.async and ldmatrix, on every GPU from compute capability 8.0 on; and on Turing (7.5),
which has no bf16, and copies by loads and stores in place of cp.async (hw/ptx.cuh)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..gpu.device import Device
from . import forward_sm80, tiles_fp32, turing
from .family import Family
from .kernels import Convert, ConvertTile, Delta, DeltaTile, Main, Slopes, SlopesTile
from .learned import learned
from .lists import lists_before
from .params import BWD_PARAMS, FWD_PARAMS
from .spec import Spec
from .splits import forward_kernels
from .tiles_sm80 import BackwardTile, ForwardTile, WideTile, divides_dq, fits
from .variant import Variant

# (largest head_dim, tile), first match that fits the shared memory. Chosen by time on an H200, 2026-11-20
# (docs/performance.md), among those that compile without spills with NVRTC 12.9, for all architectures; that of 96 on
# 2026-11-28.
_BACKWARD: tuple[tuple[int, BackwardTile], ...] = (
    (64, BackwardTile(32, 128, 4, 2, 2, dq_warps_m=1, dq_unroll=4)),
    (96, BackwardTile(64, 64, 4, 1, 2, split_d=2)),
    (128, BackwardTile(64, 128, 8, 2, 1, split_d=2)),
    (128, BackwardTile(64, 128, 8, 1, 1, split_d=2, dq_warps_m=4)),
    (128, BackwardTile(64, 64, 8, 1, 1, split_d=2)),
    (192, BackwardTile(64, 64, 8, 1, 1, split_d=4, dq_warps_m=1)),
    (256, BackwardTile(64, 64, 8, 2, 1, split_d=4, dq_warps_m=4)),
    (256, BackwardTile(64, 64, 8, 1, 1, split_d=4, dq_warps_m=1)),
    (256, BackwardTile(32, 32, 4, 1, 1, split_d=2)),
)

# For GPUs with 100 KiB a multiprocessor, chosen likewise at head_dim 64, 96, 128 and 192. Eight warps do not divide the
# columns of dQ at 112: there, what is best at 128 of those that have them padded.
_BACKWARD_SMALL: tuple[tuple[int, BackwardTile], ...] = (
    (64, BackwardTile(32, 128, 4, 1, 2, dq_warps_m=1, dq_unroll=4)),
    (96, BackwardTile(32, 64, 4, 1, 2)),
    (112, BackwardTile(64, 64, 8, 1, 1, split_d=4, dq_warps_m=4)),
    (128, BackwardTile(32, 128, 8, 1, 1)),
    (224, BackwardTile(32, 64, 8, 1, 1, split_d=2)),
    _BACKWARD[-1],
)


# Beyond 64, two groups of warps, whose columns are multiples of 16 * split_d. Chosen by time on an H200: at 192 and 256
# also with less shared memory, 2026-11-26; from 72 to 160, 192 with 96 keys, and 224, with an A100's at 112, 128 and
# 160, with 99 KiB at 112, 128 and 160, on 2026-11-28. At 256 two steps of dQ without a mask are 1 % slower. (Head_dims,
# tile): the first that fits.
_BACKWARD_WIDE: tuple[tuple[range, WideTile], ...] = (
    (range(65, 97), WideTile(64, 128, 8, 2, 1, split_d=2, dq_warps_m=4)),
    *((range(97, 129), WideTile(64, 128, 8, stages, 1, split_d=2, dq_parts=2)) for stages in (2, 1)),
    (range(97, 113), WideTile(64, 64, 8, 1, 1, split_d=2, dq_warps_m=4)),
    (range(113, 129), WideTile(32, 128, 8, 1, 1, split_d=2, dq_parts=2)),
    (range(129, 161), WideTile(64, 96, 8, 2, 1, split_d=2, dq_warps_m=4)),
    *((range(129, 161), WideTile(64, 64, 8, stages, 1, split_d=2, dq_warps_m=4)) for stages in (2, 1)),
    (range(161, 193), WideTile(64, 96, 8, 2, 1, split_d=4, dq_warps_m=4)),
    (range(193, 225), WideTile(64, 64, 8, 2, 1, split_d=2, dq_warps_m=4)),
    *((range(129, 257), WideTile(64, 64, 8, stages, 1, split_d=4)) for stages in (2, 1)),
    (range(129, 257), WideTile(32, 64, 8, 1, 1, split_d=4)),
)


# With a bias: fewer scores a thread, so that those of the bias fit the registers, too. Chosen among tiles that compile
# without spills, on every architecture; not measured.
_BACKWARD_BIAS: tuple[tuple[int, BackwardTile], ...] = (
    # Eight warps divide dQ where it has a multiple of 32 columns.
    *((limit, BackwardTile(32, 128, 8, 2, 1) if limit % 32 == 0 else _BACKWARD[0][1]) for limit in (16, 32, 48, 64)),
    *((limit, tile) for limit, tile in _BACKWARD if limit > 128 or (limit == 128 and tile.block_n == 64)),
)


# Where it comes through shared memory, it takes no registers: the usual tiles. Beside what needs more, those above.
# Chosen by time on an H200, also with less shared memory (tools.as_gpu), at head_dim 64 and 128, 2026-11-27.
_BACKWARD_COPIED_BIAS = tuple((d, replace(tile, copies_bias=True)) for d, tile in _BACKWARD if d <= 128)
_BACKWARD_COPIED_BIAS_NARROW = tuple((d, replace(tile, copies_bias=True)) for d, tile in _BACKWARD_BIAS if d <= 128)


# Fewer columns a warp. What compiles without spills; not measured.
_BACKWARD_NARROW: tuple[tuple[int, BackwardTile], ...] = (
    *(row for row in _BACKWARD_BIAS if row[0] <= 64),
    *(row for row in _BACKWARD if row[0] > 128),
)

# With two features (Spec.crowded), likewise: more warps lie along the rows of dQ, so that each has fewer.
_BACKWARD_CROWDED: tuple[tuple[int, BackwardTile], ...] = (
    *(row for row in _BACKWARD_BIAS if row[0] <= 64),
    (128, BackwardTile(64, 64, 8, 1, 1, split_d=2, dq_warps_m=4)),
    *(row for row in _BACKWARD_BIAS if row[0] > 128),
)


@dataclass(frozen=True)
class Forward(Main):
    """fwd_sm80.cuh."""

    folder, header, function, params_name, params = "sm80", "fwd_sm80", "fwd", "FwdParams", FWD_PARAMS

    unaligned: bool = False
    sink: bool = False


@dataclass(frozen=True)
class Backward(Main):
    """bwd_sm80.cuh: dK, dV, and the sum of dQ."""

    folder, header, function, params_name, params = "sm80", "bwd_sm80", "bwd", "BwdParams", BWD_PARAMS
    over = "k"

    unaligned: bool = False
    deterministic: bool = False
    dalibi: bool = False
    sink: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class BackwardWide(Backward):
    """bwd_wide_sm80.cuh: the same at head_dims beyond 64."""

    header, function = "bwd_wide_sm80", "bwd_wide"


class Sm80(Family):
    """Takes everything."""

    name = "sm80"

    def why_not(self, spec: Spec, device: Device) -> str | None:
        if spec.paged and spec.unaligned:
            return "it reads pages where rows start at multiples of 16 bytes"
        if spec.dtype == "fp32" and spec.backward and tiles_fp32.backward_tile(spec, device) is None:
            return (
                f"a backward in fp32 at head_dim {spec.widest} needs more shared memory than the "
                f"{device.smem_bytes // 1024} KiB that a block has on {device.name}; cast q, k and v to bf16 or fp16"
            )
        return None

    def forward_tile(self, spec: Spec, device: Device) -> ForwardTile:
        if spec.dtype == "fp32":
            return tiles_fp32.forward_tile(spec, device)
        return turing.forward_tile(spec, device) if device.is_tiny else forward_sm80.tile(spec, device)

    def wide_tile(self, spec: Spec, device: Device) -> WideTile | None:
        """For what two groups of warps take (bwd_wide_sm80.cuh), if it fits. Registers are left neither for a bias (or
        mods) beside a softcap or of packed sequences, nor for such with rows that are not aligned; nor from head_dim 97
        to 128 for more than a mask and sinks of packed sequences; nor beyond 160 for weights, or ranges in a fixed
        order, beside more than 64 keys. One group is faster up to 128 with weights, and with a bias, which it copies;
        up to 96 with windows and ranges. Not measured there: packed sequences, and rows that are not aligned."""
        others = spec.block_mask, spec.dalibi, spec.head_dim_v, spec.bias and (spec.softcap or spec.packed)
        d = spec.head_dim
        if any(others) or (spec.packed and spec.unaligned):
            return None
        more = spec.deterministic or spec.alibi or spec.kv_range or spec.scale_first
        weights = bool(spec.softcap or spec.mods or spec.dropout)
        if d <= 128 and (weights or spec.bias or (spec.packed and more)):
            return None
        if d <= 96 and (spec.window or spec.kv_range or spec.packed or spec.unaligned):
            return None
        tiles = [replace(tile, weights=weights) for head_dims, tile in _BACKWARD_WIDE if d in head_dims]
        of_keys = 64 if d > 160 and (weights or (spec.deterministic and spec.kv_range)) else 128  # at most
        tile = next((t for t in tiles if t.block_n <= of_keys and fits(t, spec, device)), None)
        takes_registers = spec.packed or spec.kv_range or spec.bias or spec.unaligned or weights
        if tile and (takes_registers or (spec.masked and tile.dq_warps_m == 2)):
            tile = replace(tile, dq_parts=2)
        return tile

    def backward_tile(self, spec: Spec, device: Device) -> BackwardTile:
        if spec.dtype == "fp32":
            fp32 = tiles_fp32.backward_tile(spec, device)
            assert fp32 is not None  # else `why_not` refuses the spec
            return fp32
        if wide := self.wide_tile(spec, device):
            return wide
        d = spec.widest
        table = _BACKWARD_BIAS if spec.holds_bias else _BACKWARD_SMALL if device.is_small else _BACKWARD
        if spec.dropout and device.capability >= (10, 0):  # where the usual tiles spill with it
            table = _BACKWARD_NARROW
        if spec.crowded:
            table = _BACKWARD_CROWDED
        if spec.may_copy_bias and d <= 128:
            table = _BACKWARD_COPIED_BIAS_NARROW if spec.dalibi or spec.softcap else _BACKWARD_COPIED_BIAS
        if device.is_tiny:
            table = turing.backward_tiles(spec)
        tile = next(t for limit, t in table if d <= limit and fits(t, spec, device) and divides_dq(t, spec.head_dim))
        if spec.packed and spec.block_mask and d > 192 and tile.dq_warps_m == 1:
            tile = replace(tile, dq_warps_m=2)  # else it spills
        if not divides_dq(tile, spec.head_dim, tile.dq_warps_m):
            tile = replace(tile, dq_warps_m=tile.block_m // 16)
        if spec.causal and tile.split_d == 2 and tile.block_n == 128:  # 5 % slower unmasked, but spills with this one
            tile = replace(tile, dq_unroll=4)
        return tile

    def variants(self, spec: Spec, device: Device) -> tuple[Variant, ...]:
        if not spec.backward:
            ahead = self.forward_tile(spec, device)
            # With the usual tiles, the kernel of parts spills there.
            spills = device.is_small and device.capability >= (10, 0) and 80 < spec.widest <= 128
            of_parts = forward_sm80.SIXTEEN_ROWS if spills and not spec.block_mask else ahead
            return *lists_before(spec, (ahead.block_m, ahead.block_n)), *forward_kernels(spec, Forward, ahead, of_parts)
        tile = self.backward_tile(spec, device)
        lists = lists_before(spec, *[(tile.block_m, tile.block_n)] * 2, ranks=True)
        rows = tile.block_m, tile.warps, tile.split_d, tile.dq_warps_m
        kind = BackwardWide if isinstance(tile, WideTile) else Backward
        main = Delta.of(spec, DeltaTile(*rows)), kind.of(spec, tile), Convert.of(spec, ConvertTile(*rows))
        sums = Slopes.after(spec, SlopesTile(tile.block_n, tile.warps, over_keys=True))
        return *lists, *main, *sums, *learned(spec, tile.block_m, device.smem_bytes)


SM80 = Sm80()
