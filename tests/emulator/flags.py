"""What g++ is told: of the emulator, and of the kernels that run on it."""

from __future__ import annotations

import platform

# Frame pointers: messages carry the call stack of the CUDA thread.
_COMMON = ["-std=c++17", "-fPIC", "-fno-omit-frame-pointer", "-fno-strict-aliasing", "-Wall", "-Wextra"]
_INLINED = "-fno-semantic-interposition"  # functions in others, though each can be found by its name
_X86 = ["-mavx2", "-mfma", "-mf16c"]
_KERNEL = [
    "-g1",  # lines and inlining; for variables in gdb: -g
    "-fsanitize=thread",  # plain loads and stores call runtime/hooks.cpp; libtsan is not linked
    "--param=tsan-instrument-func-entry-exit=0",
    "-fvisibility=hidden",
    "-fno-exceptions",  # nothing that a kernel calls throws, and no C++ runtime is linked
    "-fno-gnu-unique",  # else statics of two kernels with the same name are one
    "-Wno-unknown-pragmas",
    "-Wno-unused-parameter",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-unused-but-set-variable",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
# Kernels use the C library alone: to read libstdc++ would take most of a link.
LINK = ["-shared", "-nostdlib", "-Wl,-Bsymbolic"]


def flags_of_runtime() -> list[str]:
    return [*_COMMON, *_machine_flags(), "-O3", "-g", _INLINED]


def flags_of_kernels(arch: int, slow: bool) -> list[str]:
    """-O0: most of them run for less time than g++ takes to optimise them. (-Og: a tenth less for the table's cases
    with wide heads or biases, 14 to 22 % more for others.) `slow`: those of fp32, of six products each of numbers that
    are split, take eight times as long as others, and by -Og a third less with what g++ takes."""
    return [*_COMMON, *_KERNEL, *_machine_flags(), "-Og" if slow else "-O0", f"-DEMULATED_ARCH={arch}"]


def flags_of_twins() -> list[str]:
    """Of their functions, which are the same for all kernels: compiled once, they are optimised."""
    return [*_COMMON, *_KERNEL, *_machine_flags(), "-O2", _INLINED]


def _machine_flags() -> list[str]:
    return _X86 if platform.machine() in ("x86_64", "AMD64") else []
