"""Two processes on the CPU, by gloo: DDP, FSDP2, and DTensors split by batch and by heads."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests import ranks  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")),
]


def all_of_them(rank: int) -> None:
    """One after the other: it is processes that take time."""
    ranks.ddp(rank, "cpu", torch.float64)
    from torch.distributed import fsdp

    if hasattr(fsdp, "fully_shard"):  # from torch 2.6 on
        ranks.fsdp2(rank, "cpu", torch.float64)
        ranks.check_dtensor("cpu", torch.float64)


def test_two_processes(tmp_path: Any) -> None:
    ranks.run_two(all_of_them, "cpu", tmp_path)
