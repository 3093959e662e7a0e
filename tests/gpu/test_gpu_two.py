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
