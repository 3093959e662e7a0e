"""How long a new kernel takes: compiled cold, and loaded from the disk cache by a new process.

``python -m cupyflash.cli.bench.startup DTYPE HEAD_DIM ARCH`` is such a process: it prints one JSON document. On a GPU
it loads the kernels there (ARCH is then ignored); without one it stops at the cubin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from cupyflash.cli.output import quiet


def measure(dtype: str, head_dim: int, arch: str) -> dict[str, Any]:
    """The kernels of a causal forward and backward in two fresh processes that share an empty cache folder."""
    with tempfile.TemporaryDirectory(prefix="cupyflash-bench-") as folder:
        # CUDA's own cache of compiled programs would hide the cold start.
        environment = os.environ | {"CUPYFLASH_CACHE_DIR": folder, "CUDA_CACHE_DISABLE": "1"}
        command = [sys.executable, "-m", "cupyflash.cli.bench.startup", dtype, str(head_dim), arch]
        cold, warm = (
            json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
            for _ in range(2)
        )
    return {"cold": cold, "disk_cache": warm}


def child(dtype: str, head_dim: int, arch: str) -> dict[str, Any]:
    """Import, find GPU and compiler, then each kernel that a call takes, by itself; of fp16 or bf16."""
    start = time.perf_counter()
    from cupyflash.compile import jit, nvrtc
    from cupyflash.gpu import device
    from cupyflash.plan.families import variants_of_calls
    from cupyflash.problem import Problem

    imported = time.perf_counter()
    on_gpu = device.count() > 0
    if on_gpu:
        import cupy

        cupy.zeros(1)  # the CUDA context
        target = device.Device.of(0)
    else:
        target = device.Device.synthetic(arch)
    ready = time.perf_counter()
    nvrtc.usable()
    dtype = dtype if dtype in target.dtypes else target.dtypes[0]
    problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, head_dim**-0.5, (None, 0))
    kernels = []
    for variant in variants_of_calls(problem, target):
        begin = time.perf_counter()
        if on_gpu:
            jit.load(variant, target)
        else:
            jit.compile_kernel(variant, target.arch)
        kernels.append({"symbol": variant.symbol, "seconds": round(time.perf_counter() - begin, 5)})
    return {"import_s": round(imported - start, 4), "context_s": round(ready - imported, 4),
            "loaded_on_gpu": on_gpu, "kernels": kernels}  # fmt: skip


if __name__ == "__main__":
    quiet()
    print(json.dumps(child(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
