"""`cupyflash bench --decode`: which bytes count, what rotates, who is compared with whom."""

from __future__ import annotations

import csv
import functools
import itertools
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash import cli
from cupyflash.cli.bench import decode, decode_calls
from cupyflash.cli.bench import report as bench_report
from cupyflash.cli.bench.cell import OURS
from cupyflash.cli.bench.clocks import Clock, Recorded, Work
from cupyflash.cli.bench.decode_arrays import arrays
from cupyflash.cli.bench.decode_cell import PARTS, STORED, WIDE, DecodeCell
from cupyflash.cli.bench.decode_shapes import SHAPES, chosen
from cupyflash.cli.bench.lengths import DENSE
from cupyflash.cli.bench.timing import Effort, Timing, timings_ms
from cupyflash.cli.bench.work import Bench, TorchBench

pytestmark = pytest.mark.usefixtures("without_gpu", "hurried")

TINY = ("--decode", "--backend", "cpu", "--quick", "--rounds", "2")


def bench(*options: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.main, ["bench", *options])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_SETS", 2)
    monkeypatch.setattr(decode, "PER_GRAPH", 2)


def cells(backend: str, **fields: Any) -> list[DecodeCell]:
    return [DecodeCell(name, "bf16", **{**known, **fields}) for name, known in SHAPES[backend].items()]


@pytest.mark.parametrize("cell", cells("cpu") + cells("cpu", cache_dtype="int8"), ids=lambda cell: cell.where)
def test_the_bytes_are_those_of_the_keys_that_are_seen(cell: DecodeCell) -> None:
    """Counted key by key. All but ours read 16 bits."""
    seen = 0
    for n, queries, (first, end) in zip(cell.lengths, cell.queries, cell.ranges, strict=True):
        own = np.arange(n - queries, n)[:, None]  # each query's own position; the first may lie before the keys
        shown = (np.arange(n) <= own) & (np.arange(n) >= first) & (np.arange(n) < end)
        if cell.window is not None:
            shown &= np.arange(n) >= own - cell.window
        if cell.block_mask:
            shown &= cell.mask().of(0, 0)[n - queries : n, :n]
        seen += int(shown.any(axis=0).sum())
    elements = seen * cell.heads_k * sum(cell.widths)
    assert cell.bytes_of(WIDE) == cell.bytes_of("cudnn") == 2 * elements
    assert cell.bytes_of(OURS) == (1 if cell.cache_dtype else 2) * elements
    assert cell.facts("decode", OURS, 2.0)["tb_per_s"] == pytest.approx(cell.bytes_of(OURS) / 2e-3 / 1e12)


def test_the_shapes_of_a_gpu() -> None:
    """What they hold; made small, they are calls that are taken."""
    shapes = {cell.name: cell for cell in cells("cuda")}
    assert shapes["B64 8k"].bytes_of(OURS) == 2 * 2 * 64 * 8192 * 8 * 128
    assert shapes["MLA B16 8k"].bytes_of(OURS) == 2 * 16 * 8192 * 32 * (192 + 128)
    assert len(set(shapes["ragged B64 1..16k"].lengths)) > 32
    assert {cell.page for cell in shapes.values()} == {0, 1, 2, 4, 8, 16, 64, 256}
    assert shapes["mixed 63x1 + 1x256 8k"].queries == [1] * 63 + [256]
    assert len(set(shapes["kv_range B64 8k"].ranges)) > 32
    for cell, stored in zip(shapes.values(), itertools.cycle(("", *STORED)), strict=False):
        small = replace(cell, batch=2, capacity=70, heads=cell.heads // cell.heads_k, heads_k=1, cache_dtype=stored)
        out = decode.call_of(Bench(), OURS, small)()
        rows = (1 + cell.chunk,) if cell.chunk else (2, cell.seqlen_q)
        assert out.shape == (*rows, small.heads, cell.widths[1])
        assert np.isfinite(out.astype(np.float32)).all()


def test_what_flex_is_timed_with() -> None:
    """One query and a block mask at most."""
    taken = {cell.name for cell in cells("cuda") if not decode_calls.peers_lack("flex", cell)}
    assert {"B64 8k", "d64 B64 8k", "MQA B64 8k", "block mask 0.1 B8 32k"} <= taken
    lacks = {"MLA B16 8k", "ragged B64 1..16k", "4 rows B64 8k", "pages of 16 B64 8k", "softcap B64 8k"}
    assert not taken & lacks
    assert "torch's scaled_dot_product_attention has no block masks" in decode_calls.peers_lack(
        "cudnn", next(cell for cell in cells("cuda") if cell.block_mask)
    )


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, which takes the same mask."""
    import torch

    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    cell = next(c for c in cells("cpu") if c.block_mask)
    own, given = TorchBench(on_gpu=False), arrays(TorchBench(on_gpu=False), cell)
    monkeypatch.setattr(decode_calls, "arrays", lambda *_: given)
    ours, theirs = (decode.call_of(own, name, cell)() for name in (OURS, "flex"))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.needs("torch")
def test_a_peer_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    own, cell = TorchBench(on_gpu=False), cells("cpu")[0]
    given = arrays(own, cell)
    monkeypatch.setattr(decode_calls, "arrays", lambda *_: given)
    ours, theirs = (decode.call_of(own, name, cell)() for name in (OURS, "math"))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("cell", cells("cpu"), ids=lambda cell: cell.name)
def test_our_other_calls_compute_the_same(cell: DecodeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, all but pages; in two calls, where queries differ in number."""
    cell, own = replace(cell, dtype="fp32"), Bench()
    given = arrays(own, cell)
    monkeypatch.setattr(decode_calls, "arrays", lambda *_: given)
    ours = decode.call_of(own, OURS, cell)()
    of_dense = "count from its own first" if cell.block_mask else "has no pages"
    for name, lacks, reason in (
        (DENSE, cell.page or cell.block_mask, of_dense), (PARTS, not cell.chunk, "differ in queries"),
    ):  # fmt: skip
        if lacks:
            with pytest.raises(NotImplementedError, match=reason):
                decode.call_of(own, name, cell)
            continue
        found = decode.call_of(own, name, cell)()
        if name == PARTS:
            one, many = found
            assert (one.shape[:2], many.shape[:2]) == ((cell.batch - 1, cell.seqlen_q), (1, cell.chunk))
            found = np.concatenate([x.reshape(-1, *x.shape[-2:]) for x in found])
        np.testing.assert_allclose(found.reshape(ours.shape), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [{"page": 16}, {"cache_dtype": "int8"}, {"kv_range": True, "alibi": True}], ids=str)
def test_two_calls_share_what_the_one_has(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cell = DecodeCell("", "fp32", 3, 64, 4, 2, 16, chunk=20, **fields)
    given = arrays(Bench(), cell)
    monkeypatch.setattr(decode_calls, "arrays", lambda *_: given)
    ours, parts = (decode.call_of(Bench(), name, cell)() for name in (OURS, PARTS))
    np.testing.assert_allclose(np.concatenate([x.reshape(-1, 4, 16) for x in parts]), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", STORED)
def test_caches_of_8_bits_are_random_and_use_their_range(stored: str) -> None:
    given = arrays(Bench(), replace(cells("cpu")[0], batch=8, capacity=512, cache_dtype=stored))
    assert given["k_cache"].dtype == {"int8": np.int8, "e4m3": np.uint8}[stored]
    values = given["k_cache"] if stored == "int8" else given["k_cache"].view(ml_dtypes.float8_e4m3fn)
    values = values.astype(np.float32) * given["k_scale"][0]
    assert abs(values.std() - 1) < 0.05
    assert 3 < abs(values).max() < 6
    assert not (given["k_cache"] == given["v_cache"]).all()


@pytest.mark.parametrize(("whole", "sets"), [(1 << 20, 32), (99_000_000, 11), (1 << 28, 4), (1 << 31, 1)])
def test_caches_rotate(whole: int, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fill a GiB, at most 32; of short calls, so many as one function that all take part."""
    made: list[int] = []
    ran: list[int] = []

    def call_of(*_: Any) -> Work:
        made.append(len(made))
        return lambda i=made[-1]: ran.append(i)  # type: ignore[misc]

    monkeypatch.setattr(decode, "call_of", call_of)
    monkeypatch.setattr(DecodeCell, "whole_bytes", whole)
    work = decode.works(Bench(), OURS, cells("cpu")[0])["decode"]
    calls = getattr(work, "calls", 1)
    assert calls == (max(16, sets) if whole < 1e8 else 1)
    for _ in range(3):
        work()
    assert len(made) == sets
    assert ran == [i % sets for i in range(calls)] * 3 if calls > 1 else [i % sets for i in range(3)]


def test_what_a_graph_reads_lives_as_long_as_it() -> None:
    """A graph has addresses of arrays, and nothing else of them."""

    class Array:
        """Which can be looked at without being kept."""

    x = Array()
    lives = weakref.ref(x)
    recorded = Recorded(lambda: None, [functools.partial(id, x)])
    del x
    assert lives() is not None
    del recorded
    assert lives() is None


def test_the_time_is_that_of_one_call() -> None:
    class Ticks(Clock):
        def batch_ms(self, work: Work, calls: int) -> float:
            return 6.0

    works = [Clock().recorded([lambda: None] * 12), lambda: None]
    assert [t.median for t in timings_ms(works, Ticks(), Effort(1, 0, 0))] == [0.5, 6.0]


def test_ratios_are_of_tokens_a_second() -> None:
    """Twice as many of a cache of half the bytes: the same TB/s, and a ratio of 2. Our own call is no peer."""
    cell = DecodeCell("B1 2k", "bf16", 1, 2048, cache_dtype="int8")
    times = {OURS: 1.0, WIDE: 2.0, "cudnn": 3.0}
    rows = [bench_report.Row(cell, "decode", name, Timing((ms,)), None) for name, ms in times.items()]
    ours, wide, _ = bench_report.documents(rows)
    assert ours["tb_per_s"] == wide["tb_per_s"]
    found = bench_report.ratios(rows)
    means = {name: found[name]["decode"]["geomean"] for name in found}
    assert means == pytest.approx({WIDE: 2.0, "cudnn": 3.0, "best": 3.0})
    assert ours["best"] == 3.0
    assert found[WIDE]["decode"]["worst_name"] == "B1 2k, int8"


@pytest.mark.usefixtures("few_calls")
def test_a_run(tmp_path: Path) -> None:
    """JSON, table, CSV, and the same again from the file."""
    table = tmp_path / "rows.csv"
    first = bench(*TINY, "--json", "--csv", str(table), "--only", "B2 64", "--host", "--against", "fa4,math")
    document = json.loads(first.stdout)
    assert (document["flop_formula"], document["matmul_tflops"], document["packed"]) == (None, None, [])
    assert "K and V" in document["bytes_formula"]
    rows = document["rows"]
    assert list(dict.fromkeys(r["name"] for r in rows)) == [name for name in SHAPES["cpu"] if "B2 64" in name]
    ours = [r for r in rows if r["implementation"] == OURS]
    assert all(r["tb_per_s"] > 0 and r["rounds"] == 2 and r["spread"] >= 0 for r in ours)
    assert {r["implementation"] for r in rows} == {OURS, "fa4", "math"}
    assert all(r["ms"] is None and r["reason"] for r in rows if r["implementation"] == "fa4")
    assert document["host_us"][OURS]["fwd"] > 0
    assert "attention over a cache, TB/s" in first.stderr
    assert "pages of 16 B2 64" in first.stderr
    with table.open() as f:
        assert [line["name"] for line in csv.DictReader(f)] == [r["name"] for r in rows]

    saved = tmp_path / "run.json"
    saved.write_text(first.stdout)
    again = bench("--saved", str(saved), "--json")
    assert json.loads(again.stdout) == document
    assert again.stderr == first.stderr


@pytest.mark.usefixtures("few_calls")
def test_caches_of_8_bits_beside_16() -> None:
    options = ("--only", "pages of 16", "--cache-dtype", "int8,e4m3", "--framework", "numpy", "--json")
    document = json.loads(bench(*TINY, *options).stdout)
    assert [(r["cache_dtype"], r["implementation"]) for r in document["rows"]] == [
        (stored, name) for stored in STORED for name in (OURS, WIDE)
    ]
    ours, wide = document["rows"][:2]
    assert 2 * ours["bytes"] == wide["bytes"]
    assert document["ratios"][WIDE]["decode"]["cells"] == 2
    assert ours["best"] is None


@pytest.mark.usefixtures("few_calls")
def test_other_ways_of_ours_stand_beside_it(tmp_path: Path) -> None:
    """Where they are calls at all; none of them is a peer. Files of earlier versions lack the cells' newer fields."""
    options = ("--only", "mixed,20 rows,^pages of 2 B2", "--against", "dense,parts", "--framework", "numpy", "--json")
    result = bench(*TINY, *options)
    document = json.loads(result.stdout)
    ran = {(r["name"], r["implementation"]) for r in document["rows"] if r["ms"] is not None}
    names = "20 rows B1 64", "mixed 2x1 + 1x20 64", "pages of 2 B2 64"
    assert ran == {(name, OURS) for name in names} | {(name, DENSE) for name in names[:2]} | {(names[1], PARTS)}
    assert {r["chunk"] for r in document["rows"]} == {0, 20}
    assert {r["best"] for r in document["rows"]} == {None}
    assert "parts: parts are two calls in place of one whose sequences differ in queries" in result.stderr

    newer = ("chunk", "alibi", "sink", "kv_range")
    old = [{name: x for name, x in r.items() if name not in newer} for r in document["rows"] if not r["chunk"]]
    (tmp_path / "old.json").write_text(json.dumps(document | {"rows": old}))
    again = json.loads(bench("--saved", str(tmp_path / "old.json"), "--json").stdout)
    assert again["rows"] == [r for r in document["rows"] if not r["chunk"]]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (("pages of 2 ", "^B64 4k$"), ["B64 4k", "pages of 2 B64 8k"]),
        (("^B64",), ["B64 8k", "B64 4k"]),
        (("128k$", "rows B1"), ["B1 128k", "256 rows B1 32k"]),
        ((), list(SHAPES["cuda"])),
    ],
    ids=str,
)
def test_which_shapes_are_meant(only: tuple[str, ...], names: list[str]) -> None:
    options = {"backend": "cuda", "grid": False, "only": only, "dtype": "bf16", "cache_dtype": ()}
    assert [cell.name for cell in chosen(options)] == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--decode", "--backend", "cpu", "--only", "B2,9k"), "expected a text that one of these has: B2 64,"),
        (("--decode", "--seqlens", "128"), "'--seqlens': --decode has shapes of its own"),
        (("--decode", "--causal"), "--decode has shapes of its own"),
        (("--decode", "--plot", "x.png"), "of --decode it draws a --grid"),
        (("--grid",), "which is not asked for"),
        (("--decode", "--framework", "jax"), "JAX's calls over a cache are not timed"),
        (("--decode", "--cache-dtype", "int4"), "'int4' is not one of int8, e4m3"),
        (("--only", "8k"), "which is not asked for"),
        (
            ("--decode", "--backend", "cpu", "--against", "copy"),
            "copy runs a kernel, for which --backend cpu has no GPU",
        ),
        (("--backend", "cpu", "--against", "sm80"), "sm80 runs a kernel, for which --backend cpu has no GPU"),
        (("--against", "copy"), "copy is timed with --decode alone"),
        (("--against", "parts"), "parts is timed with --decode alone"),
        (("--cache-dtype", "int8"), "which is not asked for"),
    ],
)
def test_what_does_not_go_together(options: tuple[str, ...], message: str) -> None:
    output = " ".join(bench(*options, code=2).output.replace("│", " ").split())
    assert message in output


@pytest.mark.needs("matplotlib")
@pytest.mark.usefixtures("few_calls")
def test_a_grid_has_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column for each batch, a row for each dtype; along each the lengths, with ratios of tokens a second."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *x, **o: (figures.append(self), save(self, *x, **o))[1])
    picture = tmp_path / "x.png"
    options = ("--grid", "--cache-dtype", "int8", "--framework", "numpy", "--json", "--plot", str(picture))
    document = json.loads(bench(*TINY, *options).stdout)
    assert [(r["name"], r["batch"], r["capacity"]) for r in document["rows"] if r["implementation"] == OURS] == [
        ("B1 32", 1, 32), ("B1 64", 1, 64), ("B1 128", 1, 128), ("B2 32", 2, 32), ("B2 64", 2, 64),
    ]  # fmt: skip
    [figure] = figures
    assert picture.read_bytes()[:4] == b"\x89PNG"
    one, two = figure.axes
    assert (one.get_title(), two.get_title()) == ("batch 1, int8", "batch 2, int8")
    assert one.get_ylabel() == "attention over a cache, TB/s"
    assert [t.get_text() for t in one.get_xticklabels()] == ["32", "64", "128"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["cupyflash", "cupyflash, 16 bits"]
    speeds = [r["tb_per_s"] for r in document["rows"] if r["implementation"] == OURS and r["batch"] == 2]
    [line] = [x for x in two.lines if x.get_label() == "cupyflash"]
    assert list(line.get_ydata()) == speeds

    saved = tmp_path / "run.json"
    saved.write_text(json.dumps(document))
    bench("--saved", str(saved), "--plot", str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").exists()


def test_the_grid_of_a_gpu_fits_its_memory() -> None:
    grid = chosen({"backend": "cuda", "grid": True, "only": (), "dtype": "bf16", "cache_dtype": ()})
    assert max(cell.whole_bytes for cell in grid) < 4.3e9
    assert {cell.batch for cell in grid} == {1, 4, 16, 64}
    assert min(cell.capacity for cell in grid) == 512
    assert len({(cell.batch, cell.capacity) for cell in grid}) == len(grid) == 32


@pytest.mark.needs("matplotlib")
@pytest.mark.usefixtures("few_calls")
def test_a_saved_run_of_other_shapes_has_no_picture(tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    saved.write_text(bench(*TINY, "--only", "softcap", "--framework", "numpy", "--json").stdout)
    assert "no picture" in bench("--saved", str(saved), "--plot", str(tmp_path / "x.png"), code=2).output


def test_without_a_gpu() -> None:
    assert "--backend cpu" in bench("--decode", code=3).output
