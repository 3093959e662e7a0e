"""The precompiled layer: kernels for everybody on a machine, read without NVRTC and never written by a call.

<root>/precompiled/<arch>/<key>.*    key = digest of source and architecture; files 0644, folders 0755
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import stat
import tempfile
from pathlib import Path

from . import cubin
from .cubin import Cubin

FOLDER = "precompiled"
log = logging.getLogger("cupyflash")
_ARCH = re.compile(r"sm_\d+[a-z]?")


def make(root: Path, arch: str) -> Path:
    """The folder for one architecture, readable for everybody whatever the umask, and proved to be writable.

    Raises:
        OSError: if it cannot be made or written.
    """
    folder = root / FOLDER / arch
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    for path in (folder.parent, folder):
        with contextlib.suppress(PermissionError):  # another user's
            path.chmod(0o755)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def write(root: Path, key: str, kernel: Cubin) -> Cubin:
    """Put a kernel into the layer; returns it with its path.

    Raises:
        OSError: if the folder cannot be written.
    """
    return cubin.write(root / FOLDER / kernel.arch, key, kernel, mode=0o644)


def read(
    root: Path, key: str, symbol: str, arch: str, *, driver: tuple[int, int] | None, is_expected: bool
) -> Cubin | None:
    """A kernel of the layer, or None. A layer that is there and cannot be used is said so, once a process.

    Args:
        driver: the CUDA version that the installed driver supports; it loads no kernels of a newer major.
        is_expected: whether somebody chose `root`; if not, one that cannot be entered is taken to hold no layer.
    """
    folder = root / FOLDER / arch
    try:
        found = None if cubin.distrust(folder) else cubin.read(folder, key, symbol, arch)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        found = None
    if found is not None and not _is_too_new(found.nvrtc, driver):
        return found
    if reason := problem(root, arch, driver=driver, is_expected=is_expected):
        _say(reason)
    return None


@functools.cache
def _say(reason: str) -> None:
    log.warning("cupyflash: precompiled kernels are not used: %s", reason)


def problem(root: Path, arch: str, *, driver: tuple[int, int] | None, is_expected: bool = True) -> str | None:
    """Why the kernels for an architecture, if there are any, cannot be used, and the way out; else None."""
    folder = root / FOLDER / arch
    try:
        reason = cubin.distrust(folder)
    except PermissionError:
        return _unreadable(_barrier(folder)) if is_expected else None
    except OSError:
        return None
    if reason is not None:
        return reason
    for path in (folder, *_files(folder)):
        if not _can(path, os.X_OK if path == folder else os.R_OK):
            return _unreadable(path, f"-R a+rX {root / FOLDER}")
    for path in _files(folder):
        facts = cubin.facts_of(path) if path.suffix == ".json" else None
        if facts and driver and _is_too_new(facts["nvrtc"], driver):
            return (
                f"those in {folder} were compiled by NVRTC {facts['nvrtc']}, and the driver supports CUDA "
                f"{driver[0]}.{driver[1]}; update the driver, or compile them with cupyflash[cu{driver[0]}]"
            )
    return None


def problems(root: Path, *, driver: tuple[int, int] | None, is_expected: bool = True) -> list[str]:
    """The same of all architectures, or of the folder that holds them if it cannot be looked into."""
    found = [problem(root, arch, driver=driver, is_expected=is_expected) for arch in archs(root) or [""]]
    return [reason for reason in found if reason]


def archs(root: Path) -> list[str]:
    """The architectures there are folders for; none if `root` cannot be looked into."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in (root / FOLDER).iterdir() if _ARCH.fullmatch(path.name))
    return []


def folders(root: Path) -> list[Path]:
    """Those for the architectures that lie in `root` itself: what may be emptied. Links lead elsewhere."""
    found = [] if os.path.islink(root / FOLDER) else [root / FOLDER / arch for arch in archs(root)]
    return [path for path in found if not os.path.islink(path)]


def closed_to_others(root: Path) -> Path | None:
    """The first folder on the way to the layer that users without rights of their own cannot enter."""
    if os.name != "posix":
        return None
    folder = root / FOLDER
    return next((p for p in reversed((folder, *folder.parents)) if not p.stat().st_mode & stat.S_IXOTH), None)


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(p for p in folder.iterdir() if cubin.KEY.fullmatch(p.stem) and p.suffix in (".cubin", ".json"))
    return []


def _is_too_new(nvrtc: str, driver: tuple[int, int] | None) -> bool:
    major = nvrtc.partition(".")[0]
    return driver is not None and major.isdecimal() and int(major) > driver[0]


def _can(path: Path, mode: int) -> bool:
    """Whether this process has the access `mode` to an existing file or folder."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _barrier(path: Path) -> Path:
    """The first folder on the way to `path` that cannot be entered."""
    return next((p for p in reversed(path.parents) if not _can(p, os.X_OK)), path)


def _unreadable(path: Path, change: str = "") -> str:
    return f"{path} cannot be read; its owner or root can change that: chmod {change or f'a+rx {path}'}"
