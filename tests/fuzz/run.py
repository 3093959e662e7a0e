"""Runs a `Spec` where it is asked to, and judges the results."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cupyflash
from cupyflash.check.cases import Inputs

from . import oracle
from .arrays import draw
from .spec import Spec

# out, lse, dq, dk, dv, those of what features bring; gradients again where they must repeat
Results = tuple[NDArray[Any], ...]


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for the time being; "" takes one away."""
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update({name: value for name, value in values.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _calls(s: Spec, x: Inputs, to: Callable[[Any], Any], back: Callable[[Any], Any]) -> Results:
    """The public API on arrays of some library: `to` it and `back`."""

    def turned(a: Any) -> Any:
        return a.swapaxes(-3, -2) if s.layout == "bhsd" else a

    options, attention, backward = s.options | {"layout": s.layout}, cupyflash.attention, cupyflash.attention_backward
    options |= x.given(to)
    if s.packed:
        attention, backward = cupyflash.attention_varlen, cupyflash.attention_varlen_backward
    q, k, v, dout = (to(turned(a)) for a in x[:4])
    dlse = None if x.dlse is None else to(x.dlse)
    out, lse = attention(q, k, v, **options, return_lse=True)
    grads: list[Any] = []
    for _ in range(1 + s.deterministic):
        found = backward(dout, q, k, v, out, lse, dlse=dlse, gradients_of=x.learned, **options)
        grads += [turned(back(g)) for g in found] + [back(g) for g in x.learned_in(found).values()]
    return turned(back(out)), back(lse), *grads


def on_cpu(s: Spec, x: Inputs) -> Results:
    """The CPU path, by the public API."""
    with _environment(CUPYFLASH_BACKEND="cpu"):
        return _calls(s, x, lambda a: a, lambda a: a)


def on_gpu(s: Spec, x: Inputs) -> Results:
    """The current GPU, by the public API with CuPy arrays of the same strides; what is allocated next holds NaN."""
    import cupy

    from tests import gpu_arrays

    cupy.full(16 << 20, np.nan, np.float32)  # freed at once, back into the pool
    with _environment(CUPYFLASH_BACKEND="", CUPYFLASH_FAMILY="sm80" if s.family == "sm80" else ""):
        return _calls(s, x, lambda a: gpu_arrays.on_gpu(a, "cupy"), gpu_arrays.to_numpy)


def in_emulator(s: Spec, x: Inputs) -> Results:
    """The kernels, compiled by g++."""
    from . import emulated

    return emulated.run(s, x)


WHERE: dict[str, Callable[[Spec, Inputs], Results]] = {"cpu": on_cpu, "emulator": in_emulator, "gpu": on_gpu}


def verdicts(s: Spec, x: Inputs, results: Results) -> list[str]:
    """What is wrong with some results."""
    out, lse, *grads = results
    names = x.gradients
    heads = oracle.heads(s, x)
    exact_out, exact_lse = oracle.forward(s, x, heads)
    lse_dtype = "fp64" if s.dtype == "fp64" else "fp32"
    found = [oracle.judge("out", out, exact_out, s.dtype), oracle.judge("lse", lse, exact_lse, lse_dtype)]
    for name, got, exact in zip(names, grads, oracle.backward(s, x, out, heads), strict=False):
        found.append(oracle.judge(name, got, exact, s.dtype))
    for name, got, again in zip(names, grads, grads[len(names) :], strict=False):
        if got.tobytes() != again.tobytes():
            found.append(f"{name}: deterministic, but a second run gave other bits")
    found += [
        f"{n}: dtype {a.dtype}"
        for n, a in zip(("out", *names[:3]), (out, *grads), strict=False)
        if a.dtype != x.q.dtype
    ]
    return [text for text in found if text]


def check(s: Spec, where: str) -> str:
    """ "" if a problem is solved right, else what went wrong."""
    try:
        x = draw(s)
        return "\n".join(verdicts(s, x, WHERE[where](s, x)))
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        return f"{type(e).__name__} at {os.path.basename(last.filename)}:{last.lineno}: {e}"
