"""The wheel, the source archive, an editable install and a bare checkout all hold the whole package and all run."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import cupyflash
from tests.emulator.build import build_runtime

ROOT = Path(__file__).resolve().parents[2]
HARD_DEPENDENCIES = {"click", "filelock", "ml_dtypes", "numpy", "platformdirs", "rich"}
EXTRAS = {"cu12", "cu13", "dev", "jax", "lint", "plot", "test", "torch", "transformers"}
# Where a folder of the checkout lies in the installed package.
FOLDERS = {
    "cupyflash": "cupyflash",
    "cli": "cupyflash/cli",
    "kernels_cu": "cupyflash/kernels_cu",
    "tests/emulator": "cupyflash/emulator",
}
TESTS_ONLY = ROOT / "tests" / "emulator" / "kernels"  # not in the wheel
MAX_WHEEL_BYTES = 1_000_000
# Run in each kind of installation, with the folder in which all must lie as argument.
PROBE = """
import sys
from importlib.resources import files
from pathlib import Path
import cupyflash, cupyflash.cli
from cupyflash.emulator import build
kernels = files("cupyflash.kernels_cu")
assert isinstance(kernels, Path) and (kernels / "hw/ptx.cuh").is_file(), kernels
assert (build.RUNTIME / "launch.cpp").is_file() and (build.TWIN / "ptx.h").is_file(), build.HERE
for path in (cupyflash.__file__, cupyflash.cli.__file__, kernels, build.HERE):
    assert Path(path).resolve().is_relative_to(Path(sys.argv[1]).resolve()), path
print(cupyflash.__version__)
"""


def sources() -> set[str]:
    """Every file of the package, by its path in the checkout."""
    suffixes = ("py", "cuh", "cpp", "h")
    found = {path for folder in FOLDERS for suffix in suffixes for path in (ROOT / folder).rglob(f"*.{suffix}")}
    found = {path for path in found if TESTS_ONLY not in path.parents and ".build" not in path.parts}
    return {path.relative_to(ROOT).as_posix() for path in found} | {"cupyflash/py.typed"}


def installed(name: str) -> str:
    """Where a file of the checkout lies once installed."""
    folder = next(folder for folder in FOLDERS if name.startswith(f"{folder}/"))
    return FOLDERS[folder] + name[len(folder) :]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout, since building leaves files behind in it."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    left_behind = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "venv")
    return Path(shutil.copytree(ROOT, tmp_path / "checkout", ignore=left_behind))


def run(*arguments: object, cwd: Path, path: Path | None = None) -> str:
    """Run this Python, for which `path` is importable besides the dependencies and the standard library.

    With ``-S`` no .pth file is read, so a cupyflash that is installed in this environment stays out of sight.
    """
    dependencies = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), *dependencies])}
    command = [sys.executable, "-S", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def build(kind: str, checkout: Path, out: Path) -> Path:
    """Call the build backend as pip does: kind is wheel, sdist or editable."""
    out.mkdir()
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run("-c", code, out, cwd=checkout)
    (archive,) = out.iterdir()
    return archive


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel(checkout: Path, tmp_path: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    run("-m", "pip", "wheel", *options, "--wheel-dir", tmp_path / "out", ".", cwd=checkout)
    (wheel,) = (tmp_path / "out").iterdir()
    assert wheel.name == f"cupyflash-{cupyflash.__version__}-py3-none-any.whl"
    site = unpack(wheel, tmp_path / "site")

    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {name for name in files if ".dist-info/" not in name} == {installed(name) for name in sources()}
    assert wheel.stat().st_size < MAX_WHEEL_BYTES

    (info,) = site.glob("*.dist-info")
    check_metadata(email.message_from_string((info / "METADATA").read_text()))
    assert "cupyflash = cupyflash.cli:main" in (info / "entry_points.txt").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run("-c", PROBE, site, cwd=elsewhere, path=site) == cupyflash.__version__
    assert cupyflash.__version__ in run("-m", "cupyflash", "--version", cwd=elsewhere, path=site)


@pytest.mark.needs("g++")
def test_an_installed_cupyflash_runs_the_kernels(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU; what is compiled goes to the cache folder, and nothing where the package lies. The emulator lies
    there already: it takes the checkout's if all of its files are the same, as the digest in the name says."""
    site = unpack(build("wheel", checkout, tmp_path / "out"), tmp_path / "site")
    emulator = tmp_path / "cache" / "emulator"
    emulator.mkdir(mode=0o700, parents=True)
    runtime = Path(shutil.copy2(build_runtime(), emulator))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    before = sorted(site.rglob("*"))
    command = ("-m", "cupyflash", "verify", "--case", "gqa", "--dtype", "bf16", "--framework", "numpy", "--json")
    document = json.loads(run(*command, cwd=tmp_path, path=site))
    assert document["ran"] == ["emulator", "cpu"]
    assert {r["family"]: r["passed"] for r in document["emulator"]} == {"sm80": True, "sm90": True}
    assert sorted(site.rglob("*")) == before
    assert len(list(emulator.glob("fwd_sm*.so"))) == 2
    assert list(emulator.glob("runtime-*.so")) == [runtime]


def check_metadata(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "cupyflash"
    assert metadata["Version"] == cupyflash.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS
    requires = metadata.get_all("Requires-Dist")
    hard = {re.split(r"[<>=~! ;\[]", line)[0] for line in requires if "extra ==" not in line}
    assert hard == HARD_DEPENDENCIES
    assert not any("[ctk]" in line for line in requires), "the whole toolkit is not needed"


def test_sdist(checkout: Path, tmp_path: Path) -> None:
    left_behind = checkout / "tests" / "emulator" / ".build"
    left_behind.mkdir()
    (left_behind / "runtime-0123456789abcdef.so").touch()
    with tarfile.open(build("sdist", checkout, tmp_path / "out")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    rest = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert not (sources() | tests | rest) - names
    assert not [name for name in names if ".build" in name]


def test_editable(checkout: Path, tmp_path: Path) -> None:
    site = unpack(build("editable", checkout, tmp_path / "out"), tmp_path / "site")
    activate = f"import site, sys; site.addsitedir({str(site)!r})\n"
    assert run("-c", activate + PROBE, checkout, cwd=tmp_path, path=site) == cupyflash.__version__
    module = "import runpy; runpy.run_module('cupyflash', run_name='__main__')"
    assert cupyflash.__version__ in run("-c", activate + module, "--version", cwd=tmp_path, path=site)


def test_bare_checkout(checkout: Path) -> None:
    assert run("-c", PROBE, checkout, cwd=checkout) == cupyflash.__version__
    assert cupyflash.__version__ in run("-m", "cupyflash", "--version", cwd=checkout)


def test_changelog_knows_this_version() -> None:
    assert f"## [{cupyflash.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_completion_offers_the_public_names() -> None:
    """Those that are loaded at their first use included, and none that is not public."""
    code = "import cupyflash; print(*(n for n in dir(cupyflash) if not n.startswith('__')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == set(cupyflash.__all__) - {"__version__"}
