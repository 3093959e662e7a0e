"""What lies in a folder of kernels, and what may go: only what cupyflash wrote there, whatever else there is.

A kernel is two files (cubin.py). Halves of kernels, unfinished files and locks are left behind by processes that were
killed. They go when they are so old that no process can be at work on them any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import cubin

MAX_BYTES = 256 << 20
SHARE = 16  # of `MAX_BYTES`: so much may be written before a process looks again what must go
LOCKS, EMULATOR = "locks", "emulator"
_ORPHAN_SECONDS = 3600.0
_counting = threading.Lock()
_left: dict[Path, int] = {}  # bytes that this process may write to a folder before it looks again
_EMULATOR_NAME = re.compile(r"\w+-[0-9a-f]{16}\.so(\.lock)?|headers-[0-9a-f]{16}")


@dataclass(frozen=True)
class Entry:
    """One kernel on disk, as `cupyflash cache info` shows it."""

    symbol: str
    arch: str
    bytes: int
    seconds: float
    nvrtc: str
    modified: float


def entries(folder: Path) -> list[Entry]:
    """The kernels in a folder, the most recently used first."""
    found = []
    for path in _pairs(folder):
        with contextlib.suppress(OSError):
            if facts := cubin.facts_of(path):
                size, modified = path.with_suffix(".cubin").stat().st_size, path.stat().st_mtime
                found.append(Entry(facts["symbol"], facts["arch"], size, facts["seconds"], facts["nvrtc"], modified))
    return sorted(found, key=lambda e: -e.modified)


def clear(folder: Path) -> tuple[int, list[OSError]]:
    """Remove all kernels and what was left of others; how many kernels went, and why the rest did not."""
    removed, errors = 0, []
    for path in _pairs(folder):
        try:
            if _is_kernel(path):
                _remove(path)
                removed += 1
        except OSError as e:
            errors.append(e)
    for path in _orphans(folder, 0.0):
        try:
            path.unlink(missing_ok=True)
        except OSError as e:
            errors.append(e)
    return removed, errors


def clear_emulator(folder: Path) -> list[OSError]:
    """Remove what the emulator keeps in the cache `folder`; why the rest did not go."""
    errors: list[OSError] = []
    if os.path.islink(folder / EMULATOR) or not os.path.isdir(folder / EMULATOR):
        return errors
    try:
        entries = list(os.scandir(folder / EMULATOR))
    except OSError as e:
        return [e]
    for entry in entries:
        if _EMULATOR_NAME.fullmatch(entry.name):
            try:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
            except OSError as e:
                errors.append(e)
    with contextlib.suppress(OSError):  # it is not empty
        (folder / EMULATOR).rmdir()
    return errors


def wrote(folder: Path, size: int) -> None:
    """To be called for each kernel that is written, of so many bytes: `prune`, at the first one and then now and then.

    To look at a folder of 1700 kernels takes 0.1 s of system calls, and threads that compile would wait for each other
    at every one of them.
    """
    with _counting:
        left = _left.get(folder, 0) - size
        _left[folder] = left if left >= 0 else MAX_BYTES // SHARE
    if left < 0:
        prune(folder)


def prune(folder: Path, max_bytes: float = MAX_BYTES) -> None:
    """Remove the least recently used kernels until the rest fits `max_bytes`, and what was left of others long ago."""
    kept = 0
    for path in sorted(_pairs(folder), key=_modified, reverse=True):
        with contextlib.suppress(OSError):
            kept += path.with_suffix(".cubin").stat().st_size
            if kept > max_bytes and _is_kernel(path):
                _remove(path)
    for path in _orphans(folder, _ORPHAN_SECONDS):
        with contextlib.suppress(OSError):
            path.unlink()


def _files(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []


def _pairs(folder: Path) -> list[Path]:
    """The .json files with a .cubin beside them that have the names of kernels."""
    files = [p for p in _files(folder) if cubin.KEY.fullmatch(p.stem)]
    cubins = {p.stem for p in files if p.suffix == ".cubin"}
    return [p for p in files if p.suffix == ".json" and p.stem in cubins]


def _is_kernel(path: Path) -> bool:
    """Whether a pair, by its .json, is a kernel: one of the two may be damaged."""
    return _is_ours(path) or _is_ours(path.with_suffix(".cubin"))


def _is_ours(path: Path) -> bool:
    """Whether the content of a file of a kernel's name is that of a kernel."""
    with contextlib.suppress(OSError):
        if path.suffix == ".json":
            return cubin.facts_of(path) is not None
        with path.open("rb") as f:
            return cubin.is_cubin(f.read(64))
    return False


def _remove(path: Path) -> None:
    """A kernel, by its .json: that first, since without it nobody reads the other."""
    path.unlink(missing_ok=True)
    path.with_suffix(".cubin").unlink(missing_ok=True)


def _orphans(folder: Path, age: float) -> Iterator[Path]:
    """What killed processes left behind more than `age` seconds ago; unfinished files more than an hour ago."""
    now, whole = time.time(), {path.stem for path in _pairs(folder)}
    for path in _files(folder):
        is_half = cubin.KEY.fullmatch(path.stem) and path.suffix in (".json", ".cubin") and path.stem not in whole
        old = now - _modified(path)
        if (cubin.is_temporary(path) and old > _ORPHAN_SECONDS) or (is_half and old > age and _is_ours(path)):
            yield path
    for path in _files(folder / LOCKS) if not os.path.islink(folder / LOCKS) else ():
        if cubin.KEY.fullmatch(path.stem) and path.suffix == ".lock" and now - _modified(path) > age:
            yield path


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
