"""The commands on a GPU, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupyflash import api
from cupyflash.cli import frameworks
from cupyflash.cli.bench.cell import Cell
from cupyflash.cli.bench.work import TorchBench
from cupyflash.cli.verify import checks as verify_checks

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def document(*arguments: str, seconds: float | None = None) -> dict[str, Any]:
    """The JSON document that a command prints; it must succeed, and in so many seconds."""
    command = [sys.executable, "-m", "cupyflash", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("framework", ["cupy", "numpy", "torch", "jax"])
def test_verify(framework: str) -> None:
    if framework in ("torch", "jax"):
        pytest.importorskip(framework)
    if framework == "torch" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch has no CUDA")
    if framework == "jax" and not _jax_has_gpu():
        pytest.skip("JAX has no CUDA")
    found = document("verify", "--level", "smoke", "--framework", framework)
    assert found["gpu"] is not None
    assert found["verdict"].startswith("VERIFIED")
    checks = {c["check"] for c in found["checks"]}
    if framework in ("cupy", "torch"):
        assert {"non-default-stream", "cuda-graph", "two-threads", "poisoned-outputs"} <= checks
    assert all(c["shown"] for c in found["checks"])
    assert found["ran"] == ["gpu"]


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_stream_check_finds_a_call_that_does_not_wait(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "torch" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch has no CUDA")
    framework, right, own_streams = frameworks.make(library, on_gpu=True), api.attention, 0
    context = verify_checks.Context(framework, "bf16", 0)
    result = verify_checks.run_check("non-default-stream", context)
    assert result.passed, result.detail

    def stray(*arrays: Any, **options: Any) -> Any:
        """On a stream of its own, whatever the caller's is."""
        nonlocal own_streams
        own_streams += 1
        with framework.stream():
            return right(*arrays, **options)

    monkeypatch.setattr(api, "attention", stray)
    wrong = verify_checks.run_check("non-default-stream", context)
    assert own_streams > 3
    assert not wrong.passed
    assert wrong.shown
    assert "differ" in wrong.detail  # of out, or of gradients alone: who is read too early depends on the chip


def _jax_has_gpu() -> bool:
    """Asked in another process: JAX would keep most of the GPU's memory to this one."""
    code = "import jax; jax.devices('gpu')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_doctor() -> None:
    found = document("doctor")
    assert any(f["name"] == "GPU" and f["status"] == "OK" for f in found["findings"])


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_bench(framework: str) -> None:
    peers: tuple[str, ...] = ()
    if framework == "torch":
        if not pytest.importorskip("torch").cuda.is_available():
            pytest.skip("torch has no CUDA")
        peers = ("--against", "flash2")
    size = ("--head-dim", "64", "--seqlens", "512,1024", "--tokens", "2048", "--hidden", "256")
    found = document("bench", "--quick", "--host", "--startup", "--framework", framework, *size, *peers)
    for row in found["rows"]:
        assert row["tflops"] > 0, row
        assert row["peak_bytes"] > 0
    ours = [r for r in found["rows"] if r["implementation"] == "cupyflash"]
    assert all(r["peak_bytes"] <= 1.1 * r["ideal_bytes"] + (1 << 20) for r in ours)
    assert found["startup"]["disk_cache"]["loaded_on_gpu"]


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_bench_decode(framework: str) -> None:
    """Short calls, as a graph, and long ones; peers where all lengths are equal; 8 bits beside 16."""
    peers: tuple[str, ...] = ()
    if framework == "torch":
        if not pytest.importorskip("torch").cuda.is_available():
            pytest.skip("torch has no CUDA")
        peers = ("--against", "cudnn,flash2")
    options = ("bench", "--decode", "--quick", "--rounds", "2", "--framework", framework)
    for only in ("B1 2k", "B8 32k", "ragged"):
        rows = document(*options, "--only", only, *peers)["rows"]
        for row in rows:
            assert row["implementation"] == "cupyflash" or (row["ms"] is None) == (only == "ragged"), row
            assert row["ms"] is None or 0.05 < row["tb_per_s"] < 20, row
    found = document(*options, "--only", "pages of 16", "--cache-dtype", "int8,e4m3", "--host")
    assert all(r["tb_per_s"] > 0 for r in found["rows"])
    assert found["ratios"]["16-bit"]["decode"]["geomean"] > 0.5
    assert found["host_us"]["cupyflash"]["fwd"] > 0


@pytest.mark.parametrize("peer", ["cudnn", "fa4"])
def test_bench_peers(peer: str) -> None:
    """Each peer runs with fewer key heads; cuDNN's has neither window nor softcap."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch has no CUDA")
    if peer == "fa4":
        pytest.importorskip("flash_attn.cute")
    size = ("--head-dim", "128", "--hidden", "512", "--heads-k", "2", "--batch", "2", "--seqlens", "1024")
    options = ("--quick", "--causal", "--pass", "fwd", "--against", peer, *size)
    assert all(r["tflops"] > 0 for r in document("bench", *options)["rows"])
    windowed = document("bench", *options, "--window", "255")["rows"][1]
    assert (windowed["tflops"] is None) == (peer == "cudnn")
    capped = document("bench", *options, "--softcap", "20")["rows"][1]
    assert (capped["tflops"] is None) == (peer == "cudnn")


@pytest.mark.parametrize(
    ("features", "peers"),
    [
        (("--bias", "hqk"), {"efficient": True, "math": True, "flash2": False}),
        (("--bias", "qk", "--learned"), {"efficient": True, "math": True, "fa4": False}),
        (("--mask", "bk"), {"efficient": True, "math": True}),
        (("--dropout", "0.1"), {"flash2": True, "efficient": True, "math": True, "flex": False}),
        (("--block-mask", "0.25,bigbird"), {"flash2": False, "cudnn": False}),
    ],
    ids=str,
)
def test_bench_features(features: tuple[str, ...], peers: dict[str, bool]) -> None:
    """Forward and backward; who has a feature is timed, and who has not says so."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch has no CUDA")
    size = ("--head-dim", "64", "--hidden", "256", "--batch", "2", "--seqlens", "1024", "--no-causal")
    options = ("--quick", "--rounds", "2", "--pass", "fwd,bwd", "--against", ",".join(peers))
    rows = document("bench", *options, *size, *features)["rows"]
    for row in rows:
        runs = {"cupyflash": True, **peers}[row["implementation"]]
        assert (row["tflops"] is not None) == runs, (row["implementation"], row["reason"])
        assert runs or row["reason"]


def test_bench_flex_with_features() -> None:
    """A learned bias, a block mask and a mod: each a compilation of its own, forward and backward."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch has no CUDA")
    size = ("--head-dim", "64", "--hidden", "256", "--batch", "2", "--seqlens", "512", "--no-causal")
    for features in (("--bias", "hqk", "--learned"), ("--block-mask", "0.25"), ("--mod", "table")):
        options = ("--quick", "--rounds", "2", "--against", "flex", *size, *features)
        rows = document("bench", *options, seconds=240)["rows"]
        assert [(r["implementation"], r["reason"]) for r in rows] == [("cupyflash", ""), ("flex", "")] * 2
        assert all(r["tflops"] > 0 for r in rows)


def test_bench_flex() -> None:
    """One cell, forward alone, with all that flex is asked for: each cell and pass is a compilation of its own.

    A process for each would be an import of torch and a start of its compiler each time, tens of seconds in all.
    """
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch has no CUDA")
    size = ("--head-dim", "64", "--hidden", "256", "--heads-k", "2", "--batch", "2", "--seqlens", "512")
    options = ("--quick", "--rounds", "2", "--causal", "--window", "255", "--softcap", "20", "--pass", "fwd")
    rows = document("bench", *options, "--against", "flex", *size, seconds=240)["rows"]
    assert [(r["implementation"], r["reason"]) for r in rows] == [("cupyflash", ""), ("flex", "")]
    assert all(r["tflops"] > 0 for r in rows)


PACKED = Cell("bf16", 64, False, 300, 5, 4, 4, packed="uniform", lengths=(300, 1, 17, 256, 130))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 40}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("peer", ["flash2", "fa4"])
def test_packed_peers_compute_the_same(peer: str, options: dict[str, Any]) -> None:
    """What is timed beside ours is the same attention; flash2's has no softcap in torch, and says so."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    if peer == "fa4":
        pytest.importorskip("flash_attn.cute")
    cell, bench = replace(PACKED, **options), TorchBench(on_gpu=True)
    q, k, v, dout = bench.inputs(cell)
    try:
        theirs = bench.attention(peer, cell)
    except NotImplementedError as e:
        if peer != "flash2" or "softcap" not in options:
            raise
        pytest.skip(str(e))
    outs = []
    for attention in (bench.attention("cupyflash", cell), theirs):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        outs.append((out, *torch.autograd.grad(out, leaves, dout)))
    for ours, other in zip(*outs, strict=True):
        torch.testing.assert_close(ours, other, atol=2e-2, rtol=4e-2)


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_bench_packed(framework: str, tmp_path: Path) -> None:
    """All four ways of lengths, beside our dense call and, in torch, FlashAttention-2; the run can be shown again."""
    if framework == "torch" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch has no CUDA")
    peers = {"dense", "flash2"} if framework == "torch" else {"dense"}
    size = ("--head-dim", "64", "--tokens", "2048", "--hidden", "256", "--causal", "--seqlens", "512")
    packed = ("--packed", "equal,uniform,long-tailed,short", "--against", ",".join(peers), "--framework", framework)
    found = document("bench", "--quick", "--rounds", "2", "--host", *size, *packed)
    assert [x["packed"] for x in found["packed"]] == ["equal", "uniform", "long-tailed", "short"]
    assert {sum(x["lengths"]) for x in found["packed"]} == {2048}
    for row in found["rows"]:
        runs = row["implementation"] != "dense" or row["packed"] == "equal"
        assert (row["tflops"] is not None) == runs, row
    padding = {x["packed"]: 128 * 256 * 4 * len(x["lengths"]) for x in found["packed"]}  # of dq's sums, in fp32
    for row in found["rows"]:
        room = padding[row["packed"]] * (row["direction"] != "fwd") + (1 << 20)
        assert row["implementation"] != "cupyflash" or row["peak_bytes"] <= 1.1 * row["ideal_bytes"] + room, row
    assert {"cupyflash", *peers} == found["host_us"].keys()
    assert found["host_us"]["cupyflash"]["fwd_new_lengths"] > 0
    (tmp_path / "run.json").write_text(json.dumps(found))
    assert document("bench", "--saved", str(tmp_path / "run.json")) == found
