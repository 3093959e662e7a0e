"""The command line without a GPU: what it prints, and with which exit code it ends."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from kernel_files import pretend_to_compile

import cupyflash
from cupyflash import api, cli
from cupyflash.arrays import adapters as arrays
from cupyflash.check import case_inputs, cases
from cupyflash.check.cache_cases import CACHE_CASES
from cupyflash.cli import frameworks
from cupyflash.cli.bench import cycles as bench_cycles
from cupyflash.cli.bench import peers as bench_peers
from cupyflash.cli.bench import report as bench_report
from cupyflash.cli.bench.cell import Cell
from cupyflash.cli.bench.clocks import Clock
from cupyflash.cli.bench.timing import Timing
from cupyflash.cli.compile import MEMORY, variants_of
from cupyflash.cli.doctor import checks as doctor_checks
from cupyflash.cli.output import Exit
from cupyflash.cli.verify import checks as verify_checks
from cupyflash.cli.verify import kernels as verify_kernels
from cupyflash.cli.verify import main as verify_main
from cupyflash.cli.verify import report as verify_report
from cupyflash.compile import jit, nvrtc
from cupyflash.errors import CompileError, UnsupportedError
from cupyflash.gpu import device
from cupyflash.launch import clocks
from cupyflash.plan.decode import variants_over_cache
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.shipped_cache import problem as over_cache
from cupyflash.plan.variant import Variant
from cupyflash.problem import Bias, Problem

ROOT = Path(__file__).resolve().parents[2]
LEAVES = [("verify",), ("doctor",), ("bench",), ("explain",), ("run",), ("compile",), ("cache", "path"),
          ("cache", "info"), ("cache", "clear")]  # fmt: skip
Invoke = Callable[..., Result]


pytestmark = pytest.mark.usefixtures("without_gpu", "hurried")


@pytest.fixture
def invoke() -> Invoke:
    """Run a command, `verify` in this process alone; nothing but SystemExit may escape it."""

    def run_command(*arguments: str, code: int = 0, **options: Any) -> Result:
        alone = ["--timeout", "0"] if arguments[0] == "verify" else []
        result = CliRunner().invoke(cli.main, [*arguments, *alone], **options)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert result.exit_code == code, result.output
        return result

    return run_command


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cupyflash", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def needs_nvrtc() -> None:
    try:
        nvrtc.pick()
    except UnsupportedError as e:
        pytest.skip(str(e))


# ---- all commands ----


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_and_documentation(path: tuple[str, ...], invoke: Invoke) -> None:
    """Help says the exit codes; docs/cli.md names every command and option."""
    docs = (ROOT / "docs" / "cli.md").read_text()
    assert f"cupyflash {' '.join(path)}" in docs
    text = invoke(path[0], "--help").output
    assert re.search(r"Exit codes:.*\b0 ", text, flags=re.DOTALL)
    command: click.Command = cli.main
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    for parameter in command.params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert f"`{option}" in docs, f"{' '.join(path)} {option} is not in docs/cli.md"


def test_exit_codes_are_documented(invoke: Invoke) -> None:
    """docs/cli.md lists them all, and help of `verify` those that it has."""
    table = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs" / "cli.md").read_text(), flags=re.MULTILINE)
    assert [int(code) for code, _ in table] == sorted(Exit)
    text = " ".join(invoke("verify", "--help").output.split())
    said = re.search(r"Exit codes: (.*)$", text)
    assert said is not None
    wanted = {int(code) for code, meaning in table if "`verify`" in meaning} | {0, 2, 3, 4, 130}
    assert {int(n) for n in re.findall(r"(?:^|[,;] )(\d+) ", said[1])} == wanted


def test_help_is_light() -> None:
    """Neither help nor version loads an array library, NumPy included."""
    code = "import sys\ntry: import cupyflash.cli as c; c.main(['--help'])\nfinally: print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not {"numpy", "cupy", "torch", "jax", "matplotlib"} & set(done.stdout.split())


def test_errors_are_sentences(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    from cupyflash.cli import cache as command

    def fail() -> None:
        raise UnsupportedError("no [folder] today")

    monkeypatch.setattr(command.cache, "default", fail)
    assert "error: no [folder] today" in invoke("cache", "path", code=4).output

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.cache, "default", interrupt)
    invoke("cache", "path", code=130)


# ---- verify ----


def test_verify_cpu(invoke: Invoke) -> None:
    result = invoke("verify", "--level", "smoke", "--backend", "cpu", "--dtype", "fp16,fp32", "--json")
    document = json.loads(result.stdout)
    assert document["verdict"].startswith("CPU PATH VERIFIED: ")
    assert document["verdict"].endswith("no kernel ran (--backend cpu)")
    assert document["ran"] == ["cpu"]
    over_cache = {c.name for c in CACHE_CASES if c.level == "smoke"}
    assert {c["case"] for c in document["cases"]} == {c.name for c in cases.select("smoke")} | over_cache
    for c in document["cases"]:
        if c["case"] in over_cache:
            assert set(c["results"]) == {"out", "lse", "k_cache", "v_cache"}
            continue
        learned = {f"d{name}" for name in cases.case(c["case"]).inputs("fp32").learned}
        assert set(c["results"]) == {"out", "lse", "dq", "dk", "dv"} | learned
    assert {c["check"] for c in document["checks"]} == set(verify_checks.available(frameworks.Framework()))
    assert document["reproduce"] is None
    assert document["kernels"] == []
    assert "causal-d64" in result.stderr
    assert_lines_fit_a_terminal(result.stderr)


def assert_lines_fit_a_terminal(text: str) -> None:
    *lines, _ = text.splitlines()[2:]  # but for the verdict, which says all that was checked
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize(("framework", "dtype", "other"), [("torch", "bf16", "fp64"), ("jax", "fp64", "bf16")])
def test_verify_frameworks(framework: str, dtype: str, other: str, invoke: Invoke) -> None:
    """All cases in one dtype, some in another: one that NumPy has not, one that JAX asks a setting for."""
    pytest.importorskip(framework)
    for which in (("--dtype", dtype), ("--dtype", other, "--head-dim", "128")):
        invoke("verify", "--level", "smoke", "--backend", "cpu", "--framework", framework, *which)
    if framework == "jax":
        assert not sys.modules["jax"].config.jax_enable_x64, "verify left its setting in the process"


def test_verify_compiles_where_nothing_runs(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    """A few of the kernels: that all compile is said by tests/kernels/test_compile.py."""
    needs_nvrtc()
    some = verify_kernels.selection("smoke")[::6]
    monkeypatch.setattr(verify_main, "selection", lambda level: some)
    result = invoke("verify", "--level", "smoke", "--dtype", "fp64", "--head-dim", "64")
    count = len(some)
    assert count > 1
    assert "\nCPU PATH VERIFIED: " in result.stdout
    assert f"{count} kernels compiled for 1 architecture" in result.stdout
    assert "there is no GPU in this test" in result.stdout


def test_verify_finds_a_mistake_and_reproduces_it(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    right = api.attention_backward

    def wrong(*arrays: Any, **options: Any) -> Any:
        dq, dk, dv = right(*arrays, **options)
        return api.Gradients(dq, dk * (1.05 if options["causal"] else 1), dv)

    monkeypatch.setattr(api, "attention_backward", wrong)
    result = invoke("verify", "--level", "smoke", "--backend", "cpu", "--dtype", "fp32", "--seed", "3", code=1)
    assert re.search(r"^dense-d64 .*PASS$", result.stdout, flags=re.MULTILINE)
    assert re.search(r"^causal-d64 .*dk .*FAIL$", result.stdout, flags=re.MULTILINE)
    assert "FAILED: max and rms error above the bound" in result.stdout
    command = re.search(r"^reproduce: cupyflash (.*)$", result.stdout, flags=re.MULTILINE)
    assert command is not None
    assert "--seed 3" in command[1]
    again = invoke(*command[1].split(), "--json", code=1)
    assert [c["passed"] for c in json.loads(again.stdout)["cases"]] == [False]


def test_verify_survives_an_exception(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def broken(*arrays: Any, **options: Any) -> Any:
        raise RuntimeError("[red]no[/red]")

    monkeypatch.setattr(api, "attention", broken)
    result = invoke("verify", "--level", "smoke", "--backend", "cpu", "--dtype", "fp32", code=1)
    assert "RuntimeError: [red]no[/red]" in result.stdout
    assert "reproduce: cupyflash verify --case dense-d64 --dtype fp32" in result.stdout


def test_verify_without_compiler(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def nothing() -> None:
        raise UnsupportedError("NVRTC: no libnvrtc was found; install one with: pip install 'cupyflash[cu12]'")

    monkeypatch.setattr(nvrtc, "find", nothing)
    monkeypatch.setattr(sys, "platform", "linux")
    result = invoke("verify", "--level", "smoke", "--dtype", "fp32", "--head-dim", "128", code=5)
    assert "NOT VERIFIED" in result.stdout
    assert "pip install 'cupyflash[cu12]'" in result.stdout


def refuse(variant: Any, arch: str, *rest: Any) -> None:
    raise CompileError(variant.symbol, arch, "line 7: error: no such thing")


def test_verify_reports_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    needs_nvrtc()
    monkeypatch.setattr(jit, "compile_kernel", refuse)
    result = invoke("verify", "--level", "smoke", "--dtype", "fp32", "--head-dim", "128", code=5)
    assert "line 7: error: no such thing" in result.stdout
    assert "reproduce: cupyflash compile --preset all --arch sm_90" in result.stdout


def test_verify_usage(invoke: Invoke) -> None:
    assert "primes" in invoke("verify", "--case", "prime", code=2).output
    assert "bf17" in invoke("verify", "--dtype", "bf16,bf17", code=2).output
    invoke("verify", "--head-dim", "65", code=2)
    invoke("verify", "--framework", "cupy", code=3)
    invoke("verify", "--case", "cuda-graph", code=2)


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_asking_for_a_gpu_that_is_not_there(command: str) -> None:
    done = shell(command, "--backend", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    if command == "verify":  # whose option it was, of which the variable is a consequence
        assert done.stderr.startswith("error: --backend cuda: ")
        assert done.stderr.endswith("; --backend auto runs the kernels in the emulator\n")
        asked = shell(command, CUDA_VISIBLE_DEVICES="", CUPYFLASH_BACKEND="cuda")
        assert asked.returncode == 3
        assert asked.stderr.startswith("error: CUPYFLASH_BACKEND=cuda: ")


def test_one_check_alone(invoke: Invoke) -> None:
    result = invoke("verify", "--case", "two-threads", "--backend", "cpu")
    assert "0 cases and 1 check on" in result.stdout


def test_checks_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks fail when results differ from call to call, or when an input is written."""
    right, count = api.attention, 0

    def restless(q: Any, k: Any, v: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        out, lse = right(q, k, v, **options)
        out[0, 0, 0, 0] += count
        q[0, 0, 0, 0] = count
        return out, lse

    monkeypatch.setattr(api, "attention", restless)
    context = verify_checks.Context(frameworks.Framework(), "fp32", 0)
    for name in ("repeated-forward", "repeated-deterministic-backward", "two-threads", "poisoned-outputs"):
        assert "out" in verify_checks.run_check(name, context).detail, name
    assert verify_checks.run_check("unchanged-inputs", context).detail == "q changed"


def test_lines_fit_a_terminal(invoke: Invoke) -> None:
    """That of the case with the longest name, beside which the numbers of others stand as in any line."""
    longest = max((c.name for c in cases.CASES), key=len)
    assert_lines_fit_a_terminal(invoke("verify", "--case", longest, "--backend", "cpu", "--dtype", "fp16").stdout)
    assert len(verify_report.CASE_HEADER.strip()) <= 100


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("memory", sorted(case_inputs.MEMORY))
def test_arrays_keep_values_strides_and_alignment(library: str, memory: str) -> None:
    pytest.importorskip(library)
    framework = frameworks.make(library, on_gpu=False)
    case = next(c for c in cases.CASES if c.memory == memory)
    for x in case.inputs("bf16")[:4]:
        y = framework.from_numpy(x)
        strides = y.strides if library == "numpy" else tuple(s * x.itemsize for s in y.stride())
        address = y.ctypes.data if library == "numpy" else y.data_ptr()
        assert strides == x.strides
        assert address % 16 == x.ctypes.data % 16
        assert framework.to_numpy(y).tobytes() == x.tobytes()


# ---- doctor ----


def test_doctor(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(nvrtc, "driver_version", lambda: None)
    document = json.loads(invoke("doctor", "--json").stdout)
    assert document["exit_code"] == 0
    names = [f["name"] for f in document["findings"]]
    assert {"cupyflash", "driver", "cupy", "GPU", "NVRTC", "cache", "backend"} <= set(names)
    for finding in document["findings"]:
        assert finding["status"] in ("OK", "WARN", "FAIL")


def test_doctor_on_a_machine_with_nothing(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def nothing() -> None:
        raise UnsupportedError("NVRTC: no libnvrtc was found; install one with: pip install 'cupyflash[cu12]'")

    monkeypatch.setattr(doctor_checks, "installed", dict)
    monkeypatch.setattr(doctor_checks, "import_cupy", lambda: (None, "ImportError: no cupy"))
    monkeypatch.setattr(nvrtc, "driver_version", lambda: None)
    monkeypatch.setattr(nvrtc, "find", nothing)
    lines = invoke("doctor").stdout.splitlines()
    warned = {line.split()[1] for line in lines if line.startswith("WARN")}
    assert warned == {"driver", "cupy", "GPU", "NVRTC"}
    assert any("-> pip install 'cupyflash[cu12]'" in line for line in lines)


def test_doctor_finds_two_cupys(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    both = {"cupy-cuda12x": "14.0.0", "cupy-cuda13x": "14.0.0", "numpy": np.__version__}
    monkeypatch.setattr(doctor_checks, "installed", lambda: both)
    text = invoke("doctor", code=7).stdout
    assert "FAIL cupy" in text
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in text


def test_doctor_finds_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(doctor_checks, "installed", lambda: {"cupy-cuda13x": "14.0.0"})
    monkeypatch.setattr(doctor_checks, "import_cupy", lambda: (object(), ""))
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (12, 4))
    text = invoke("doctor", code=7).stdout
    assert "needs a driver of CUDA 13" in text
    assert "FAIL GPU" in text


@pytest.mark.parametrize(
    ("reason", "fix"),
    [("PermissionError: [Errno 13] Permission denied: '~'", "set CUPY_CACHE_DIR to a folder of your own"),
     ("ImportError: libcudart.so.12", "pip install --force-reinstall cupy-cuda12x")],
)  # fmt: skip
def test_doctor_says_how_cupy_can_be_imported(
    reason: str, fix: str, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    """Without a home folder CuPy cannot make its cache, and is not damaged."""
    monkeypatch.setattr(doctor_checks, "installed", lambda: {"cupy-cuda12x": "14.0.0"})
    monkeypatch.setattr(doctor_checks, "import_cupy", lambda: (None, reason))
    text = invoke("doctor", code=7).stdout
    assert f"cannot be imported ({reason})\n" in text
    assert f"-> {fix}\n" in text


def test_doctor_reaches_its_end(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def broken() -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(doctor_checks.cache, "default", broken)
    text = invoke("doctor", code=7).stdout
    assert "OSError: disk on fire" in text
    assert "backend" in text


# ---- bench ----

TINY = ("--backend", "cpu", "--quick", "--rounds", "1", "--head-dim", "16", "--seqlens", "16,32", "--tokens", "32",
        "--hidden", "16")  # fmt: skip


def test_bench_cpu(tmp_path: Path, invoke: Invoke) -> None:
    table = tmp_path / "rows.csv"
    result = invoke("bench", *TINY, "--framework", "numpy", "--causal", "--csv", str(table), "--host", "--json")
    document = json.loads(result.stdout)
    rows = document["rows"]
    assert [(r["seqlen"], r["direction"]) for r in rows] == [(16, "fwd"), (32, "fwd"), (16, "bwd"), (32, "bwd")]
    assert all(r["causal"] and r["tflops"] > 0 and r["peak_bytes"] > 0 for r in rows)
    assert document["host_us"]["cupyflash"]["fwd"] > 0
    assert document["host_us"]["cupyflash"]["fwd_new_lengths"] > 0
    with table.open() as f:
        assert [int(r["seqlen"]) for r in csv.DictReader(f)] == [16, 32, 16, 32]


def test_bench_against_a_peer(tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "speed.png", tmp_path / "speed.svg"]
    options = ("--against", "math,flash2", "--no-causal", "--pass", "fwd", "--framework", "torch")
    result = invoke("bench", *TINY, *options, "--plot", str(pictures[0]))
    assert "cupyflash / math, forward: geometric mean" in result.stdout
    assert "flash2: needs a GPU" in result.stdout
    invoke("bench", *TINY, "--framework", "numpy", "--memory-only", "--plot", str(pictures[1]))
    assert [p.read_bytes()[:4] for p in pictures] == [b"\x89PNG", b"<?xm"]


def test_bench_usage(invoke: Invoke) -> None:
    assert ".png" in invoke("bench", *TINY, "--plot", "speed.pdf", code=2).output
    invoke("bench", *TINY, "--against", "flash9", code=2)
    invoke("bench", *TINY, "--framework", "cupy", code=2)
    assert "--batch" in invoke("bench", *TINY, "--batch", "2", code=2).output
    assert "does not divide the 1 heads" in invoke("bench", *TINY, "--heads-k", "2", code=2).output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seqlens", "0", "expected lengths from 1 to"),
        ("--seqlens", "64,-5", "got -5"),
        ("--seqlens", "1000000000000", "got 1000000000000"),
        ("--seqlens", ",", "holds no value"),
        ("--head-dim", "", "holds no value"),
        ("--pass", " , ", "holds no value"),
        ("--csv", "missing/rows.csv", "cannot be written: No such file or directory"),
        ("--plot", "missing/rows.png", "cannot be written: No such file or directory"),
        ("--csv", "file/rows.csv", "cannot be written: Not a directory"),
        ("--csv", ".", "is a directory"),
    ],
)
def test_bench_knows_wrong_arguments_before_it_runs(
    option: str, value: str, message: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_anyway(*_: Any) -> None:
        raise AssertionError("measured in vain")

    monkeypatch.setattr("cupyflash.cli.bench.main.measure", run_anyway)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    output = invoke("bench", "--backend", "cpu", "--quick", option, value, code=2).output
    assert message in " ".join(output.split())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_bench_key_heads_batch_and_window(invoke: Invoke) -> None:
    """What the options say is what runs; torch's own attention is left out of windows, with a reason."""
    pytest.importorskip("torch")
    size = ("--head-dim", "16", "--hidden", "64", "--heads-k", "2", "--batch", "3", "--seqlens", "24", "--window", "7")
    options = ("--backend", "cpu", "--quick", "--rounds", "1", "--against", "math", "--causal", "--pass", "fwd", *size)
    found = json.loads(invoke("bench", *options, "--json").stdout)
    ours, math = found["rows"]
    shape = {"batch": 3, "heads": 4, "heads_k": 2, "window": 7, "seqlen": 24}
    assert {k: ours[k] for k in shape} == shape
    assert ours["tflops"] > 0
    assert ours["ideal_bytes"] == Cell("bf16", 16, True, 24, 3, 4, 2).ideal_bytes("fwd")
    assert (math["ms"], "sliding window" in math["reason"]) == (None, True)
    assert found["ratios"] == {}


def test_bench_with_a_softcap(tmp_path: Path, invoke: Invoke) -> None:
    """Ours runs with it, CSV, JSON and the table say it, and peers without it say why they do not run."""
    pytest.importorskip("torch")
    table = tmp_path / "rows.csv"
    size = ("--head-dim", "16", "--hidden", "64", "--batch", "1", "--seqlens", "24", "--softcap", "2.5")
    options = ("--backend", "cpu", "--quick", "--rounds", "1", "--against", "math,flex", "--causal", *size)
    result = invoke("bench", *options, "--framework", "torch", "--csv", str(table), "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [row["softcap"] for row in rows] == [2.5] * 6
    reasons = {row["implementation"]: row["reason"] for row in rows}
    why = "torch's scaled_dot_product_attention has no softcap"
    assert reasons == {"cupyflash": "", "math": why, "flex": "needs a GPU"}
    assert "causal, softcap 2.5" in result.stderr
    with table.open() as f:
        assert {row["softcap"] for row in csv.DictReader(f)} == {"2.5"}
    for wrong in ("0", "1e4", "much"):
        invoke("bench", *options[:-1], wrong, code=2)


def test_bench_gives_the_softcap_to_calls(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    given = []
    for name in ("attention", "attention_backward"):
        original = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *x, of=original, **o: (given.append(o["softcap"]), of(*x, **o))[1])
    invoke("bench", *TINY, "--framework", "numpy", "--quick", "--rounds", "1", "--softcap", "3", "--pass", "both")
    assert set(given) == {3.0}


def test_bench_with_slopes(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    """Calls get them, JSON and the table say it, and peers without ALiBi say so."""
    given = []
    for name in ("attention", "attention_backward"):
        original = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *x, of=original, **o: (given.append(o["alibi_slopes"]), of(*x, **o))[1])
    result = invoke("bench", *TINY, "--framework", "numpy", "--quick", "--rounds", "1", "--alibi", "--json")
    assert {row["alibi"] for row in json.loads(result.stdout)["rows"]} == {True}
    assert ", ALiBi" in result.stderr
    for slopes in given:
        ratios = slopes[1:] / slopes[:-1]
        assert slopes[-1] == 2.0**-8
        np.testing.assert_allclose(ratios, 2.0 ** (-8 / len(slopes)), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="FlashAttention-4 has no ALiBi"):
        bench_peers.fa4(Cell("bf16", 64, True, 24, 1, 2, 2, alibi=True))


def test_bench_with_sinks(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    """Calls get them, JSON and the table say it, and peers without sinks say so."""
    given = []
    for name in ("attention", "attention_backward"):
        original = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *x, of=original, **o: (given.append(o["sink"]), of(*x, **o))[1])
    result = invoke("bench", *TINY, "--framework", "numpy", "--quick", "--rounds", "1", "--sink", "--json")
    assert {row["sink"] for row in json.loads(result.stdout)["rows"]} == {True}
    assert ", sinks" in result.stderr
    assert all(sink.shape for sink in given)
    cell = Cell("bf16", 64, True, 24, 1, 2, 2, sink=True)
    assert bench_peers.sdpa_lacks(cell) == "sinks"
    with pytest.raises(NotImplementedError, match="FlashAttention-2 has no sinks"):
        bench_peers.flash2_varlen(cell, None)


def test_ratios() -> None:
    cells = [Cell("bf16", 64, False, n, 1, 1, 1) for n in (1024, 2048)]
    times = {"cupyflash": (1.0, 2.0), "flash2": (2.0, 1.0), "cudnn": (None, 8.0)}
    rows = [bench_report.Row(c, "fwd", n, ms and Timing((ms,)), None) for n, pair in times.items()
            for c, ms in zip(cells, pair, strict=True)]  # fmt: skip
    summary = bench_report.ratios(rows)
    assert summary["flash2"]["fwd"]["geomean"] == pytest.approx(1.0)
    assert summary["flash2"]["fwd"]["worst"] == pytest.approx(0.5)
    assert summary["flash2"]["fwd"]["worst_cell"]["seqlen"] == 2048
    assert (summary["cudnn"]["fwd"]["geomean"], summary["cudnn"]["fwd"]["cells"]) == (pytest.approx(4.0), 1)
    assert list(summary) == ["flash2", "cudnn", "best"]
    assert summary["best"]["fwd"]["geomean"] == pytest.approx(1.0)
    assert (summary["best"]["fwd"]["below_par"], summary["cudnn"]["fwd"]["below_par"]) == (1, 0)
    best = [d["best"] for d in bench_report.documents(rows)]
    assert best == [pytest.approx(2.0), pytest.approx(0.5), None, None, None, None]


def test_tensor_core_cycles(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    """Two blocks that lived 1000 cycles in 500 ns each, and half of what the tensor cores could do meanwhile."""
    counts = np.array([[1000, 500], [1000, 500]])
    assert bench_cycles.utilisation(4096 * 1000, counts[:, 0], counts[:, 1]) == (50.0, 2.0)
    options = (*TINY, "--framework", "numpy", "--causal")
    assert "MMA %" not in invoke("bench", *options).stdout

    monkeypatch.setattr(bench_cycles, "LIBRARIES", {Clock: arrays.NUMPY})
    monkeypatch.setattr(clocks, "forward_clocks", lambda *arguments: counts, raising=False)
    rows = json.loads(invoke("bench", *options, "--json").stdout)["rows"]
    assert {(r["direction"], r["clock_ghz"]) for r in rows} == {("fwd", 2.0), ("bwd", None)}
    assert rows[0]["tensor_core_percent"] == pytest.approx(100 * 4 * 16 * 136 * 2 / (4096 * 2000))
    assert re.search(r"MMA % +GHz", invoke("bench", *options).stdout)


# ---- compile and cache ----


def kernels_of_calls(arch: str, dtypes: tuple[str, ...], head_dim: int) -> set[Variant]:
    """What the plan takes for dense and causal calls with arrays of any strides and alignment."""
    memory = [{"aligned": True, "tma": True}, {"aligned": True, "tma": False}, {"aligned": False, "tma": False}]
    problems = [Problem(dtype, 2, 99, 99, 4, heads_k, head_dim, 0.125, (None, right)) for dtype in dtypes
                for right in (None, 0) for heads_k in (2, 4)]  # fmt: skip
    target = device.Device.synthetic(arch)
    return {v for p in problems for options in memory for v in variants_of_calls(p, target, **options)}


def test_compile_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    needs_nvrtc()
    pretend_to_compile(monkeypatch)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "out"
    done = invoke("compile", "--arch", "sm_90", "--dtype", "fp16", "--head-dim", "32", "--out", str(out), "--json")
    rows = json.loads(done.stdout)["compiled"]
    expected = kernels_of_calls("sm_90", ("fp16",), 32)
    assert sorted(r["symbol"] for r in rows) == sorted(v.symbol for v in expected)
    assert {r["arch"] for r in rows} == {"sm_90", "sm_90a"}
    assert all(r["registers"] > 0 and "_fp16_" in r["symbol"] for r in rows)
    layer = [path.parent.name for path in (out / "precompiled").glob("*/*.cubin")]
    hopper = sum(v.arch_suffix == "a" for v in expected)
    plain = len(expected) - hopper
    assert (layer.count("sm_90"), layer.count("sm_90a")) == (plain, hopper)

    assert invoke("cache", "path").stdout.strip() == str(tmp_path / "cache")
    folder = {"path": str(tmp_path / "cache")}
    assert json.loads(invoke("cache", "path", "--json").stdout) == {"command": "cache path"} | folder
    assert len(json.loads(invoke("cache", "info", "--json").stdout)["entries"]) == len(expected)
    assert re.search(rf"sm_90 .* {plain} ", invoke("cache", "info").stdout)
    invoke("cache", "clear", code=1, input="n\n")
    assert f"{len(expected)} kernels removed" in invoke("cache", "clear", "--yes").stdout
    assert json.loads(invoke("cache", "info", "--json").stdout)["entries"] == []
    nothing = {"command": "cache clear", "removed": 0, "errors": []} | folder
    assert json.loads(invoke("cache", "clear", "--json").stdout) == nothing


@pytest.mark.parametrize("preset", ["common", "all"])
def test_compile_with_a_softcap(preset: str) -> None:
    """The same again with one; no cap is compiled in."""
    target = device.Device.synthetic("sm_90")
    plain = set(variants_of(preset, target, ("bf16",), (64, 200)))
    both = set(variants_of(preset, target, ("bf16",), (64, 200), softcap=True))
    assert plain < both
    for window in ((None, None), (None, 0)):
        problem = Problem("bf16", 2, 99, 99, 4, 2, 200, 0.125, window, softcap=30.0)
        for memory in MEMORY:
            assert set(variants_of_calls(problem, target, **memory)) <= both
    assert all(v.softcap for v in both - plain)


def test_compile_for_another_head_dim_of_v(invoke: Invoke) -> None:
    """MLA's, also over a cache, in place of those of q's and k's."""
    target = device.Device.synthetic("sm_90")
    plain = set(variants_of("common", target, ("bf16",), (192,), packed=True, with_cache=True))
    found = set(variants_of("common", target, ("bf16",), (192,), packed=True, with_cache=True, head_dim_v=128))
    assert not plain & found
    for window, packed in itertools.product(((None, None), (None, 0)), (False, True)):
        problem = Problem("bf16", 2, 99, 99, 4, 2, 192, 0.125, window, packed=packed, head_dim_v=128)
        for memory in MEMORY:
            assert set(variants_of_calls(problem, target, **memory)) <= found
    step = over_cache("bf16", 192, 64, head_dim_v=128)
    assert set(variants_over_cache(step, target, aligned=True, tma=True)) <= found
    refused = invoke("compile", "--arch", "sm_90", "--head-dim", "192", "--head-dim-v", "100", code=2).stderr
    assert "100 is not a multiple of 8" in refused


@pytest.mark.parametrize("preset", ["common", "all"])
def test_compile_with_slopes(preset: str) -> None:
    """The same again with ALiBi's, fixed and learned, of any shape."""
    target = device.Device.synthetic("sm_90")
    plain = set(variants_of(preset, target, ("bf16",), (96, 200), packed=True))
    both = set(variants_of(preset, target, ("bf16",), (96, 200), packed=True, alibi=True))
    assert plain < both
    for window, more in (((None, None), {"alibi": 1}), ((None, 0), {"alibi": 2, "packed": True})):
        problem = Problem("bf16", 2, 99, 99, 4, 2, 200, 0.125, window, **more)  # type: ignore[arg-type]
        for memory in MEMORY:
            for learned in (False, True):
                assert set(variants_of_calls(problem, target, dalibi=learned, **memory)) <= both
    others = "bwd_slopes", "bwd_delta", "bwd_convert"  # whose tile that of sm80 decides: learned ones have their own
    assert all("alibi" in v.symbol or v.function in others for v in both - plain)


def test_compile_with_a_bias() -> None:
    """The same with one of either dtype, fixed and learned, read in pairs or not, packed or not."""
    target = device.Device.synthetic("sm_90")
    plain = set(variants_of("common", target, ("bf16",), (64, 200), packed=True))
    both = set(variants_of("common", target, ("bf16",), (64, 200), packed=True, bias=True))
    assert plain < both
    for dtype, own, packed in (("bf16", (True,) * 4, False), ("fp32", (False, False, True, True), True)):
        problem = Problem("bf16", 2, 99, 99, 4, 2, 200, 0.125, (None, 0), packed=packed, bias=Bias(dtype, own))
        for known in itertools.product((False, True), repeat=2):
            more = dict(zip(("dbias", "paired_bias"), known, strict=True))
            for memory in MEMORY:
                assert set(variants_of_calls(problem, target, **more, **memory)) <= both
    of_masks = "mask_tiles", "block_mask"  # what masks alone become
    of_tiles = "bwd_delta", "bwd_convert"  # of other tiles, which packed ones have with it
    assert all("bias" in v.symbol or any(x in v.symbol for x in (*of_masks, *of_tiles)) for v in both - plain)


def test_compile_with_sinks() -> None:
    """The same with sinks, fixed and learned, packed or not."""
    target = device.Device.synthetic("sm_90")
    plain = set(variants_of("common", target, ("bf16",), (64, 200), packed=True))
    both = set(variants_of("common", target, ("bf16",), (64, 200), packed=True, sink=True))
    assert plain < both
    for window, packed in (((None, None), False), ((None, 0), True)):
        problem = Problem("bf16", 2, 99, 99, 4, 2, 200, 0.125, window, packed=packed, sink=True)
        for memory in MEMORY:
            for learned in (False, True):
                assert set(variants_of_calls(problem, target, dsink=learned, **memory)) <= both
    assert all("sink" in v.symbol for v in both - plain)


@pytest.mark.parametrize("preset", ["common", "all"])
def test_compile_with_packed_sequences(preset: str) -> None:
    """The same again for attention_varlen, with and without a softcap."""
    target = device.Device.synthetic("sm_90")
    plain = set(variants_of(preset, target, ("fp16",), (64, 200), softcap=True))
    both = set(variants_of(preset, target, ("fp16",), (64, 200), softcap=True, packed=True))
    assert plain < both
    for window, softcap in (((None, None), None), ((None, 0), 30.0)):
        problem = Problem("fp16", 9, 99, 99, 4, 2, 200, 0.125, window, softcap=softcap, packed=True)
        for memory in MEMORY:
            assert set(variants_of_calls(problem, target, **memory)) <= both
    assert all(v.packed for v in both - plain)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compile_with_ranges_of_keys(arch: str) -> None:
    """The same for kv_range, with and without a softcap, packed or not."""
    target = device.Device.synthetic(arch)
    plain = set(variants_of("common", target, ("fp16",), (64, 200), softcap=True, packed=True))
    both = set(variants_of("common", target, ("fp16",), (64, 200), softcap=True, packed=True, kv_range=True))
    assert plain < both
    for window, softcap, packed in (((None, None), None, False), ((None, 0), 30.0, False), ((None, 0), None, True)):
        problem = Problem("fp16", 9, 99, 99, 4, 2, 200, 0.125, window, False, softcap, packed, kv_range=True)
        for memory in MEMORY:
            assert set(variants_of_calls(problem, target, **memory)) <= both
    assert all(v.kv_range for v in both - plain)


def test_cache_without_a_folder(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "~nobody-is-called-so/kernels")
    for command in ("path", "clear"):
        assert "set CUPYFLASH_CACHE_DIR to one of your own" in invoke("cache", command, code=4).output
    assert json.loads(invoke("cache", "info", "--json").stdout)["path"] is None
    assert "set CUPYFLASH_CACHE_DIR to one of your own" in invoke("cache", "info").output
    assert "new kernels are not kept" in invoke("doctor").output
    needs_nvrtc()
    assert "--out must be given" in invoke("compile", "--arch", "sm_80", code=2).output


def test_compile_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    needs_nvrtc()
    monkeypatch.setattr(jit, "precompile", refuse)
    result = invoke("compile", "--arch", "sm_80", "--head-dim", "64", "--out", str(tmp_path), code=5)
    assert "line 7: error: no such thing" in result.stderr
    count = len(kernels_of_calls("sm_80", ("bf16", "fp16"), 64))
    assert f"{count} of {count} kernels did not compile" in result.stderr


def test_compile_for_an_architecture_that_nvrtc_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    """Known before anything is compiled."""
    needs_nvrtc()
    compiled = pretend_to_compile(monkeypatch)
    monkeypatch.setattr(nvrtc.find(), "archs", ("sm_80", "sm_90"))
    result = invoke("compile", "--arch", "sm_90,sm_110", "--out", str(tmp_path), code=4)
    assert "knows no architecture for this GPU (sm_110); it knows sm_80, sm_90" in result.stderr
    assert compiled == []


def test_compile_usage(invoke: Invoke) -> None:
    invoke("compile", code=2)
    assert "sm_120" in invoke("compile", "--arch", "sm_70", code=2).output
    invoke("compile", "--arch", "sm_80", "--head-dim", "12", code=2)
    invoke("compile", "--arch", "sm_80", "--dtype", "fp64", code=2)


def test_version(invoke: Invoke) -> None:
    assert cupyflash.__version__ in invoke("--version").stdout
