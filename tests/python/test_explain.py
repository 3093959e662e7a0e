"""`cupyflash explain`: what it says is what the library does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import cli
from cupyflash.cli.explain import work as explain_work
from cupyflash.compile import jit, nvrtc
from cupyflash.compile.cache import Cubin
from cupyflash.errors import CompileError, UnsupportedError
from cupyflash.gpu import device, tensormap
from cupyflash.gpu.device import ARCHS, Device
from cupyflash.plan.families import plan_call
from cupyflash.problem import make_problem
from tests.gpu_arrays import on_gpu

ROOT = Path(__file__).resolve().parents[2]
Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYFLASH_FAMILY", raising=False)
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(device, "_probe", lambda: (0, "there is no GPU in this test"))


@pytest.fixture
def invoke() -> Invoke:
    def run_command(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(cli.main, ["explain", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert result.exit_code == code, result.output
        return result

    return run_command


@pytest.fixture
def document(invoke: Invoke) -> Callable[..., dict[str, Any]]:
    """The JSON document, without compiling."""

    def parse(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(invoke("--json", "--no-compile", *arguments).stdout)
        return found

    return parse


Document = Callable[..., dict[str, Any]]


# ---- plans ----


@pytest.mark.parametrize("arch", ARCHS)
def test_launches_are_those_of_the_plan(arch: str, document: Document) -> None:
    gpu = Device.synthetic(arch)
    size = (
        "--head-dim",
        "96",
        "--batch",
        "2",
        "--seqlen-q",
        "300",
        "--seqlen-k",
        "700",
        "--heads",
        "6",
        "--heads-k",
        "2",
    )
    found = document("--arch", arch, *size, "--window", "64,10", "--deterministic", "--layout", "bhsd")
    shapes = (2, 6, 300, 96), (2, 2, 700, 96), (2, 2, 700, 96)
    problem = make_problem(shapes, gpu.dtypes[:1] * 3, window=(64, 10), layout="bhsd", deterministic=True)
    plans = [plan_call(problem, gpu, backward=backward) for backward in (False, True)]
    assert [p["direction"] for p in found["passes"]] == ["forward", "backward"]
    for plan, shown in zip(plans, found["passes"], strict=True):
        assert [(x["symbol"], x["grid"]) for x in shown["launches"]] == [
            (x.variant.symbol, x.grid) for x in plan.launches
        ]
        assert tuple(shown["sections"]) == plan.numbers[2:4]
        assert set(shown["workspace"]) == set(plan.workspace)
        for launch, x in zip(plan.launches, shown["launches"], strict=True):
            assert (x["threads"], x["smem_bytes"]) == (launch.variant.threads, launch.variant.smem_bytes)
            assert x["smem_limit_bytes"] == gpu.smem_bytes
            assert x["registers"] is x["waves"] is x["resident_blocks"] is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_block_masks(arch: str, document: Document) -> None:
    """Launches and memory are those of the plan, lists first; the work is that of the tiles that are visited."""
    words = "--arch", arch, "--backward", "--heads=6", "--heads-k=2", "--head-dim=64", "--seqlen=1000", "--batch=2"
    found = document(*words, "--block-mask=butterfly")
    shapes = (2, 1000, 6, 64), (2, 1000, 2, 64), (2, 1000, 2, 64)
    problem = make_problem(shapes, ("bf16",) * 3, block_mask=1)
    blocks = [min(1000, 128 * i + 128) - 128 * i for i in range(8)]
    pairs = sum(blocks[i] * blocks[j] for i in range(8) for j in range(8) if i == j or (i ^ j).bit_count() == 1)
    for backward, shown in enumerate(found["passes"]):
        plan = plan_call(problem, Device.synthetic(arch), backward=bool(backward))
        assert [x["symbol"] for x in shown["launches"]] == [x.variant.symbol for x in plan.launches]
        assert shown["launches"][0]["symbol"].startswith("key_lists")
        assert set(shown["workspace"]) == set(plan.workspace)
        assert shown["flops"] == 4 * 64 * pairs * 2 * 6 * (2.5 if backward else 1)
        lists = [x for x in shown["launches"] if "_lists" in x["symbol"]]
        sizes = [shown["workspace"][x["symbol"].partition("_lists")[0] + "_lists"] for x in lists]
        assert [x["bytes"] for x in lists] == [4 * 16 * 16 + n for n in sizes]
        assert len(lists) == 1 + backward
    mask = found["block_mask"]
    assert (mask["tiles"], mask["mask"], mask["bytes"]) == (256, "butterfly", 4 * 256 + 4 * 256)
    assert mask["density"] == mask["visited"] / 256 == 0.5
    assert document(*words)["block_mask"] is None


@pytest.mark.parametrize(("density", "tile"), [("1", "m192n64"), ("0.25", "m128n128")])
def test_tiles_that_suit_a_block_mask(density: str, tile: str, document: Document) -> None:
    found = document("--arch=sm_90", "--head-dim=128", "--seqlen=2048", f"--block-mask={density}", "--layout=bhsd")
    assert tile in found["passes"][0]["launches"][-1]["symbol"]


def test_block_masks_that_are_refused(invoke: Invoke) -> None:
    assert "explained of a batch" in invoke("--block-mask=0.5", "--packed", "--no-compile", code=2).output
    assert "as many queries as keys" in invoke("--block-mask=bigbird", "--seqlen-q=5", "--no-compile", code=2).output
    for wrong in ("0", "1.5", "nan", "sparse"):
        assert "neither a density" in invoke(f"--block-mask={wrong}", "--no-compile", code=2).output
    said = invoke("--block-mask=0.25", "--no-compile", "--seqlen=1024").output
    assert "block mask 0.25: 64 of 256 tiles" in " ".join(said.split())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_packed_sequences(arch: str, document: Document) -> None:
    """Launches are those of the plan; the work is that of each sequence by itself."""
    words = "--arch", arch, "--backward", "--causal", "--heads=6", "--heads-k=2", "--head-dim=64"
    found = document(*words, "--lengths=700,20,0", "--lengths-k=300,20,41")
    problem = make_problem(((720, 6, 64), *[(361, 2, 64)] * 2), ("bf16",) * 3, causal=True, sequences=3)
    assert found["problem"]["lengths_k"] == [300, 20, 41]
    for backward, shown in enumerate(found["passes"]):
        plan = plan_call(problem, Device.synthetic(arch), backward=bool(backward))
        assert [(x["symbol"], x["grid"]) for x in shown["launches"]] == [
            (x.variant.symbol, x.grid) for x in plan.launches
        ]
        assert all("_packed" in x["symbol"] for x in shown["launches"])
        pairs = 300 * 301 // 2 + 20 * 21 // 2
        assert shown["flops"] == 4 * 64 * pairs * 6 * (2.5 if backward else 1)
    assert document(*words, "--packed", "--batch=3", "--seqlen=720")["problem"]["lengths_q"] == [240] * 3


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_ranges_of_keys(arch: str, document: Document) -> None:
    found = document("--arch", arch, "--backward", "--causal", "--kv-range")
    assert found["problem"]["kv_range"] is True
    flags = [x["flags"] for shown in found["passes"] for x in shown["launches"]]
    assert sum("kv_range" in names for names in flags) == len(flags) - 1  # all but delta's


@pytest.mark.parametrize("words", [("--lengths-k=3",), ("--lengths=3,4", "--lengths-k=3"), ("--lengths=3,-1",)])
def test_lengths_that_cannot_be(words: tuple[str, ...], invoke: Invoke) -> None:
    assert "--lengths" in invoke("--no-compile", *words, code=2).output


def test_a_persistent_forward(document: Document) -> None:
    (found,) = document("--head-dim", "128", "--seqlen", "8192", "--causal")["passes"]
    (launch,) = found["launches"]
    assert (found["family"], found["not_taken"], launch["arch"]) == ("sm90", [], "sm_90a")
    assert (launch["persistent"], launch["grid"]) == (True, 132)
    assert launch["tiles"] == 16 * -(-8192 // launch["tile"]["block_m"])
    assert launch["flags"] == ["causal"]
    assert launch["tile"]["consumer_registers"] > launch["tile"]["producer_registers"]


@pytest.mark.parametrize(
    ("options", "path", "reason"),
    [
        (("--arch", "sm_80"), "sm90 family", "sm_80 has 8.0"),
        (("--memory", "unaligned"), "sm90 family", "the addresses of q, k and v are not"),
        (("--memory", "unaligned"), "copies of 16 bytes", "one by one"),
        (("--memory", "broadcast"), "sm90 family", "that of k and v along the heads is 0"),
        (("--seqlen", "0"), "sm90 family", "nothing is to be computed"),
    ],
)
def test_why_not(options: tuple[str, ...], path: str, reason: str, document: Document) -> None:
    (found,) = document(*options)["passes"]
    assert found["family"] == "sm80"
    assert any(x["path"] == path and reason in x["reason"] for x in found["not_taken"]), found["not_taken"]


def test_one_repeated_head_is_no_broadcast(document: Document) -> None:
    assert document("--memory", "broadcast", "--heads-k", "1")["passes"][0]["family"] == "sm90"


def test_the_family_asked_for(monkeypatch: pytest.MonkeyPatch, document: Document, invoke: Invoke) -> None:
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm80")
    (found,) = document()["passes"]
    assert found["family"] == "sm80"
    assert found["not_taken"] == [{"path": "sm90 family", "reason": "CUPYFLASH_FAMILY=sm80"}]
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm90")
    assert document()["passes"][0]["family"] == "sm90"
    assert "unset it" in invoke("--arch", "sm_89", code=4).output
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm70")
    assert "expected one of sm80, sm90" in invoke(code=2).output


def test_a_backend_that_calls_refuse(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "gpu")
    assert "CUPYFLASH_BACKEND: expected one of auto, cuda, cpu, got 'gpu'" in invoke(code=2).output


@pytest.mark.parametrize("understood", [True, False])
def test_a_gpu_of_this_machine(understood: bool, monkeypatch: pytest.MonkeyPatch, document: Document) -> None:
    """The default is GPU 0; its driver's tensor maps decide too, and a GPU without data sheet has no least time."""
    gpu = dataclasses.replace(Device.synthetic("sm_90"), name="NVIDIA Thing", ordinal=0, sm_count=99)
    monkeypatch.setattr(device, "_probe", lambda: (1, ""))
    monkeypatch.setattr(Device, "of", lambda ordinal: gpu)
    monkeypatch.setattr(Device, "current", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(tensormap, "address_slot", lambda tensor: 0 if understood else None)
    found = document()
    (shown,) = found["passes"]
    assert (found["device"]["ordinal"], found["device"]["sm_count"]) == (0, 99)
    assert (shown["least_times"], shown["least_times_reason"]) == ([], "no data sheet of NVIDIA Thing here")
    assert (shown["family"], shown["launches"][0]["grid"]) == (("sm90", 99) if understood else ("sm80", 512))
    assert [x["reason"] for x in shown["not_taken"]] == (
        [] if understood else ["this driver's tensor maps are not understood"]
    )
    assert document("--arch", "sm_80")["device"]["name"] == "sm_80"


# ---- work ----


def test_work_is_counted_once(document: Document) -> None:
    """q, k, v, out and lse; repeated heads are read once; the backward's workspaces are written and read."""
    size = ("--batch", "3", "--seqlen", "1000", "--heads", "8", "--heads-k", "4", "--head-dim", "64")
    (found,) = document(*size)["passes"]
    rows = 3 * 1000 * 8
    assert found["flops"] == 4 * 64 * 1000 * rows
    assert found["bytes"] == 2 * (2 * rows * 64 + 2 * rows // 2 * 64) + 4 * rows
    (broadcast,) = document(*size, "--memory", "broadcast")["passes"]
    assert found["bytes"] - broadcast["bytes"] == 2 * 2 * (rows // 2 - 3 * 1000) * 64
    backward = document(*size, "--backward")["passes"][1]
    delta, main, convert, shares = backward["launches"]
    assert [x["flops"] for x in (delta, main, convert, shares)] == [0, 2.5 * found["flops"], 0, 0]
    assert shares["grid"] == 0
    assert not any(name.endswith("_shares") for name in backward["workspace"])
    assert convert["bytes"] == backward["workspace"]["dq_accum"] + 2 * rows * 64
    assert backward["bytes"] == sum(x["bytes"] for x in backward["launches"])
    one = ("--batch", "1", "--seqlen", "512", "--heads", "8", "--heads-k", "1", "--head-dim", "64")
    shared = document(*one, "--backward")["passes"][1]
    left = shared["workspace"]["dk_shares"] + shared["workspace"]["dv_shares"]
    assert left == 2 * 4 * 8 * 512 * 64  # eight shares
    assert shared["launches"][3]["bytes"] == left + 2 * 2 * 512 * 64
    wide, backward = document("--seqlen", "1000", "--head-dim", "256", "--backward")["passes"]
    assert [x["flops"] / wide["flops"] for x in backward["launches"]] == [0, 2, 1.5]
    assert list(backward["workspace"]) == ["row_stats"]


@pytest.mark.parametrize(
    ("seqlen", "mask", "is_stored"), [(1000, [], True), (3000, [], False), (3000, ["--causal"], True)]
)
def test_what_is_stored_first_need_not_be_cleared(
    seqlen: int, mask: list[str], is_stored: bool, document: Document
) -> None:
    size = (
        "--arch",
        "sm_90",
        "--batch",
        "3",
        "--seqlen",
        str(seqlen),
        "--heads",
        "8",
        "--head-dim",
        "64",
        "--backward",
    )
    backward = document(*size, *mask)["passes"][1]
    rows, workspace = 3 * seqlen * 8, backward["workspace"]
    cleared = 0 if is_stored else workspace["dq_accum"]
    assert ("dq_turn" in workspace) == is_stored
    assert backward["launches"][0]["bytes"] == 2 * 2 * rows * 64 + 4 * rows + workspace["row_stats"] + cleared


def test_least_times(document: Document) -> None:
    """The data sheets of the architecture; long sequences are bound by the tensor cores, one query by the memory."""
    (long,), (short,) = (document("--seqlen-q", n)["passes"] for n in ("16384", "1"))
    times = {t["gpu"]: t for t in long["least_times"]}
    assert {g.capability for name, g in explain_work.GPUS.items() if name in times} == {(9, 0)}
    assert times["NVIDIA H200"]["ms"] == pytest.approx(long["flops"] / 989e9)
    assert {t["bound"] for t in long["least_times"]} == {"tensor cores"}
    (single,) = document("--seqlen-q", "16384", "--dtype", "fp32", "--arch", "sm_80")["passes"]
    fp32 = next(t for t in single["least_times"] if t["gpu"] == "NVIDIA A100-SXM4-80GB")
    assert fp32["ms"] == pytest.approx(6 * single["flops"] / 312e9)  # each product is six of bf16
    assert {t["bound"] for t in short["least_times"]} == {"memory"}
    h200 = next(t for t in short["least_times"] if t["gpu"] == "NVIDIA H200")
    assert h200["ms"] == pytest.approx(short["bytes"] / 4800e6)
    assert document("--arch", "sm_86")["passes"][0]["least_times"] == []


# ---- what the compiler says ----


def needs_nvrtc() -> None:
    try:
        nvrtc.pick()
    except UnsupportedError as e:
        pytest.skip(str(e))


def test_compiled(invoke: Invoke) -> None:
    needs_nvrtc()
    result = invoke("--head-dim", "64", "--backward", "--json")
    forward, backward = json.loads(result.stdout)["passes"]
    (main,) = forward["launches"]
    assert (main["blocks_per_sm"], main["spill_bytes"], main["advice"]) == (1, 0, [])
    assert main["waves"] == pytest.approx(main["tiles"] / 132)
    for x in backward["launches"]:
        assert x["registers"] > 0
        assert x["blocks_per_sm"] == min(x["resident_blocks"].values())
        assert x["waves"] == pytest.approx(x["grid"] / (132 * x["blocks_per_sm"]))
    text = invoke("--head-dim", "64", "--backward").stdout
    assert re.search(r"registers +\d+ a thread, \d+ while it computes, \d+ while it loads, none spilled", text)
    assert "dq_accum" in text


def test_what_ptxas_complains_of_is_shown(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def compiled(variant: Any, arch: str) -> Cubin:
        return Cubin(b"", variant.symbol, arch, 128, 912, 1.0, "12.9", "(C7512) Potential Performance Loss: ...")

    monkeypatch.setattr(jit, "compile_kernel", compiled)
    text = invoke().stdout
    assert "912 bytes spilled" in text
    assert "(C7512) Potential Performance Loss: ..." in text


def test_failures(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def refuse(variant: Any, arch: str) -> None:
        raise CompileError(variant.symbol, arch, "line 7: error: no such thing")

    def nothing(variant: Any, arch: str) -> None:
        raise UnsupportedError("NVRTC: no libnvrtc was found")

    monkeypatch.setattr(jit, "compile_kernel", refuse)
    assert "line 7: error: no such thing" in invoke(code=5).output
    monkeypatch.setattr(jit, "compile_kernel", nothing)
    assert "NVRTC: no libnvrtc was found; `--no-compile` does without" in invoke(code=4).output
    assert "not compiled" in invoke("--no-compile", "--arch", "sm_80").stdout


def test_usage(invoke: Invoke) -> None:
    assert "fp64 has no GPU kernel" in invoke("--dtype", "fp64", code=4).output
    assert "multiple of 8" in invoke("--head-dim", "12", code=4).output
    assert "to divide heads_q = 16, got heads_k = 3" in invoke("--heads-k", "3", code=2).output
    assert "hides every key; leave a side empty" in invoke("--window", "-5,2", code=2).output
    assert "neither LEFT nor LEFT,RIGHT" in invoke("--window", "1,2,3", code=2).output
    invoke("--arch", "sm_70", code=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1023", "window 1023, all"), ("64,64", "window 64, 64"), (",10", "window all, 10"), (",0", "causal")],
)
def test_windows(text: str, expected: str, invoke: Invoke) -> None:
    assert f"head_dim 128, {expected}\n" in invoke("--no-compile", "--window", text).stdout


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", ["64", "256"])
def test_slopes(arch: str, head_dim: str, document: Document, invoke: Invoke) -> None:
    options = ("--arch", arch, "--alibi", "--head-dim", head_dim, "--seqlen", "300", "--heads", "6")
    fixed, learned = document(*options, "--backward"), document(*options, "--learned")
    assert fixed["problem"]["alibi"] == learned["problem"]["alibi"] == 1
    names = [[x["symbol"] for x in found["passes"][1]["launches"]] for found in (fixed, learned)]
    assert [len(x) for x in names] == [3, 4]
    assert not any("dalibi" in name for name in names[0])
    assert [name.startswith("bwd_slopes") for name in names[1]] == [False, False, False, True]
    sums = learned["passes"][1]["launches"][3]
    assert (sums["grid"], sums["flops"], sums["bytes"]) == (6, 0, learned["passes"][1]["workspace"]["dalibi_parts"])
    assert ", no mask, ALiBi\n" in invoke("--no-compile", *options).stdout
    assert "nothing to learn without --alibi" in invoke("--learned", code=2).output
    assert document("--arch", arch)["problem"]["alibi"] == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_bias(arch: str, document: Document, invoke: Invoke) -> None:
    """Its bytes are read by each pass, and its gradient is a launch of two products."""
    options = ("--arch", arch, "--bias", "hqk", "--batch", "2", "--seqlen", "300", "--heads", "6")
    plain, biased = document("--arch", arch, *options[4:], "--backward"), document(*options, "--learned")
    assert biased["problem"]["bias"] == ["bf16", [False, True, True, True], None]
    assert plain["problem"]["bias"] is None
    size = 6 * 300 * 300 * 2
    (forward, backward), (before, without) = biased["passes"], plain["passes"]
    assert forward["bytes"] - before["bytes"] == size
    dbias = backward["launches"][-1]
    assert dbias["symbol"].startswith("bwd_dbias")
    rows = 128 if arch == "sm_90" else 64  # queries, and keys, of a tile
    assert (dbias["grid"], dbias["flops"]) == (6 * (-(-300 // rows)) ** 2, forward["flops"])
    assert backward["workspace"].keys() == without["workspace"].keys()
    assert all("paired_bias" in x["symbol"] for x in (*forward["launches"], dbias))
    assert ", no mask, bias along heads, queries, keys\n" in invoke("--no-compile", *options).stdout
    assert ", no mask, bias along nothing\n" in invoke("--no-compile", "--bias", "-").stdout
    masked = document("--arch", arch, "--mask", "qk", "--seqlen", "300", "--batch", "2", "--heads", "6")
    bits, tiles = 25 * 1024, 25 * 4  # by tile of 64 x 64: written and read, tiles by who makes the lists
    lists = masked["passes"][0]["workspace"]["key_lists"]
    assert masked["passes"][0]["bytes"] - before["bytes"] == 300 * 300 + 2 * (bits + tiles) + lists
    assert [x["symbol"].split("_bf16")[0] for x in masked["passes"][0]["launches"][:2]] == ["mask_tiles", "key_lists"]
    assert masked["passes"][0]["workspace"] == {"block_tiles": tiles, "block_bits": bits, "key_lists": lists}
    assert ", no mask, mask along queries\n" in invoke("--no-compile", "--mask", "q").stdout
    both = document("--arch", arch, "--mask", "qk", "--bias", "h", "--seqlen", "300", "--batch", "2", "--heads", "6")
    lists = both["passes"][0]["workspace"]["key_lists"]
    assert both["passes"][0]["bytes"] - before["bytes"] == 300 * 300 + 2 * (bits + tiles) + lists + 6 * 2
    assert both["problem"]["bias"] == ["bf16", [False, True, False, False], [False, False, True, True]]
    said = invoke("--no-compile", "--mask", "q", "--bias", "h").stdout
    assert ", no mask, bias along heads, mask along queries\n" in said
    odd = document("--arch", arch, "--bias", "qk", "--seqlen", "301")
    assert not any("paired_bias" in x["symbol"] for x in odd["passes"][0]["launches"])
    assert "is not made of the letters b, h, q and k" in invoke("--bias", "bsk", code=2).output


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_mods(arch: str, document: Document, invoke: Invoke) -> None:
    """They are compiled, and the arrays that they read count; a mask_mod becomes a block mask."""
    options = ("--arch", arch, "--seqlen", "300", "--heads", "6", "--backward")
    given = ("--score-mod", "score + table[h, k]", "--mod-array", "table:bf16:6x300")
    plain, found = document(*options), document(*options, *given)
    assert found["problem"]["mod_shapes"] == [[6, 300]]
    assert found["passes"][0]["bytes"] - plain["passes"][0]["bytes"] == 6 * 300 * 2
    named = [[x["symbol"] for x in p["launches"]] for p in found["passes"]]
    assert not {x for p in named for x in p} <= {x["symbol"] for p in plain["passes"] for x in p["launches"]}
    learned = document(*options, *given, "--learned")["passes"][1]
    backward = found["passes"][1]
    *before, clear, adds, store = learned["launches"]
    assert [x["symbol"] for x in before] == [x["symbol"] for x in backward["launches"]]
    assert [x["symbol"].split("_bf16")[0] for x in (clear, adds, store)] == [
        "bwd_dmods_sums",
        "bwd_dmods",
        "bwd_dmods_sums",
    ]
    assert (clear["bytes"], adds["flops"], store["bytes"]) == (6 * 300 * 4, found["passes"][0]["flops"], 6 * 300 * 4)
    assert ", no mask, mods\n" in invoke("--no-compile", *given).stdout
    assert "table" in invoke("--score-mod", "score + table[h, k]", code=2).output
    assert "is not NAME:DTYPE:SIZES" in invoke(*given[:2], "--mod-array", "table:float:6", code=2).output
    assert "nothing reads it" in invoke(*given[2:], code=2).output
    masked = document(*options, "--mask-mod", "table[h, k] > q", *given[2:])
    bits, tiles, lists = 6 * 25 * 1024, 6 * 25 * 4, masked["passes"][0]["workspace"]["key_lists"]
    more = 6 * 300 * 2 + 2 * (bits + tiles) + lists
    assert masked["passes"][0]["bytes"] - plain["passes"][0]["bytes"] == more
    assert [x["symbol"].split("_bf16")[0] for x in masked["passes"][0]["launches"][:2]] == ["mask_tiles", "key_lists"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_sinks(arch: str, document: Document, invoke: Invoke) -> None:
    options = ("--arch", arch, "--sink", "--seqlen", "300", "--heads", "6")
    fixed, learned = document(*options, "--backward"), document(*options, "--learned", "--alibi")
    assert fixed["problem"]["sink"] is learned["problem"]["sink"] is True
    assert fixed["passes"][0]["launches"][0]["symbol"].endswith("_sink")
    assert ["sink" in x["symbol"] for x in fixed["passes"][1]["launches"]] == [False, True, False]
    slopes, sinks = learned["passes"][1]["launches"][3:]
    assert [x["symbol"][:8] for x in (slopes, sinks)] == ["bwd_slop", "bwd_sink"]
    assert (sinks["grid"], sinks["flops"], sinks["bytes"]) == (6, 0, learned["passes"][1]["workspace"]["row_stats"])
    assert ", no mask, sinks\n" in invoke("--no-compile", *options).stdout
    assert document("--arch", arch)["problem"]["sink"] is False


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_softcap(arch: str, document: Document, invoke: Invoke) -> None:
    options = ("--arch", arch, "--softcap", "30", "--backward", "--head-dim", "256")
    found = document(*options)
    assert found["problem"]["softcap"] == 30
    launches = [launch for p in found["passes"] for launch in p["launches"]]
    assert len(launches) == 4
    assert all("softcap" in launch["flags"] for launch in launches)
    assert ", no mask, softcap 30\n" in invoke("--no-compile", *options).stdout
    assert "0.0 is not in the range 0.001<=x<=1000.0" in invoke("--softcap", "0", code=2).output
    assert document("--arch", arch)["problem"]["softcap"] is None


@pytest.mark.gpu
def test_the_gpu_of_this_machine() -> None:
    """What is explained is what `attention` prepares."""
    from cupyflash import attention
    from cupyflash.launch import prepared as launch

    command = [sys.executable, "-m", "cupyflash", "explain", "--seqlen", "1000", "--heads", "20", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (shown,) = found["passes"][0]["launches"]
    launch.forget()
    attention(*[on_gpu(np.ones((1, 1000, 20, 128), ml_dtypes.bfloat16), "cupy")] * 3)
    (call,) = launch.calls.values()
    assert found["device"]["ordinal"] == 0
    assert (shown["persistent"], found["passes"][0]["family"] == "sm90") == (call.persistent, call.persistent)
    assert shown["registers"] > 0
