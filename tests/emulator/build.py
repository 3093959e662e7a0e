"""Compiles the runtime and kernel units; shared libraries are cached by the content of all that went in."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from cupyflash.compile import cache

from . import compiler

HERE = Path(__file__).resolve().parent
RUNTIME, TWIN = HERE / "runtime", HERE / "twin"
_STALE_SECONDS = 14 * 24 * 3600
_TWINS = ("ptx.h", "ptx_sm90.h", "ptx_more.h")
_FROM_ARCH_ON = re.compile(r"^#if EMULATED_ARCH >= (\d+)\nconstexpr \w+ (\w+) = ", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_COMMENT = re.compile(r"^//.*\n", re.MULTILINE)


class BuildError(RuntimeError):
    """The compiler refused a source; the message is its output."""


@functools.cache
def build_folder() -> Path:
    """Where shared libraries are kept: in a checkout beside the sources, once installed in the user's cache.

    They are loaded into the process, so a folder that others can write is not used. Where nothing can be written: a
    temporary folder, which goes with the process.
    """
    with contextlib.suppress(OSError):
        if (HERE.parent.parent / "pyproject.toml").is_file():
            folder = HERE / ".build"
            folder.mkdir(exist_ok=True)
            (folder / ".gitignore").write_text("*\n")
            return folder
        if (kept := cache.default().emulator()) is not None:
            return kept
    folder = Path(tempfile.mkdtemp(prefix="cupyflash-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def digest(*parts: object) -> str:
    return hashlib.sha256(repr((compiler.version(), *parts)).encode()).hexdigest()[:16]


_includes = functools.lru_cache(maxsize=1024)(_INCLUDE.findall)  # the headers that a text names
_digest_of = functools.lru_cache(maxsize=1024)(lambda headers: digest(headers, twin_texts()))


def _publish(path: Path, text: str) -> None:
    """Write a file so that another process never sees half of it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _compile(command: Sequence[str], out: Path, cwd: Path | None = None) -> None:
    temporary = out.with_name(f"{out.name}.{os.getpid()}.{threading.get_ident()}")
    done = subprocess.run([compiler.program(), *command, "-o", str(temporary)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr[:8000])
    os.replace(temporary, out)


@functools.cache
def twin_texts() -> dict[str, str]:
    files = [*sorted(TWIN.glob("*.h")), RUNTIME / "api.h"]
    return {f.name: f.read_text() for f in files}


@functools.cache
def from_arch_on() -> dict[str, int]:
    """The twins' constants that differ, and the architecture from which on they have another value."""
    return {name: int(arch) for text in twin_texts().values() for arch, name in _FROM_ARCH_ON.findall(text)}


@functools.lru_cache(maxsize=1024)
def _named_in(text: str) -> frozenset[str]:
    """Which of them a text names."""
    return frozenset(name for name in from_arch_on() if name in text)


def _remove_stale() -> None:
    """Libraries that no recent source asks for; each edit of a kernel leaves some behind."""
    for path in (*build_folder().glob("*.so"), *build_folder().glob("*.lock")):
        if time.time() - path.stat().st_atime > _STALE_SECONDS:
            path.unlink(missing_ok=True)


def build_runtime() -> Path:
    """The emulator itself, with the twins' functions: one shared library, compiled once."""
    flags, twins = compiler.runtime_flags(), compiler.twin_flags()
    texts = [f.read_text() for folder in (RUNTIME, TWIN) for f in sorted(folder.glob("*.*"))]
    if not texts:
        raise BuildError(f"the emulator's sources are not there as files, in {HERE}: it does not run out of a zip")
    out = build_folder() / f"runtime-{digest(texts, flags, twins)}.so"
    with FileLock(f"{out}.lock"):  # one process of the test run builds
        if out.exists():
            return out
        _remove_stale()
        with tempfile.TemporaryDirectory() as folder:  # in two steps, as kernels are
            objects = []
            for sources, options in ((RUNTIME, flags), (TWIN, twins)):
                objects.append(Path(folder) / f"{sources.name}.o")
                whole = objects[-1].with_suffix(".cpp")  # one unit: functions call others all the time, across files
                whole.write_text("".join(f'#include "{source}"\n' for source in sorted(sources.glob("*.cpp"))))
                _compile([*options, "-c", str(whole)], objects[-1])
            _compile(["-shared", *map(str, objects), "-ldl", "-Wl,-Bsymbolic"], out)
    return out


@dataclass(frozen=True)
class Unit:
    """An entry unit, as handed to NVRTC.

    Attributes:
        source: includes some of `headers` and defines the kernels `symbols`.
        headers: text by file name; messages call them ``kernels_cu/<name>``.
        arch: what ``__CUDA_ARCH__`` would be, for the twins.
    """

    source: str
    headers: Mapping[str, str]
    symbols: Sequence[str]
    arch: int = 800

    @functools.cached_property
    def twin_arch(self) -> int:
        """The oldest architecture that has the same twins, as far as this unit asks for what differs."""
        texts = (self.source, *(text for name, text in self.included.items() if not name.startswith("hw/ptx")))
        named = frozenset().union(*map(_named_in, texts))
        return max((arch for name, arch in from_arch_on().items() if name in named and arch <= self.arch), default=750)

    @functools.cached_property
    def included(self) -> dict[str, str]:
        """The headers that it includes, itself or by others."""
        found: dict[str, str] = {}
        todo = [*_includes(self.source)]
        while todo:
            name = todo.pop()
            if name in self.headers and name not in found:
                found[name] = self.headers[name]
                todo += _includes(found[name])
        return dict(sorted(found.items()))

    @property
    def flags(self) -> list[str]:
        return compiler.kernel_flags(self.twin_arch)

    @functools.cached_property
    def library(self) -> Path:
        """Where its shared library is, or will be: headers that it does not include make no difference."""
        text = _COMMENT.sub("", self.source)  # a variant's first line is the digest of all headers
        key = digest(text, _digest_of(tuple(self.included.items())), self.flags, tuple(self.symbols))
        return build_folder() / f"{self.symbols[0]}-{key}.so"

    @property
    def shared(self) -> str:
        """What stands before its struct Variant besides includes: a user's expressions, if it has some."""
        return _INCLUDE.sub("", self.source.partition("struct Variant")[0])

    @property
    def own(self) -> str:
        """The rest, and the way in."""
        _, struct, rest = self.source.partition("struct Variant")
        return struct + rest + "".join(f"\nEMU_ENTRY({symbol})" for symbol in self.symbols) + "\n"


def build(units: Iterable[Unit]) -> None:
    """Makes the libraries that are missing of some units. Those that have the same headers and twins, and differ in
    what is their own alone, are compiled as one, so that headers are read once."""
    alike: dict[tuple[object, ...], list[Unit]] = {}
    named: Counter[tuple[object, ...]] = Counter()
    for unit in {unit.library: unit for unit in units if not unit.library.exists()}.values():
        common = unit.shared, *unit.flags, frozenset(unit.headers.items())
        named[name := (*unit.symbols, *common)] += 1  # one of a name in a library
        alike.setdefault((*common, named[name]), []).append(unit)
    for some in alike.values():
        with FileLock(f"{min(unit.library for unit in some)}.lock"):  # another process may be first
            if missing := [unit for unit in some if not unit.library.exists()]:
                _compile_as_one(missing)


def _compile_as_one(units: Sequence[Unit]) -> None:
    """One library, by the names of all."""
    included = {name: text for unit in units for name, text in unit.included.items()}
    folder = build_folder() / f"headers-{digest(included)}"
    for name, text in included.items():
        _publish(folder / "kernels_cu" / name, compiler.readable(text))
    includes = dict.fromkeys(line[0] for unit in units for line in _INCLUDE.finditer(unit.source))
    each = (f"namespace of_{i} {{\n{unit.own}}}\n" for i, unit in enumerate(units))
    source = "".join((*includes, units[0].shared, *each))
    file = folder / f"{units[0].symbols[0]}-{digest(source)}.cpp"
    _publish(file, source)
    options = [*units[0].flags, *(f"-include{TWIN / name}" for name in _TWINS), "-Ikernels_cu"]
    with tempfile.TemporaryDirectory() as scratch:  # in two steps: linking with -fsanitize=thread would pull in libtsan
        unit_object = Path(scratch) / "unit.o"
        _compile([*options, "-c", file.name], unit_object, cwd=folder)
        _compile([*compiler.link_flags(), str(unit_object), "-lm", "-lc"], units[0].library)
    for unit in units[1:]:
        _link(units[0].library, unit.library)


def _link(out: Path, name: Path) -> None:
    """Gives a library a further name; by a copy where the file system has no links."""
    try:
        os.link(out, name)
    except FileExistsError:
        pass  # built by another process beside other units
    except OSError:
        temporary = name.with_name(f"{name.name}.{os.getpid()}.{threading.get_ident()}")
        shutil.copyfile(out, temporary)
        os.replace(temporary, name)
