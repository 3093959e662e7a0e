"""Times block masks of several densities against our dense call and FlexAttention (compiled), in random order.

    python -m tools.bench_masks --seqlen 8192 --head-dim 64,128 --densities 0.1,0.25,0.5,1

The blocks are drawn at random, 128 by 128, one mask for all heads, the diagonal always. Time is the median of
rounds in each of which everybody takes a turn, in an order drawn anew. `of dense x density` is what linear would be: 1.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

ROUNDS, SECONDS, BLOCK = 7, 0.05, 128
Runs = dict[str, Callable[[], Any]]


def blocks_of(density: float, n: int, seed: int = 0) -> np.ndarray:
    """So much of n x n blocks, the diagonal included."""
    found = np.random.default_rng(seed).random((n, n))
    np.fill_diagonal(found, -1)
    return found <= np.quantile(found, density)


def runs_of(args: argparse.Namespace, head_dim: int, densities: list[float]) -> dict[str, Runs]:
    """pass -> name -> what is timed."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    import cupyflash
    from cupyflash import masks

    shape = (args.batch, args.seqlen, args.heads, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    found: dict[str, Runs] = {"fwd": {}, "bwd": {}}

    def add(name: str, call: Callable[[], Any]) -> None:
        out = call()
        like = dout if out.shape == dout.shape and out.is_contiguous() else dout.transpose(1, 2)
        found["fwd"][name] = call
        found["bwd"][name] = lambda: torch.autograd.grad(out, (q, k, v), like, retain_graph=True)

    add("dense", lambda: cupyflash.attention(q, k, v))
    flex = torch.compile(flex_attention, dynamic=False)
    for density in densities:
        blocks = blocks_of(density, -(-args.seqlen // BLOCK))
        mask = masks.from_blocks(blocks, BLOCK, args.seqlen)
        ours = functools.partial(cupyflash.attention, q, k, v, block_mask=mask)
        add(f"cupyflash {density:g}", ours)
        if args.no_flex:
            continue
        there = torch.from_numpy(blocks).cuda()

        def mod(b: Any, h: Any, i: Any, j: Any, there: Any = there) -> Any:
            return there[i // BLOCK, j // BLOCK]

        theirs = create_block_mask(mod, None, None, args.seqlen, args.seqlen, device="cuda")
        add(
            f"flex {density:g}",
            lambda theirs=theirs: flex(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=theirs),  # type: ignore[misc]
        )
    return found


def measure(runs: Runs) -> dict[str, float]:
    """Median milliseconds of each."""
    import torch

    def timed(call: Callable[[], Any], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / count

    counts = {}
    for name, call in runs.items():
        timed(call, 2)
        counts[name] = max(3, int(1000 * SECONDS / max(1e-3, timed(call, 3))))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name in random.sample(list(runs), len(runs)):
            found[name].append(timed(runs[name], counts[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", default="64,128")
    parser.add_argument("--densities", default="0.1,0.25,0.5,1")
    parser.add_argument("--no-flex", action="store_true")
    args = parser.parse_args()
    densities = [float(x) for x in args.densities.split(",")]
    for head_dim in map(int, args.head_dim.split(",")):
        for direction, runs in runs_of(args, head_dim, densities).items():
            ms = measure(runs)
            print(
                f"head_dim {head_dim}, {direction}, {args.batch} x {args.seqlen} x {args.heads}: "
                f"dense {ms['dense']:.3f} ms"
            )
            for density in densities:
                ours, theirs = ms[f"cupyflash {density:g}"], ms.get(f"flex {density:g}", float("nan"))
                of_linear = ours / (ms["dense"] * density)
                print(
                    f"  density {density:5.2f}  {ours:8.3f} ms  of dense x density {of_linear:5.2f}"
                    f"  flex {theirs:8.3f} ms  flex / ours {theirs / ours:5.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
