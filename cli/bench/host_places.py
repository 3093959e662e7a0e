"""What a call costs the host as a part of something: torch's operator, a compiled region, a program of JAX's.

Beside it stands what the same place costs with torch's own attention, or with a call or function that does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cupyflash
from cupyflash.operands import FORWARD
from cupyflash.options import make_options

from .cell import OURS, Cell
from .clocks import Work
from .timing import host_us
from .work import Bench

PLACES = {
    "operator": "forward by torch's operator",
    "compiled": "forward in a compiled region",
    "compiled_both": "forward + backward in a compiled region",
    "autograd": "forward + backward by autograd",
    "jit": "forward inside jit",
}
COMPILER = "inductor"
SDPA, EMPTY = "sdpa", "empty"
Works = dict[str, Work]


def measure_places(bench: Bench, cell: Cell) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds of host time by place and by who is called there, and their spread; nothing of other frameworks."""
    of = {"torch": _of_torch, "jax": _of_jax}.get(bench.name)
    found = {}
    for place, works in (of(bench, cell) if of else {}).items():
        timings = zip(works, host_us(list(works.values()), bench.clock), strict=True)
        found[place] = {name: {"us": timing.median, "spread": timing.spread} for name, timing in timings}
    return found


def _of_torch(bench: Bench, cell: Cell) -> dict[str, Works]:
    import torch

    from cupyflash.torch import ops

    q, k, v, dout = bench.inputs(cell)
    values = ops.arguments(FORWARD, {"q": q, "k": k, "v": v}, make_options())
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours, theirs = [q, k, v], [x.transpose(1, 2) for x in (q, k, v)]

    def compiled(attend: Callable[..., Any]) -> Callable[..., Any]:
        def region(q: Any, k: Any, v: Any) -> Any:
            return attend(2 * q, k, v) + 1

        region.__code__ = region.__code__.replace()  # torch looks for programs by code: each region has its own
        return torch.compile(region, backend=COMPILER, fullgraph=True)

    def both(call: Callable[..., Any], given: list[Any], dout: Any) -> Work:
        leaves = [x.detach().requires_grad_() for x in given]
        return lambda: torch.autograd.grad(call(*leaves), leaves, dout)

    forward, of_sdpa = compiled(cupyflash.attention), compiled(sdpa)
    return {
        "operator": {OURS: lambda: ops.FORWARD_OP(*values), SDPA: lambda: sdpa(*theirs)},
        "compiled": {OURS: lambda: forward(*ours), SDPA: lambda: of_sdpa(*theirs)},
        "compiled_both": {
            OURS: both(compiled(cupyflash.attention), ours, dout),
            SDPA: both(compiled(sdpa), theirs, dout.transpose(1, 2)),
        },
        "autograd": {OURS: both(cupyflash.attention, ours, dout), EMPTY: both(_empty_function(), ours, dout)},
    }


def _empty_function() -> Callable[..., Any]:
    """A function of q, k and v for autograd that computes nothing: what any costs."""
    import torch

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            return dout, dout, dout

    found: Callable[..., Any] = Empty.apply
    return found


@functools.cache
def _register_empty(on_gpu: bool) -> str:
    """A custom call's name, which XLA takes once."""
    from cupyflash.gpu import device
    from cupyflash.jax import ffi

    name = f"cupyflash_{EMPTY}"
    ffi.register(name, None, device.current() if on_gpu else None)
    return name


def _of_jax(bench: Bench, cell: Cell) -> dict[str, Works]:
    import jax

    from cupyflash.jax import ffi

    q, k, v, _ = bench.inputs(cell)
    name = _register_empty(next(iter(q.devices())).platform == "gpu")
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((1, 4, 64), "float32")]
    ours = jax.jit(lambda *x: cupyflash.attention(*x, return_lse=True))
    empty = jax.jit(lambda *x: ffi.call(name, results, x, ""))
    return {"jit": {OURS: lambda: ours(q, k, v), EMPTY: lambda: empty(q, k, v)}}
