"""Two processes on the CPU: DDP, FSDP2, and DTensors split by batch and by heads."""

from __future__ import annotations

import os
from typing import Any

import pytest

import cupyflash

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")),
]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return cupyflash.attention(*self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3), causal=True).flatten(-2)


def check_parallel(rank: int, wrap: Any) -> None:
    """Gradients are those of one process that sees the whole batch."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 9, 16, dtype=torch.float64)
    want = torch.autograd.grad(layer(x).square().mean(), list(layer.parameters()))
    parallel = wrap(layer)
    parallel(x[2 * rank :][:2]).square().mean().backward()
    for parameter, g in zip(parallel.parameters(), want, strict=True):
        found = parameter.grad
        torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, g)


def check_dtensor(rank: int) -> None:
    """Splits by batch and by heads are kept, others are made whole; results and gradients are those of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    for heads, packed, split, kept in (
        ((4, 2), False, 0, 0), ((4, 2), False, 2, 2), ((6, 3), False, 2, None), ((4, 2), False, 1, None),
        ((4, 2), True, 1, 1), ((4, 2), True, 0, None),
    ):  # fmt: skip
        torch.manual_seed(1)
        rows = (9,) if packed else (2, 9)
        x = [torch.randn(*rows, h, 8, dtype=torch.float64, requires_grad=True) for h in (heads[0], heads[1], heads[1])]
        spread = [distribute_tensor(t.detach(), mesh, [Shard(split)]).requires_grad_() for t in x]
        spread_cu = distribute_tensor(cu, mesh, [Replicate()])

        def call(x: list[Any], cu: Any, packed: bool = packed) -> Any:
            if packed:
                return cupyflash.attention_varlen(*x, cu, causal=True, return_lse=True)
            return cupyflash.attention(*x, causal=True, return_lse=True)

        (out, lse), (want, want_lse) = call(spread, spread_cu), call(x, cu)
        if kept is not None:
            assert out.placements == (Shard(kept),)
            assert lse.placements == (Shard({0: 0, 2: 1}[kept] if not packed else 0),)
        torch.testing.assert_close((out.full_tensor(), lse.full_tensor()), (want, want_lse))
        (out.square().sum() + lse.sum()).full_tensor().backward()
        (want.square().sum() + want_lse.sum()).backward()
        for a, b in zip(spread, x, strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def work(rank: int, file: str) -> None:
    os.environ["CUPYFLASH_BACKEND"] = "cpu"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    from torch.distributed import fsdp

    check_parallel(rank, torch.nn.parallel.DistributedDataParallel)
    if hasattr(fsdp, "fully_shard"):
        check_parallel(rank, fsdp.fully_shard)
    check_dtensor(rank)
    torch.distributed.barrier()  # none leaves before the other is done
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that ends by itself


def test_two_processes(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path / "rendezvous"),), nprocs=2)
