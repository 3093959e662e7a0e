"""Contestants of `cupyflash bench` that are neither peers nor our usual call: other kernels, and reading alone."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash.arrays.adapters import NUMPY
from cupyflash.cli.bench import decode, decode_calls, reading, work
from cupyflash.cli.bench.cell import ORDERED, OURS, SM80, Cell
from cupyflash.cli.bench.clocks import Clock, Recorded
from cupyflash.cli.bench.contestants import works_of
from cupyflash.cli.bench.cupy_work import CupyBench
from cupyflash.cli.bench.decode_arrays import arrays
from cupyflash.cli.bench.decode_cell import COPY, WIDE, DecodeCell
from cupyflash.cli.bench.decode_shapes import SHAPES
from cupyflash.cli.bench.family import by_family
from cupyflash.cli.bench.jax_work import JaxBench
from cupyflash.cli.bench.work import Bench, TorchBench

DECODE = DecodeCell("B2 64", "bf16", **SHAPES["cpu"]["B2 64"])


@pytest.mark.parametrize("before", [None, "sm90"])
def test_a_family_is_insisted_on_for_a_while(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens; then it is as before."""
    monkeypatch.delenv("CUPYFLASH_FAMILY", raising=False)
    if before:
        monkeypatch.setenv("CUPYFLASH_FAMILY", before)

    def fail() -> None:
        raise ArithmeticError(os.environ["CUPYFLASH_FAMILY"])

    with pytest.raises(ArithmeticError, match=r"^sm80$"):
        by_family("sm80", fail)()
    assert os.environ.get("CUPYFLASH_FAMILY") == before


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Which of our functions ran, and which family it was to be."""
    found: list[tuple[str, str | None]] = []
    monkeypatch.delenv("CUPYFLASH_FAMILY", raising=False)

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(*arrays: Any, **options: Any) -> Any:
            found.append((name, os.environ.get("CUPYFLASH_FAMILY")))
            return function(*arrays, **options)

        monkeypatch.setattr(module, name, watched)

    watch(work.api, "attention")
    watch(work.api, "attention_backward")
    watch(decode_calls.kvcache, "attention_with_cache")
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_the_ordered_backward_is_asked_for(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of that contestant alone; the rows of both say the same of their cell."""
    module, name = (work.varlen, "attention_varlen_backward") if packed else (work.api, "attention_backward")
    function, found = getattr(module, name), []

    def watched(*arrays: Any, **options: Any) -> Any:
        found.append(options.get("deterministic", False))
        return function(*arrays, **options)

    monkeypatch.setattr(module, name, watched)
    cell = Cell("fp32", 16, True, 8, 1, 2, 2, **{"packed": "equal", "lengths": (8,)} if packed else {})
    for contestant, deterministic in ((OURS, False), (ORDERED, True)):
        assert contestant == OURS or Bench().absent(contestant) is None
        works_of(Bench(), contestant, cell)["bwd"]()
        assert found.pop() == deterministic
    assert "deterministic" not in cell.record()


def test_each_call_of_the_other_family_asks_for_it(asked: list[tuple[str, str | None]]) -> None:
    cell = Cell("fp32", 16, True, 8, 1, 2, 2)
    theirs, ours = (works_of(Bench(), name, cell) for name in (SM80, OURS))
    asked.clear()
    for direction in ("fwd", "bwd", "both"):
        theirs[direction]()
        ours[direction]()
    both = ["attention", "attention_backward"]
    assert asked == [(name, f) for names in (both[:1], both[1:], both) for f in ("sm80", None) for name in names]


@pytest.mark.parametrize("short_bytes", [0, 1e9])
def test_over_a_cache_too(
    short_bytes: float, asked: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where calls are recorded as one function, which still says how many they are."""
    monkeypatch.setattr(decode, "SHORT_BYTES", short_bytes)
    monkeypatch.setattr(decode, "MOST_SETS", 2)
    monkeypatch.setattr(decode, "PER_GRAPH", 2)
    [run] = works_of(Bench(), SM80, DECODE).values()
    run()
    assert asked == [("attention_with_cache", "sm80")] * (2 if short_bytes else 1)
    assert isinstance(run, Recorded) == (short_bytes > 0)


@pytest.mark.needs("torch")
def test_who_can_be_timed_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (Bench(), TorchBench(on_gpu=False)):
        assert {name: own.absent(name) for name in (SM80, COPY)} == dict.fromkeys((SM80, COPY), "needs a GPU")
        assert own.absent("parts") is None
    for kind in (CupyBench, TorchBench):
        own = kind.__new__(kind)
        monkeypatch.setattr(own, "on_gpu", True, raising=False)
        assert [own.absent(name) for name in (SM80, COPY, "parts")] == [None] * 3
    assert "keeps its family" in str(JaxBench.absent(JaxBench.__new__(JaxBench), SM80))


# ---- copy ----


@pytest.mark.parametrize("name", SHAPES["cpu"])
@pytest.mark.parametrize("stored", ["", "int8"])
def test_what_is_read_are_the_bytes_that_count(name: str, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of K and of V, by their widths, whole vectors, within the arrays; as the kernel finds it behind its pointers."""
    cell = DecodeCell(name, "bf16", **SHAPES["cpu"][name], cache_dtype=stored)
    given = arrays(Bench(), cell)
    launched: list[tuple[Any, ...]] = []
    function = type("Function", (), {"ptr": 7})()
    monkeypatch.setattr(reading, "arrays", lambda *_: given)
    monkeypatch.setattr(reading, "loaded", lambda: (function, 264))
    monkeypatch.setattr(reading.jit, "launcher", lambda: lambda *facts: launched.append(facts))
    monkeypatch.setitem(reading.LIBRARIES, Clock, NUMPY)
    run = decode.call_of(Bench(), COPY, cell)
    run()
    [(*facts, parameters, extra)] = launched
    assert (facts, extra) == ([7, 264, 1, 1, 512, 1, 1, 0, 0], 0)
    pointers = (ctypes.POINTER(ctypes.c_uint64) * 5).from_address(parameters)
    k, v, *vectors, found = (pointer.contents.value for pointer in pointers)
    assert (k, v) == (given["k_cache"].ctypes.data, given["v_cache"].ctypes.data)
    assert 16 * sum(vectors) == cell.bytes_of(OURS) == cell.bytes_of(COPY)
    for n, name in zip(vectors, ("k_cache", "v_cache"), strict=True):
        assert 0 < 16 * n <= given[name].nbytes
    assert ctypes.c_int.from_address(found).value == 0
    assert cell.bytes_of(WIDE) == (2 if stored else 1) * cell.bytes_of(COPY)


def test_eight_loads_are_in_flight() -> None:
    """Of four registers each; two blocks share a multiprocessor's 64 Ki registers."""
    for arch in ("sm_80", "sm_90"):
        _, log = reading.compiled(arch)
        [registers] = re.findall(r"Used (\d+) registers", log)
        assert 32 + 5 < int(registers) <= 64, log
        assert "0 bytes spill stores, 0 bytes spill loads" in log


_ONE_BY_ONE = """
struct uint4 {{ unsigned x, y, z, w; }};
struct Index {{ unsigned x; }};
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#define __launch_bounds__(...)
#define __restrict__
{source}
extern "C" void run(const uint4 *k, const uint4 *v, unsigned long long n, unsigned long long m, unsigned *found) {{
    gridDim.x = 3, blockDim.x = 32;
    for (blockIdx.x = 0; blockIdx.x < 3; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) read_both(k, v, n, m, found);
}}
"""


@pytest.mark.needs("g++")
def test_all_is_read_and_nothing_else(tmp_path: Path) -> None:
    """The kernel's threads one after the other. A number that they look for is found wherever it lies, but beyond."""
    source, library = tmp_path / "read.cpp", tmp_path / "read.so"
    source.write_text(_ONE_BY_ONE.format(source=reading.SOURCE))
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    run = ctypes.CDLL(str(library)).run
    lengths = 1, 95, 96, 97, 383, 384, 385, 1000  # 96 threads, of 4 vectors of each array a turn
    for of_k, of_v in zip(lengths * 2, (*lengths, *lengths[::-1]), strict=True):
        k, v, found = np.zeros((of_k + 9, 4), np.uint32), np.zeros((of_v + 9, 4), np.uint32), np.zeros(1, np.uint32)
        for array, n in ((k, of_k), (v, of_v)):
            for row in {*range(0, n + 9, 7), n - 1, n}:
                array[row, row % 4] = 0x9E3779B9
                found[0] = 0
                run(*(ctypes.c_void_p(x.ctypes.data) for x in (k, v)), ctypes.c_ulonglong(of_k),
                    ctypes.c_ulonglong(of_v), ctypes.c_void_p(found.ctypes.data))  # fmt: skip
                assert found[0] == (row < n), (n, row)
                array[row] = 0


@pytest.mark.gpu
def test_a_gpu_reads_all_of_it() -> None:
    """By a launch that a graph replays."""
    import cupy

    own = CupyBench()
    run = decode.call_of(own, COPY, DecodeCell("", "bf16", 2, 1000, 4, 2, 16))
    given, found, _ = run()
    replay = own.clock.recorded([run])
    own.clock.synchronize()
    arrays = [given[name].reshape(-1).view(cupy.uint32) for name in ("k_cache", "v_cache")]
    for x in arrays:
        x[...] = 0
    for x in arrays:
        for at in (0, x.size // 2 + 1, x.size - 1):
            x[at], found[0] = 0x9E3779B9, 0
            replay()
            assert int(found[0]) == 1
            x[at], found[0] = 0, 0
            replay()
            assert int(found[0]) == 0
