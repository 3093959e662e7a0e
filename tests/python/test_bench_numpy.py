"""`cupyflash bench --framework numpy` and what `explain` says of NumPy arrays, on a pretended GPU and without one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import cli
from cupyflash.cli.bench import numpy_work
from cupyflash.cli.bench.cell import Cell
from cupyflash.launch import where
from tests.pretended_copies import Cuda, pretend_gpu

TINY = ("--framework", "numpy", "--causal", "--head-dim", "16", "--hidden", "32", "--batch", "2", "--seqlens", "16,40",
        "--quick")  # fmt: skip


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, hurried: None) -> Cuda:
    return pretend_gpu(monkeypatch)


def test_each_way_is_timed_and_stands_in_a_table(cuda: Cuda, tmp_path: Path) -> None:
    document = json.loads(run("bench", *TINY, "--against", "plain,cpu", "--json").stdout)
    rows = {(r["implementation"], r["direction"], r["seqlen"]): r for r in document["rows"]}
    assert len(rows) == 3 * 2 * 2
    assert all(r["ms"] > 0 and len(r["ms_rounds"]) == 5 and r["peak_bytes"] is None for r in rows.values())
    assert set(document["ratios"]) == {"plain", "cpu"}
    known = {(x["direction"], x["seqlen"]): x for x in document["numpy"]}
    assert known["fwd", 40]["bytes"] == 2 * 40 * 2 * (4 * 16 * 2 + 4)
    assert {x["taken"] for x in known.values()} == {"cuda"}
    assert all(x["least_gpu_ms"] > 0 and x["about_cpu_ms"] > 0 for x in known.values())
    file = tmp_path / "run.json"
    file.write_text(json.dumps(document))
    lines = run("bench", "--saved", str(file), "--plot", str(tmp_path / "ways.svg")).output.splitlines()
    assert "cupyflash, plain copies" in (tmp_path / "ways.svg").read_text()
    at = next(i for i, line in enumerate(lines) if line.startswith("NumPy arrays, forward"))
    assert lines[at + 1].split() == [
        "mask", "batch", "seqlen", "heads", "head_dim", "MB", "GPU,", "ms", "spread", "plain", "copies,", "ms",
        "spread", "CPU", "path,", "ms", "spread", "plain", "copies", "/", "GPU", "CPU", "path", "/", "GPU", "taken",
    ]  # fmt: skip
    for line, seqlen in zip(lines[at + 2 :], (16, 40), strict=False):
        words = line.split()
        assert words[:5] == ["causal", "2", str(seqlen), "2", "16"]
        ms = [rows[name, "fwd", seqlen]["ms"] for name in ("cupyflash", "plain", "cpu")]
        assert [words[6], words[8], words[10]] == [f"{x:.3f}" for x in ms]
        assert [*words[12:14], words[14]] == [f"{x / ms[0]:.2f}" for x in ms[1:]] + ["GPU"]


def test_each_way_is_the_one_it_says(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it copies; one after the other, in any order."""
    bench, cell = numpy_work.NumpyOnGpu(), Cell("fp16", 16, True, 40, 1, 2, 2)
    works = {name: bench.works(name, cell) for name in ("cupyflash", "plain", "cpu")}
    asked: list[str] = []
    real = cuda.alloc_pinned_memory
    monkeypatch.setattr(cuda, "alloc_pinned_memory", lambda size: asked.append("pinned") or real(size))
    for direction in ("fwd", "bwd", "both"):
        for name in ("cpu", "cupyflash", "plain", "cpu", "plain", "cupyflash"):
            before = len(cuda.copies)
            result = works[name][direction]()
            staged = len(cuda.copies) - before
            assert staged == ({"fwd": 5, "bwd": 9, "both": 14}[direction] if name == "cupyflash" else 0)
            flat = [x for part in result for x in (part if isinstance(part, (list, tuple)) else [part])]
            assert all(type(x) is np.ndarray for x in flat)


def test_features_of_plain_copies_have_a_reason(cuda: Cuda) -> None:
    text = run("bench", *TINY, "--against", "plain", "--sink", "--pass", "fwd").output
    assert "plain: plain is timed without arrays of features and lengths" in text
    options = [x for x in TINY if x not in ("--batch", "2")]
    text = run("bench", *options, "--packed", "equal", "--tokens", "100", "--against", "cpu", "--pass", "fwd").output
    assert "equal 40" in text


def test_padding_is_known_to_the_choice() -> None:
    """As it is drawn; and cells that say too little are left out."""
    padded = Cell("bf16", 64, False, 1000, 3, 2, 2, padded="left")
    keys = int(np.diff(padded.ranges).sum())
    assert numpy_work._sizes_of(padded) == (3, 3000, keys, 2 * 1000 * keys)
    packed = Cell("bf16", 64, False, 40, 2, 2, 2, packed="uniform", lengths=(30, 40))
    assert numpy_work._sizes_of(packed) == (2, 70, 70, 2 * (900 + 1600))
    for more in ({"bias": "hqk"}, {"mask": "qk"}, {"mod": "gates"}, {"block_mask": "0.5"}):
        assert numpy_work.facts([Cell("bf16", 64, False, 64, 1, 2, 2, **more)], ("fwd",)) == []
    assert numpy_work.facts([Cell("fp64", 64, False, 64, 1, 2, 2)], ("fwd",)) == []


@pytest.mark.usefixtures("without_gpu", "hurried")
def test_without_a_gpu() -> None:
    run("bench", *TINY, code=3)
    lines = run("bench", *TINY, "--backend", "cpu", "--against", "cpu,plain", "--pass", "fwd").output.splitlines()
    assert "cpu: a way of --framework numpy where there is a GPU" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("NumPy arrays, forward"))
    head = ["mask", "batch", "seqlen", "heads", "head_dim", "MB", "CPU", "path,", "ms", "spread", "taken"]
    assert lines[at + 1].split() == head


def test_usage(cuda: Cuda) -> None:
    assert "need --backend cpu" in run("bench", "--decode", "--framework", "numpy", code=2).output
    assert "cupy arrays are not timed" in run("bench", "--framework", "cupy", "--backend", "cpu", code=2).output


# ---- explain ----


def explained(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("explain", "--no-compile", "--json", *arguments).stdout)["numpy"]
    return found


def test_explain_says_which_way_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYFLASH_BACKEND", raising=False)
    forward, backward = explained("--seqlen", "512", "--heads", "4", "--head-dim", "64", "--backward")
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    assert forward["bytes"] == 512 * 4 * (4 * 64 * 2 + 4)
    assert backward["bytes"] == 512 * 4 * (8 * 64 * 2 + 4)
    assert (forward["taken"], forward["forced"]) == ("cuda", False)
    table = ("--seqlen", "16", "--score-mod", "score + t[h, k]", "--mod-array", "t:fp32:16x100000000")
    assert explained(*table)[0]["taken"] == "cpu"
    assert [x["taken"] for x in explained(*table, "--learned")] == ["cpu", "cuda"]
    text = run("explain", "--no-compile", *table).output
    assert "NumPy arrays, forward: they take the CPU path. Copies of 6.0 GiB take at least 213 ms" in text
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
    assert [(x["taken"], x["forced"]) for x in explained(*table)] == [("cuda", True)]
    assert "they go by way of the GPU, as CUPYFLASH_BACKEND says." in run("explain", "--no-compile", *table).output


def test_explain_of_packed_sequences() -> None:
    found = explained("--lengths", "10,0,300", "--lengths-k", "20,5,100", "--heads", "2", "--head-dim", "64")[0]
    rates = where._FORWARD
    scores, elements = 2 * (200 + 30000), 64 * 2 * 2 * (310 + 125)
    ms = 3 * rates.call_s + elements * rates.element_s["bf16"] + scores * (256 / rates.flops_s + rates.score_s)
    assert found["about_cpu_ms"] == pytest.approx(1e3 * ms)


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` sets the variable; it is put back."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", os.environ.get("CUPYFLASH_BACKEND", "auto"))
