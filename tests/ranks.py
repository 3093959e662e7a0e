"""Two processes: models in DDP and FSDP2, and DTensors split by batch and by heads, against one that sees all."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

import cupyflash
from tests.torch_exact import exact

SECONDS = 300.0  # after which two processes have hung; CI runs them at a low priority, too


class Layer(torch.nn.Module):
    """Attention of what a linear layer makes; `attention` may be another one."""

    def __init__(self, head_dim: int, **where: Any) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = torch.nn.Linear(2 * head_dim, 6 * head_dim, **where)
        self.attention: Callable[..., Any] = cupyflash.attention

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, self.head_dim)).unbind(-3)
        return self.attention(q, k, v, causal=True).flatten(-2)

    def plain(self, dtype: torch.dtype) -> Layer:
        """The same by plain attention, in that dtype."""
        found = copy.deepcopy(self).to(dtype)
        found.attention = lambda *x, causal: exact(*x, causal=causal)[0]
        return found


def check_parallel(rank: int, wrap: Any, kind: str, dtype: torch.dtype) -> None:
    """Gradients are those of one process that sees the whole batch: of 16 bits by the 2x rule."""
    torch.manual_seed(0)
    head_dim, seqlen = (8, 9) if dtype is torch.float64 else (64, 301)
    layer = Layer(head_dim, dtype=dtype, device=kind)
    x = torch.randn(4, seqlen, 2 * head_dim, dtype=dtype, device=kind)

    def gradients(model: Layer) -> list[Any]:
        out = model(x.to(next(model.parameters()).dtype))
        return list(torch.autograd.grad(out.square().mean(), list(model.parameters())))

    want, plain = gradients(layer.plain(torch.float64)), gradients(layer.plain(dtype))
    parallel = wrap(layer)
    parallel(x[2 * rank :][:2]).square().mean().backward()
    for parameter, w, p in zip(parallel.parameters(), want, plain, strict=True):
        found = parameter.grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        if dtype is torch.float64:
            torch.testing.assert_close(found, w)
            continue
        rounding = torch.finfo(dtype).eps / 2
        for size in (lambda t: t.abs().max(), lambda t: t.square().mean().sqrt()):
            ours, bound = size(found.double() - w), 2 * size(p.double() - w) + rounding * size(w)
            assert ours <= bound, (wrap, ours, bound)


def check_dtensor(kind: str, dtype: torch.dtype) -> None:
    """Splits by batch and by heads are kept, others are made whole; results and gradients are those of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(kind, (2,))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=kind)
    for heads, packed, split, kept in (
        ((4, 2), False, 0, 0), ((4, 2), False, 2, 2), ((6, 3), False, 2, None), ((4, 2), False, 1, None),
        ((4, 2), True, 1, 1), ((4, 2), True, 0, None),
    ):  # fmt: skip
        torch.manual_seed(1)
        rows, (heads_q, heads_k) = (9,) if packed else (2, 9), heads
        x = [torch.randn(*rows, h, 8, dtype=dtype, device=kind).requires_grad_() for h in (heads_q, heads_k, heads_k)]
        spread = [distribute_tensor(t.detach(), mesh, [Shard(split)]).requires_grad_() for t in x]
        spread_cu = distribute_tensor(cu, mesh, [Replicate()])

        def call(x: list[Any], cu: Any, packed: bool = packed) -> Any:
            options = {"causal": True, "return_lse": True, "deterministic": True}
            if packed:
                return cupyflash.attention_varlen(*x, cu, **options)
            return cupyflash.attention(*x, **options)

        (out, lse), (want, want_lse) = call(spread, spread_cu), call(x, cu)
        if kept is not None:
            assert out.placements == (Shard(kept),)
            assert lse.placements == (Shard({0: 0, 2: 1}[kept] if not packed else 0),)
        torch.testing.assert_close((out.full_tensor(), lse.full_tensor()), (want, want_lse))
        (out.square().sum() + lse.sum()).full_tensor().backward()
        (want.square().sum() + want_lse.sum()).backward()
        for a, b in zip(spread, x, strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def _work(rank: int, file: str, kind: str, check: Callable[[int], None]) -> None:
    if kind == "cpu":
        os.environ["CUPYFLASH_BACKEND"] = "cpu"
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "gloo" if kind == "cpu" else "nccl", init_method=f"file://{file}", rank=rank, world_size=2,
        timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    check(rank)
    torch.distributed.barrier()  # none leaves before the other is done
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that ends by itself


def run_two(check: Callable[[int], None], kind: str, folder: Any) -> None:
    """`check` of each rank, a function of a module, in two processes that are ended where they hang."""
    processes = torch.multiprocessing.spawn(_work, (str(folder / "rendezvous"), kind, check), nprocs=2, join=False)
    end = time.monotonic() + SECONDS
    while not processes.join(timeout=1):
        if time.monotonic() > end:
            for process in processes.processes:
                process.kill()
            raise TimeoutError(f"two processes have not ended in {SECONDS} s")


def ddp(rank: int, kind: str, dtype: torch.dtype) -> None:
    devices = {"device_ids": [rank]} if kind == "cuda" else {}
    check_parallel(rank, lambda layer: torch.nn.parallel.DistributedDataParallel(layer, **devices), kind, dtype)


def fsdp2(rank: int, kind: str, dtype: torch.dtype) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(kind, (2,))  # else it is one of GPUs wherever there is one
    check_parallel(rank, lambda layer: fully_shard(layer, mesh=mesh), kind, dtype)
