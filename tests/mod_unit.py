"""A score_mod alone, compiled with its derivative, as kernels have both."""

from __future__ import annotations

import pytest

import cupyflash
from cupyflash.compile import jit, nvrtc
from cupyflash.mods import read
from cupyflash.plan.variant import kernel_sources


def compile_mod(text: str) -> None:
    """By NVRTC, where there is one; `text`: as `bind` makes it."""
    try:
        compiler = nvrtc.find()
    except cupyflash.UnsupportedError as reason:
        pytest.skip(str(reason))
    source = (
        f'#include "attention/mods.cuh"\n{read(text).source()}struct None {{}};\n'
        'extern "C" __global__ void kernel(float *x) {\n'
        "    const mods::Mods m{None{}};\n"
        "    x[0] = m.score_mod(mods::Dual(x[0], 1.f), 0, 1, 2, 3).d + m.score_mod(x[1], 0, 1, 2, 3);\n}\n"
    )
    compiler.compile(source, "kernel.cu", kernel_sources(), jit._options("sm_80"))
