"""What the tests of the sm90 family on a GPU share: calls of several shapes, and their results on a quiet chip."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.check import cases, reference
from cupyflash.check.accuracy import Oracle, compare
from cupyflash.gpu.device import Device
from cupyflash.launch import counters
from cupyflash.launch import prepared as launch
from tests.gpu_arrays import on_gpu, to_numpy

# (batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim), dtype, options: few tiles and many, even and uneven ones.
SHAPES: tuple[tuple[tuple[int, ...], str, dict[str, Any]], ...] = (
    ((1, 40, 333, 1, 1, 64), "bf16", {}),
    ((2, 777, 777, 4, 2, 128), "bf16", {"causal": True}),
    ((3, 2500, 300, 16, 4, 64), "fp16", {}),
    ((1, 1500, 1500, 12, 12, 128), "fp16", {"window": (200, 30)}),
    ((2, 600, 1100, 6, 3, 256), "bf16", {"causal": True}),
    ((4, 1024, 1024, 16, 16, 64), "bf16", {"causal": True}),
)
NUMBERS = range(len(SHAPES))


@contextlib.contextmanager
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable insists on a family, nothing is prepared before or after, and all tile counters are 0 at the end."""
    if Device.of(0).capability != (9, 0):
        pytest.skip("not a GPU of compute capability 9.0")
    monkeypatch.delenv("CUPYFLASH_FAMILY", raising=False)
    launch.forget()
    yield
    launch.forget()
    assert not any(words.any() for words in all_counters()), "a launch left its counter behind"


def all_counters() -> list[np.ndarray]:
    """What every counter of GPU 0 holds, once all work is done."""
    from cupy.cuda import runtime

    runtime.deviceSynchronize()
    found = []
    for memory in counters.of(0)._chunks:
        words = np.ones(memory.size // 4, np.int32)
        runtime.memcpy(words.ctypes.data, memory.ptr, memory.size, runtime.memcpyDeviceToHost)
        found.append(words)
    return found


def case_of(number: int) -> tuple[cases.Case, str]:
    """One of `SHAPES`, and its dtype."""
    (batch, seqlen_q, seqlen_k, heads_q, heads_k, d), dtype, options = SHAPES[number]
    return cases.Case(f"hopper-{number}", "full", seqlen_q, seqlen_k, d, batch, heads_q, heads_k, **options), dtype


def make(number: int, library: str = "cupy") -> Callable[[], Any]:
    """A call on fresh arrays of one of `SHAPES`."""
    case, dtype = case_of(number)
    q, k, v = (on_gpu(x, library) for x in case.inputs(dtype)[:3])
    synchronize()
    return lambda: cupyflash.attention(q, k, v, **SHAPES[number][2])


@functools.cache
def quiet(number: int) -> bytes:
    """The bits of one of `SHAPES`, computed while nothing else runs, and right by the 2x rule."""
    synchronize()
    call = make(number)
    out = call()
    synchronize()
    judge_out(number, out)
    return bits(out)


def judge_out(number: int, out: Any) -> None:
    """A result of one of `SHAPES`; the 2x rule must hold."""
    case, dtype = case_of(number)
    (q, k, v), problem = case.inputs(dtype)[:3], case.problem(dtype)
    exact, plain = (f(q, k, v, problem)[0] for f in (reference.forward, reference.plain_forward))
    verdict = compare("out", to_numpy(out), exact, plain, dtype)
    assert verdict.passed, verdict


def bits(x: Any) -> bytes:
    return to_numpy(x).tobytes()


def synchronize() -> None:
    from cupy.cuda import runtime

    runtime.deviceSynchronize()


def new_stream() -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def judge(case: cases.Case, dtype: str, stream: Any = None) -> None:
    """A case through the public API, on a stream if one is given; the 2x rule must hold."""
    inputs = case.inputs(dtype)
    q, k, v = (on_gpu(case.in_layout(x), "cupy") for x in inputs[:3])
    brought = inputs.given(lambda x: on_gpu(x, "cupy"))
    synchronize()
    with stream or contextlib.nullcontext():
        out, lse = cupyflash.attention(q, k, v, **brought, **case.options(), return_lse=True)
    synchronize()
    verdicts = Oracle(case.problem(dtype), *inputs).judge_forward(case.in_layout(to_numpy(out)), to_numpy(lse))
    failed = [str(verdict) for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join(failed)


def family() -> str:
    """Which family the calls since the last `launch.forget()` went to."""
    (found,) = {"sm90" if call.persistent else "sm80" for call in launch.calls.values()}
    return found
