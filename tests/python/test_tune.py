"""tools/tune.py: the tiles that it would measure, what it leaves out, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cupyflash.compile import jit, nvrtc
from cupyflash.compile.cache import Cubin
from cupyflash.errors import CompileError, UnsupportedError
from cupyflash.gpu import device
from cupyflash.gpu.device import Device
from cupyflash.plan.sm80 import SM80
from cupyflash.plan.sm90 import SM90
from cupyflash.plan.spec import Spec
from cupyflash.plan.tiles_sm80 import ForwardTile
from cupyflash.plan.tiles_sm90 import HopperForwardTile
from tools import candidates as tools_candidates
from tools import tune
from tools.candidates import Candidate, Speed, candidates, fits_pool, in_use, judge, registers_at_launch, variants

ROOT = Path(__file__).resolve().parents[2]
HOPPER, AMPERE = Device.synthetic("sm_90"), Device.synthetic("sm_80")
HEAD_DIMS = (8, 64, 96, 128, 200, 256)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_probe", lambda: (0, "there is no GPU in this test"))


def invoke(*arguments: str, code: int) -> Result:
    result = CliRunner().invoke(tune.main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == code, result.output
    return result


# ---- candidates ----


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hopper_tiles_fit_an_sm(head_dim: int) -> None:
    found = [c.tile for c in candidates("sm90", head_dim, HOPPER, {})]
    assert len(set(found)) == len(found) > 30
    assert found[0] == SM90.forward_tile(Spec("bf16", head_dim), HOPPER)
    for tile in found:
        assert isinstance(tile, HopperForwardTile)
        assert tile.smem_bytes(head_dim) <= HOPPER.smem_bytes
        at_launch = registers_at_launch(tile.groups) * (tile.groups + 1)
        assert 128 * at_launch <= 65536
        assert tile.groups * tile.consumer_registers + tile.producer_registers <= at_launch
        assert (tile.block_n % 16, tile.consumer_registers % 8, tile.producer_registers % 8) == (0, 0, 0)
        assert 32 <= tile.block_n <= 256


@pytest.mark.parametrize("gpu", [AMPERE, HOPPER], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_ampere_tiles_fit_as_often_as_they_say(gpu: Device, head_dim: int) -> None:
    found = [c.tile for c in candidates("sm80", head_dim, gpu, {})]
    assert found[0] == SM80.forward_tile(Spec("bf16", head_dim), gpu)
    assert len(found) > 10
    for tile in found:
        assert isinstance(tile, ForwardTile)
        smem = tile.smem_bytes(head_dim) + 1024
        assert tile.blocks_per_sm * smem <= gpu.smem_per_sm_bytes
        assert tile.block_m // tile.warps in (16, 32)


@pytest.mark.parametrize(("family", "generate"), [("sm90", "hopper_tiles"), ("sm80", "ampere_tiles")])
def test_the_tiles_in_use_would_be_found_again(family: str, generate: str) -> None:
    """What the tables hold now is no exception from the rules here."""
    for head_dim in (64, 128, 256):
        now = candidates(family, head_dim, HOPPER, {})[0].tile
        assert now in getattr(tools_candidates, generate)(head_dim, HOPPER.smem_bytes)


def test_registers_that_would_never_come_free() -> None:
    """640 threads start with 96 registers: 4 * 120 + 24 would fit the register file, and wait for ever."""
    tile = HopperForwardTile(256, 64, 4, 2, 112, 32)
    assert [registers_at_launch(groups) for groups in (1, 2, 3, 4)] == [248, 168, 128, 96]
    assert fits_pool(tile, 96)
    assert not fits_pool(replace(tile, consumer_registers=120), 96)
    assert not fits_pool(tile, 88)


def test_only() -> None:
    found = candidates("sm90", 128, HOPPER, {"block_n": (80, 96), "stages": (2,)})
    assert len(found) > 3
    for c in found[1:]:
        assert isinstance(c.tile, HopperForwardTile)
        assert c.tile.block_n in (80, 96)
        assert c.tile.stages == 2


def test_the_library_plans_with_the_candidate() -> None:
    tile = HopperForwardTile(128, 96, 3, 1, 240, 24)
    before = SM90.forward_tile(Spec("bf16", 128), HOPPER)
    dense, clocks, causal, _ = variants(Candidate(128, tile), "sm90", HOPPER, "fp16", (False, True))
    symbol = "fwd_sm90_fp16_d128_m128n96s3q1"
    assert [v.symbol for v in (dense, clocks, causal)] == [symbol, f"{symbol}_clocks", f"{symbol}_causal"]
    small = ForwardTile(64, 32, 4, 3, 2)
    (variant,) = variants(Candidate(128, small), "sm80", HOPPER, "bf16", (True,))
    assert variant.symbol == "fwd_sm80_bf16_d128_m64n32w4s3_causal"
    assert SM90.forward_tile(Spec("bf16", 128), HOPPER) == before
    with in_use(tile):
        assert SM90.forward_tile(Spec("bf16", 8), HOPPER) == tile
    with pytest.raises(KeyError), in_use(tile):
        raise KeyError
    assert SM90.forward_tile(Spec("bf16", 128), HOPPER) == before


# ---- what is left out ----


def cubin(registers: int = 168, spill_bytes: int = 0, advice: str = "") -> Cubin:
    return Cubin(b"", "symbol", "sm_90a", registers, spill_bytes, 1.0, "12.9", advice)


def test_judge() -> None:
    c = Candidate(128, HopperForwardTile(128, 64, 2, 1, 240, 24))
    assert judge(c, [cubin(), cubin()]) == ""
    assert judge(c, [cubin(), cubin(spill_bytes=8)]) == "registers spill"
    assert judge(c, [cubin(advice="(C7512) Potential Performance Loss: wgmma\n(C7510) more")]) == (
        "ptxas: (C7512) Potential Performance Loss: wgmma"
    )
    assert judge(c, [cubin(), cubin(registers=160)]) == "too few registers at launch for the trade"
    assert judge(Candidate(128, ForwardTile(128, 64, 4, 2, 2)), [cubin(registers=40)]) == ""


def needs_nvrtc() -> None:
    try:
        nvrtc.pick()
    except UnsupportedError as e:
        pytest.skip(str(e))


def test_compile_all() -> None:
    """A tile too large for the registers of four warpgroups spills, and ptxas serialises its wgmma."""
    needs_nvrtc()
    small, large = (Candidate(128, HopperForwardTile(256, n, 8, 4, 112, 32)) for n in (32, 48))
    good = candidates("sm90", 64, HOPPER, {"block_m": (320,)})
    done: list[None] = []
    tools_candidates.compile_all([*good, small, large], HOPPER, "sm90", "bf16", (True,), 2, lambda: done.append(None))
    assert [c.reason for c in good] == [""]
    assert good[0].registers > 0
    assert large.reason == "registers spill"
    assert len(done) == 3
    advice = jit.compile_kernel(variants(large, "sm90", HOPPER, "bf16", (True,))[0], "sm_90").advice
    assert advice.startswith("(C7512)")


# ---- the report ----


def test_lines_can_be_pasted() -> None:
    for family, tile in (
        ("sm90", HopperForwardTile(128, 96, 3, 1, 240, 24)),
        ("sm80", ForwardTile(64, 32, 4, 3, 2, True)),
    ):
        line = Candidate(128, tile).line()
        found = eval(f"({line.strip()})", vars(sys.modules[type(tile).__module__]))
        assert found == ((128, tile),), family


def test_scores() -> None:
    def measured(*speeds: float) -> Candidate:
        tile = HopperForwardTile(128, 64, 2, 1, 240, int(speeds[0]))
        return Candidate(64, tile, speeds=[Speed(False, i, x, None) for i, x in enumerate(speeds)])

    slow, left_out, fast = measured(50, 100), Candidate(64, ForwardTile(1, 1, 1, 1, 1), "spills"), measured(100, 100)
    ranked = tune.scores([slow, left_out, fast])
    assert [c for _, c in ranked] == [fast, slow]
    assert [value for value, _ in ranked] == pytest.approx([1.0, 0.5**0.5])
    assert tune.scores([left_out]) == []


# ---- the command ----


def test_without_a_gpu(no_gpu: None) -> None:
    assert "there is no GPU in this test; `--no-run` compiles alone" in invoke(code=3).output


def test_compiling_alone(no_gpu: None) -> None:
    needs_nvrtc()
    options = (
        "--no-run",
        "--head-dim",
        "64",
        "--no-causal",
        "--only",
        "block_m=192",
        "--only",
        "block_n=32",
        "--only",
        "stages=2",
    )
    text = invoke(*options, code=0).stdout
    now = SM90.forward_tile(Spec("bf16", 64), HOPPER)
    assert f"{astuple(now)} (in use)" in text
    found = json.loads(invoke(*options, "--json", code=0).stdout)["tiles"]
    assert [x["tile"]["block_n"] for x in found[1:]] == [32] * (len(found) - 1)
    assert all(x["registers"] > 0 and x["speeds"] == [] for x in found)


def test_nothing_compiles(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(variant: Any, arch: str) -> None:
        raise CompileError(variant.symbol, arch, "line 7: error: no such thing")

    needs_nvrtc()
    monkeypatch.setattr(jit, "compile_kernel", refuse)
    assert "line 7: error: no such thing" in invoke("--no-run", "--head-dim", "64", code=5).output


def test_wrong_results_are_the_first_thing_to_know(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(found: list[Candidate], *rest: Any) -> None:
        found[0].reason = f"{tune.WRONG}: out: max 1"

    monkeypatch.setattr(tune, "usable_gpu", lambda options: HOPPER)
    monkeypatch.setattr(tune, "compile_all", lambda *arguments, done: None)
    monkeypatch.setattr(tune, "measure_all", wrong)
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    assert "wrong: out: max 1" in invoke("--head-dim", "64", code=1).stdout


def test_usage(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a tile has no 'warps'" in invoke("--only", "warps=4", code=2).output
    assert "is not FIELD=N,N" in invoke("--only", "stages=many", code=2).output
    invoke("--family", "sm80", "--only", "warps=4", code=3)
    monkeypatch.setattr(device, "_probe", lambda: (1, ""))
    monkeypatch.setattr(Device, "of", lambda ordinal: AMPERE)
    assert "sm_80 has no sm90 family" in invoke(code=4).output


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_measuring(family: str) -> None:
    if family == "sm90" and Device.of(0).capability != (9, 0):
        pytest.skip("not a Hopper")
    size = (
        "--head-dim",
        "64",
        "--seqlens",
        "512,1024",
        "--tokens",
        "2048",
        "--hidden",
        "256",
        "--only",
        "block_n=64",
        "--only",
        "stages=2",
    )
    command = [sys.executable, "-m", "tools.tune", "--family", family, "--quick", "--keep", "2", "--json", *size]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tiles"]
    measured = [x for x in found if x["speeds"]]
    assert 2 <= len(measured) <= 3
    assert measured[0] is found[0]
    for x in measured:
        assert [(s["causal"], s["seqlen"]) for s in x["speeds"]] == [(c, n) for c in (False, True) for n in (512, 1024)]
        assert all(s["tflops"] > 0 for s in x["speeds"])
        assert all((0 < (s["percent"] or 0) < 100) == (family == "sm90") for s in x["speeds"])
    assert "for the family's tables in cupyflash/plan:" in done.stderr
