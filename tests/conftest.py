"""What all tests share: threads, the folder of compiled kernels, seeds, and which tests may be skipped.

``@pytest.mark.gpu`` marks a test that launches kernels, ``@pytest.mark.needs("torch", "g++")`` one that needs a module
or program; where it is missing the test is skipped. ``CUPYFLASH_REQUIRE=torch,jax,g++`` says what must be there: the
session stops when one of them (or "gpu") is missing, and any skip but that of a gpu test counts as a failure.
``needs("torch>=2.6")`` asks for a version; ``CUPYFLASH_REQUIRE=torch==2.4`` for that one, and bears such skips alone.
"""
# ruff: noqa: E402

from __future__ import annotations

import os
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Before NumPy loads: one thread a process, since pytest-xdist already runs one process a core.
for _name in runpy.run_path(str(ROOT / "cupyflash" / "cpu" / "workers.py"))["BLAS_LIMITS"]:
    os.environ.setdefault(_name, "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several JAX processes share one GPU
os.environ.setdefault("MPLBACKEND", "Agg")
if not os.path.exists("/dev/nvidiactl"):
    # Without a GPU JAX and Inductor compile each program for one run; on one, what it is compared with is to be quick.
    _flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_optimization_level" not in _flags:
        os.environ["XLA_FLAGS"] = f"{_flags} --xla_backend_optimization_level=0".lstrip()
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # else it tries out vectors, in processes of their own
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # and starts others, which load torch, to compile

import functools
import gc
import importlib.metadata
import importlib.util
import logging
import random
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterator

import numpy as np
import pytest

REQUIRED = tuple(filter(None, os.environ.get("CUPYFLASH_REQUIRE", "").split(",")))
MAX_WORKERS = 8  # each holds a CUDA context of about half a GiB

# The collector looks for cycles at so many new objects; at 700, the default, that took 2 % of a whole run.
gc.set_threshold(50_000)

if importlib.util.find_spec("hypothesis"):
    import hypothesis

    # Kernels compile inside examples, so time limits mean nothing; CI draws the same examples each time.
    hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
    hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@functools.cache
def missing(name: str) -> str | None:
    """Why the thing that a test needs is not there, or None when it is."""
    if name == "gpu":
        return _missing_gpu()
    name, sign, version = re.fullmatch(r"(.*?)(?:(==|>=)(.*))?", name).groups()
    found = shutil.which(name) if name.endswith("++") else importlib.util.find_spec(name)
    if not found or not sign:
        return None if found else f"{name} is not installed"
    installed, wanted = (tuple(map(int, x.split(".")[:2])) for x in (importlib.metadata.version(name), version))
    fits = installed == wanted if sign == "==" else installed >= wanted
    return None if fits else f"{name} is {'.'.join(map(str, installed))}"


def _missing_gpu() -> str | None:
    if os.environ.get("CUPYFLASH_BACKEND") == "cpu":
        return "CUPYFLASH_BACKEND=cpu"
    from cupyflash.gpu import device

    if not device.count():
        return device.why_none()
    gpu = device.Device.of(0)
    return None if gpu.capability >= device.MIN_CAPABILITY else f"{gpu.name} has compute capability {gpu.capability}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulator-seeds", type=int, default=1, metavar="N", help="run each kernel on the CPU in N random orders"
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run each case on the CPU in all modes, dtypes and families, not in turn; compile all kernels everywhere",
    )


@pytest.hookimpl(trylast=True)  # ids end with the seed's number
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames and metafunc.module.__name__.rpartition(".")[2].startswith("test_emulator"):
        metafunc.parametrize("seed", range(metafunc.config.getoption("--emulator-seeds")), indirect=True)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist inherits the environment of its controller
        return
    for name in REQUIRED:
        if reason := missing(name):
            raise pytest.UsageError(f"CUPYFLASH_REQUIRE={','.join(REQUIRED)}: {reason}")
    os.environ["CUPYFLASH_CACHE_DIR"] = str(_cache_folder(config))


def _cache_folder(config: pytest.Config) -> Path:
    """A folder for compiled kernels: never the user's own, kept from run to run (`--cache-clear` empties it)."""
    try:
        folder = config.cache.mkdir("cupyflash")
        folder.chmod(0o700)
    except (AttributeError, OSError):  # -p no:cacheprovider, or a checkout that cannot be written
        folder = Path(tempfile.mkdtemp(prefix="cupyflash-tests-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: one process a core that this process may use, within what the memory of a GPU bears."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ids are the same in every process: pytest-xdist compares them, `rng` draws by them, a person repeats by them."""
    if not config.getoption("--thorough"):
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    for item in items:
        if re.search(r"\b0x[0-9a-f]{4}|\bid='\d", item.nodeid):
            raise pytest.UsageError(f"{item.nodeid}: this id holds an address; give the parameters ids")


_modules_seen = 0


def _forget_what_stays() -> None:
    """The garbage collector need not look at modules and tests each time, for 0.4 s with all of them: they stay."""
    global _modules_seen
    if len(sys.modules) > _modules_seen + 200:
        _modules_seen = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    _forget_what_stays()


def pytest_runtest_logfinish() -> None:
    _forget_what_stays()


def pytest_runtest_setup(item: pytest.Item) -> None:
    names = _needed(item)
    if item.get_closest_marker("gpu"):
        names.append("gpu")
    for name in names:
        if reason := missing(name):
            pytest.skip(f"needs {'a usable GPU' if name == 'gpu' else name}: {reason}")


def _needed(item: pytest.Item) -> list[str]:
    return [name for marker in item.iter_markers("needs") for name in marker.args]


def _is_too_new(item: pytest.Item) -> bool:
    """Whether it needs a later version than the one that is required."""
    asked = {name.partition("==")[0] for name in REQUIRED if "==" in name}
    return any(name.partition(">=")[0] in asked and missing(name) for name in _needed(item) if ">=" in name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not item.get_closest_marker("gpu") and not hasattr(report, "wasxfail") and not _is_too_new(item):
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Where everything is said to be there, a test that was not run has not passed."""
    if REQUIRED and report.skipped:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}: no test may be skipped under CUPYFLASH_REQUIRE={','.join(REQUIRED)}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the name of the test and on nothing else."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Global generators start each test in the same state."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 for libraries that draw from it
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The order of warps and copies on the CPU: the same at every run of a test, another in each test."""
    return zlib.crc32(request.node.nodeid.encode()) % 2**16


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy arrays take the CPU path, wherever the tests run."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands see a machine without a GPU, and what they make of the logger's level does not stay."""
    from cupyflash.gpu import device
    from cupyflash.launch import run

    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    monkeypatch.setattr(run, "backend", lambda: "cpu")
    monkeypatch.setattr(device, "_probe", lambda: (0, "there is no GPU in this test"))
    logger = logging.getLogger("cupyflash")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` measures for as short as it can: these tests look at what it says of times, not at the times."""
    from cupyflash.cli.bench import cycles, main, timing

    at_once = timing.Effort(warm_s=0.0, run_s=0.001)
    for module, name in ((main, "QUICK"), (main, "SUSTAINED"), (cycles, "WARM_UP")):
        monkeypatch.setattr(module, name, at_once)
    monkeypatch.setattr(timing, "BATCH_MS", 0.1)
    monkeypatch.setattr(timing.host_us, "__defaults__", (4, 3))  # calls, rounds
