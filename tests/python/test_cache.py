"""The user's cache: what is accepted from it, what is removed, and that no folder, however broken, is an error."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pwd
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
from kernel_files import SMALL, another_user, edit, elf, empty_cache, pretend_to_compile

import cupyflash
from cupyflash.compile import cache, jit, nvrtc, upkeep
from cupyflash.gpu.device import Device

try:
    nvrtc.pick()
except cupyflash.UnsupportedError as reason:
    pytest.skip(str(reason), allow_module_level=True)

OTHER_KEY = "0123456789" * 4


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with empty_cache(monkeypatch) as path:
        yield path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return pretend_to_compile(monkeypatch)


def kernel(arch: str = "sm_80") -> cache.Cubin:
    return jit.compile_kernel(SMALL, arch)


def files_of(folder: Path) -> tuple[Path, Path]:
    """The .json and the .cubin of the one kernel there."""
    (path,) = folder.glob("*.json")
    return path, path.with_suffix(".cubin")


# ---- what is accepted ----


def test_a_kernel_is_compiled_once_and_read_back(folder: Path, compiled: list[str]) -> None:
    first, second = kernel(), kernel()
    assert (first.from_cache, second.from_cache) == (False, True)
    assert (first.data, first.registers, first.arch) == (second.data, second.registers, second.arch)
    assert compiled == [SMALL.symbol]


@pytest.mark.parametrize(
    "text",
    ["", "null", "5", '"x"', "[]", "{}", "[" * 100_000, '{"sha256": 5}', "\x00"],
    ids=lambda text: repr(text[:20]),
)
def test_a_json_that_says_something_else_is_no_kernel(text: str, folder: Path, compiled: list[str]) -> None:
    good = kernel()
    files_of(folder)[0].write_text(text)
    assert kernel().data == good.data
    assert len(compiled) == 2
    assert kernel().from_cache


@pytest.mark.parametrize(
    "change",
    [{"symbol": "fwd_other"}, {"arch": "sm_90"}, {"key": OTHER_KEY}, {"registers": "32"}, {"registers": True},
     {"seconds": None}, {"advice": 1}, {"extra": 1}],
    ids=str,
)  # fmt: skip
def test_facts_of_another_kernel_are_refused(change: dict[str, Any], folder: Path, compiled: list[str]) -> None:
    kernel()
    edit(files_of(folder)[0], **change)
    again = kernel()
    assert (again.symbol, again.arch, again.from_cache) == (SMALL.symbol, "sm_80", False)
    assert len(compiled) == 2


def test_another_kernels_files_under_the_right_name_are_refused(folder: Path, compiled: list[str]) -> None:
    kernel("sm_90")
    other = files_of(folder)
    contents = [path.read_bytes() for path in other]
    for path in other:
        path.unlink()
    kernel("sm_80")
    for path, content in zip(files_of(folder), contents, strict=True):
        path.write_bytes(content)
    assert kernel("sm_80").arch == "sm_80"
    assert len(compiled) == 3


@pytest.mark.parametrize(
    "data", [b"", b"garbage", b"\x7fELF", elf("fwd_other"), elf(SMALL.symbol).replace(b"\xbe", b"\x3e")]
)
def test_garbage_with_a_matching_checksum_is_refused(data: bytes, folder: Path, compiled: list[str]) -> None:
    good = kernel()
    facts, path = files_of(folder)
    path.write_bytes(data)
    edit(facts, sha256=hashlib.sha256(data).hexdigest())
    assert kernel().data == good.data
    assert len(compiled) == 2


def test_cuda_gets_the_bytes_that_were_checked(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the file again, which may be another one by then."""
    loaded: list[bytes] = []

    class Module:
        def load(self, data: bytes) -> None:
            loaded.append(data)

        def get_function(self, symbol: str) -> SimpleNamespace:
            return SimpleNamespace(ptr=7, module=self, symbol=symbol, kernel=SimpleNamespace(ptr=7))

    def raw_module(path: str) -> Module:
        loaded.append(Path(path).read_bytes())
        return Module()

    driver = SimpleNamespace(funcSetAttribute=lambda *_: None)
    cuda = SimpleNamespace(Module=Module, driver=driver)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=raw_module))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)  # type: ignore[arg-type]
    real = jit.compile_kernel

    def replaced(*arguments: Any) -> cache.Cubin:
        found = real(*arguments)
        for path in folder.glob("*.cubin"):
            path.write_bytes(elf("fwd_other"))
        return found

    monkeypatch.setattr(jit, "compile_kernel", replaced)
    for _ in range(2):
        found = jit._load(SMALL, Device.synthetic("sm_80"))
        assert (found.function, found.owner.symbol) == (7, SMALL.symbol)
    assert loaded == [elf(SMALL.symbol)] * 2


def test_the_folder_is_private(folder: Path, compiled: list[str]) -> None:
    mask = os.umask(0)
    try:
        kernel()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in files_of(folder)] == [0o600, 0o600]


# ---- a folder that cannot be used ----


def no_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("CUPYFLASH_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


def no_home_for_tilde(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    no_home(monkeypatch, folder)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "~/kernels")


def relative_in_a_folder_that_is_gone(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    gone = folder.with_name("gone")
    gone.mkdir()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "kernels")
    monkeypatch.chdir(gone)
    gone.rmdir()


def a_file(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.touch()


def below_a_file(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.touch()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(folder / "cache"))


def locks_is_a_file(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "locks").touch()


def no_inodes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    real = os.open

    def full(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(folder)):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", full)


def no_quota(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    monkeypatch.setattr(os, "mkdir", full)


def refuse_locks(code: int) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        fcntl = pytest.importorskip("fcntl")

        def flock(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", flock)

    refused.__name__ = f"flock_{errno.errorcode[code]}"
    return refused


def lock_not_implemented(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", refused)


BROKEN = [no_home, no_home_for_tilde, relative_in_a_folder_that_is_gone, a_file, below_a_file, locks_is_a_file,
          no_inodes, no_quota, lock_not_implemented,
          *map(refuse_locks, (errno.ENOLCK, errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS))]  # fmt: skip


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda f: f.__name__)
def test_a_folder_that_cannot_be_used_is_no_error(
    breaks: Callable[[pytest.MonkeyPatch, Path], None],
    folder: Path,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvrtc.find()
    with monkeypatch.context() as patch:
        breaks(patch, folder)
        start = time.perf_counter()
        assert kernel().data == elf(SMALL.symbol)
        assert time.perf_counter() - start < 1.5
        store = cache.default()
        assert store.entries() == [] or store.problem is None
        if store.path is None:
            assert "CUPYFLASH_CACHE_DIR" in str(store.problem)
            assert store.clear() == (0, [])
    assert compiled == [SMALL.symbol]


def test_a_folder_replaced_by_a_file_is_no_error(folder: Path, compiled: list[str]) -> None:
    kernel()
    store = cache.default()
    folder.rename(folder.with_name("moved"))
    folder.touch()
    assert kernel().path is None
    assert store.entries() == []
    assert store.clear() == (0, [])
    with store.lock(OTHER_KEY, "symbol"):
        pass


def test_locks_of_root_are_no_error(folder: Path, compiled: list[str]) -> None:
    (folder / "locks").mkdir(parents=True, mode=0o755)
    with another_user(folder):
        pass
    if os.geteuid() == 0:
        os.chown(folder / "locks", 0, 0)
    else:
        (folder / "locks").chmod(0o555)
    with another_user():
        assert not kernel().from_cache
        assert kernel().from_cache
    assert len(compiled) == 1


def test_kernels_in_a_read_only_folder_are_used(folder: Path, compiled: list[str]) -> None:
    kernel()
    with another_user(folder):
        folder.chmod(0o500)
        (folder / "locks").chmod(0o500)
        assert kernel().from_cache
        assert "is not writable" in str(cache.default().problem)
        assert kernel("sm_90").path is None
        folder.chmod(0o700)


def test_a_folder_that_others_can_write_is_not_read(folder: Path, compiled: list[str]) -> None:
    kernel()
    folder.chmod(0o777)
    assert str(cache.default().problem).endswith(f"can be written by others; chmod go-w {folder}")
    assert kernel().path is None
    assert len(compiled) == 2


def test_chmod_is_advised_to_those_who_can(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with another_user():
        owner = folder.stat().st_uid
        if owner:
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        problem = str(cache.default().problem)
    assert "chmod" not in problem
    assert problem.endswith("set CUPYFLASH_CACHE_DIR to a folder of your own")


def test_tilde_is_expanded(folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "~/kernels")
    assert cache.default().path == folder / "kernels"
    kernel()
    assert files_of(folder / "kernels")


# ---- what is removed ----


def foreign_files(folder: Path) -> list[Path]:
    """Files of a project, of CuPy and of anybody, some with names like those of kernels."""
    sha1 = hashlib.sha1(b"payload").hexdigest()
    texts = {
        "package.json": '{"name": "mine"}',
        "yarn.lock": "",
        ".secret.tmp": "",
        f"{sha1}.json": '{"symbol": "fwd", "arch": "sm_80"}',
        f"{sha1[::-1]}.cubin": f"{sha1}payload",  # as CuPy keeps them
        f".{OTHER_KEY}.tmp": "",
        "x.cubin": "\x7fELF",
        "locks/poetry.lock": "",
        "src/package.json": "{}",
        f"precompiled/{OTHER_KEY}.json": "{}",
        "precompiled/sm_80/notes.json": "{}",
        "precompiled/other/package.json": "{}",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def age(*paths: Path, seconds: float) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


def all_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def orphans(folder: Path) -> list[Path]:
    """What killed processes leave behind."""
    half, other_half = folder / f"{OTHER_KEY}.cubin", folder / f"{OTHER_KEY[::-1]}.json"
    half.write_bytes(elf("fwd"))
    facts = json.loads(files_of(folder)[0].read_text())
    other_half.write_text(json.dumps(facts | {"key": other_half.stem}))
    temporary, lock = folder / f".cupyflash-{OTHER_KEY}-x7_abc.tmp", folder / "locks" / f"{OTHER_KEY}.lock"
    temporary.touch()
    lock.touch()
    return [half, other_half, temporary, lock]


@pytest.mark.parametrize("precompiled", [False, True])
def test_clear_removes_what_cupyflash_wrote(precompiled: bool, folder: Path, compiled: list[str]) -> None:
    folder.mkdir(mode=0o700)
    foreign = set(foreign_files(folder))
    jit.precompile(SMALL, "sm_80", folder)
    kernel("sm_90")
    layer = set((folder / "precompiled" / "sm_80").glob("*")) - foreign
    assert len(layer) == 2
    assert cache.default().clear(precompiled=precompiled) == (3 if precompiled else 2, [])
    assert all_files(folder) == (foreign if precompiled else foreign | layer)


def test_clear_follows_no_links(folder: Path, tmp_path: Path, compiled: list[str]) -> None:
    jit.precompile(SMALL, "sm_80", folder)
    elsewhere = tmp_path / "elsewhere"
    (folder / "precompiled").rename(elsewhere)
    (folder / "precompiled").symlink_to(elsewhere)
    assert cache.default().clear(precompiled=True) == (1, [])
    assert len(all_files(elsewhere)) == 2


def test_clear_removes_what_the_emulator_keeps(folder: Path, tmp_path: Path, compiled: list[str]) -> None:
    kept = cache.default().emulator()
    assert kept == folder / "emulator"
    assert kept.stat().st_mode & 0o077 == 0
    digest = OTHER_KEY[:16]
    for name in (f"runtime-{digest}.so", f"runtime-{digest}.so.lock", f"fwd_sm80_bf16_d64-{digest}.so", "mine.so"):
        (kept / name).touch()
    (kept / f"headers-{digest}" / "kernels_cu").mkdir(parents=True)
    (kept / f"headers-{digest[::-1]}").symlink_to(tmp_path)
    assert cache.default().clear() == (0, [])
    assert [path.name for path in kept.iterdir()] == ["mine.so"]
    assert tmp_path.is_dir()
    (kept / "mine.so").unlink()
    cache.default().clear()
    assert not kept.exists()


def test_the_emulator_loads_nothing_that_others_can_write(folder: Path) -> None:
    kept = cache.default().emulator()
    assert kept is not None
    kept.chmod(0o777)
    assert cache.default().emulator() is None


def test_orphans_go_when_they_are_old(folder: Path, compiled: list[str]) -> None:
    kernel()
    left = orphans(folder)
    age(*left, seconds=600)
    kernel("sm_86")
    assert all(path.exists() for path in left)
    age(*left, seconds=4000)
    upkeep._left.clear()  # as in the next process
    kernel("sm_89")
    assert not any(path.exists() for path in left)
    assert {e.arch for e in cache.default().entries()} == {"sm_80", "sm_86", "sm_89"}


def test_clear_leaves_what_is_being_written(folder: Path, compiled: list[str]) -> None:
    kernel()
    half, other_half, temporary, lock = orphans(folder)
    cache.default().clear()
    assert [path.exists() for path in (half, other_half, temporary, lock)] == [False, False, True, False]


def test_clear_says_what_it_could_not_remove(folder: Path, compiled: list[str]) -> None:
    kernel()
    with another_user(folder):
        folder.chmod(0o500)
        removed, errors = cache.default().clear()
        folder.chmod(0o700)
    assert removed == 0
    assert all(isinstance(e, PermissionError) for e in errors)
    assert errors


# ---- waiting for another process ----


def test_a_long_wait_is_announced_once(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "NOTICE_SECONDS", 0.05, raising=False)
    kernel()
    (path,) = (folder / "locks").glob("*.lock")
    cache.default().clear()
    results = []
    with caplog.at_level(logging.WARNING, "cupyflash"), filelock.FileLock(path):
        thread = threading.Thread(target=lambda: results.append(kernel()))
        thread.start()
        thread.join(0.4)
        assert thread.is_alive()
    thread.join(5)
    assert not results[0].from_cache
    assert caplog.messages == [f"cupyflash: waiting for another process to compile {SMALL.symbol} (lock file {path})"]


def test_a_lock_that_is_never_given_back_is_not_waited_for_for_ever(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "NOTICE_SECONDS", 0.05, raising=False)
    monkeypatch.setattr(cache, "GIVE_UP_SECONDS", 0.1, raising=False)
    kernel()
    (path,) = (folder / "locks").glob("*.lock")
    cache.default().clear()
    with filelock.FileLock(path):
        assert not kernel().from_cache


def test_processes_that_are_killed_leave_no_broken_kernel(folder: Path) -> None:
    """kill -9 in the middle of a write: the next process compiles and cleans up in time."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from kernel_files import SMALL, elf;"
        "from cupyflash.compile import cache; from cupyflash.compile.cubin import Cubin;"
        "os.replace = lambda *_: os._exit(9);"
        f"cache.default().write('{OTHER_KEY}', Cubin(elf('k'), 'k', 'sm_80', 1, 0, 0.0, '12.9'))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(Path(__file__).resolve().parents[1])], check=False)
    assert done.returncode == 9
    (left,) = all_files(folder)
    assert left.name.startswith(f".cupyflash-{OTHER_KEY}-")
    assert cache.default().read(OTHER_KEY, "k", "sm_80") is None
