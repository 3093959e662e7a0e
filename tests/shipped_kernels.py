"""Which kernels are shipped for which architectures, and which architectures stand for the others of a generation."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from cupyflash.gpu.device import Device
from cupyflash.plan.shipped import shipped
from cupyflash.plan.shipped_cache import shipped_over_cache
from cupyflash.plan.variant import Variant

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_75")
PINNED = ("sm_80", "sm_90")  # a family each


def all_shipped(arch: str) -> tuple[Variant, ...]:
    """Those of dense and packed calls, and those of calls over a cache."""
    device = Device.synthetic(arch)
    return *shipped(device), *shipped_over_cache(device)


@functools.cache
def kernels() -> dict[str, dict[str, Variant]]:
    """All that are shipped: source -> the architectures that take it, the pinned ones first."""
    found: dict[str, dict[str, Variant]] = {}
    for arch in sorted(ARCHS, key=lambda arch: arch not in PINNED):
        for v in all_shipped(arch):
            found.setdefault(v.source(), {})[arch] = v
    return found


def generations(archs: Iterable[str], turn: int) -> list[str]:
    """One architecture of each, in turn; a pinned one always."""
    found: dict[str, list[str]] = {}
    for arch in archs:
        found.setdefault(arch[:-1], []).append(arch)
    return [some[0] if some[0] in PINNED else some[turn % len(some)] for some in found.values()]
