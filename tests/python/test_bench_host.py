"""`bench --host`: what a call costs inside of torch's and JAX's programs, beside what these cost anyway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_bench import bench

from cupyflash.cli.bench import host_places
from cupyflash.cli.bench.timing import Timing

pytestmark = pytest.mark.usefixtures("without_gpu")
FRAMEWORKS = {
    "torch": {place: ["cupyflash", "sdpa"] for place in ("operator", "compiled", "compiled_both")}
    | {"autograd": ["cupyflash", "empty"]},
    "jax": {"jit": ["cupyflash", "empty"]},
    "numpy": {},
}


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_place_has_its_figures(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function is called; inductor, which compiles C++ here, gives way to a faster compiler."""
    monkeypatch.setattr(host_places, "COMPILER", "aot_eager")

    def once(works: list[Any], clock: Any, calls: int = 0, rounds: int = 0) -> list[Timing]:
        for work in works:
            assert work() is not None
        return [Timing((2.0 + i, 3.0 + i, 4.0 + i)) for i in range(len(works))]

    for module in ("host", "host_places"):
        monkeypatch.setattr(f"cupyflash.cli.bench.{module}.host_us", once)
    options = "--framework", framework, "--dtype", "fp32", "--quick", "--rounds", "1", "--host"
    places = json.loads(bench(*options, "--json").stdout)["host_places"]
    assert {place: list(costs) for place, costs in places.items()} == FRAMEWORKS[framework]
    for costs in places.values():
        assert costs["cupyflash"] == {"us": 3.0, "spread": pytest.approx(2 / 3)}
    shown = " ".join(bench(*options).stdout.split())
    for place, (ours, other) in FRAMEWORKS[framework].items():
        label = host_places.PLACES[place]
        assert f"host, {label}: {ours} 3.0 us (spread 66.7%), {other} 4.0 us (spread 50.0%) a call" in shown


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_compared_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from cupyflash.cli.bench import host
    from cupyflash.cli.bench.work import TorchBench

    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    monkeypatch.setattr(host_places, "COMPILER", "eager")
    places = host_places._of_torch(TorchBench(on_gpu=False), host.small("fp32"))
    for works in places.values():
        ours, theirs = (work() for work in works.values())
        ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
        if host_places.EMPTY in works:
            assert [x.shape for x in ours] == [x.shape for x in theirs]
            continue
        for a, b in zip(ours, theirs, strict=len(theirs) > 1):
            torch.testing.assert_close(a, b.transpose(1, 2))
    torch._dynamo.reset()


@pytest.mark.needs("jax")
def test_a_call_that_does_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what every other call does, but for the call."""
    import jax

    from cupyflash.cli.bench import host
    from cupyflash.cli.bench.jax_work import JaxBench
    from cupyflash.jax import ffi

    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    looked: list[Any] = []
    look = ffi._buffers
    monkeypatch.setattr(ffi, "_buffers", lambda pointers: looked.append(pointers) or look(pointers))
    [works] = host_places._of_jax(JaxBench(on_gpu=False), host.small("fp32")).values()
    out, lse = jax.block_until_ready(works["empty"]())
    assert (out.shape, lse.shape) == ((1, 64, 4, 64), (1, 4, 64))
    assert not looked
    jax.block_until_ready(works[host_places.OURS]())
    assert looked
