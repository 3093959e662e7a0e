"""A case that hangs, or takes the process with it, ends `cupyflash verify` with its name."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cupyflash.cli import watchdog

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 8  # enough for the imports of the child on a busy machine
# Run as a program: its child imports it again, and so has the same fault.
PROGRAM = """
import ctypes, os, signal, sys, time
from cupyflash.cli import watchdog
at_first = [*map(os.environ.get, watchdog.BLAS_LIMITS)]
from cupyflash import api, cli
right = api.attention

def say(*words):
    os.write(2, (" ".join(map(str, words)) + chr(10)).encode())  # at once: print writes word by word

def attention(*arrays, **options):
    if options["causal"]:
        say("pid", os.getpid())
        {fault}
    return right(*arrays, **options)

api.attention = attention
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which what a shell starts in the background ignores
    cli.main(sys.argv[1:], prog_name="cupyflash")
"""
FAULTS = {
    "sleeps": "time.sleep(1000)",
    "sleeps with Python's lock held": "ctypes.PyDLL(None).sleep(1000)",
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "says its threads": "say('threads', *at_first, *map(os.environ.get, watchdog.BLAS_LIMITS))",
}


def start(tmp_path: Path, fault: str, *arguments: str) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(fault=FAULTS[fault]))
    command = [sys.executable, str(program), "verify", "--level", "smoke", "--backend", "cpu", "--dtype", "fp32"]
    environment = {name: x for name, x in os.environ.items() if name not in watchdog.BLAS_LIMITS}
    environment |= {"PYTHONPATH": str(ROOT), "MKL_NUM_THREADS": "3"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True)


def assert_gone(stderr: str) -> None:
    """No process of the run is left."""
    (pid,) = re.findall(r"^pid (\d+)$", stderr, flags=re.MULTILINE)
    for _ in range(100):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def start_with(tmp_path: Path, fault: str, as_json: bool) -> subprocess.Popen[str]:
    return start(tmp_path, fault, "--timeout", str(SECONDS), *(["--json"] if as_json else []))


def assert_named(process: subprocess.Popen[str], why: str, as_json: bool, before: str = "") -> None:
    """The process ends and says why it has; `before`: what was read of its messages."""
    stdout, rest = process.communicate(timeout=60)
    stderr = before + rest
    assert_gone(stderr)
    verdict = f"FAILED: case causal-d64 (fp32) {why}; what comes after it was not run"
    reproduce = "cupyflash verify --case causal-d64 --dtype fp32 --framework numpy --backend cpu"
    text = stderr if as_json else stdout
    assert f"\n{verdict}\nreproduce: {reproduce}\n" in text
    assert "Traceback" not in stderr
    if as_json:
        document = json.loads(stdout)
        assert (document["verdict"], document["reproduce"]) == (verdict, reproduce)
        assert (document["exit_code"], document["ran"], document["gpu"]) == (process.returncode, ["cpu"], None)
        assert [(c["case"], c["passed"]) for c in document["cases"]] == [("dense-d64", True)]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_case_that_crashes_is_named(as_json: bool, tmp_path: Path) -> None:
    process = start_with(tmp_path, "crashes", as_json)
    assert_named(process, "ended the process (SIGSEGV)", as_json)
    assert process.returncode == 1


def test_a_case_that_hangs_is_named(tmp_path: Path) -> None:
    """One run begins when the other hangs, so that they wait at the same time."""
    runs = []
    for fault, as_json in (("sleeps", False), ("sleeps with Python's lock held", True)):
        process = start_with(tmp_path, fault, as_json)
        assert process.stderr is not None
        read = ""
        while "pid" not in read and (line := process.stderr.readline()):
            read += line
        runs.append((process, as_json, read, time.monotonic()))
    for process, as_json, read, began in runs:
        assert_named(process, f"did not end within {SECONDS} s", as_json, read)
        assert process.returncode == 6
        assert time.monotonic() - began >= SECONDS - 1  # it is counted from the step before


def test_ctrl_c_ends_both_processes(tmp_path: Path) -> None:
    process = start(tmp_path, "sleeps with Python's lock held")
    assert process.stderr is not None
    line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 130
    assert rest == "interrupted\n"
    assert_gone(line)


def test_many_short_steps_may_take_longer() -> None:
    """The time is that of a step, not of the run; a result starts it again, as a step does."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def speak() -> None:
        for i in range(6):
            theirs.send((f"step {i}", {"last": i}, None) if i % 2 else (None, {}, ("kernels", i)))
            time.sleep(0.25)
        theirs.close()

    thread = threading.Thread(target=speak)
    thread.start()
    progress, hangs = watchdog._listen(ours, 1.0)
    thread.join()
    assert not hangs
    assert progress == watchdog.Progress("step 5", {"last": 5, "kernels": [0, 2, 4]})


def test_silence_is_noticed() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send(("a step", {}, None))
    assert watchdog._listen(ours, 0.2) == (watchdog.Progress("a step"), True)


def test_exit_codes_of_the_child(tmp_path: Path) -> None:
    """What the child found is the exit code, under a watchdog or not."""
    for timeout in ("0", "60"):
        command = [sys.executable, "-m", "cupyflash", "verify", "--case", "no-such-case", "--timeout", timeout]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.count("no case is called") == 1


def test_blas_has_one_thread_unless_the_user_says_how_many(tmp_path: Path) -> None:
    """With more, the reference waits beside compilations on all cores."""
    before = dict(os.environ)
    run = start(tmp_path, "says its threads")
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 0
    # As BLAS reads it when it is loaded, and behind that for our own threads.
    assert set(re.findall(r"^threads (.*)$", stderr, flags=re.MULTILINE)) == {"1 1 3 1 None None 3 None"}
    with watchdog._one_blas_thread():
        pass
    assert dict(os.environ) == before
