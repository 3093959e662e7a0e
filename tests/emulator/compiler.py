"""The C++ compiler, clang++ or g++, and what it is told: of the emulator, and of the kernels that run on it."""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import shutil
import subprocess
from pathlib import Path

# Frame pointers: messages carry the call stack of the CUDA thread.
_COMMON = ["-std=c++17", "-fPIC", "-fno-omit-frame-pointer", "-fno-strict-aliasing", "-Wall", "-Wextra"]
_INLINED = "-fno-semantic-interposition"  # functions in others, though each can be found by its name
_X86 = ["-mavx2", "-mfma", "-mf16c"]
_KERNEL = [
    "-g1",  # lines and inlining; for variables in gdb: -g
    "-fsanitize=thread",  # plain loads and stores call runtime/hooks.cpp; libtsan is not linked
    "-fvisibility=hidden",
    "-fno-exceptions",  # nothing that a kernel calls throws, and no C++ runtime is linked
    "-Wno-unknown-pragmas",
    "-Wno-unused-parameter",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-unused-but-set-variable",
    "-Wno-uninitialized",
]
_KERNEL_BY_GCC = [
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-gnu-unique",  # else statics of two kernels with the same name are one
    "-Wno-maybe-uninitialized",
]
_KERNEL_BY_CLANG = [
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write"),  # of both, g++ announces both
    "-gno-column-info",
]
# Kernels use the C library alone: to read libstdc++ would take most of a link.
_LINK = ["-shared", "-nostdlib", "-Wl,-Bsymbolic"]
_LINK_BY_CLANG = ["-Wl,--wrap=memcpy,--wrap=memset"]


def missing_compiler() -> str | None:
    """Why the emulator cannot run here, with the way out, or None."""
    if platform.system() != "Linux":
        return "the emulator runs on Linux only"
    if shutil.which(program()) is None:
        return "the emulator needs clang++ or g++ with C++17: apt-get install clang"
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in Path("/proc/cpuinfo").read_text():
        return "the emulator needs a CPU with AVX2, FMA and F16C"
    return None


@functools.cache
def program() -> str:
    """clang++, which takes half as long, where it knows the flags and finds the headers of C++, which come with g++;
    else g++."""
    command = ["clang++", "-std=c++17", *_KERNEL_BY_CLANG, "-fsyntax-only", "-x", "c++", "-"]
    with contextlib.suppress(OSError):
        if not subprocess.run(command, input="#include <vector>", capture_output=True, text=True).returncode:
            return command[0]
    return "g++"


def version() -> str:
    return _version_of(program())


@functools.cache
def _version_of(name: str) -> str:
    done = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def _is_clang() -> bool:
    return program() == "clang++"


def readable(text: str) -> str:
    """A header's text as the compiler takes it: clang++ insists on a loop behind `#pragma unroll`, and a planted bug
    may stand between."""
    return re.sub(r"#pragma unroll.*", "", text)


def runtime_flags() -> list[str]:
    return [*_COMMON, *_machine_flags(), "-O3", "-g", _INLINED]


def kernel_flags(arch: int) -> list[str]:
    """-O0: most of them run for less time than it takes to optimise them."""
    return [*_COMMON, *_flags_of_kernels(), "-O0", f"-DEMULATED_ARCH={arch}"]


def link_flags() -> list[str]:
    """Of kernels."""
    return [*_LINK, *(_LINK_BY_CLANG if _is_clang() else [])]


def twin_flags() -> list[str]:
    """Of their functions, which are the same for all kernels: compiled once, they are optimised."""
    return [*_COMMON, *_flags_of_kernels(), "-O2", _INLINED]


def _flags_of_kernels() -> list[str]:
    return [*_KERNEL, *(_KERNEL_BY_CLANG if _is_clang() else _KERNEL_BY_GCC), *_machine_flags()]


def _machine_flags() -> list[str]:
    return _X86 if platform.machine() in ("x86_64", "AMD64") else []
