"""`cupyflash bench --packed`: which lengths, what is counted, whom it is timed against; and `--saved` runs."""

from __future__ import annotations

import csv
import functools
import importlib.machinery
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cupyflash
from cupyflash import cli, varlen
from cupyflash.cli.bench import frameworks as bench_frameworks
from cupyflash.cli.bench import host as bench_host
from cupyflash.cli.bench import peers as bench_peers
from cupyflash.cli.bench import plot as bench_plot
from cupyflash.cli.bench import report as bench_report
from cupyflash.cli.bench import timing as bench_timing
from cupyflash.cli.bench import work as bench_work
from cupyflash.cli.bench.cell import Cell
from cupyflash.cli.bench.lengths import DISTRIBUTIONS, draw
from cupyflash.cli.bench.timing import Timing

pytestmark = pytest.mark.usefixtures("without_gpu", "hurried")
TINY = ("--backend", "cpu", "--quick", "--rounds", "1", "--head-dim", "16", "--tokens", "64", "--hidden", "32")
LENGTHS = (5, 1, 0, 37, 19)


def bench(*options: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.main, ["bench", *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == code, result.output
    return result


def packed(**more: Any) -> Cell:
    fields = {"dtype": "fp32", "head_dim": 16, "causal": False, "heads": 4, "heads_k": 4}
    return Cell(seqlen=37, batch=len(LENGTHS), packed="uniform", lengths=LENGTHS, **fields | more)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("longest", "tokens"), [(512, 4096), (1024, 16384), (300, 700)])
def test_lengths_fill_the_tokens(distribution: str, longest: int, tokens: int) -> None:
    lengths = draw(distribution, longest, tokens)
    assert 1 <= min(lengths) <= max(lengths) <= longest
    assert sum(lengths) == (tokens // longest * longest if distribution == "equal" else tokens)
    assert lengths == draw(distribution, longest, tokens)


def test_the_distributions_are_what_their_names_say() -> None:
    assert set(draw("equal", 512, 16384)) == {512}
    uniform = draw("uniform", 16, 1 << 17)
    counts = np.bincount(uniform, minlength=17)[1:]
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()
    tail = sorted(draw("long-tailed", 4096, 16384))
    assert tail[-3:] == [2048, 2048, 4096]
    assert all(n <= 256 for n in tail[:-3])
    assert len(tail) > 50
    assert len(draw("short", 16, 16384)) > 1500


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 7])
def test_flops_and_bytes_are_those_of_each_sequence(causal: bool, window: int | None) -> None:
    cell = packed(causal=causal, window=window, heads_k=2)
    alone = [Cell("fp32", 16, causal, n, 1, 4, 2, window) for n in LENGTHS]
    for direction in ("fwd", "bwd", "both"):
        assert cell.flops(direction) == sum(one.flops(direction) for one in alone)
        assert cell.ideal_bytes(direction) == sum(one.ideal_bytes(direction) for one in alone)
    assert [shape[0] for shape in cell.shapes()] == [sum(LENGTHS)] * 4


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "heads_k": 2}, {"window": 3, "softcap": 2.0}])
def test_what_is_timed_is_attention_of_each_sequence(framework: str, options: dict[str, Any]) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    cell, bench = packed(**options), bench_frameworks.make(framework, on_gpu=False)
    arrays = bench.inputs(cell)
    bench.inputs = lambda _: [x.clone() if framework == "torch" else x for x in arrays]  # type: ignore[method-assign]
    works = bench.works("cupyflash", cell)
    out = works["fwd"]()
    out, grads = np.asarray(out[0] if framework == "numpy" else out), works["bwd"]()
    q, k, v, dout = (np.asarray(x)[None] for x in arrays)
    start = 0
    for n in LENGTHS:
        rows = np.s_[:, start : start + n]
        one, lse = cupyflash.attention(q[rows], k[rows], v[rows], **cell.options, return_lse=True)
        np.testing.assert_allclose(out[None][rows], one, atol=1e-5)
        exact = cupyflash.attention_backward(dout[rows], q[rows], k[rows], v[rows], one, lse, **cell.options)
        for got, expected in zip(grads, exact, strict=True):
            np.testing.assert_allclose(np.asarray(got)[None][rows], expected, atol=1e-4)
        start += n


def test_a_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours beside our own dense call; lengths stand in the document once."""
    monkeypatch.setattr(bench_host, "host_us", functools.partial(bench_timing.host_us, calls=5, rounds=2))
    table = tmp_path / "rows.csv"
    options = ("--packed", "equal,uniform", "--seqlens", "32", "--causal", "--pass", "fwd", "--host")
    result = bench(*TINY, "--framework", "numpy", *options, "--against", "dense", "--csv", str(table), "--json")
    document = json.loads(result.stdout)
    assert document["packed"] == [
        {"packed": name, "seqlen": 32, "lengths": list(draw(name, 32, 64))} for name in ("equal", "uniform")
    ]
    rows = {(r["packed"], r["implementation"]): r for r in document["rows"]}
    assert "lengths" not in rows["equal", "cupyflash"]
    assert (rows["equal", "cupyflash"]["batch"], rows["equal", "cupyflash"]["seqlen"]) == (2, 32)
    ran = {key for key, row in rows.items() if row["ms"] is not None}
    assert ran == {("equal", "cupyflash"), ("equal", "dense"), ("uniform", "cupyflash")}
    assert "--packed equal" in rows["uniform", "dense"]["reason"]
    assert document["ratios"]["dense"]["fwd"]["cells"] == 1
    assert "best" not in document["ratios"]
    assert document["host_us"]["cupyflash"]["fwd_new_lengths"] > 0
    assert document["host_us"]["dense"]["fwd"] > 0
    assert "equal 32: 2 sequences of 32 rows, 64 in all" in result.stderr
    with table.open() as f:
        assert [(r["packed"], r["implementation"]) for r in csv.DictReader(f)] == list(rows)


def test_calls_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all lengths there are, and the options of the cell."""
    given: list[tuple[list[int], Any]] = []
    for name in ("attention_varlen", "attention_varlen_backward"):
        original = getattr(varlen, name)

        def record(*x: Any, of: Any = original, **o: Any) -> Any:
            given.append((o["cu_seqlens_q"].tolist(), o["softcap"]))
            return of(*x, **o)

        monkeypatch.setattr(varlen, name, record)
    bench(*TINY, "--framework", "numpy", "--packed", "long-tailed", "--seqlens", "32", "--softcap", "3", "--causal")
    cu_seqlens = np.cumsum([0, *draw("long-tailed", 32, 64)]).tolist()
    assert given
    assert all(x == (cu_seqlens, 3.0) for x in given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--against", "dense"), "a peer of --packed"),
        (("--packed", "equal", "--batch", "2"), "until --tokens are full"),
        (("--packed", "long-tailed", "--seqlens", "40"), "long-tailed lengths up to 40 need at least 80, got 64"),
        (("--packed", "uniform", "--seqlens", "65"), "uniform lengths up to 65 need at least 65, got 64"),
        (("--packed", "random"), "is not one of equal"),
    ],
)
def test_wrong_usage(options: tuple[str, ...], message: str) -> None:
    assert message in " ".join(bench(*TINY, *options, code=2).output.replace("\u2502", "").split())


# ---- Peers ----


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., Any]) -> None:
    """A module of this name, its parents included."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        part = ".".join(parts[:i])
        if part.startswith("torch") and i < len(parts):
            continue
        module = ModuleType(part)
        module.__spec__ = importlib.machinery.ModuleSpec(part, None)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, part, module)
    for function, value in functions.items():
        setattr(sys.modules[name], function, value)


def bounds(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """flash-attn 2's and torch's -1 is no bound."""
    left, right = (None if bound == -1 else bound for bound in window)
    return left, right


def torch_varlen(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
                 window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Any:  # fmt: skip
    """As PyTorch 2.13 documents it."""
    assert (max_q, max_k) == (37, 37)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return cupyflash.attention_varlen(q, k, v, cu_seq_q, cu_seq_k, window=bounds(window_size))


def torch_varlen_210(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
                     is_causal: bool = False, return_aux: Any = None) -> Any:  # fmt: skip
    """As PyTorch 2.10 documents it."""
    assert return_aux is None
    return cupyflash.attention_varlen(q, k, v, cu_seq_q, cu_seq_k, causal=is_causal)


def flash2_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """As flash-attn 2.8 documents it."""
    assert max_seqlen_q == max_seqlen_k == 37
    return cupyflash.attention_varlen(q, k, v, cu_q, cu_k, causal=causal, window=bounds(window_size),
                                      softcap=softcap or None)  # fmt: skip


def fa4_varlen(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
               causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
               softcap: float = 0.0) -> Any:  # fmt: skip
    """As flash-attn-4 documents it: always (out, lse), and None is no bound."""
    assert max_seqlen_q == max_seqlen_k == 37
    return cupyflash.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window_size,
                                      softcap=softcap or None, return_lse=True)  # fmt: skip


OPTIONS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": 3}, {"causal": True, "window": 3},
                                 {"softcap": 2.0, "causal": True}, {"heads_k": 2}]  # fmt: skip


@pytest.mark.needs("torch")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("peer", ["torch", "torch-2.10", "flash-attn", "fa4"])
def test_peers_are_asked_for_the_same(peer: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the documented signatures give what ours gives, or the peer says why it cannot."""
    found = {"torch": torch_varlen, "torch-2.10": torch_varlen_210}.get(peer)
    without = set() if found else {"torch.nn.attention.varlen"}
    if found:
        fake_module(monkeypatch, "torch.nn.attention.varlen", varlen_attn=found)
    if peer == "flash-attn":
        fake_module(monkeypatch, "flash_attn.flash_attn_interface", flash_attn_varlen_func=flash2_varlen)
    else:
        without.add("flash_attn.flash_attn_interface")
    if peer == "fa4":
        fake_module(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=fa4_varlen)
    has = bench_peers.has
    monkeypatch.setattr(bench_peers, "has", lambda module: module not in without and has(module))
    cell, bench = packed(**options), bench_work.TorchBench(on_gpu=False)
    q, k, v, _ = bench.inputs(cell)
    lacks = {"torch": {"softcap"}, "torch-2.10": {"softcap", "window", "heads_k"}}.get(peer, set())
    name = "fa4" if peer == "fa4" else "flash2"
    if lacks & options.keys():
        with pytest.raises(NotImplementedError, match=r"varlen_attn .*, and flash-attn is not installed"):
            bench.attention(name, cell)
        return
    expected = bench.attention("cupyflash", cell)(q, k, v)
    np.testing.assert_allclose(bench.attention(name, cell)(q, k, v), expected, atol=1e-5)


@pytest.mark.needs("torch")
def test_other_peers_have_no_packed_call() -> None:
    bench = bench_work.TorchBench(on_gpu=False)
    for peer in ("math", "cudnn", "flex"):
        with pytest.raises(NotImplementedError, match=f"{peer} is not timed with packed sequences"):
            bench.attention(peer, packed())


@pytest.mark.needs("torch")
@pytest.mark.parametrize("added", [{"bias": "hqk"}, {"mask": "bk"}], ids=str)
def test_biases_and_masks_are_ours_alone(added: dict[str, Any]) -> None:
    cell, bench = packed(**added), bench_work.TorchBench(on_gpu=False)
    q, k, v, _ = bench.inputs(cell)
    assert bench.attention("cupyflash", cell)(q, k, v).shape == q.shape
    for peer in ("flash2", "fa4"):
        with pytest.raises(NotImplementedError, match=f"{peer} has no bias or mask of packed sequences"):
            bench.attention(peer, cell)


def test_our_own_dense_call_is_not_among_the_best() -> None:
    cell = packed()
    ms = {"cupyflash": 2.0, "dense": 1.0, "fa4": 3.0, "flash2": 4.0}
    rows = [bench_report.Row(cell, "fwd", name, Timing((t,)), None) for name, t in ms.items()]
    found = {name: by["fwd"]["geomean"] for name, by in bench_report.ratios(rows).items()}
    assert found == {"dense": 0.5, "fa4": 1.5, "flash2": 2.0, "best": 1.5}
    assert bench_report.documents(rows)[0]["best"] == 1.5


@pytest.mark.needs("torch")
def test_versions_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    bench = bench_work.TorchBench(on_gpu=False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert bench.versions(("cudnn", "fa4", "math")) == {"cudnn": "9.19.0"}
    assert bench.versions(("math",)) == {}
    monkeypatch.setattr(bench_work.metadata, "version", {"flash-attn-4": "4.0.0b36"}.__getitem__)
    bench.on_gpu = True
    assert bench.versions(("fa4",)) == {"fa4": "4.0.0b36"}


# ---- Saved runs ----


def test_a_saved_run_is_shown_again(tmp_path: Path) -> None:
    """The same document, tables and CSV; one direction alone if asked for."""
    options = ("--framework", "numpy", "--packed", "equal,uniform", "--seqlens", "32", "--against", "dense", "--causal")
    tables = [tmp_path / name for name in ("first.csv", "again.csv")]
    first = bench(*TINY, *options, "--csv", str(tables[0]), "--json")
    saved = tmp_path / "run.json"
    saved.write_text(first.stdout)
    again = bench("--saved", str(saved), "--csv", str(tables[1]), "--json")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert again.stderr == first.stderr
    assert tables[0].read_text() == tables[1].read_text()
    forward = json.loads(bench("--saved", str(saved), "--pass", "fwd", "--json").stdout)
    assert forward["rows"] == [r for r in json.loads(first.stdout)["rows"] if r["direction"] == "fwd"]
    assert "no rows of both" in bench("--saved", str(saved), "--pass", "both", code=2).output


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": "verify"}', '{"command": "bench", "rows": [{}]}'])
def test_a_file_that_is_no_saved_run(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert "is not what" in bench("--saved", str(tmp_path / "run.json"), code=2).output
    assert "does not exist" in bench("--saved", str(tmp_path / "none.json"), code=2).output


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_picture_of_a_saved_run(is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Titles, axes, the ratios and in whose colour they stand."""
    from matplotlib.figure import Figure

    rows = []
    for longest in (512, 1024):
        lengths = draw("equal", longest, 2048)
        more: dict[str, Any] = {"packed": "equal", "lengths": lengths} if is_packed else {}
        cell = Cell("bf16", 64, True, longest, len(lengths), 4, 4, **more)
        for name, ms in (("cudnn", 2.0), ("fa4", 1.5), ("cupyflash", 1.0 if longest == 512 else 2.0)):
            rows.append(bench_report.Row(cell, "fwd", name, Timing((ms,) * 5), 1 << 20))
    head: dict[str, Any] = {"command": "bench", "version": "0.1.0", "date": "2026-11-22", "device": "NVIDIA X"}
    head |= {
        "peer_versions": {"cudnn": "9.19.0"},
        "dtype": "bf16",
        "framework": "torch",
        "flop_formula": "",
        "matmul_tflops": None,
        "few_rounds": None,
    }
    drawn = [{"packed": "equal", "seqlen": n, "lengths": list(draw("equal", n, 2048))} for n in (512, 1024)]
    document = head | {"rows": bench_report.documents(rows), "packed": drawn if is_packed else []}
    (tmp_path / "run.json").write_text(json.dumps(document))
    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *x, **o: (figures.append(self), save(self, *x, **o))[1])
    bench("--saved", str(tmp_path / "run.json"), "--plot", str(tmp_path / "speed.png"))

    [figure] = figures
    assert (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"
    title = "NVIDIA X, bf16, 2026-11-22, cupyflash 0.1.0\nmedian of 5 rounds, each in a random order"
    assert figure.get_suptitle() == title
    [panel] = figure.axes
    assert panel.get_ylabel() == "forward, TFLOP/s"
    assert panel.get_ylim()[0] == 0
    ratios = [(t.get_text(), t.get_color()) for t in panel.texts]
    assert ratios == [("1.50", bench_plot.COLORS["cupyflash"]), ("0.75", bench_plot.COLORS["fa4"])]
    ticks = [t.get_text() for t in panel.get_xticklabels()]
    assert ticks == (["equal\n512", "equal\n1k"] if is_packed else ["512", "1k"])
    named = [t.get_text() for t in figure.legends[0].get_texts()]
    assert named == ["cupyflash", "cuDNN 9.19.0", "FlashAttention-4"]
    names = ("cupyflash", *bench_work.PEERS)
    assert len({bench_plot.COLORS[n] for n in names}) == len({bench_plot.MARKERS[n] for n in names}) == len(names)
