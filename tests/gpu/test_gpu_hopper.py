"""The sm90 family on a Hopper GPU: when it is chosen, and that it repeats on quiet and busy chips."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import cupyflash
from cupyflash.arrays.adapters import CUPY
from cupyflash.check import cases
from cupyflash.check.accuracy import Oracle
from cupyflash.compile import jit
from cupyflash.gpu import tensormap
from cupyflash.gpu.device import Device
from cupyflash.launch import clocks, counters, prepare
from cupyflash.launch import prepared as launch
from cupyflash.launch.counters import Counters
from cupyflash.launch.kept import Kept
from tests import hopper
from tests.gpu_arrays import on_gpu, to_numpy
from tests.hopper import NUMBERS, bits, judge, make, new_stream, quiet, synchronize

pytestmark = pytest.mark.gpu

# What TMA can read, and what goes to the other family.
FAMILIES = {
    "dense-d64": "sm90", "causal-d128": "sm90", "bhsd": "sm90", "fused-qkv": "sm90", "padded-rows": "sm90",
    "every-second-row": "sm90", "broadcast-batch": "sm80", "broadcast-heads": "sm80", "misaligned": "sm80",
    "empty-seqlen-k": "sm80",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hopper.clean(monkeypatch):
        yield


# ---- which family ----


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_follows_the_memory(name: str) -> None:
    judge(cases.case(name), "bf16")
    assert hopper.family() == FAMILIES[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_other_family_takes_it_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm80")
    judge(cases.case(name), "bf16")
    assert hopper.family() == "sm80"


@pytest.mark.parametrize("name", FAMILIES)
def test_insisting_on_this_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm90")
    if FAMILIES[name] == "sm90":
        judge(cases.case(name), "fp16")
        assert hopper.family() == "sm90"
    else:
        with pytest.raises(cupyflash.UnsupportedError, match=r"CUPYFLASH_FAMILY=sm90: .*unset it"):
            judge(cases.case(name), "fp16")


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("elements", "family"), [(0, "sm90"), (8, "sm90"), (4, "sm80"), (1, "sm80")])
def test_one_address_that_is_no_multiple_of_16(elements: int, family: str) -> None:
    import torch

    case = cases.Case("address", "full", 100, 100, 64, 4)
    inputs = case.inputs("fp16")
    q, k, v = (on_gpu(x, "torch") for x in inputs[:3])
    v = torch.cat([v.flatten()[:elements], v.flatten()])[elements:].view(v.shape)
    assert v.data_ptr() % 16 == 2 * elements % 16
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    assert hopper.family() == family
    verdicts = Oracle(case.problem("fp16"), *inputs).judge_forward(to_numpy(out), to_numpy(lse))
    assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))


def test_maps_that_are_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "address_slot", lambda tensor: None)
    judge(cases.case("causal-d128"), "fp16")
    assert hopper.family() == "sm80"


# ---- tiles and counters ----


@pytest.mark.parametrize(("batch", "heads", "seqlen_q"), [(1, 1, 1), (1, 3, 500), (3, 12, 3000), (131, 1, 60),
                                                          (132, 1, 60), (133, 1, 60), (1, 132, 300)])  # fmt: skip
@pytest.mark.parametrize("counted", [True, False])
def test_fewer_and_more_tiles_than_multiprocessors(
    batch: int, heads: int, seqlen_q: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a counter, when the numbers of the tiles come in a fixed stride."""
    if not counted:
        monkeypatch.setattr(Counters, "_take", lambda self: 0)
    stream = new_stream()
    judge(cases.Case("tiles", "full", seqlen_q, 130, 128, batch, heads, heads, causal=True), "bf16", stream)
    assert hopper.family() == "sm90"
    assert (stream.ptr in counters.of(0)._of_stream) == counted


def test_the_counter_is_zero_between_launches() -> None:
    stream, call = new_stream(), make(2)
    for _ in range(5):
        with stream:
            call()
        assert not any(words.any() for words in hopper.all_counters())


def test_clocks() -> None:
    """The profiling form says of every block how long it lived."""
    case = cases.Case("clocks", "full", 2000, 2000, 128, 2, 8, 8)
    q, k, v = (on_gpu(x, "cupy") for x in case.inputs("bf16")[:3])
    found = clocks.forward_clocks(CUPY, q, k, v, prepare.Options())
    assert found is not None
    assert found.shape == (Device.of(0).sm_count, 2)
    gigahertz = found[:, 0] / found[:, 1]
    assert (gigahertz > 0.1).all()
    assert (gigahertz < 3).all()
    assert clocks.forward_clocks(CUPY, q[:0], k[:0], v[:0], prepare.Options()) is None


# ---- repeated, on a quiet and on a busy chip ----


@pytest.mark.parametrize("number", NUMBERS)
def test_launches_repeat_bitwise(number: int) -> None:
    expected, call = quiet(number), make(number)
    outs = [call() for _ in range(60)]
    assert hopper.family() == "sm90"
    assert all(bits(out) == expected for out in outs)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_busy_chip_gives_the_same(number: int) -> None:
    """Other streams take multiprocessors away, so that tiles are drawn in another order."""
    expected, calls = [quiet(i) for i in NUMBERS], [make(i) for i in NUMBERS]
    streams, mine = [new_stream() for _ in NUMBERS], new_stream()
    outs, kept = [], []
    for _ in range(10):
        for stream, call in zip(streams, calls, strict=True):
            with stream:
                kept.append(call())
        with mine:
            outs += [calls[number]() for _ in range(3)]
    synchronize()
    assert all(bits(out) == expected[number] for out in outs)
    assert all(bits(out) == expected[i % len(expected)] for i, out in enumerate(kept))


def test_threads_with_streams_and_shapes_of_their_own() -> None:
    expected, calls = [quiet(i) for i in NUMBERS], [make(i) for i in NUMBERS]
    wrong: list[tuple[int, int]] = []
    barrier = threading.Barrier(len(calls))

    def work(number: int) -> None:
        stream = new_stream()
        barrier.wait()
        with stream:
            outs = [calls[number]() for _ in range(50)]
            stream.synchronize()
        wrong.extend((number, i) for i, out in enumerate(outs) if bits(out) != expected[number])

    threads = [threading.Thread(target=work, args=(i,)) for i in NUMBERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_two_families_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call goes to the family that CUPYFLASH_FAMILY names at the time, and neither disturbs the other."""
    expected, ours = quiet(1), make(1)
    launch.forget()
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm80")
    theirs = make(5)
    out = theirs()
    hopper.judge_out(5, out)
    other = bits(out)
    streams, outs = (new_stream(), new_stream()), []
    for _ in range(20):
        for stream, call, family in zip(streams, (ours, theirs), ("", "sm80"), strict=True):
            monkeypatch.setenv("CUPYFLASH_FAMILY", family)
            with stream:
                outs.append(call())
    synchronize()
    assert sorted(call.persistent for call in launch.calls.values()) == [False, True]
    assert all(bits(out) == (expected, other)[i % 2] for i, out in enumerate(outs))


def test_streams_come_and_go() -> None:
    """A new stream gets the handle of one that was destroyed while its work still runs, but not its counter."""
    case = cases.Case("long", "full", 2000, 20000, 128, heads_q=16, heads_k=16)  # half a millisecond
    q, k, v = (on_gpu(x, "cupy") for x in case.inputs("bf16")[:3])
    expected, handles = bits(cupyflash.attention(q, k, v)), set()
    outs = []
    for _ in range(60):
        stream = new_stream()
        with stream:
            outs.append(cupyflash.attention(q, k, v))
        handles.add(stream.ptr)
        del stream
    synchronize()
    assert len(handles) < 60
    assert all(bits(out) == expected for out in outs)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_first_call_of_a_new_thread(library: str) -> None:
    """A thread that has no CUDA context yet gets the same family, and so do all who call the same later."""
    if library == "torch" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch has no CUDA")
    expected, call = quiet(3), make(3, library)
    launch.forget()
    outs: list[Any] = []
    thread = threading.Thread(target=lambda: outs.append(call()))
    thread.start()
    thread.join()
    assert hopper.family() == "sm90"
    synchronize()
    assert bits(outs[0]) == expected


def test_more_calls_prepared_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping prepared calls drops no work that is queued."""
    monkeypatch.setattr(launch, "calls", Kept(2))
    monkeypatch.setattr(launch, "specs", Kept(2))
    monkeypatch.setattr(launch, "series", Kept(2))
    expected, calls = [quiet(i) for i in NUMBERS], [make(i) for i in NUMBERS]
    outs = [call() for _ in range(10) for call in calls]
    synchronize()
    assert all(bits(out) == expected[i % len(expected)] for i, out in enumerate(outs))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 200, 256])
def test_lengths_around_the_tiles(head_dim: int, dtype: str) -> None:
    """One below, on and above a tile's rows and a block's keys, where rows of one warpgroup are past the end."""
    base = cases.Case("lengths", "full", 1, 1, head_dim, heads_q=2, heads_k=1)
    for seqlen_q in (63, 64, 65, 128, 129, 191, 192, 193, 256, 257):
        for causal in (False, True):
            judge(replace(base, seqlen_q=seqlen_q, seqlen_k=seqlen_q + 64 - seqlen_q % 3, causal=causal), dtype)
    assert hopper.family() == "sm90"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_overlapping_launches_of_other_numbers(head_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls one behind the other, which share workspaces, against calls whose kernels wait for each other. dQ is added
    up in any order where it is not the result of a kernel of its own."""
    import cupy as cp

    rng = cp.random.default_rng(head_dim)
    given = [
        [rng.standard_normal((2, 1024, 16, head_dim), dtype=cp.float32).astype(cp.float16) for _ in range(4)]
        for _ in range(8)
    ]
    kept = [cupyflash.attention(*x[:3], causal=causal, return_lse=True) for x in given]

    def gradients() -> list[Any]:
        launch.forget()
        made = [
            cupyflash.attention_backward(x[3], *x[:3], *of, causal=causal) for x, of in zip(given, kept, strict=True)
        ]
        synchronize()
        return made

    overlapping = gradients()
    monkeypatch.setattr(launch, "DependentLaunch", lambda *facts: partial(jit.launcher(), *facts))
    for found, wanted in zip(overlapping, gradients(), strict=True):
        assert (found.dk == wanted.dk).all()
        assert (found.dv == wanted.dv).all()
        assert cp.allclose(found.dq, wanted.dq, atol=0 if head_dim > 128 else 2e-3, rtol=0)
