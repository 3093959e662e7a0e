"""The sm80 family's tiles for forwards of 16 bits, from compute capability 8.0 on, where copies are asynchronous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..gpu.device import Device
from .spec import Spec
from .tiles_sm80 import ForwardTile, fits, has_room, is_plain

Table = tuple[tuple[int, ForwardTile], ...]

# (largest head_dim, tile), first match that fits the shared memory. Chosen by time on an H200 (docs/performance.md): at
# head_dim 64 and 128 on 2026-11-20, with more than 163 KiB at 256 on 2026-11-23, from 80 to 112 on 2026-11-28. With
# NVRTC 12.9 that at 128 spills 8 to 152 bytes, on sm_80, 90, 100 and 103, that at 256 with a window 8 to 112 on sm_100
# and 103; those at 80 and 96 spilled with a softcap and a window of packed sequences 12 to 64 on sm_100, 103 and 120,
# and at 96 with a range of keys, causal, 116 on sm_90, before rows lay without gaps. With 13.0 none are counted.
_USUAL: Table = (
    (64, ForwardTile(128, 64, 4, 2, 2, q_in_regs=True)),
    (96, ForwardTile(128, 64, 4, 2, 2)),
    (112, ForwardTile(128, 80, 4, 2, 2)),
    (128, ForwardTile(128, 64, 4, 2, 2)),
    (248, ForwardTile(128, 64, 8, 2, 1)),
    (256, ForwardTile(128, 96, 8, 2, 1, split_d=2)),
    (256, ForwardTile(128, 64, 8, 2, 1)),
)

# The same for GPUs with 100 KiB a multiprocessor, where a block of four warps would run alone, and wait for its own
# softmax. Chosen by time on an H200 with no more shared memory (tools.as_gpu), at head_dim 256 on 2026-11-23, at 80,
# 96, 112, 128 and 192 on 2026-11-28. That of 256 rows by 64 keys spills 64 to 88 bytes, and with a softcap 260.
_SMALL: Table = (
    *_USUAL[:2],
    (112, ForwardTile(128, 48, 4, 2, 2)),
    (128, ForwardTile(256, 64, 8, 2, 1)),
    (128, ForwardTile(256, 48, 8, 2, 1)),
    (128, ForwardTile(128, 64, 4, 2, 2)),
    (192, ForwardTile(128, 64, 8, 2, 1)),
    (208, ForwardTile(128, 48, 8, 2, 1)),
    (256, ForwardTile(128, 32, 8, 2, 1)),
)

# Up to head_dim 64 and beyond 128, more keys a block where nothing else takes registers, full and causal; of those that
# have room. Chosen by time on an H200, 2026-11-28, at 32, 48, 64, 160, 192, 224 and 256, with an A100's shared memory
# also at 160, 192, 224 and 256, with 99 KiB at 32, 64 and 144. With 128 keys those at 176 spill, and those beyond 192
# few registers, 12 to 108 bytes; at 64 on sm_80, with slopes, and where scores are scaled first. The first one spills
# on sm_103 and 120, that of 48 8 bytes on sm_103. (Head_dims, tile).
_PLAIN: tuple[tuple[range, ForwardTile], ...] = (
    (range(33), ForwardTile(128, 128, 4, 2, 2, q_in_regs=True)),
    (range(33), ForwardTile(128, 128, 4, 2, 2)),
    (range(49), ForwardTile(128, 96, 4, 2, 2, q_in_regs=True)),
    (range(65), ForwardTile(128, 128, 4, 2, 2)),
    (range(129, 161), ForwardTile(128, 128, 8, 2, 1, split_d=2)),
    (range(129, 177), ForwardTile(128, 96, 8, 2, 1, split_d=2)),
    (range(177, 193), ForwardTile(128, 128, 8, 2, 1, split_d=2)),
    (range(177, 193), ForwardTile(128, 96, 8, 2, 1, split_d=2)),
    (range(193, 257), ForwardTile(128, 128, 8, 2, 1, split_d=2)),
    (range(129, 249), ForwardTile(128, 96, 8, 2, 1)),
    (range(249, 257), ForwardTile(128, 64, 8, 2, 1, split_d=2)),
)

# With dropout, up to head_dim 128, of those that have room: chosen by time on an H200 at 64, 96 and 128, 2026-11-28.
_DROPOUT: Table = (
    (64, ForwardTile(128, 64, 4, 2, 2)),
    (112, ForwardTile(128, 128, 8, 2, 1, q_in_regs=True)),
    (128, ForwardTile(128, 128, 8, 2, 1)),
)

SIXTEEN_ROWS = ForwardTile(128, 64, 8, 2, 1)  # up to head_dim 128: what compiles without spills, whatever rows bring

# With a bias: fewer scores a thread, so that those of the bias fit the registers, too. Chosen among tiles that compile
# without spills, on every architecture; not measured.
_BIAS: Table = (
    (64, ForwardTile(128, 32, 4, 4, 2, q_in_regs=True)),
    (256, ForwardTile(128, 64, 8, 2, 1)),
    (256, ForwardTile(64, 64, 4, 2, 1)),
)
# Of interleaved keys (up to 128), unless a bias of fp32 would spill, or a block be alone on a multiprocessor. Chosen by
# time on an H200, also with less shared memory, at head_dim 32, 64 and 128, 2026-11-27.
_INTERLEAVED: Table = (
    (32, _BIAS[0][1]),
    *_USUAL[:1],
    (128, ForwardTile(128, 32, 4, 4, 2)),
)

# Beside a block mask; with 99 KiB beyond 64 a block would be alone. By time on an H200 at 64 and 128, 2026-11-29.
_INTERLEAVED_LISTED: Table = (_BIAS[0], _INTERLEAVED[-1])

_ONE_ROW: Table = (*_USUAL[:1], (112, _INTERLEAVED[-1][1]))  # of a bias: what compiles without spills


def _rows(spec: Spec, device: Device) -> Iterator[tuple[int, ForwardTile]]:
    """In the order in which they are tried."""
    d = spec.widest
    narrow = 48 if device.capability < (9, 0) or spec.scale_first or spec.alibi else 64
    with_room: Table = ()
    if spec.dropout:
        reads = spec.bias or spec.block_mask or spec.unaligned or (spec.softcap and spec.packed)
        with_room = () if reads else _DROPOUT
    elif is_plain(spec) and not (spec.window or narrow < d <= 128):
        with_room = tuple((d, tile) for head_dims, tile in _PLAIN[device.capability > (10, 0) :] if d in head_dims)
    yield from ((limit, tile) for limit, tile in with_room if has_room(tile, spec, device))
    listed = spec.block_mask and not (spec.mods or spec.softcap or (device.is_small and d > 64))
    if listed and spec.interleaves_keys(32, beside_others=True):
        yield from _INTERLEAVED_LISTED
    if spec.dropout or (spec.block_mask and (spec.crowded or (spec.packed and d > 64))):
        yield 128, SIXTEEN_ROWS
    if spec.interleaves_keys(32) and not (device.is_small if d > 64 else spec.wide_bias):
        yield from _INTERLEAVED
    if spec.bias_of_keys and not (spec.holds_bias or device.is_small):
        yield from _ONE_ROW
    yield from _BIAS if spec.holds_bias else _SMALL if device.is_small else _USUAL


def tile(spec: Spec, device: Device) -> ForwardTile:
    """Loads of unaligned rows and bits of a block mask take registers that wide blocks do not leave; with a block mask
    beside a bias or of packed sequences, and beside dropout that mostly, warps take 16 rows. Warps that share rows
    leave none for any of these, nor for a softcap; 256 rows a block leave none for packed sequences, nor for a range of
    keys where scores are scaled first or capped. Tiles of a block mask have no whole blocks of 48 or 80."""
    d = spec.widest
    is_full = d > 64 and (spec.unaligned or spec.block_mask)
    may_share = not (is_full or spec.dropout or spec.softcap or spec.head_dim_v)
    may_be_tall = not (is_full or spec.packed or (spec.kv_range and (spec.softcap or spec.scale_first)))
    most_keys = 48 if spec.softcap else 64  # of 256 rows
    fitting = (t for limit, t in _rows(spec, device) if d <= limit and fits(t, spec, device))
    found = next(
        t
        for t in fitting
        if (t.split_d == 1 or may_share) and (t.block_m <= 128 or (may_be_tall and t.block_n <= most_keys))
    )
    if spec.bias and not (spec.paired_bias or spec.bias_of_keys):
        found = replace(found, q_in_regs=False)
    is_wide = found.warps != 8 or found.block_n == 48 or (spec.crowded and d > 128)
    found = replace(found, block_n=32) if is_full and is_wide else found
    interleaves = spec.interleaves_keys(found.block_n, beside_others=spec.block_mask > 0)
    return replace(found, interleaves_keys=True) if interleaves else found
