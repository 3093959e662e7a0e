"""What a warm call does on the host, on a pretended GPU: counted, not timed, in functions of ours that Python calls.

A limit is what the way takes today and a few more: a second hop through torch's dispatcher, or structs of XLA's that
are read field by field, is above it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cupyflash
from cupyflash.launch import prepared as launch
from cupyflash.operands import BACKWARD, FORWARD
from cupyflash.options import Options
from tests import pretended_gpu
from tests.pretended_gpu import Gpu

pytestmark = pytest.mark.needs("cupy")
HOME = str(Path(cupyflash.__file__).parent)
WARM = 3  # a call is prepared, then known by its key, and there compared with the next


def functions_of(call: Callable[[], Any]) -> int:
    """How many functions of ours a warm call calls, after `WARM` others."""
    found: list[str] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and code.co_name[0] != "<":  # no comprehensions
            found.append(code.co_name)

    for _ in range(WARM):
        call()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    print(*found)  # which pytest shows where it is too many
    return len(found)


# ---- Lengths never seen ----


@pytest.mark.needs("torch")
@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("place", [pretended_gpu.plain, pretended_gpu.with_a_mark])
def test_new_lengths_cost_little_more_than_known_ones(
    family: str, place: pretended_gpu.Place, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each such call is prepared by itself, a forward takes 44 functions more, a backward 71, a packed one 54."""
    import torch

    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    gpu.place = place
    # Maps of arrays this small have a mark.
    q, k, v, out, dout = (torch.randn(2, 60, 4, 64, dtype=torch.bfloat16) for _ in range(5))
    lse, ends, other = torch.randn(2, 4, 60), *(torch.tensor([0, 7, 9], dtype=torch.int32) for _ in "qk")

    def forward(m: int) -> None:
        cupyflash.attention(q[:, :m], k, v)

    def backward(m: int) -> None:
        cupyflash.attention_backward(dout[:, :m], q[:, :m], k, v, out[:, :m], lse[:, :, :m].contiguous())

    def packed(m: int) -> None:
        cupyflash.attention_varlen(q[0, :m], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=other)

    for call, limit in ((forward, 20), (backward, 57), (packed, 20)):
        lengths = iter(range(10, 60))
        known = functions_of(lambda call=call: call(60))
        assert functions_of(lambda call=call, lengths=lengths: call(next(lengths))) <= known + limit


# ---- Torch's autograd ----


@pytest.mark.needs("torch")
def test_a_recorded_pair_costs_little(gpu: Gpu) -> None:
    """On a GPU torch runs the backward on a thread of its own, where each function costs twice what it does here."""
    import torch

    q, k, v = (torch.randn(1, 64, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    assert functions_of(lambda: cupyflash.attention(q, k, v)) <= 21
    assert functions_of(lambda: torch.autograd.grad(cupyflash.attention(q, k, v), (q, k, v), dout)) <= 32


# ---- Torch's operators ----


@pytest.mark.needs("torch")
def test_an_operator_costs_little_more_than_the_call_in_it(gpu: Gpu) -> None:
    import torch

    from cupyflash.torch import ops

    q, k, v = (torch.randn(1, 64, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    arrays = {"q": q, "k": k, "v": v}
    values = ops.arguments(FORWARD, arrays, Options())
    inner = functions_of(lambda: ops.compute_forward(arrays, Options()))
    launched = len(gpu.launched)
    assert functions_of(lambda: ops.FORWARD_OP(*values)) <= inner + 8
    assert len(gpu.launched) == launched + WARM + 1
    out, lse = ops.FORWARD_OP(*values)
    arrays |= {"out": out, "dout": q, "lse": lse}
    values = ops.arguments(BACKWARD, arrays, Options())
    inner = functions_of(lambda: ops.compute_backward(arrays, Options(), ()))
    assert functions_of(lambda: ops.BACKWARD_OP(*values)) <= inner + 8


@pytest.mark.needs("torch")
def test_a_recorded_operator_costs_little_more_than_a_recorded_call(gpu: Gpu) -> None:
    import torch

    from cupyflash.torch import ops

    q = torch.randn(1, 64, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    values = ops.arguments(FORWARD, {"q": q, "k": q, "v": q}, Options())
    eager = functions_of(lambda: cupyflash.attention(q, q, q).backward(q.detach()))
    assert functions_of(lambda: ops.FORWARD_OP(*values)[0].backward(q.detach())) <= eager + 4


# ---- JAX's custom calls ----


def frame_of(static: Any, shapes: list[Any], results: int | None = None, address: int = 4096) -> Any:
    """XLA's frame of a call of arrays of bf16 (rows in fp32), with memory for so many results; None: for all."""
    import jax
    import numpy as np

    from cupyflash.jax import call
    from cupyflash.jax.buffers import Buffer
    from tests.xla_frame import XlaFrame

    given = [jax.ShapeDtypeStruct(shape, "bfloat16" if len(shape) == 4 else "float32") for shape in shapes]
    made = call.results_of(static, given)
    made += call._workspace(static, given, len(made))
    buffers = [
        Buffer(address + 4096 * i, tuple(x.shape), call.CODE_OF[np.dtype(x.dtype)], 0)
        for i, x in enumerate([*given, *made])
    ]
    end = len(buffers) if results is None else len(given) + results
    return XlaFrame(static.text(given), buffers[: len(given)], buffers[len(given) : end])


SHAPE, ROWS = (1, 64, 4, 64), (1, 4, 64)
CALLS = [("forward", ("q", "k", "v"), [SHAPE] * 3, ("lse",)),
         ("backward", ("q", "k", "v", "out", "dout", "lse"), [*[SHAPE] * 5, ROWS], ())]  # fmt: skip


@pytest.fixture
def handler(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    from cupyflash.jax import call, ffi

    monkeypatch.setattr("cupyflash.gpu.device.count", lambda: 1)
    return ffi._handler(call._run, lambda: 0)


@pytest.mark.needs("jax")
@pytest.mark.parametrize(("which", "names", "shapes", "wanted"), CALLS, ids=["forward", "backward"])
def test_a_call_of_xlas_goes_from_its_frame_to_the_launch(
    which: str, names: tuple[str, ...], shapes: list[Any], wanted: tuple[str, ...], gpu: Gpu, handler: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And what it launches there is what any call launches of such arrays."""
    from cupyflash.jax import call
    from cupyflash.launch import find

    static = call.Static.of(which, names, Options(causal=True), wanted)
    frame = frame_of(static, shapes)
    assert functions_of(lambda: frame.run(handler)) <= 12
    assert frame.errors == []
    count = len(gpu.launched) // (WARM + 1)
    warm = gpu.launched[-count:]
    launch.forget()
    frame.run(handler)  # prepared there
    with monkeypatch.context() as patch:
        patch.setattr(find, "ready", lambda *_: None)
        frame.run(handler)
    assert gpu.launched[-count:] == gpu.launched[-2 * count : -count] == warm
    assert frame.errors == []


@pytest.mark.needs("jax")
def test_frames_that_need_another_look(gpu: Gpu, handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other addresses, lengths and streams than those of the call before; too few results; no address at all."""
    from cupyflash.jax import call

    which, names, shapes, wanted = CALLS[0]
    static = call.Static.of(which, names, Options(), wanted)
    frames = [frame_of(static, shapes), frame_of(static, shapes, address=4096 + 8)]
    frames.append(frame_of(static, [(2, 32, 4, 64)] * 3))
    for frame in frames:
        frame.run(handler)
        assert frame.errors == []
    aligned, odd, short = gpu.launched
    assert odd.symbol != aligned.symbol
    assert short.symbol == aligned.symbol
    assert short.params != aligned.params
    frame = frame_of(static, shapes, results=1)
    frame.run(handler)
    frame_of(static, [(1, 0, 4, 64), *shapes[1:]], address=-4096).run(handler)  # q lies at -4096, k at 0
    assert len(gpu.launched) == 3
    assert "CUPYFLASH_FAMILY" in frame.errors[0]


@pytest.mark.needs("jax")
def test_all_that_decides_a_call_of_xlas_is_asked(gpu: Gpu, handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once calls of each kind were found: the text, the shapes, the GPU, the family, and what is kept."""
    from cupyflash.jax import call, ffi

    which, names, shapes, wanted = CALLS[0]
    statics = [call.Static.of(which, names, options, wanted) for options in (Options(), Options(causal=True))]
    frames = [frame_of(static, x) for static in statics for x in (shapes, [(1, 64, 2, 64)] * 3, [(1, 80, 4, 64)] * 3)]
    found: list[Any] = []
    for _ in range(3):
        for frame in frames:
            frame.run(handler)
            found.append(gpu.launched[-1])
    assert found == found[:6] * 3
    assert len(set(found)) == 6
    with monkeypatch.context() as patch:
        patch.setenv("CUPYFLASH_FAMILY", "sm80")
        frames[0].run(handler)
        assert gpu.launched[-1].symbol[:8] == "fwd_sm80"
    frames[0].run(handler)
    assert gpu.launched[-1] == found[0]
    launched = len(gpu.launched)
    launch.forget()
    with monkeypatch.context() as patch:
        patch.setattr(call.run, "forward", lambda *_: None)
        frames[0].run(handler)
        frames[0].run(ffi._handler(call._run, lambda: 1))  # on a GPU for which nothing is kept
    assert len(gpu.launched) == launched
    assert not any(frame.errors for frame in frames)


@pytest.mark.needs("jax")
def test_frames_come_and_go(gpu: Gpu, handler: Any) -> None:
    """XLA's tables of functions may lie where others lay before."""
    from cupyflash.jax import call

    which, names, shapes, wanted = CALLS[0]
    static = call.Static.of(which, names, Options(), wanted)
    for i in range(50):
        frame, _ = frame_of(static, shapes), [frame_of(static, shapes) for _ in range(i % 5)]
        frame.run(handler)
        assert frame.errors == []
    assert len(gpu.launched) == 50
