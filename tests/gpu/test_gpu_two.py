"""Two GPUs: DDP, FSDP2 and DTensors by NCCL, and JAX's shard_map and sharded programs, by the 2x rule.

Each test runs in processes of its own, which are ended where they hang.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupyflash.gpu import device

pytestmark = [
    pytest.mark.gpu,
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")),
]


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if device.count() < 2:
        pytest.skip("needs two GPUs")


def ddp(rank: int) -> None:
    import torch

    from tests import ranks

    ranks.ddp(rank, "cuda", torch.bfloat16)


def fsdp2(rank: int) -> None:
    import torch

    from tests import ranks

    ranks.fsdp2(rank, "cuda", torch.bfloat16)


def dtensors(rank: int) -> None:
    import torch

    from tests import ranks

    ranks.check_dtensor("cuda", torch.bfloat16)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("check", [ddp, fsdp2, dtensors], ids=["ddp", "fsdp2", "dtensors"])
def test_two_processes(check: Any, tmp_path: Path) -> None:
    from tests import ranks

    ranks.run_two(check, "cuda", tmp_path)


@pytest.mark.needs("jax")
def test_jax_on_two_gpus() -> None:
    """What XLA divides, and shard_map."""
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    done = subprocess.run(
        [sys.executable, "-m", "tests.two_devices"], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "DONE", done.stderr[-3000:]


def test_cupy_arrays_of_the_gpu_that_is_not_current() -> None:
    """Results of repeated calls, which are made from what is kept, lie there too, and the current GPU stays so."""
    import cupy
    import numpy as np

    import cupyflash

    rng = np.random.default_rng(0)
    with cupy.cuda.Device(1):
        q, k, v = (cupy.asarray(rng.standard_normal((2, n, 8, 64)).astype(np.float16)) for n in (1, 100, 100))
        wanted = [x.get() for x in (cupyflash.attention(k, k, v), *_step(q, k, v))]
    with cupy.cuda.Device(0):
        for _ in range(3):
            found = cupyflash.attention(k, k, v), *_step(q, k, v)
            assert cupy.cuda.runtime.getDevice() == 0
            assert [x.device.id for x in found] == [1] * 3
            for x, same in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(x.get(), same)


def _step(q: Any, k: Any, v: Any) -> Any:
    import cupyflash

    return cupyflash.attention_with_cache(q, k, v, cache_seqlens=70, return_lse=True)


@pytest.mark.needs("torch", "transformers")
def test_masks_of_each_gpu() -> None:
    """Ranges are made, and masks with holes found, on the GPU that they lie on."""
    import torch

    from cupyflash import UnsupportedError
    from cupyflash.transformers import holes, masks, ranges

    padding = torch.ones(3, 50, dtype=torch.bool)
    padding[1, :7] = False
    for ordinal in (1, 0, 1):
        where = torch.device(f"cuda:{ordinal}")
        mask = masks.mask(3, 1, 50, 49, 0, attention_mask=padding.to(where), device=where)
        assert mask is not None
        assert mask.device == where
        assert ranges.kv_range_of(mask).tolist() == [[0, 50], [7, 50], [0, 50]]
    padding[2, 10:20] = False
    masks.mask(3, 50, 50, attention_mask=padding.to("cuda:1"), device=torch.device("cuda:1"))
    torch.cuda.synchronize(1)
    try:
        with pytest.raises(UnsupportedError, match="throw it away"):
            holes.look()
    finally:
        holes.check_masks(False)
