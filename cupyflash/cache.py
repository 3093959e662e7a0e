"""Compiled kernels on disk: content-addressed, verified on read, private to their owner, bounded in size.

<path>/<key>.cubin                      a kernel; key = digest of source, options, architecture and NVRTC build
<path>/<key>.json                       its symbol, architecture, registers ..., and the SHA-256 of the cubin
<path>/locks/<key>.lock                 held while one of N processes compiles
<path>/precompiled/<arch>/<key>.*       the read-only layer: key = digest of source and architecture alone
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock

MAX_BYTES = 256 << 20
log = logging.getLogger("cupyflash")


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel."""

    data: bytes
    symbol: str
    arch: str
    registers: int
    spill_bytes: int
    seconds: float  # that its compilation took
    nvrtc: str
    advice: str = ""  # what ptxas says of lost performance: "(C7510) Potential Performance Loss: ..."
    from_cache: bool = False
    path: str | None = None  # where it lies on disk, if it does


@dataclass(frozen=True)
class Entry:
    """What `cupyflash cache info` shows of one kernel."""

    symbol: str
    arch: str
    bytes: int
    seconds: float
    nvrtc: str
    modified: float


def _read(folder: Path, key: str) -> Cubin | None:
    """The kernel under `key`; None if it is missing or damaged."""
    try:
        facts = json.loads((folder / f"{key}.json").read_bytes())
        path = folder / f"{key}.cubin"
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != facts.pop("sha256"):
            return None
        return Cubin(data, **facts, from_cache=True, path=str(path))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, key: str, cubin: Cubin) -> Cubin:
    """Publish a kernel whole or not at all; returns it with its path.

    Raises:
        OSError: if the folder cannot be written.
    """
    facts = asdict(cubin) | {"sha256": hashlib.sha256(cubin.data).hexdigest()}
    for name in ("data", "from_cache", "path"):
        del facts[name]
    _publish(folder / f"{key}.cubin", cubin.data)
    _publish(folder / f"{key}.json", json.dumps(facts).encode())
    return Cubin(**(asdict(cubin) | {"path": str(folder / f"{key}.cubin")}))


def _publish(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _others_can_write(path: Path) -> bool:
    """Whether someone else than the owner of this process, or root, could put a kernel there."""
    if os.name != "posix":
        return False  # the user's own folders are private there
    status = path.stat()
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) or status.st_uid not in (0, os.getuid())


class Cache:
    """The folder of one user. A folder that cannot be used costs recompilation, never an error; `problem` says why."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def problem(self) -> str | None:
        """Why kernels are not kept here, or None."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _others_can_write(self.path):
                return f"{self.path} can be written by others; make it private: chmod 700 {self.path}"
            (self.path / "locks").mkdir(mode=0o700, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                return f"{self.path} is not writable"
        except OSError as e:
            return f"{self.path} cannot be used: {e}"
        return None

    def precompiled(self, key: str, arch: str) -> Cubin | None:
        """A kernel of the read-only layer."""
        folder = self.path / "precompiled" / arch
        with contextlib.suppress(OSError):
            if not _others_can_write(folder):
                return _read(folder, key)
        return None

    def read(self, key: str) -> Cubin | None:
        """A kernel that this user compiled before."""
        if self.problem:
            return None
        cubin = _read(self.path, key)
        if cubin is not None:
            with contextlib.suppress(OSError):
                os.utime(self.path / f"{key}.json")  # used just now: `prune` keeps it
        return cubin

    def write(self, key: str, cubin: Cubin) -> Cubin:
        """Keep a kernel if that is possible; in any case return it."""
        if self.problem:
            log.info("kernel %s is not kept: %s", cubin.symbol, self.problem)
            return cubin
        try:
            kept = write(self.path, key, cubin)
            self.prune()
        except OSError as e:
            log.info("kernel %s is not kept: %s", cubin.symbol, e)
            return cubin
        return kept

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by the one process that compiles `key`."""
        if self.problem:
            yield
            return
        with FileLock(self.path / "locks" / f"{key}.lock"):
            yield

    def entries(self) -> list[Entry]:
        """The kernels kept here (the read-only layer apart), the most recently used first."""
        found = []
        for path in self.path.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                facts = json.loads(path.read_bytes())
                size = path.with_suffix(".cubin").stat().st_size
                modified = path.stat().st_mtime
                found.append(Entry(facts["symbol"], facts["arch"], size, facts["seconds"], facts["nvrtc"], modified))
        return sorted(found, key=lambda e: -e.modified)

    def size_bytes(self) -> int:
        return sum(e.bytes for e in self.entries())

    def clear(self) -> int:
        """Remove all kernels kept here (the read-only layer stays); return how many."""
        removed = 0
        for path in [*self.path.glob("*.json"), *self.path.glob("*.cubin"), *self.path.glob("locks/*.lock")]:
            with contextlib.suppress(OSError):
                path.unlink()
                removed += path.suffix == ".cubin"
        return removed

    def prune(self, max_bytes: int = MAX_BYTES) -> None:
        """Remove the least recently used kernels until the rest fits `max_bytes`."""
        aged = sorted(self.path.glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
        kept = 0
        for path in aged:
            with contextlib.suppress(OSError):
                kept += path.with_suffix(".cubin").stat().st_size
                if kept > max_bytes:
                    path.unlink()
                    path.with_suffix(".cubin").unlink()


@functools.cache
def _cache_at(path: str) -> Cache:
    return Cache(Path(path))


def default() -> Cache:
    """The cache of this process: CUPYFLASH_CACHE_DIR, or the platform's folder for caches."""
    return _cache_at(os.environ.get("CUPYFLASH_CACHE_DIR") or platformdirs.user_cache_dir("cupyflash", appauthor=False))
