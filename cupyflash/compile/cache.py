"""Compiled kernels on disk: content-addressed, verified on read, private to their owner, bounded in size.

<path>/<key>.*                          a kernel; key = digest of source, options, architecture and NVRTC build
<path>/locks/<key>.lock                 held while one of N processes compiles
<path>/precompiled/<arch>/<key>.*       the read-only layer for everybody (layer.py)
<path>/emulator/                        what was compiled for the emulator of an installed cupyflash
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from . import cubin, layer, upkeep
from .cubin import Cubin as Cubin  # what a cache gives out

NOTICE_SECONDS = 2.0  # who waits longer for another process says so
GIVE_UP_SECONDS = 300.0  # no compilation takes as long
log = logging.getLogger("cupyflash")


class Cache:
    """The folder of one user. A folder that cannot be used costs recompilation, never an error; `problem` says why.

    Attributes:
        path: the folder; None if there is none, for the reason `missing`.
        is_chosen: the user named it.
    """

    def __init__(self, path: Path | None, *, is_chosen: bool = False, missing: str = "") -> None:
        self.path, self.is_chosen, self.missing = path, is_chosen, missing

    @property
    def problem(self) -> str | None:
        """Why kernels are not kept here, and the way out; None if they are. Makes the folder where there is none."""
        if self.path is None:
            return self.missing
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if reason := cubin.distrust(self.path):
                return reason
        except OSError as e:
            return f"{self.path} cannot be used ({e}); set CUPYFLASH_CACHE_DIR to a folder of your own"
        if not os.access(self.path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            return f"{self.path} is not writable; set CUPYFLASH_CACHE_DIR to a folder of your own"
        return None

    def precompiled(self, key: str, symbol: str, arch: str, driver: tuple[int, int] | None) -> Cubin | None:
        """A kernel of the read-only layer that a driver of that CUDA version loads."""
        if self.path is None:
            return None
        return layer.read(self.path, key, symbol, arch, driver=driver, is_expected=self.is_chosen)

    def read(self, key: str, symbol: str, arch: str) -> Cubin | None:
        """A kernel that this user compiled before; the folder need not be writable."""
        if self.path is None:
            return None
        try:
            found = None if cubin.distrust(self.path) else cubin.read(self.path, key, symbol, arch)
        except OSError:
            return None
        if found is not None:
            with contextlib.suppress(OSError):
                os.utime(self.path / f"{key}.json")  # used just now: `prune` keeps it
        return found

    def write(self, key: str, kernel: Cubin) -> Cubin:
        """Keep a kernel if that is possible; in any case return it."""
        reason = self.problem
        if self.path is not None and reason is None:
            try:
                kept = cubin.write(self.path, key, kernel)
                upkeep.wrote(self.path, len(kernel.data))
                return kept
            except OSError as e:
                reason = str(e)
        log.info("kernel %s is not kept: %s", kernel.symbol, reason)
        return kernel

    @contextlib.contextmanager
    def lock(self, key: str, symbol: str) -> Iterator[None]:
        """Held by the one process that compiles `key`; not at all where there are no locks."""
        held = None if self.path is None or self.problem else _acquire(self.path / upkeep.LOCKS / f"{key}.lock", symbol)
        try:
            yield
        finally:
            if held is not None:
                with contextlib.suppress(OSError):
                    held.release()

    def emulator(self) -> Path | None:
        """Where the emulator keeps what it compiled; None where nothing is kept.

        Raises:
            OSError: if there can be no such folder.
        """
        if self.path is None or self.problem:
            return None
        folder = self.path / upkeep.EMULATOR
        folder.mkdir(mode=0o700, exist_ok=True)
        return None if cubin.distrust(folder) else folder

    def entries(self) -> list[upkeep.Entry]:
        """The kernels kept here (the read-only layer apart), the most recently used first."""
        return upkeep.entries(self.path) if self.path else []

    def layers(self) -> dict[str, list[upkeep.Entry]]:
        """The kernels of the read-only layer, by architecture."""
        if self.path is None:
            return {}
        return {arch: upkeep.entries(self.path / layer.FOLDER / arch) for arch in layer.archs(self.path)}

    def layer_problems(self, driver: tuple[int, int] | None) -> list[str]:
        """Why kernels of the read-only layer cannot be used by a driver of that CUDA version."""
        return layer.problems(self.path, driver=driver, is_expected=self.is_chosen) if self.path else []

    def clear(self, *, precompiled: bool = False) -> tuple[int, list[OSError]]:
        """Remove all kernels kept here, on request those of the read-only layer too, and nothing else.

        Returns:
            how many kernels went, and why the rest did not.
        """
        if self.path is None:
            return 0, []
        removed, errors = upkeep.clear(self.path)
        errors += upkeep.clear_emulator(self.path)
        for folder in layer.folders(self.path) if precompiled else ():
            count, why = upkeep.clear(folder)
            removed, errors = removed + count, errors + why
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        return removed, errors


def _acquire(path: Path, symbol: str) -> FileLock | None:
    """The lock, waited for; None where it cannot be had."""
    lock = FileLock(path)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            lock.acquire(timeout=NOTICE_SECONDS)
        except Timeout:
            log.warning("cupyflash: waiting for another process to compile %s (lock file %s)", symbol, path)
            lock.acquire(timeout=GIVE_UP_SECONDS)
    except Exception as e:  # Timeout, OSError, and what else a file system without locks brings about
        log.info("%s is compiled without a lock: %s", symbol, e)
        return None
    return lock


def default() -> Cache:
    """The cache of this process: CUPYFLASH_CACHE_DIR, or the platform's folder for caches."""
    wish = os.environ.get("CUPYFLASH_CACHE_DIR")
    try:
        path = Path(wish or platformdirs.user_cache_dir("cupyflash", appauthor=False)).expanduser()
        return Cache(path.absolute(), is_chosen=bool(wish))
    except (OSError, RuntimeError, KeyError) as e:  # no home folder, or the current folder is gone
        reason = f"there is no folder for compiled kernels ({e}); set CUPYFLASH_CACHE_DIR to one of your own"
        return Cache(None, is_chosen=bool(wish), missing=reason)
