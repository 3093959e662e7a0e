"""Prepare a call of attention over a cache on the GPU: from a problem to launches that lack only addresses.

Lengths and tables stay on the device, so a call that is kept serves all steps of a generation.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.adapters import Signature
from ..cache.problem import CacheProblem
from ..compile import jit
from ..gpu import tensormap
from ..gpu.dependent import DependentLaunch, max_active_clusters
from ..gpu.device import Device
from ..plan.decode import plan_append, plan_decode, plan_dequantize
from ..plan.decode_kernels import Decode, DecodeSm90
from ..plan.decode_shares import DecodePlan
from ..plan.params_decode import DECODE_SM90_PARAMS
from ..plan.variant import Variant
from .alignment import access_to_cache
from .block import Block
from .cached_params import (
    APPEND_MEMBERS,
    DECODE_MEMBERS,
    DEQUANTIZE_MEMBERS,
    box_map,
    dequantized_rows,
    fill,
    fill_append,
    fill_dequantize,
    strides_of,
    words_of,
    workspace,
)
from .growing import Growing, Room
from .passes import contiguous_strides
from .prepare import family

_thread = threading.local()
_CACHES = ("k_cache", "v_cache")
Made = list[tuple[tuple[int, ...], str]]
Launch = Callable[[int], None]  # on a stream
Struct = tuple[np.ndarray, dict[str, tuple[int, ...]]]  # params, and the words of 64 bits where an array's address goes


class CacheCall:
    """The launches of one call on one device, ready but for the addresses of the arrays.

    Attributes:
        copied: of q, k and v, those of which it takes contiguous copies.
        made: (shape, dtype) of what the launches share, whose addresses come last.
        growing: writes the caches' shape where others than its own are given; None: they have none other.
    """

    recent = True
    copied: tuple[str, ...]

    def __init__(
        self, ordinal: int, made: Made, blocks: Sequence[Block], launches: Sequence[Launch], growing: Growing | None
    ) -> None:
        from cupy.cuda import runtime

        self.copied, self.made, self.growing = (), made, growing
        self._ordinal, self._blocks, self._launches = ordinal, tuple(blocks), tuple(launches)
        self._lock = threading.Lock()  # threads that make the same call share its structs
        self._get_device, self._set_device = runtime.getDevice, runtime.setDevice

    def __call__(
        self, addresses: Sequence[int], stream: int, length: int | None = None, room: Room | None = None
    ) -> None:
        """Append and attend, queued on `stream`.

        Args:
            addresses: in the order of the call's names, then of `made`.
            length: of all sequences, where the names have no cache_seqlens.
            room: as `Growing.fitting` gives it for other caches.
        """
        current = self._get_device()
        if current != self._ordinal or not hasattr(_thread, "has_context"):
            self._set_device(self._ordinal)  # also gives a new thread its CUDA context
            _thread.has_context = True
        try:
            with self._lock:
                if self.growing is not None:
                    self.growing.write(room or self.growing.own)
                for block in self._blocks:
                    block.write(addresses, length)
                for launch in self._launches:
                    launch(stream)
        finally:
            if current != self._ordinal:
                self._set_device(current)


def prepare(
    problem: CacheProblem,
    names: tuple[str, ...],
    signatures: Mapping[str, Signature],
    device: Device,
    *,
    aligned: bool,
    stream: int,
    attends: bool = True,
    dequantizes: bool = False,
) -> CacheCall:
    """The call of these arrays, or, unless it `attends`, what it appends alone; its kernels are loaded.

    If it `dequantizes`, the forward attends to rows that it makes of a cache of 8 bits.

    Args:
        names: the inputs given, in the order of `cache.arrays.CACHE_ARRAYS`, then, if it `attends`, out and lse.
        signatures: of the inputs.
        aligned: whether all of q, k_cache, v_cache, k and v lie at multiples of 16 bytes.

    Raises:
        UnsupportedError: no kernel of this device can do it, or one is not loaded yet while `stream` is captured.
    """
    shapes = {name: signature.shape for name, signature in signatures.items()}
    strides = strides_of(shapes, {name: signature.strides for name, signature in signatures.items()})
    strides["out"] = contiguous_strides((*shapes["q"][:-1], problem.head_dim_v))
    made: dict[str, tuple[tuple[int, ...], str]] = {}
    blocks: list[Block] = []
    launches: list[Launch] = []
    growing = None
    with device.current():  # drivers encode tensor maps for a thread with a context alone
        if (append := plan_append(problem, device)) is not None:
            variant, grid = append
            if problem.rotary_dim:
                made["rotated_q"] = tuple(shapes["q"]), problem.dtype
            params = fill_append(problem, strides)
            blocks.append(Block(params, words_of(params.dtype, APPEND_MEMBERS), (*names, *made)))
            launches.append(_launch(variant, grid, blocks[0].whole, device, stream))
            if problem.rotary_dim:
                strides["q"] = contiguous_strides(shapes["q"])
        if dequantizes:
            own, blocks_of_rows = plan_dequantize(problem)
            made |= dequantized_rows(problem)
            params = fill_dequantize(problem, strides)
            blocks.append(Block(params, words_of(params.dtype, DEQUANTIZE_MEMBERS), (*names, *made)))
            launches.append(_launch(own, blocks_of_rows, blocks[-1].whole, device, stream))
        if attends and 0 not in signatures["q"].shape:
            plan, struct = _planned(problem, signatures, strides, device, aligned, stream)
            made |= workspace(problem, plan)
            block = Block(*struct, (*names, *made))
            blocks.append(block)
            growing = Growing.of(problem, plan, block.params, strides)
            launches += _launches(plan, block, device, stream)
    return CacheCall(device.ordinal, list(made.values()), blocks, launches, growing)


def _planned(
    p: CacheProblem, signatures: Mapping[str, Signature], strides: Mapping[str, tuple[int, ...]], device: Device,
    aligned: bool, stream: int,
) -> tuple[DecodePlan, Struct]:  # fmt: skip
    """A plan, with TMA if it can read the caches and the driver's maps of them are understood, and its struct."""
    access = access_to_cache(signatures, aligned, p.itemsize)
    for tma in (access["tma"], False):
        known: dict[str, Any] = {**access, "tma": tma, "family": family() if tma or not access["tma"] else None}
        plan = plan_decode(p, device, **known)
        if plan.variant.tile.cluster and not _clusters_fit(plan, device, stream):
            plan = plan_decode(p, device, **known, clusters=False)
        struct = _struct(p, plan, strides)
        if struct is not None:
            return plan, struct
    raise AssertionError("every GPU has a plan without TMA")


def _clusters_fit(plan: DecodePlan, device: Device, stream: int) -> bool:
    """Whether this GPU holds all clusters of a plan at the same time."""
    v = plan.variant
    return plan.grid // v.tile.cluster <= _active_clusters(v, device, stream)


@functools.lru_cache(maxsize=1024)  # streams come and go
def _active_clusters(variant: Decode, device: Device, stream: int) -> int:
    function = jit.load(variant, device, stream).function
    return max_active_clusters(function, variant.tile.cluster, variant.threads, variant.smem_bytes)


def _struct(p: CacheProblem, plan: DecodePlan, strides: Mapping[str, tuple[int, ...]]) -> Struct | None:
    """The params of a plan's main kernel, and where addresses go; None if the driver's maps are not understood."""
    plain = fill(p, plan, strides)
    if not isinstance(plan.variant, DecodeSm90):
        return plain, words_of(plain.dtype)
    whole = np.zeros((), DECODE_SM90_PARAMS)
    whole["plain"] = plain
    words = words_of(whole.dtype)
    fields: Any = whole.dtype.fields
    for name, head_dim in zip(_CACHES, p.widths, strict=True):
        member = f"map_{DECODE_MEMBERS[name]}"
        box = box_map(p, plan.variant.tile, head_dim, strides[name])
        found = tensormap.anywhere(box)
        if found is None:
            return None
        whole[member], slot = found
        words[name] = (*words[name], fields[member][1] // 8 + slot)
    return whole, words


def _launches(plan: DecodePlan, block: Block, device: Device, stream: int) -> Iterator[Launch]:
    """Of the main kernel, and of the one behind it."""
    yield _launch(plan.variant, plan.grid, block.whole, device, stream)
    behind = plan.combine
    if behind is not None and plan.combine_grid:
        yield _launch(behind, plan.combine_grid, block.plain, device, stream)


def _launch(variant: Variant, grid: int, arguments: int, device: Device, stream: int) -> Launch:
    """A kernel, loaded; `arguments`: the address of the array of pointers to its parameters."""
    function = jit.load(variant, device, stream).function
    facts = function, grid, 1, 1, variant.threads, 1, 1, variant.smem_bytes
    if variant.dependent:
        early = DependentLaunch(*facts)
        return lambda on: early(on, arguments)
    launch = jit.launcher()
    return lambda on: launch(*facts, on, arguments, 0)
