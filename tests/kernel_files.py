"""What the tests of folders of kernels share: kernels without a compiler, and another user."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupyflash.compile import nvrtc
from cupyflash.plan.kernels import Convert, ConvertTile

SMALL = Convert("bf16", 64, ConvertTile(64, 8, 1, 2))  # the variant that compiles fastest
NOBODY = 65534


def elf(symbol: str) -> bytes:
    """What a cubin of `symbol` looks like from outside."""
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + (2).to_bytes(2, "little") + (190).to_bytes(2, "little")
    return header.ljust(64, b"\0") + symbol.encode() + b"\0" * 64


def pretend_to_compile(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on no compiler compiles: what it would have compiled is listed by symbol, and looks like it."""
    done: list[str] = []

    def compile(self: nvrtc.Nvrtc, source: str, name: str, *rest: Any) -> tuple[bytes, str]:
        symbol = name.removesuffix(".cu")
        if symbol != "probe":
            done.append(symbol)
        return elf(symbol), "ptxas info : Used 32 registers"

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compile)
    return done


@contextlib.contextmanager
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder that is not there yet, in a folder that every user may enter."""
    base = Path(tempfile.mkdtemp(prefix="cupyflash-tests-"))
    base.chmod(0o755)
    path = base / "cache"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(path))
    try:
        yield path
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def another_user(*owned: Path) -> Iterator[None]:
    """Inside, this process has no rights of root, and `owned` (with all below) belongs to it.

    A process that is not root has none anyway: there nothing changes.
    """
    if os.geteuid() != 0:
        yield
        return
    for path in owned:
        for each in (path, *path.rglob("*")):
            os.chown(each, NOBODY, NOBODY)
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a .json."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
