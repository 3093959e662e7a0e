"""What the command line says where something is wrong: to people, as a JSON document, and by its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cupyflash import attention, cli
from cupyflash.cli import cache as cli_cache
from cupyflash.cli import watchdog
from cupyflash.cli.bench import arguments as bench_arguments
from cupyflash.compile import cubin, layer
from cupyflash.launch import run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("without_gpu")


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("explain", "--head-dim", "7"), 4),
        (("explain", "--window", "x"), 2),
        (("bench",), 3),
        (("bench", "--bias", "x"), 2),
        (("verify", "--timeout", "0", "--backend", "cpu", "--case", "dense-d64", "--head-dim", "128"), 2),
        (("compile", "--arch", "sm_110"), 4),
    ],
)
def test_an_error_is_a_document_too(arguments: tuple[str, ...], code: int) -> None:
    """One document, and the message for people beside it."""
    result = invoke(*arguments, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["exit_code"], document["command"]) == (code, code, arguments[0])
    assert document["error"].splitlines()[-1] in result.stderr
    assert set(document) == {"command", "error", "exit_code"}
    assert not invoke(*arguments).stdout.startswith("{")


def test_a_document_is_not_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: Any, gpu: Any) -> None:
        cli.output.emit({"command": "explain"})
        raise KeyboardInterrupt

    monkeypatch.setattr("cupyflash.cli.explain.main.explain", interrupted, raising=False)
    monkeypatch.setattr("cupyflash.cli.explain.cached.explain", interrupted)
    result = invoke("explain", "--with-cache", "--no-compile", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (130, {"command": "explain"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--timeout", "nan"), "nan is not a finite number"),
        (("verify", "--timeout", "inf"), "inf is not a finite number"),
        (
            ("verify", "--timeout", "0", "--case", "cache-many-queries", "--dtype", "fp32"),
            "has no fp32, but fp16, bf16",
        ),
        (("verify", "--timeout", "0", "--case", "cache-one-query", "--head-dim", "128"), "has head_dim 64"),
        (("bench", "--backend", "cpu", "--softcap", "nan"), "nan is not a finite number"),
        (("bench", "--backend", "cpu", "--dropout", "nan"), "nan is not"),
        (("bench", "--backend", "cpu", "--mask", ""), "'' is not made of the letters"),
        (("explain", "--score-mod", "score + a[h]", "--mod-array", "a:fp32:²"), "is not NAME:DTYPE:SIZES"),
        (("explain", "--score-mod", "score + a[h]", "--mod-array", "a:fp32:8:9"), "is not NAME:DTYPE:SIZES"),
        (
            ("explain", "--score-mod", "score + a[h]", "--mod-array", "a:fp32:8", "--mod-array", "a:fp32:9"),
            "is the second one called a",
        ),
        (("run", "--nonsense", "x.py"), "No such option"),
        (("run", "--flash-attn", "--nonsense", "x.py"), "No such option"),
        (("run", "--flash-attn", "-m", "no.such.module"), "no module 'no.such.module'"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_mods_read_arrays_of_fp64() -> None:
    result = invoke("explain", "--no-compile", "--score-mod", "score + a[h]", "--mod-array", "a:fp64:16")
    assert result.exit_code == 0, result.output


def test_a_run_that_does_not_fit_the_memory() -> None:
    huge = "--seqlens", "64", "--batch", "99999999999", "--head-dim", "64"
    result = invoke("bench", "--backend", "cpu", "--quick", *huge, "--causal", "--pass", "fwd", "--framework", "numpy")
    assert result.exit_code == 4
    assert "give a smaller --batch" in result.output


def test_a_poll_that_ends_in_years(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a poll can be; what is told ends it, and nothing else before its time."""

    class Pipe:
        polls = 0

        def poll(self, seconds: float) -> bool:
            assert 0 <= seconds <= 86400
            self.polls += 1
            return self.polls == 3

    pipe: Any = Pipe()
    assert watchdog._is_told(pipe, time.monotonic() + 1e300)
    assert pipe.polls == 3
    assert not watchdog._is_told(pipe, time.monotonic() - 1)


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [("CUPYFLASH_FAMILY", "foo", "FAIL"), ("CUPYFLASH_DEBUG", "yes", "WARN"), ("CUPYFLASH_DEBUG", "1", "OK"),
     ("CUPYFLASH_FAMILY", "sm80", "OK"), ("CUPYFLASH_BACKEND", "", "OK")],
)  # fmt: skip
def test_doctor_looks_at_variables(name: str, value: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    lines = [line for line in invoke("doctor").stdout.splitlines() if name in line]
    assert lines[0].split()[0] == level


def test_a_variable_that_is_empty_is_not_set(monkeypatch: pytest.MonkeyPatch, rng: Any) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "")
    assert run.asked_backend() == "auto"
    q = rng.standard_normal((1, 3, 1, 8)).astype("float32")
    assert attention(q, q, q).shape == q.shape


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "cupyflash", "explain", "--no-compile"], stdout=full, cwd=ROOT,
                              stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    assert done.returncode == 4
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cache_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the way is said, not raised."""
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / ("x" * 300)))
    result = invoke("cache", "clear", "--yes")
    assert "Traceback" not in result.output


@pytest.mark.needs("torch")
def test_a_module_of_a_package_that_imports_flash_attn(tmp_path: Path) -> None:
    """Nothing of it is imported before the name stands for cupyflash."""
    package = tmp_path / "trained"
    package.mkdir()
    (package / "__init__.py").write_text("import flash_attn\n")
    (package / "by.py").write_text("import sys\nprint('by', sys.argv[1:])\n")
    command = [sys.executable, "-m", "cupyflash", "run", "--flash-attn", "-m", "trained.by", "--json"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "by ['--json']\n"), done.stderr


@pytest.mark.needs("torch")
def test_a_script_stays_main_and_knows_where_it_is(tmp_path: Path) -> None:
    """As from Python: for threads that outlive its last line, and wherever it goes."""
    (tmp_path / "script.py").write_text(
        "import os, pickle, sys, threading, time\n"
        "class A: pass\n"
        "def late():\n"
        "    time.sleep(0.3)\n"
        "    print(len(pickle.dumps(A())) > 0, sys.argv)\n"
        "threading.Thread(target=late).start()\n"
        "os.chdir('/')\n"
        "print(os.path.isfile(__file__))\n"
    )
    command = [sys.executable, "-m", "cupyflash", "run", "--flash-attn", "script.py", "more"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\nTrue ['script.py', 'more']\n"), done.stderr


def run_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    command = [sys.executable, "-m", "cupyflash", *arguments]
    return subprocess.run(command, env=environment, text=True, timeout=120, **{"capture_output": True} | options)


def test_a_path_that_the_terminal_cannot_write(tmp_path: Path) -> None:
    folder = {"CUPYFLASH_CACHE_DIR": str(tmp_path / "käche"), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run_command("cache", "info", env=folder, encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert r"k\xe4che" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_below_the_help() -> None:
    with open("/dev/full", "w") as full:
        done = run_command("--help", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr


def test_nobody_is_there_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr("cupyflash.compile.cache.Cache.entries", lambda self: [None])
    assert cli_cache.clear.callback is not None
    with pytest.raises(click.UsageError, match="give --yes"):
        cli_cache.clear.callback(precompiled=False, yes=False, as_json=False)


def test_options_before_the_command() -> None:
    result = invoke("--json", "explain")
    assert (result.exit_code, json.loads(result.stdout)["exit_code"]) == (2, 2)


@pytest.mark.parametrize("more", [[], ["--with-cache"]])
def test_no_head_dim_of_v(more: list[str]) -> None:
    result = invoke("explain", "--no-compile", "--arch", "sm_90", "--head-dim-v", "0", *more)
    assert result.exit_code != 0
    assert "expected a head_dim of at least 8, got 0" in result.output
    assert invoke("bench", "--backend", "cpu", "--head-dim-v", "0").exit_code == 2


def test_folders_that_may_not_be_looked_into(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `Path.exists` and `is_symlink` of Python 3.11 tell of folders that only others may enter."""

    def refuse(self: Path, *_: Any, **__: Any) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refuse)
    monkeypatch.setattr(Path, "is_symlink", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(click.BadParameter, match="cannot be written: Permission denied"):
        bench_arguments.check_writable("--csv", tmp_path / "x.csv")
    assert layer.folders(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_in_the_cache(tmp_path: Path) -> None:
    """Nobody waits for who might write to it."""
    path = tmp_path / f"{'0' * 40}.json"
    os.mkfifo(path)
    assert cubin.facts_of(path) is None
