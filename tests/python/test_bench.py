"""`cupyflash bench` cannot flatter: who is timed after whom, which rounds count, and which FLOPs."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import cli
from cupyflash.cli import block_masks
from cupyflash.cli.bench import features as bench_features
from cupyflash.cli.bench import main as bench_main
from cupyflash.cli.bench import peers as bench_peers
from cupyflash.cli.bench import report as bench_report
from cupyflash.cli.bench import tables as bench_tables
from cupyflash.cli.bench import timing as bench_timing
from cupyflash.cli.bench import work as bench_work
from cupyflash.cli.bench.cell import Cell
from cupyflash.cli.bench.clocks import Clock, Work
from cupyflash.cli.bench.features import NAMED, WITHOUT
from cupyflash.cli.bench.frameworks import make
from cupyflash.cli.bench.mods import MODS, of_documents
from cupyflash.cli.bench.timing import QUICK, SUSTAINED, Effort, Timing
from cupyflash.cli.output import human

TINY = ("--backend", "cpu", "--framework", "numpy", "--causal", "--pass", "fwd", "--head-dim", "16", "--tokens", "16",
        "--seqlens", "16", "--hidden", "16")  # fmt: skip


pytestmark = pytest.mark.usefixtures("without_gpu", "hurried")


def bench(*options: str) -> Result:
    result = CliRunner().invoke(cli.main, ["bench", *TINY, *options])
    assert result.exit_code == 0, result.output
    return result


def bench_of_torch(*options: str) -> Result:
    """As `bench`, on torch tensors."""
    return bench("--framework", "torch", *options)


@pytest.mark.parametrize("how", ["ctrl-c", "timeout", "error"])
def test_a_run_that_is_interrupted_shows_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    cell, table = bench_main.measure_cell, tmp_path / "rows.csv"

    def measure_cell(bench: bench_work.Bench, at: Cell, *given: Any) -> Any:
        if at.seqlen == 8 and how == "timeout":
            signal.raise_signal(signal.SIGTERM)
        elif at.seqlen == 8:
            raise KeyboardInterrupt if how == "ctrl-c" else RuntimeError("an illegal memory access")
        return cell(bench, at, *given)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(bench_main, "measure_cell", measure_cell)
    options = [*TINY, "--seqlens", "16,8,4", "--csv", str(table)]
    result = CliRunner().invoke(cli.main, ["bench", *options, "--host", "--json"])
    assert result.exit_code == 130, result.output
    document = json.loads(result.stdout)
    assert {row["seqlen"] for row in document["rows"]} == {16}
    assert document["not_measured"] == 2
    assert "interrupted: 2 of 3 configurations are not measured" in result.stderr
    assert ("RuntimeError: an illegal memory access" in result.stderr) == (how == "error")
    assert len(table.read_text().splitlines()) == 1 + len(document["rows"])
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_that_is_interrupted_at_once_has_nothing_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_main, "measure_cell", interrupt)
    result = CliRunner().invoke(cli.main, ["bench", *TINY, "--json"])
    assert (result.exit_code, json.loads(result.stdout)["error"]) == (130, "interrupted")


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
    "features",
    [{}, {"softcap": 0.5, "sink": True}, {"window": 7, "softcap": 0.5, "alibi": True}, {"window": 0, "sink": True},
     {"alibi": True}, {"bias": "hqk"}, {"bias": "bk", "softcap": 0.5}, {"bias": "-", "alibi": True}, {"mask": "qk"},
     {"mask": "bhqk", "window": 9}, {"block_mask": "0.5"}, {"block_mask": "longformer", "alibi": True},
     {"padded": "left"}, {"padded": "right", "mask": "qk", "alibi": True},
     {"mod": "relative", "window": 9}, {"mod": "table", "softcap": 0.5, "alibi": True}, {"mod": "gates"},
     {"mod": "documents", "softcap": 0.5}],
    ids=str,
)  # fmt: skip
def test_flex_computes_the_same(causal: bool, features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU and not compiled, with fewer key heads; random blocks are 16 by 16 here."""
    import torch
    from torch._functorch import config

    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(block_masks, "BLOCK", 16)
    monkeypatch.setitem(MODS, "documents", of_documents(10))
    block_masks.make.cache_clear()
    cell = Cell("fp32", 24, causal, 37, 2, 4, 2, **features)
    bench = bench_work.TorchBench(on_gpu=False)
    q, k, v, _ = bench.inputs(cell)
    given = bench.brought(cell)
    with config.patch(donated_buffer=True):
        out = bench.attention("flex", cell, given)(q, k, v)
        assert not config.donated_buffer
    want = bench.attention("cupyflash", cell, given)(q, k, v)
    block_masks.make.cache_clear()
    seen = np.ones((37, 37), bool) if not cell.mask else given["mask"].expand(2, 4, 37, 37).numpy()
    assert seen.any(axis=-1).mean() > 0.9
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "features",
    [{"bias": "hqk"}, {"bias": "k"}, {"mask": "bqk"}, {"mask": "hk"}, {"padded": "right"},
     {"padded": "right", "bias": "hqk", "mask": "hk"}],
    ids=str,
)  # fmt: skip
def test_torch_sdpa_computes_the_same(causal: bool, features: dict[str, str]) -> None:
    """Its plain backend, on the CPU: gradients too, of a bias as well."""
    import torch

    learned = "bias" in features
    cell = Cell("fp32", 16, causal, 37, 2, 4, 2, learned=learned, **features)  # type: ignore[arg-type]
    bench, given = bench_work.TorchBench(on_gpu=False), {}
    given |= bench.brought(cell)
    if "mask" in given:
        given["mask"][..., :1] = True  # torch gives NaN where a query sees nothing
    inputs = bench.inputs(cell)
    bench.brought = lambda _: {n: x.clone() for n, x in given.items()}  # type: ignore[method-assign]
    bench.inputs = lambda _: [x.clone() for x in inputs]  # type: ignore[method-assign]
    ours, theirs = (bench.works(name, cell) for name in ("cupyflash", "math"))
    for direction in ("fwd", "bwd", "both"):
        a, b = _flat(ours[direction]()), _flat(theirs[direction]())
        assert len(a) == len(b) == {"fwd": 1, "bwd": 3 + learned, "both": 4 + learned}[direction]
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert not ours["fwd"]().requires_grad


@pytest.mark.needs("torch")
@pytest.mark.parametrize("features", [{}, {"mask": "bk"}, {"bias": "hqk"}])
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_kernel_of_the_cpu(causal: bool, features: dict[str, str]) -> None:
    """`torch-cpu` is that kernel and no other, forward and backward, and computes the same."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    ran: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.name())
            return func(*args, **(kwargs or {}))

    cell = Cell("fp32", 16, causal, 37, 2, 4, 4, **features)  # type: ignore[arg-type]
    bench, given = bench_work.TorchBench(on_gpu=False), {}
    given |= bench.brought(cell)
    if "mask" in given:
        given["mask"][..., :1] = True  # torch gives NaN where a query sees nothing
    inputs = bench.inputs(cell)
    bench.brought = lambda _: dict(given)  # type: ignore[method-assign]
    bench.inputs = lambda _: [x.clone() for x in inputs]  # type: ignore[method-assign]
    ours, theirs = (bench.works(name, cell)["both"] for name in ("cupyflash", "torch-cpu"))
    with Record():
        found = theirs()
    attentions = [name for name in ran if "attention" in name]
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert attentions == [forward, f"{forward}_backward"]
    for x, y in zip(_flat(ours()), _flat(found), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.needs("torch")
def test_torchs_kernel_of_the_cpu_is_timed_there_alone() -> None:
    bench = bench_work.TorchBench(on_gpu=False)
    assert bench.absent("torch-cpu") is None
    bench.on_gpu = True
    assert bench.absent("torch-cpu") == "needs --backend cpu"
    assert bench_work.Bench().absent("torch-cpu") == "needs torch"
    result = bench_of_torch("--against", "math,torch-cpu", "--rounds", "5", "--quick", "--pass", "fwd,bwd", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [(r["direction"], r["implementation"]) for r in rows] == [
        (d, name) for d in ("fwd", "bwd") for name in ("cupyflash", "math", "torch-cpu")
    ]
    assert all(len(r["ms_rounds"]) == 5 and r["spread"] >= 0 and not r["reason"] for r in rows)


def _flat(x: Any) -> list[Any]:
    return [y for one in x for y in _flat(one)] if isinstance(x, tuple) else [x]


@pytest.mark.needs("torch")
def test_peers_get_dropout_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the backend that is asked for, and no other."""
    import torch
    from torch.nn.attention import SDPBackend

    asked: list[Any] = []

    @contextlib.contextmanager
    def kernel(backend: Any) -> Iterator[None]:
        asked.append(backend)
        yield

    def sdpa(q: Any, k: Any, v: Any, **options: Any) -> Any:
        asked.append(options)
        return q

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", kernel)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    bench, cell = bench_work.TorchBench(on_gpu=False), Cell("bf16", 16, True, 37, 2, 2, 2, dropout=0.25)
    q, k, v, _ = bench.inputs(cell)
    names = ("flash2", "cudnn", "efficient", "math")
    for name in names:
        bench.attention(name, cell)(q, k, v)
    assert asked[::2] == [getattr(SDPBackend, f"{name}_ATTENTION") for name in ("FLASH", "CUDNN", "EFFICIENT")] + [
        SDPBackend.MATH
    ]
    assert all(x == {"dropout_p": 0.25, "is_causal": True, "enable_gqa": False, "attn_mask": None} for x in asked[1::2])
    for name, what in (("flex", "flex_attention has no dropout"), ("fa4", "FlashAttention-4 has no dropout")):
        with pytest.raises(NotImplementedError, match=what):
            bench.attention(name, cell)
    for name in names:
        with pytest.raises(NotImplementedError, match="no block masks"):
            bench.attention(name, replace(cell, dropout=0, block_mask="0.5"))
    for features in ({"bias": "hqk"}, {"mask": "bk"}, {"padded": "left"}):
        with pytest.raises(NotImplementedError, match="no bias, no mask and no padding"):
            bench.attention("flash2", replace(cell, dropout=0, **features))  # type: ignore[arg-type]


@pytest.mark.needs("torch")
@pytest.mark.needs("torch")
def test_mods_are_for_flex_alone() -> None:
    options = ("--mod", "table", "--framework", "torch", "--against", "math")
    rows = json.loads(bench(*options, "--json").stdout)["rows"]
    assert {(r["implementation"], r["mod"], r["tflops"] is not None) for r in rows} == {
        ("cupyflash", "table", True), ("math", "table", False)
    }  # fmt: skip
    assert all("takes no mods" in r["reason"] for r in rows if r["implementation"] == "math")


@pytest.mark.needs("torch")
def test_flex_is_absent_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_work.Bench().absent("flex") == "needs torch"
    bench = bench_work.TorchBench(on_gpu=False)
    assert bench.absent("flex") == "needs a GPU"
    bench.on_gpu = True
    assert bench.absent("flex") is None
    monkeypatch.setattr(bench_peers, "has", lambda module: False)
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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7), (False, 7)])
def test_flops_of_padded_sequences_are_those_of_visible_pairs(side: str, causal: bool, window: int | None) -> None:
    """Counted pair by pair, sequence by sequence; padding is where its name says."""
    cell = Cell("bf16", 24, causal, 37, 5, 3, 3, window, padded=side)
    pairs = 0
    for first, end in cell.ranges:
        assert (end == 37) if side == "left" else (first == 0)
        for query in range(37):
            for key in range(first, end):
                pairs += (not causal or key <= query) and (window is None or key >= query - window)
    assert cell.flops("fwd") == 4 * 24 * pairs * 3
    assert replace(cell, mask="qk").flops("fwd") == cell.flops("fwd") / 2
    assert len({end - first for first, end in cell.ranges}) > 2


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_documents_are_those_of_visible_pairs(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODS, "documents", of_documents(10))
    i = np.arange(37)
    seen = (i[:, None] // 10 == i // 10) & (not causal or i[:, None] >= i)
    assert Cell("bf16", 24, causal, 37, 2, 3, 3, mod="documents").flops("fwd") == 4 * 24 * seen.sum() * 2 * 3


def test_flops_of_masks_are_those_of_visible_pairs() -> None:
    cell = Cell("bf16", 24, True, 300, 2, 3, 3)
    seen = np.tril(block_masks.make("butterfly", 300, 300).of(0, 0))
    assert replace(cell, block_mask="butterfly").flops("fwd") == 4 * 24 * seen.sum() * 2 * 3
    assert replace(cell, mask="bk").flops("bwd") == cell.flops("bwd") / 2
    assert replace(cell, bias="bhqk").flops("bwd") == replace(cell, dropout=0.5).flops("bwd") == cell.flops("bwd")
    learned = replace(cell, bias="qk", learned=True)
    assert learned.ideal_bytes("bwd") == cell.ideal_bytes("bwd") + 2 * 300 * 300


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(
    "words",
    [("--bias", "hqk", "--learned"), ("--mask", "kb"), ("--dropout", "0.1"), ("--block-mask", "bigbird"),
     ("--padded", "left"), ("--score-std", "3")],
)  # fmt: skip
def test_features_run_on_the_cpu(framework: str, words: tuple[str, ...], tmp_path: Path) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    options = ["--backend", "cpu", "--framework", framework, "--head-dim", "16", "--tokens", "200", "--seqlens", "100"]
    options += ["--causal", "--hidden", "32", "--quick", "--rounds", "1", "--json", *words]
    document = CliRunner().invoke(cli.main, ["bench", *options]).stdout
    rows = json.loads(document)["rows"]
    assert [row["ms"] > 0 for row in rows] == [True, True]
    none = {"bias": "", "mask": "", "learned": False, "dropout": 0.0, "block_mask": "", "padded": "", "score_std": 1.0}
    found = {name: rows[0][name] for name in none}
    want = {"--bias": {"bias": "hqk", "learned": True}, "--mask": {"mask": "bk"}, "--dropout": {"dropout": 0.1},
            "--block-mask": {"block_mask": "bigbird"}, "--padded": {"padded": "left"},
            "--score-std": {"score_std": 3.0}}[words[0]]  # fmt: skip
    assert found == none | want
    saved = tmp_path / "run.json"
    saved.write_text(document)
    shown = CliRunner().invoke(cli.main, ["bench", "--saved", str(saved)])
    assert shown.exit_code == 0, shown.output
    assert Cell("bf16", 16, True, 9, 1, 1, 1, **want).mask_name in shown.output  # type: ignore[arg-type]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_scores_have_the_deviation_that_is_asked_for(framework: str) -> None:
    pytest.importorskip(framework)
    bench, cell = make(framework, on_gpu=False), Cell("fp16", 64, False, 64, 4, 4, 4, score_std=3.0)
    q, k, v, dout = (np.asarray(x, np.float64) for x in bench.inputs(cell))
    assert (k.std(), v.std(), dout.std()) == pytest.approx((1, 1, 1), rel=0.02)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 8
    assert scores.std() == pytest.approx(3, rel=0.05)


def test_features_by_name() -> None:
    """Each alone, in one run, by what the options in detail say; beside such an option it is wrong usage."""
    assert {name for sets in NAMED.values() for name in sets} == set(WITHOUT)
    options = WITHOUT | {"feature": ()}
    assert bench_features.each(options) == [options]
    found = bench_features.each(options | {"feature": tuple(NAMED)})
    assert [{k: v for k, v in one.items() if v != options[k] and k != "feature"} for one in found] == [*NAMED.values()]
    words = "--quick", "--rounds", "1", "--pass", "bwd"
    rows = json.loads(bench(*words, "--feature", "learned-bias,padding,softcap", "--json").stdout)["rows"]
    assert [*dict.fromkeys((x["bias"], x["learned"], x["padded"], x["softcap"]) for x in rows)] == [
        ("hqk", True, "", None), ("", False, "left", None), ("", False, "", 30.0),
    ]  # fmt: skip
    for other in (("--bias", "k"), ("--block-mask", "1"), ("--sink",), ("--window", "0")):
        wrong = CliRunner().invoke(cli.main, ["bench", "--backend", "cpu", "--feature", "softcap", *other])
        assert wrong.exit_code == 2
        assert other[0] in wrong.stderr


def test_several_block_masks_are_rows_of_their_own() -> None:
    rows = json.loads(bench("--quick", "--rounds", "1", "--block-mask", "0.25,butterfly,1", "--json").stdout)["rows"]
    assert [row["block_mask"] for row in rows] == ["0.25", "butterfly", "1"]


def test_what_features_cannot_be_is_said() -> None:
    for words, said in ((("--bias", "xy"), "made of the letters"), (("--learned",), "nothing to learn"),
                        (("--dropout", "1"), "0<=x<1"), (("--block-mask", "2"), "neither a density"),
                        (("--padded", "left", "--block-mask", "1"), "neither with --packed nor"),
                        (("--padded", "right", "--packed", "equal"), "neither with --packed nor"),
                        (("--padded", "left", "--mod", "documents"), "not with documents")):  # fmt: skip
        result = CliRunner().invoke(cli.main, ["bench", *TINY, *words])
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())


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
