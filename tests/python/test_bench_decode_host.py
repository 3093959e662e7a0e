"""`cupyflash bench --decode --host`: lengths that change, pages, and whose arrays they are."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from test_bench_decode import TINY, bench

from cupyflash.cli.bench import decode_host
from cupyflash.cli.bench.cell import OURS
from cupyflash.cli.bench.clocks import Clock, Stepped
from cupyflash.cli.bench.decode_cell import DecodeCell
from cupyflash.cli.bench.timing import Timing, host_us
from cupyflash.cli.bench.work import Bench

pytestmark = pytest.mark.usefixtures("without_gpu", "hurried")


def test_what_happens_between_calls_takes_no_time() -> None:
    steps: list[int] = []
    slow = Stepped(lambda: None, lambda: (steps.append(1), time.sleep(0.002)))
    [timing] = host_us([slow], Clock(), 10, 2)
    assert timing.median < 1000
    assert len(steps) == 2 * (50 + 10)


@pytest.mark.parametrize("page", [0, 16])
def test_each_call_has_other_lengths(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more key than the call before, in the same array, never more than there is room for."""
    seen: list[tuple[int, list[int]]] = []

    def attention(**given: Any) -> None:
        lengths = given["cache_seqlens"]
        seen.append((lengths.ctypes.data, lengths.tolist()))
        assert lengths.max() <= 9
        assert ("block_table" in given) == bool(page)

    monkeypatch.setattr(decode_host.kvcache, "attention_with_cache", attention)
    run = decode_host._stepped(Bench(), DecodeCell("", "fp32", 2, 9, 4, 2, 16, page=page))
    for _ in range(12):
        run()
    assert len({where for where, _ in seen}) == 1
    assert [lengths for _, lengths in seen] == [[n, n] for n in (5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9, 4)]


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=pytest.mark.needs("torch"))])
@pytest.mark.parametrize("only", ["B2 64", "kv_range,mixed"])
def test_each_place_has_its_figures(framework: str, only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(works: list[Any], clock: Any, calls: int = 0, rounds: int = 0) -> list[Timing]:
        for work in works:
            assert np.isfinite(np.asarray(work(), np.float32) if framework == "numpy" else work().float().numpy()).all()
        return [Timing((2.0 + i, 3.0 + i, 4.0 + i)) for i in range(len(works))]

    monkeypatch.setattr(decode_host, "host_us", once)
    result = bench(*TINY, "--framework", framework, "--only", only, "--host", "--json", "--against", "fa4")
    document = json.loads(result.stdout)
    assert document["host_us"] == {OURS: {"fwd": 3.0, "fwd_spread": pytest.approx(2 / 3)}}
    figures = {place: costs[framework]["us"] for place, costs in document["host_places"].items()}
    assert figures == {"cache": 3.0, "cache_steps": 4.0, "pages": 5.0, "pages_steps": 6.0}
    shown = " ".join(result.stderr.split())
    for place, us in figures.items():
        assert f"host, {decode_host.PLACES[place]}: {framework} {us} us (spread" in shown


def test_on_a_gpu_cupy_stands_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.cli.bench import cupy_work

    class Named(Bench):
        def __init__(self, name: str, on_gpu: bool) -> None:
            self.name, self.on_gpu = name, on_gpu

    monkeypatch.setattr(cupy_work, "CupyBench", lambda: Named("cupy", True))
    for name, on_gpu, both in (("torch", True, True), ("torch", False, False), ("cupy", True, False)):
        found = [own.name for own in decode_host._frameworks(Named(name, on_gpu))]
        assert found == ([name, "cupy"] if both else [name])
