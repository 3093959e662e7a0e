"""The sm90 family: wgmma, TMA, mbarrier and setmaxnreg, on Hopper alone."""

from __future__ import annotations

from dataclasses import replace

from ..gpu.device import Device
from ..operand import MASK_TILE
from ..problem import KEY_BLOCK, MAX_SEQLEN
from .family import Family
from .kernels import Convert, ConvertTile, Delta, DeltaTile, Slopes, SlopesTile
from .kernels_sm90 import BackwardDkvSm90, BackwardDqSm90, BackwardSm90, BiasGradientSm90, ForwardSm90
from .learned import learned
from .lists import lists_before
from .spec import NARROW, Spec
from .splits import forward_kernels
from .tiles_sm90 import (
    HopperBackwardTile,
    HopperDkvTile,
    HopperDqTile,
    HopperForwardTile,
)
from .variant import Variant

# (largest head_dim, tile); they need the 227 KiB of Hopper. Chosen on an H200 by tensor-core cycles, at 80 with a mask
# by time (docs/performance.md).
_FORWARD: tuple[tuple[int, HopperForwardTile], ...] = (
    (64, HopperForwardTile(256, 64, 8, 8, 112, 32)),
    (80, HopperForwardTile(192, 80, 3, 6, 160, 32)),
    (112, HopperForwardTile(192, 80, 3, 6, 160, 32)),
    (128, HopperForwardTile(192, 64, 4, 6, 160, 32)),
    (160, HopperForwardTile(192, 64, 3, 3, 160, 32)),
    (192, HopperForwardTile(128, 64, 2, 4, 232, 40)),
    (256, HopperForwardTile(128, 64, 2, 3, 232, 40)),
)
# With a mask, of whose diagonal a block of 80 keys computes more in vain: 1 to 3 % slower at 80, not from 96 on.
_FORWARD_MASKED: tuple[tuple[int, HopperForwardTile], ...] = tuple(
    (limit, HopperForwardTile(192, 64, 4, 6, 160, 32) if limit == 80 else tile) for limit, tile in _FORWARD
)
# In pages, in place of tiles whose blocks of keys could lie in two of them.
_FORWARD_PAGED = _FORWARD[3][1]
# With a block mask, in place of 192 queries: tiles of the mask end where blocks do, and two warpgroups have the
# registers that the place in a list takes. Packed, a block lies within one tile of the mask, beyond which it may end.
_FORWARD_LISTED = HopperForwardTile(128, 2 * MASK_TILE, 2, 4, 232, 40)
_FORWARD_LISTED_NARROW = HopperForwardTile(128, MASK_TILE, 4, 4, 232, 40)
_FORWARD_LISTED_WIDE = HopperForwardTile(128, MASK_TILE, 2, 4, 232, 40)
# Of a tall one, and of a mask of booleans, whose blocks seldom are 128 by 128: three warpgroups, as without one.
_FORWARD_LISTED_TALL = HopperForwardTile(192, MASK_TILE, 3, 6, 160, 32)

_BACKWARD: tuple[tuple[int, HopperBackwardTile], ...] = (
    (64, HopperBackwardTile(64, 192, 4, 160, 32)),
    (128, HopperBackwardTile(64, 128, 2, 240, 24, 64)),
)
# Beyond 128, with a narrower v (bwd_wide_sm90.cuh).
_BACKWARD_NARROW_V = ((192, HopperBackwardTile(64, 128, 2, 240, 24)),)
# With dropout, whose random numbers take registers; packed, what compiles without spills.
_FORWARD_DROPOUT = ((64, HopperForwardTile(192, 64, 8, 6, 160, 32)), *_FORWARD_MASKED[1:])
_BACKWARD_DROPOUT_PACKED = (64, HopperBackwardTile(64, 128, 4, 240, 24)), _BACKWARD[1]
_WIDE_BACKWARD: tuple[tuple[int, HopperDkvTile, HopperDqTile], ...] = (
    (192, HopperDkvTile(64, 64, 3, 232, 40), HopperDqTile(128, 64, 5, 232, 40)),
    (256, HopperDkvTile(64, 64, 2, 232, 40), HopperDqTile(128, 64, 3, 232, 40)),
)

# With a bias, which is read ahead: fewer rows, or columns of V held, so that it fits the registers, too; fewer keys
# where mods read arrays, and packed; where two elements take more than one register, fewer rows still.
_FORWARD_BIAS: tuple[tuple[int, HopperForwardTile], ...] = (
    (64, HopperForwardTile(192, 96, 5, 6, 160, 32)),
    *((limit, tile) for limit, tile in _FORWARD_MASKED if 64 < limit <= 128),
    (192, HopperForwardTile(128, 64, 2, 4, 232, 40)),
    (256, HopperForwardTile(128, 64, 2, 3, 232, 40)),
)
_FORWARD_BIAS_NARROW = (64, HopperForwardTile(192, 64, 8, 6, 160, 32)), *_FORWARD_BIAS[1:]
_FORWARD_BIAS_WIDE = (
    (64, HopperForwardTile(128, 64, 8, 4, 232, 40)),
    (128, HopperForwardTile(128, 64, 4, 4, 232, 40)),
    *_FORWARD_BIAS[-2:],
)
_BACKWARD_BIAS: tuple[tuple[int, HopperBackwardTile], ...] = (
    (64, HopperBackwardTile(64, 128, 4, 240, 24)),
    (128, HopperBackwardTile(64, 128, 2, 240, 24)),
)
# Where it comes through shared memory; fewer keys where others would spill, and with its gradient, whose kernel needs
# boxes of 128.
_BACKWARD_COPIED_BIAS = (64, HopperBackwardTile(64, 192, 3, 160, 32, copies_bias=True)), _BACKWARD_BIAS[1]
_BACKWARD_COPIED_BIAS_NARROW = (64, HopperBackwardTile(64, 128, 4, 240, 24, copies_bias=True)), _BACKWARD_BIAS[1]
# With two such features (Spec.crowded), likewise; packed, three warpgroups spill.
_FORWARD_CROWDED: tuple[tuple[int, HopperForwardTile], ...] = (
    _FORWARD_BIAS_NARROW[0],
    (128, _FORWARD_LISTED_NARROW),
    (192, _FORWARD_LISTED_WIDE),
    (256, HopperForwardTile(128, 32, 4, 3, 232, 40)),
)
# Up to 128, three warpgroups, too, where the bits of a block mask and a bias of 16 bits is all.
_FORWARD_CROWDED_TALL = _FORWARD_CROWDED[0], (128, _FORWARD_LISTED_TALL), *_FORWARD_CROWDED[2:]
# With a block mask, whose bits a thread brings, which takes registers, too; fewer keys if packed or crowded, and no
# columns of V held.
_BACKWARD_LISTED = (64, HopperBackwardTile(64, 192, 4, 160, 32)), (128, HopperBackwardTile(64, 128, 2, 232, 40, 32))
_BACKWARD_LISTED_NARROW = (64, HopperBackwardTile(64, 128, 4, 232, 40)), _BACKWARD_LISTED[1]
_BACKWARD_LISTED_CROWDED = _BACKWARD_LISTED_NARROW[0], (128, HopperBackwardTile(64, 128, 2, 232, 40))
_BACKWARD_LISTED_COPIED = _BACKWARD_COPIED_BIAS[0], _BACKWARD_LISTED_CROWDED[1]
_BACKWARD_LISTED_COPIED_NARROW = (
    (64, HopperBackwardTile(64, 128, 4, 232, 40, copies_bias=True)),
    _BACKWARD_LISTED_CROWDED[1],
)

# K and V that share the L2, where tiles are alike and where mixing more heads evens out the tail.
_SECTION_BYTES = 4 << 20, 16 << 20
# Up to how many keys, of those that queries may see, it pays that dQ's accumulator need not be cleared
# (docs/performance.md): with a mask `NARROW`; without one these, as dq_visits.cuh has it. There key blocks of a head
# wait for each other, 8 at most since each has 128 keys: all run at the same time, even if they share such a GPU.
_TURNED_LIMIT, _TURNED_SM_COUNT = 1024, 64


def _backward_tiles(spec: Spec) -> tuple[tuple[int, HopperBackwardTile], ...]:
    """Those that keep dQ's sum; none for wider heads."""
    found: tuple[tuple[int, HopperBackwardTile], ...]
    if spec.widest > _BACKWARD[-1][0]:
        added = spec.block_mask, spec.bias, spec.mask, spec.mods, spec.softcap, spec.dropout, spec.dalibi
        narrow_v = spec.width_v <= _BACKWARD[-1][0]
        return _BACKWARD_NARROW_V if narrow_v and not any(added) else ()
    if spec.may_copy_bias:
        wide = _BACKWARD_LISTED_COPIED if spec.block_mask else _BACKWARD_COPIED_BIAS
        narrow = _BACKWARD_LISTED_COPIED_NARROW if spec.block_mask else _BACKWARD_COPIED_BIAS_NARROW
        takes_registers = spec.block_mask and (spec.window or (spec.causal and spec.dtype == "fp16"))
        found = narrow if spec.dbias or spec.dalibi or spec.softcap or takes_registers else wide
    elif spec.block_mask:
        listed = _BACKWARD_LISTED_NARROW if spec.packed else _BACKWARD_LISTED
        found = _BACKWARD_LISTED_CROWDED if spec.crowded else listed
    elif spec.crowded or spec.holds_bias or spec.dbias:
        found = _BACKWARD_BIAS
    else:
        found = _BACKWARD_DROPOUT_PACKED if spec.dropout and spec.packed else _BACKWARD
    return found


def _forward_width(spec: Spec) -> int:
    """The head_dim by which a forward's tile is chosen. Q and K take shared memory alone, as much at 192 as at 160, V
    also registers: those of O. With dropout of packed sequences that spills."""
    as_narrow = spec.head_dim <= 192 and not (spec.dropout and spec.packed)
    return max(spec.width_v, min(spec.head_dim, 160) if as_narrow else spec.head_dim)


def _holds_little(spec: Spec) -> bool:
    """Whether a thread of a forward needs few registers for two features: words of a block mask, and pairs of a bias or
    a mask of 16 bits or less."""
    pairs = (spec.paired_bias or spec.bias_of_keys) and not spec.wide_bias
    more = spec.mods or spec.dropout or spec.masked_bias or spec.packed or spec.paged
    return bool(spec.block_mask and pairs and not more)


class Sm90(Family):
    """For wide heads, dQ has a kernel of its own."""

    name = "sm90"

    def why_not(self, spec: Spec, device: Device) -> str | None:
        if device.capability != (9, 0):
            has = f"{device.capability[0]}.{device.capability[1]}"
            return f"it needs compute capability 9.0 exactly, {device.name} has {has}"
        if spec.dtype == "fp32":
            return "it multiplies elements of 16 bits"
        if spec.is_empty:
            return "nothing is to be computed"
        if not spec.tma:
            return "TMA reads rows at multiples of 16 bytes, and no dimension with a stride of 0"
        return None

    def forward_tile(self, spec: Spec, device: Device) -> HopperForwardTile:
        ahead = _FORWARD_BIAS_NARROW if spec.packed or spec.mod_shapes else _FORWARD_BIAS
        is_narrow = spec.mods or spec.bias_of_keys or (spec.paired_bias and not spec.wide_bias)
        added = ahead if is_narrow else _FORWARD_BIAS_WIDE
        alone = added if spec.bias else _FORWARD_MASKED if spec.masked else _FORWARD
        crowded = _FORWARD_CROWDED_TALL if _holds_little(spec) else _FORWARD_CROWDED[spec.packed :]
        table = crowded if spec.crowded else _FORWARD_DROPOUT if spec.dropout else alone
        tile = next(tile for limit, tile in table if _forward_width(spec) <= limit)
        if spec.paged and KEY_BLOCK % tile.block_n:
            tile = _FORWARD_PAGED
        if spec.block_mask and tile.block_m == 192 and not spec.crowded:
            listed = _FORWARD_LISTED_TALL if spec.mask_tiles or spec.tall else _FORWARD_LISTED
            narrow = _FORWARD_LISTED_NARROW if spec.packed else listed
            tile = narrow if spec.widest <= 128 else _FORWARD_LISTED_WIDE
        return replace(tile, interleaves_keys=True) if spec.interleaves_keys(tile.block_n, beside_others=True) else tile

    def variants(self, spec: Spec, device: Device) -> tuple[Variant, ...]:
        if not spec.backward:
            ahead = self.forward_tile(spec, device)
            return *lists_before(spec, (ahead.block_m, ahead.block_n)), *forward_kernels(spec, ForwardSm90, ahead)
        # dQ lies as a warpgroup leaves it, 64 columns at a time.
        rows = 64, 4 * -(-spec.head_dim // 64), 4, 4
        for limit, tile in _backward_tiles(spec):
            if spec.widest <= limit:
                sums = Slopes.after(spec, SlopesTile(64, 4, over_keys=True))
                lists = lists_before(spec, *[(tile.block_m, tile.block_n)] * 2, ranks=True)
                delta = Delta.of(spec, DeltaTile(*rows, tile.block_n if spec.packed else 0, overlaps=True))
                main = delta, BackwardSm90.of(spec, tile), Convert.of(spec, ConvertTile(*rows, overlaps=True))
                others = learned(spec, 64, device.smem_bytes, BiasGradientSm90.beside(spec, tile))
                return *lists, *main, *sums, *others
        dkv, dq = next((dkv, dq) for limit, dkv, dq in _WIDE_BACKWARD if spec.widest <= limit)
        wide = spec._replace(deterministic=False)  # these are by nature
        sums = Slopes.after(spec, SlopesTile(64, 4, over_keys=False))
        lists = lists_before(spec, (dq.block_m, dq.block_n), (dkv.block_m, dkv.block_n))
        of_keys, of_queries = wide._replace(dalibi=False), wide._replace(sink=False, grouped=False)
        dkv_dq = BackwardDkvSm90.of(of_keys, dkv), BackwardDqSm90.of(of_queries, dq)
        delta = Delta.of(spec, DeltaTile(*rows, overlaps=True))
        return *lists, delta, *dkv_dq, *sums, *learned(spec, 64, device.smem_bytes)

    def mixed_bytes(self, spec: Spec, device: Device) -> int:
        return super().mixed_bytes(spec, device) if spec.backward else _SECTION_BYTES[spec.uneven]

    def first_stores_limit(self, spec: Spec, device: Device) -> int:
        if spec.masked:
            return MAX_SEQLEN if spec.narrow else NARROW
        return -1 if device.sm_count < _TURNED_SM_COUNT else _TURNED_LIMIT


SM90 = Sm90()
