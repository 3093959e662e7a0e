"""Problems and arrays of attention over a cache on this GPU, in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cupyflash.arrays.adapters import TORCH
from cupyflash.cache.problem import CacheProblem
from cupyflash.gpu.device import Device
from cupyflash.launch.decode import CacheCall, prepare

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Call = Callable[[], object]


def problem(
    batch: int, capacity: int, heads_q: int = 32, heads_k: int = 8, d: int = 128, *, seqlen_q: int = 1, page: int = 0,
    dtype: str = "bf16", causal: bool = True, **options: Any,
) -> CacheProblem:  # fmt: skip
    capacity = -(-capacity // page) * page if page else capacity
    options = {"scale": d**-0.5, "window": (None, 0 if causal else None), **options}
    return CacheProblem(
        dtype=dtype, batch=batch, seqlen_q=seqlen_q, heads_q=heads_q, heads_k=heads_k, head_dim=d, head_dim_v=d,
        slots=batch * capacity // page + 5 if page else batch, page_size=page or None, capacity=capacity, **options,
    )  # fmt: skip


@dataclass
class Arrays:
    """q, caches, lengths, and the tables of pages; out and lse."""

    p: CacheProblem
    named: dict[str, torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, p: CacheProblem, lengths: list[int] | None = None, seed: int = 0) -> Arrays:
        g = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=DTYPES[p.dtype], generator=g)

        shape = p.slots, p.page_size or p.capacity, p.heads_k, p.head_dim
        named = {"q": normal(p.batch, p.seqlen_q, p.heads_q, p.head_dim), "k_cache": normal(*shape)}
        named["v_cache"] = normal(*shape)
        if p.stored:
            scale = 6 / (127 if p.stored == "int8" else 448)
            kind = torch.int8 if p.stored == "int8" else torch.float8_e4m3fn
            for name in ("k_cache", "v_cache"):
                named[name] = (named[name].float() / scale).clamp(-127, 127).to(kind)
        named["cache_seqlens"] = torch.tensor(lengths or [p.capacity] * p.batch, dtype=torch.int32, device="cuda")
        if p.page_size:
            order = torch.randperm(p.slots, device="cuda", generator=g)[: p.batch * p.pages_per_sequence]
            named["block_table"] = order.to(torch.int32).view(p.batch, -1)
        if p.stored:
            each = (p.slots, p.heads_k)[2 - p.scale_dims :]
            named |= {name: torch.full(each, scale, device="cuda") for name in ("k_scale", "v_scale")}
        return cls(p, named, torch.full_like(named["q"], torch.nan), torch.full(p.rows, torch.nan, device="cuda"))

    def prepared(self) -> tuple[CacheCall, Call]:
        signatures = {name: TORCH.describe(name, TORCH.signature(x)) for name, x in self.named.items()}
        names = (*self.named, "out", "lse")
        call = prepare(self.p, names, signatures, Device.of(0), aligned=True, stream=stream())
        made = [TORCH.empty(shape, dtype, self.out) for shape, dtype in call.made]
        for x in made:
            x.fill_(torch.nan)
        addresses = [x.data_ptr() for x in (*self.named.values(), self.out, self.lse, *made)]
        return call, lambda keep=made: call(addresses, stream())


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream
