"""One compiled kernel, in memory and as two files of a folder.

<folder>/<key>.cubin    the kernel, an ELF file; key = 40 hexadecimal digits of a digest
<folder>/<key>.json     its key, symbol, architecture, registers ..., and the SHA-256 of the cubin

Neither name is proof: CuPy keeps files of the first kind too, and anything may be called package.json. What is not
word for word what `write` writes is not read, not counted and not removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KEY = re.compile(r"[0-9a-f]{40}")
_TEMPORARY = re.compile(rf"\.cupyflash-{KEY.pattern}-\w+\.tmp")
_ELF_MAGIC, _ELF_MACHINE, _CUDA = b"\x7fELF", slice(18, 20), (190).to_bytes(2, "little")
_FACTS = {"key": str, "symbol": str, "arch": str, "registers": int, "spill_bytes": int, "seconds": float, "nvrtc": str,
          "advice": str, "sha256": str}  # fmt: skip
_OWN_FOLDER = "set CUPYFLASH_CACHE_DIR to a folder of your own"
_NOT_FACTS = ("data", "from_cache", "path")  # of `Cubin`


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


def facts_of(path: Path) -> dict[str, Any] | None:
    """What a .json of `write` says of its kernel; None for any other file.

    Raises:
        OSError: if it cannot be read.
    """
    if not path.is_file():  # a pipe would wait for somebody
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != _FACTS.keys() or found["key"] != path.stem:
        return None
    return found if all(type(found[name]) is kind for name, kind in _FACTS.items()) else None


def is_cubin(data: bytes) -> bool:
    """Whether this is the beginning of an ELF file for NVIDIA GPUs."""
    return data.startswith(_ELF_MAGIC) and data[_ELF_MACHINE] == _CUDA


def is_temporary(path: Path) -> bool:
    """Whether `write` calls its unfinished files like this."""
    return _TEMPORARY.fullmatch(path.name) is not None


def distrust(folder: Path) -> str | None:
    """Why no kernel is taken from a folder: someone else than this user, or root, could put one there. None if nobody.

    The reason ends with the way out. Raises OSError if the folder is not there or cannot be looked at.
    """
    status = folder.stat()
    if os.name != "posix":
        return None  # the user's own folders are private there
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to another user (uid {status.st_uid}); {_OWN_FOLDER}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        can_change = os.geteuid() in (0, status.st_uid)
        return f"{folder} can be written by others; {f'chmod go-w {folder}' if can_change else _OWN_FOLDER}"
    return None


def read(folder: Path, key: str, symbol: str, arch: str) -> Cubin | None:
    """The kernel `symbol` for `arch` under `key`; None if it is damaged or another one.

    Raises:
        OSError: if it is not there or cannot be read.
    """
    facts, path = facts_of(folder / f"{key}.json"), folder / f"{key}.cubin"
    if facts is None or (facts["symbol"], facts["arch"]) != (symbol, arch):
        return None
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != facts["sha256"] or not is_cubin(data) or symbol.encode() not in data:
        return None
    return Cubin(data, **{n: facts[n] for n in _FACTS if n not in ("key", "sha256")}, from_cache=True, path=str(path))


def write(folder: Path, key: str, cubin: Cubin, *, mode: int = 0o600) -> Cubin:
    """Publish a kernel whole or not at all; returns it with its path.

    Raises:
        OSError: if the folder cannot be written.
    """
    facts = {name: value for name, value in asdict(cubin).items() if name not in _NOT_FACTS}
    facts |= {"key": key, "seconds": float(cubin.seconds), "sha256": hashlib.sha256(cubin.data).hexdigest()}
    _publish(folder / f"{key}.cubin", cubin.data, mode)
    _publish(folder / f"{key}.json", json.dumps(facts).encode(), mode)
    return Cubin(**(asdict(cubin) | {"path": str(folder / f"{key}.cubin")}))


def _publish(path: Path, data: bytes, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".cupyflash-{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        with contextlib.suppress(OSError):  # a file system without modes
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
