"""A pretended GPU: NumPy arrays and torch tensors seem to lie on it, nothing is compiled, launches are written down.

The driver encodes tensor maps in a layout of the tests' own, which `place` decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupyflash.arrays import adapters as arrays
from cupyflash.compile import jit
from cupyflash.gpu import tensormap
from cupyflash.gpu.device import Device
from cupyflash.launch import cached, constants, counters, decode
from cupyflash.launch import prepared as launch
from cupyflash.launch.kept import Kept
from cupyflash.plan.variant import Variant

COUNTER = 0x5000
Place = Callable[[Any, Any, list[int], list[int]], None]


class Launched(NamedTuple):
    """One launch: the kernel's symbol, the blocks, and the params struct's bytes."""

    symbol: str
    grid: int
    params: bytes


def plain(longs: Any, words: Any, lengths: list[int], strides: list[int]) -> None:
    """Lengths less 1, strides in units of 16 bytes, and what is left of long strides in a word of its own."""
    words[8 : 8 + len(lengths)] = [n - 1 for n in lengths]
    words[16 : 16 + len(strides)] = [step >> 4 & 0xFFFFFFFF for step in strides]
    words[20] = sum(step >> 36 << 4 * i for i, step in enumerate(strides))


def with_a_mark(longs: Any, words: Any, lengths: list[int], strides: list[int]) -> None:
    """Small arrays have a bit set."""
    plain(longs, words, lengths, strides)
    if sum((n - 1) * step for n, step in zip(lengths[1:], strides, strict=True)) < 131072:
        words[3] |= 1 << 21


def crossed(longs: Any, words: Any, lengths: list[int], strides: list[int]) -> None:
    """Nothing lies in a word of its own."""
    for i, n in enumerate((*lengths, *strides)):
        longs[4 + i] = n << 7


class Gpu:
    """Attributes: what was launched, and of that, what may start before the launch in front of it has ended; the
    variants loaded, the tensor maps encoded, and those that are refused; how many clusters run at the same time; what
    lies there for good."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.dependent_ones: list[Launched] = []
        self.loaded: list[Variant] = []
        self.encoded, self.clusters = 0, 1000
        self.constants: list[np.ndarray] = []
        self.place: Place = plain
        self.refuses: Callable[[list[int]], bool] = lambda lengths: False

    def load(self, variant: Variant, device: Device, stream: int = 0) -> jit.Kernel:
        self.loaded.append(variant)
        return jit.Kernel(variant, len(self.loaded) - 1, None)

    def put(self, values: np.ndarray) -> int:
        self.constants.append(values)
        return values.ctypes.data

    def launch(self, function: int, grid: int, *rest: Any) -> None:
        variant, pointer = self.loaded[function], ctypes.c_void_p.from_address(rest[-2]).value
        assert pointer is not None
        params = ctypes.string_at(pointer, variant.params.itemsize)
        self.launched.append(Launched(variant.symbol, grid, params))

    def dependent(self, function: int, grid: int, *block: int) -> Callable[..., None]:
        def launch(stream: int, arguments: int, _: int = 0) -> None:
            self.launch(function, grid, stream, arguments, 0)
            self.dependent_ones.append(self.launched[-1])

        return launch

    def encode(self, to: Any, dtype: Any, rank: Any, address: Any, sizes: Any, strides: Any, box: Any, *_: Any) -> int:
        self.encoded += 1
        if self.refuses(list(sizes)):
            return 1
        longs, words = (kind.from_address(to.value) for kind in (ctypes.c_uint64 * 16, ctypes.c_uint32 * 32))
        longs[0], words[2], words[30] = address.value, dtype.value, box[1]
        self.place(longs, words, list(sizes), list(strides))
        return 0


def pretend(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90") -> Gpu:
    """A GPU that is not there, an H100 unless told otherwise, on which nothing is prepared yet."""
    from cupy.cuda import runtime

    found, device = Gpu(), dataclasses.replace(Device.synthetic(arch), ordinal=0)
    monkeypatch.delenv("CUPYFLASH_FAMILY", raising=False)
    for library in (arrays.NUMPY, arrays.TORCH):
        monkeypatch.setattr(library, "signature", lambda x, of=library.signature: (*of(x)[:3], 0))
        monkeypatch.setattr(library, "look", partial(arrays.Numpy.look, library))
        monkeypatch.setattr(library, "stream", lambda _: 0)
    monkeypatch.setattr(Device, "of", lambda ordinal: device)
    monkeypatch.setattr(Device, "current", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(runtime, "setDevice", lambda ordinal: None)
    monkeypatch.setattr(counters.Counters, "address", lambda self, stream: COUNTER)
    monkeypatch.setattr(counters.Counters, "is_low", lambda self: False)
    monkeypatch.setattr(constants, "_on", {})
    monkeypatch.setattr(constants.Constants, "_is_captured", lambda self, stream: False)
    monkeypatch.setattr(constants.Constants, "_put", lambda self, values: found.put(values))
    monkeypatch.setattr(jit, "load", found.load)
    monkeypatch.setattr(jit, "launcher", lambda: found.launch)
    monkeypatch.setattr(tensormap, "_encoder", lambda: found.encode)
    monkeypatch.setattr(decode, "_active_clusters", lambda variant, device, stream: found.clusters)
    for module in (decode, launch):
        monkeypatch.setattr(module, "DependentLaunch", found.dependent)
    forget(monkeypatch)
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is prepared from now on."""
    monkeypatch.setattr(launch, "calls", Kept(100))
    monkeypatch.setattr(launch, "specs", Kept(100))
    monkeypatch.setattr(launch, "series", Kept(100))
    monkeypatch.setattr(cached, "calls", Kept(100))
    monkeypatch.setattr(tensormap, "slots", {})


def facts(params: Any) -> dict[str, bytes]:
    """All that a params struct says but addresses."""
    plain = params["plain"] if "plain" in params.dtype.names else params
    found = {name: plain[name].tobytes() for name in plain.dtype.names if plain.dtype[name] != np.uint64}
    return found | {name: params[name][1:].tobytes() for name in params.dtype.names if name.startswith("map_")}


def found_in(launched: list[Launched], gpu: Gpu) -> list[tuple[str, int, dict[str, bytes]]]:
    """The same of what was launched; each map must have the address that the plain params have, or its own result's."""
    kinds = {variant.symbol: variant.params for variant in gpu.loaded}
    found = []
    for symbol, grid, data in launched:
        params = np.frombuffer(data, kinds[symbol])[0]
        for name in [n for n in kinds[symbol].names or () if n.startswith("map_")]:
            assert params[name][0] == params["plain"][name.removeprefix("map_")] != 0, name
        plain = params["plain"] if "plain" in (kinds[symbol].names or ()) else params
        if "dk_shares" in plain.dtype.names and plain["shares"] > 1:
            assert plain["dk_shares"] != plain["dv_shares"] != 0 != plain["dk_shares"]
        if "counter" in (kinds[symbol].names or ()):
            assert params["counter"] in (0, COUNTER)
        found.append((symbol, grid, facts(params)))
    return found


def launched_by(gpu: Gpu, call: Callable[[], Any]) -> list[tuple[str, int, dict[str, bytes]]]:
    """The same of what a call launches."""
    gpu.launched.clear()
    call()
    return found_in(gpu.launched, gpu)


def random_array(rng: np.random.Generator, lengths: tuple[int, int, int], head_dim: int, layout: str) -> np.ndarray:
    """An array of batch, seqlen and heads in some layout, whose strides vary but that TMA can read."""
    more = rng.integers(0, 3, 3)
    whole = np.zeros([n + int(m) for n, m in zip(lengths, more, strict=True)] + [head_dim + 8], np.float16)
    part = whole[: lengths[0], : lengths[1], : lengths[2], :head_dim]
    return part if layout == "bshd" else part.swapaxes(1, 2)
