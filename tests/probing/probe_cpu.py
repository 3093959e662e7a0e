"""Runs layout probes on the emulator."""

from __future__ import annotations

import functools

import numpy as np

from tests.emulator.launch import EmulatedKernel, Memory, Mode, tensor_map

from . import probes
from .probes import Map, Probe, Words


@functools.cache
def _headers() -> dict[str, str]:
    return probes.headers()


@functools.lru_cache(maxsize=256)
def _kernel(name: str) -> EmulatedKernel:
    probe = probes.all_probes()[name]
    unit = probes.units()[probe.unit]
    return EmulatedKernel(probes.unit_source(unit), _headers(), probe.symbol, 900, [p.symbol for p in unit])


def encode(m: Map, address: int) -> np.ndarray:
    """The probe's tensor map on a buffer at `address`."""
    return tensor_map(address, m.sizes, m.strides_bytes, m.box, m.swizzle, m.element_bytes)


def run(probe: Probe, mode: Mode, seed: int = 0) -> Words:
    """What the probe writes."""
    with Memory() as memory:
        source = memory.input("in", probe.words_in)
        address, out = memory.output("out", probe.out.shape, np.uint32)
        out[...] = probe.out
        tensor = (
            encode(probe.map, source if probe.map.on == "in" else address) if probe.map else np.zeros(16, np.uint64)
        )
        args = [tensor, np.uint64(source), np.uint64(address), probe.structured_args]
        _kernel(probe.name)(probe.blocks, probe.threads, probe.smem_bytes, args, mode, seed, probe.cluster)
        return out.copy()
