"""`cupyflash bench` cannot flatter: who is timed after whom, which rounds count, and which FLOPs."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cupyflash
from cupyflash import cli
from cupyflash.check.accuracy import Oracle
from cupyflash.cli.bench import peers as bench_peers
from cupyflash.cli.bench import report as bench_report
from cupyflash.cli.bench import tables as bench_tables
from cupyflash.cli.bench import timing as bench_timing
from cupyflash.cli.bench import work as bench_work
from cupyflash.cli.bench.cell import Cell
from cupyflash.cli.bench.timing import QUICK, SUSTAINED, Clock, Effort, Timing, Work
from cupyflash.cli.output import human
from cupyflash.problem import make_problem

TINY = ("--backend", "cpu", "--framework", "numpy", "--causal", "--pass", "fwd", "--head-dim", "16", "--tokens", "16",
        "--seqlens", "16", "--hidden", "16")  # fmt: skip


pytestmark = pytest.mark.usefixtures("without_gpu")


def bench(*options: str) -> Result:
    result = CliRunner().invoke(cli.main, ["bench", *TINY, *options])
    assert result.exit_code == 0, result.output
    return result


class Recorder(Clock):
    """A clock whose times are what the functions return; it writes down which one ran."""

    def __init__(self) -> None:
        self.ran: list[Work] = []

    def batch_ms(self, work: Work, calls: int) -> float:
        self.ran.append(work)
        return float(work())


def rounds_of(contestants: int, effort: Effort) -> list[tuple[int, ...]]:
    """The order of each round."""
    clock = Recorder()
    works: list[Work] = [lambda ms=20.0 + i: ms for i in range(contestants)]  # type: ignore[misc]
    bench_timing.sustained_ms(works, clock, effort)
    turns = [works.index(work) for work in clock.ran[::2]]  # a turn is a call alone, then one batch
    assert len(turns) == contestants * effort.rounds
    return [tuple(turns[i : i + contestants]) for i in range(0, len(turns), contestants)]


@pytest.mark.parametrize("contestants", [2, 3, 4])
def test_each_round_has_an_order_of_its_own(contestants: int) -> None:
    """All take part in each round; no order comes twice running, and nobody keeps a place."""
    found = rounds_of(contestants, Effort(rounds=60, warm_s=0, run_s=0))
    assert all(sorted(order) == list(range(contestants)) for order in found)
    assert all(a != b for a, b in itertools.pairwise(found))
    for place in (0, -1):
        counts = Counter(order[place] for order in found)
        assert len(counts) == contestants
        assert max(counts.values()) < 60 * 2 / 3  # 30 of 60 by nature with two, 20 and 15 expected beyond


def test_the_order_is_another_one_in_each_run() -> None:
    effort = Effort(rounds=20, warm_s=0, run_s=0)
    assert rounds_of(3, effort) != rounds_of(3, effort)


def test_one_contestant_alone() -> None:
    assert rounds_of(1, Effort(rounds=3, warm_s=0, run_s=0)) == [(0,)] * 3


def test_the_median_of_the_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lucky round and one unlucky one change the spread, not the figure."""
    values = {"a": iter([5.0, 4.0, 1.0, 4.2, 90.0]), "b": iter([8.0] * 5)}
    works: list[Any] = list(values)  # what is measured is never called here
    monkeypatch.setattr(bench_timing, "_median_ms", lambda work, *_: next(values[work]))
    assert bench_timing.sustained_ms(works, Clock(), SUSTAINED) == [4.2, 8.0]
    timing = Timing((5.0, 4.0, 1.0, 4.2, 90.0))
    assert (timing.median, timing.spread) == (4.2, pytest.approx(89 / 4.2))


def test_the_host_cost_is_measured_in_turns_too() -> None:
    turns: list[str] = []
    works = [lambda: turns.append("a"), lambda: turns.append("b")]
    found = bench_timing.host_us(works, Clock(), calls=1, rounds=6)
    measured = turns[50::51]  # what follows 50 calls that warm up
    orders = ["".join(measured[i : i + 2]) for i in range(0, 12, 2)]
    assert orders in (["ab", "ba"] * 3, ["ba", "ab"] * 3)
    assert [len(t.rounds) for t in found] == [6, 6]


def test_five_rounds_unless_asked_for_fewer() -> None:
    assert QUICK.rounds == SUSTAINED.rounds == bench_timing.ROUNDS == 5
    result = bench("--quick", "--json")
    document = json.loads(result.stdout)
    assert (document["rounds"], document["few_rounds"]) == (5, None)
    assert "instead of 5" not in result.stderr

    result = bench("--quick", "--rounds", "2", "--json")
    document = json.loads(result.stdout)
    assert document["rounds"] == document["rows"][0]["rounds"] == 2
    assert document["few_rounds"].startswith("2 rounds instead of 5")
    assert document["few_rounds"] in " ".join(result.stderr.split())


def test_the_spread_is_reported(tmp_path: Path) -> None:
    """In JSON, in CSV, and in the table."""
    table = tmp_path / "rows.csv"
    document = json.loads(bench("--quick", "--host", "--csv", str(table), "--json").stdout)
    [row] = document["rows"]
    assert 0 < row["ms_fastest"] <= row["ms"] <= row["ms_slowest"]
    assert row["spread"] == pytest.approx((row["ms_slowest"] - row["ms_fastest"]) / row["ms"])
    with table.open() as f:
        [line] = csv.DictReader(f)
    assert {name: line[name] for name in ("spread", "rounds")} == {"spread": str(row["spread"]), "rounds": "5"}
    assert document["host_us"]["cupyflash"]["fwd_spread"] >= 0
    assert re.search(r"cupyflash +ms +spread\n.*\d%\s", bench("--quick").stdout)


def test_the_table_gives_the_spread_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours 2 ms with 10 %, a peer 4 ms with 5 %; a peer that did not run has none."""
    cell = Cell("bf16", 64, False, 1024, 1, 1, 1)
    times = {"cupyflash": Timing((2.0, 2.1, 1.9)), "cudnn": Timing((4.0, 4.1, 3.9)), "fa4": None}
    rows = [bench_report.Row(cell, "fwd", name, timing, None) for name, timing in times.items()]
    assert [d["spread"] for d in bench_report.documents(rows)] == [pytest.approx(0.1), pytest.approx(0.05), None]
    bench_tables.print_rows(rows, human(False))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split()[4:] == ["2.000", "10.0%", "0.0671", "(2.00)", "5.0%", "-", "-", "2.00"]


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap", "alibi", "sink"),
    [(None, None, False, False), (None, 0.5, False, True), (7, 0.5, True, False), (0, None, False, True),
     (None, None, True, False)],
)  # fmt: skip
def test_flex_computes_the_same(
    causal: bool, window: int | None, softcap: float | None, alibi: bool, sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU and not compiled, with fewer key heads."""
    import torch
    from torch._functorch import config

    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    cell = Cell("fp32", 24, causal, 37, 2, 4, 2, window, softcap, alibi=alibi, sink=sink)
    bench = bench_work.TorchBench(on_gpu=False)
    q, k, v, dout = bench.inputs(cell)
    problem = make_problem([x.shape for x in (q, k, v)], ["fp32"] * 3, **cell.options, alibi=int(alibi), sink=sink)
    oracle = Oracle(problem, *map(np.asarray, (q, k, v, dout)), **cell.brought())
    with config.patch(donated_buffer=True):
        out = bench.attention("flex", cell)(q, k, v)
        assert not config.donated_buffer
    lse = cupyflash.attention(q, k, v, **cell.options, **bench.brought(cell), return_lse=True)[1]
    assert all(verdict.passed for verdict in oracle.judge_forward(out.numpy(), lse.numpy()))


@pytest.mark.needs("torch")
def test_flex_is_absent_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_work.Bench().absent("flex") == "needs torch"
    bench = bench_work.TorchBench(on_gpu=False)
    assert bench.absent("flex") == "needs a GPU"
    bench.on_gpu = True
    assert bench.absent("flex") is None
    monkeypatch.setattr(bench_peers, "_has", lambda module: False)
    assert bench.absent("flex") == "this torch has no flex_attention"
    assert bench.absent("cudnn") is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 7, 36, 99])
def test_flops_are_those_of_visible_pairs(causal: bool, window: int | None) -> None:
    """Counted pair by pair."""
    pairs = 0
    for query in range(37):
        for key in range(37):
            pairs += (not causal or key <= query) and (window is None or key >= query - window)
    cell = Cell("bf16", 24, causal, 37, 2, 3, 3, window)
    assert cell.flops("fwd") == 4 * 24 * pairs * 2 * 3
    assert cell.flops("bwd") == 2.5 * cell.flops("fwd")
    assert cell.flops("both") == 3.5 * cell.flops("fwd")


@pytest.mark.needs("jax")
@pytest.mark.parametrize("causal", [False, True])
def test_jax_computes_the_same_as_its_peer(causal: bool) -> None:
    from cupyflash.cli.bench.jax_work import JaxBench

    cell = Cell("fp32", 16, causal, 24, 2, 4, 2)
    ours, theirs = (JaxBench(on_gpu=False).works(name, cell) for name in ("cupyflash", "math"))
    for direction in ("fwd", "bwd", "both"):
        for a, b in zip(_leaves(ours[direction]()), _leaves(theirs[direction]()), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def _leaves(tree: object) -> list[np.ndarray]:
    import jax

    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.needs("jax")
def test_jax_says_what_its_peers_lack() -> None:
    from cupyflash.cli.bench.jax_work import JaxBench

    bench = JaxBench(on_gpu=False)
    assert bench.absent("fa4") == "jax.nn has cudnn and math"
    assert bench.absent("cudnn") == "needs a GPU"
    for given, lacks in (({"softcap": 5.0}, "a softcap"), ({"alibi": True}, "ALiBi")):
        with pytest.raises(NotImplementedError, match=f"jax.nn.dot_product_attention has no {lacks}"):
            bench.works("math", replace(Cell("fp32", 16, False, 24, 2, 4, 2), **given))  # type: ignore[arg-type]
