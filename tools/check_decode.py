"""Is attention over a cache right on this GPU?

    python -m tools.check_decode [--only TEXT]

Against float64 by the 2x rule (cupyflash/check), three times each, with NaN in K and V behind every length.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cupyflash.cache.problem import CacheProblem

from .decode_arrays import Arrays, problem


def visible(p: CacheProblem, length: int) -> torch.Tensor:
    """(seqlen_q, length): which keys a query sees."""
    i = torch.arange(p.seqlen_q, device="cuda")[:, None] + length - p.seqlen_q
    j, (left, right) = torch.arange(length, device="cuda")[None], p.window
    seen = torch.ones(p.seqlen_q, length, dtype=torch.bool, device="cuda")
    seen &= j >= i - left if left is not None else True
    return seen & (j <= i + right) if right is not None else seen


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, p: CacheProblem) -> tuple[Any, Any]:
    """(heads, rows, d) in the dtype of the inputs, softmax in fp32 at least; lse."""
    s = (q @ k.transpose(1, 2)).to(torch.promote_types(q.dtype, torch.float32)) * p.scale
    s = p.softcap * torch.tanh(s / p.softcap) if p.softcap else s
    s = s.masked_fill(~seen, -torch.inf)
    weights = torch.nan_to_num(torch.softmax(s, -1), nan=0.0).to(q.dtype)
    return weights @ v, torch.logsumexp(s, -1)


def largest(x: torch.Tensor) -> float:
    y = x.abs().max().item() if x.numel() else 0.0
    return y if y == y else float("inf")


def check(name: str, p: CacheProblem, lengths: list[int]) -> bool:
    x = Arrays.of(p, lengths, poison=True)
    call, run = x.prepared()
    results = []
    for _ in range(3):
        x.out.fill_(torch.nan), x.lse.fill_(torch.nan)
        run()
        results.append((x.out.clone(), x.lse.clone()))
    worst = bound = worst_lse = 0.0
    squares = [0.0, 0.0]
    for b, n in enumerate(lengths):
        q = x.named["q"][b].transpose(0, 1)
        k, v = (x.keys(c, b, n).transpose(0, 1).repeat_interleave(p.group, 0) for c in ("k_cache", "v_cache"))
        seen = visible(p, n)
        want, want_lse = attend(q.double(), k.double(), v.double(), seen, p)
        error, plain = x.out[b].transpose(0, 1).double() - want, attend(q, k, v, seen, p)[0].double() - want
        worst, bound = max(worst, largest(error)), max(bound, largest(plain))
        squares = [squares[0] + error.square().sum().item(), squares[1] + plain.square().sum().item()]
        same = want_lse == x.lse[b]
        worst_lse = max(worst_lse, largest(torch.where(same, 0.0, x.lse[b].double() - want_lse)))
    limit = 2 * bound + {"bf16": 2**-8, "fp16": 2**-11}[p.dtype] * 0.01
    repeats = all(torch.equal(a, results[0][0]) and torch.equal(c, results[0][1]) for a, c in results)
    good = worst <= limit and squares[0] <= 4 * squares[1] + 1e-12 and worst_lse < 2e-5 and repeats
    if not good:
        ratio = (squares[0] / max(squares[1], 1e-30)) ** 0.5
        print(f"WRONG {name}: max {worst:.2e}, plain {bound:.2e}, rms ratio {ratio:.2f}, "
              f"lse {worst_lse:.1e}{'' if repeats else ', differs each time'}; {call.kernels}", flush=True)  # fmt: skip
    return good


def cases() -> Iterator[tuple[str, CacheProblem, list[int]]]:
    rng = random.Random(1)

    def ragged(n: int, most: int) -> list[int]:
        return [rng.randint(0, most) for _ in range(n)]

    for dtype in ("bf16", "fp16"):
        for d in (64, 128, 192, 256, 8, 72, 96, 200):
            yield f"{dtype} d{d}", problem(3, 1000, d=d, dtype=dtype), [1000, 0, 517]
    for d in (64, 128, 256):
        yield f"d{d} large", problem(40, 3000, d=d), ragged(40, 3000)
        for rows in (2, 4, 7, 16, 64, 300):
            yield f"d{d} {rows} rows", problem(5, 3000, d=d, seqlen_q=rows), [3000, 2, 0, 777, 2048]
        yield f"d{d} one sequence", problem(1, 20000, d=d), [19999]
        for page in (1, 2, 8, 16, 24, 64, 256):
            yield f"d{d} pages of {page}", problem(4, 2048, d=d, page=page), [*ragged(3, 2048), 2048]
    yield "MQA", problem(2, 5000, 32, 1), [5000, 4999]
    yield "MHA", problem(2, 5000, 16, 16), [5000, 4999]
    yield "group 5", problem(3, 900, 40, 8, seqlen_q=3), [900, 1, 450]
    yield "window", problem(4, 3000, seqlen_q=4, window=(500, 0)), [3000, 2, 777, 2048]
    yield "window to the right", problem(4, 3000, seqlen_q=9, window=(100, 3)), [3000, 2, 777, 2048]
    yield "softcap", problem(4, 3000, softcap=20.0), [3000, 2, 777, 2048]
    yield "scale < 0", problem(4, 3000, scale=-0.1), [3000, 2, 777, 2048]
    yield "300 short", problem(300, 100, 8, 2), ragged(300, 100)
    for splits in (1, 3, 64):
        yield f"{splits} splits", problem(4, 3000, num_splits=splits), [3000, 2, 777, 2048]
    yield "batch_invariant", problem(4, 9000, batch_invariant=True), [9000, 2, 777, 2048]


def invariant() -> bool:
    """Whether a sequence's result is the same, bit by bit, alone and among others."""
    p = problem(6, 6000, batch_invariant=True)
    lengths = [6000, 1, 0, 3333, 4097, 1024]
    x = Arrays.of(p, lengths)
    x.prepared()[1]()
    good = True
    for b, n in enumerate(lengths):
        one = replace(p, batch=1, slots=1)
        alone = Arrays.of(one, [n])
        for name in ("q", "k_cache", "v_cache"):
            alone.named[name].copy_(x.named[name][b : b + 1])
        alone.prepared()[1]()
        good &= torch.equal(alone.out[0], x.out[b]) and torch.equal(alone.lse[0], x.lse[b])
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="Is attention over a cache right on this GPU?")
    parser.add_argument("--only", default="", help="cases whose names have this text")
    only, start = parser.parse_args().only, time.time()
    chosen = [case for case in cases() if only in case[0]]
    right = sum(check(*case) for case in chosen)
    same = invariant()
    print(f"{right} of {len(chosen)} cases right; batch_invariant: {same}; {time.time() - start:.0f} s", flush=True)
    return int(right < len(chosen) or not same)


if __name__ == "__main__":
    sys.exit(main())
