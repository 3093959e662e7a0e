"""How fast does attention over a cache read K and V on this GPU, beside torch's SDPA?

    python -m tools.bench_decode [--only TEXT] [--tiles]

Times are medians: event-timed batches, or CUDA graph replays where a call is short. K and V rotate through more memory
than the L2 holds, and who comes first is drawn anew each round. TB/s: bytes of K and V that count over the time. How
many more tokens a second 8-bit caches give says the time of "B64 8k" over that of "int8 B64 8k".
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cupyflash.cache.problem import CacheProblem
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import plan_decode
from cupyflash.plan.decode_shares import DecodePlan, shared_out

from .decode_arrays import Arrays, Call, problem

PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
ROTATED_BYTES = 1 << 30
SHORT_BYTES = 100e6  # of K and V: a graph of calls is timed up to there

SHAPES: dict[str, CacheProblem] = {
    "B64 8k": problem(64, 8192),
    "B1 128k": problem(1, 131072),
    "B8 32k": problem(8, 32768),
    "B128 1k": problem(128, 1024),
    "B256 512": problem(256, 512),
    "B1 8k": problem(1, 8192),
    "B1 2k": problem(1, 2048),
    "B4 4k": problem(4, 4096),
    "B2 8k": problem(2, 8192),
    "MQA B64 8k": problem(64, 8192, 32, 1),
    "MHA B32 2k": problem(32, 2048, 32, 32),
    "d64 B64 8k": problem(64, 8192, d=64),
    "d256 B64 8k": problem(64, 8192, d=256),
    "ragged B64 1..16k": problem(64, 16384),
    "4 rows B64 8k": problem(64, 8192, seqlen_q=4),
    **{f"pages of {n} B64 8k": problem(64, 8192, page=n) for n in (256, 64, 16, 8, 1)},
    "window 4k B64 8k": problem(64, 8192, window=(4096, 0)),
    "softcap B64 8k": problem(64, 8192, softcap=30.0),
    **{f"{s} B64 8k": problem(64, 8192, stored=s, scale_dims=1) for s in ("int8", "e4m3")},
    **{f"fp16, {s} B64 8k": problem(64, 8192, dtype="fp16", stored=s, scale_dims=1) for s in ("int8", "e4m3")},
    "int8, pages of 16 B64 8k": problem(64, 8192, page=16, stored="int8", scale_dims=2),
    "e4m3, pages of 16 B64 8k": problem(64, 8192, page=16, stored="e4m3", scale_dims=2),
    "int8 d64 B64 8k": problem(64, 8192, d=64, stored="int8", scale_dims=1),
    "int8 d256 B64 8k": problem(64, 8192, d=256, stored="int8", scale_dims=1),
    "int8 B1 8k": problem(1, 8192, stored="int8", scale_dims=1),
}


def batches_us(calls: list[Call], per_batch: int = 10, batches: int = 7) -> float:
    """Of one call, launched one after the other."""
    order = [calls[i % len(calls)] for i in range(max(per_batch, len(calls)))]
    return _median_us(lambda: [call() for call in order], len(order), batches)


def graph_us(calls: list[Call], per_graph: int = 16, replays: int = 9) -> float:
    """Of one call in a graph of calls: what it costs the GPU, not the host."""
    order, side = [calls[i % len(calls)] for i in range(max(per_graph, len(calls)))], torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in order:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in order:
            call()
    return _median_us(graph.replay, len(order), replays)


def _median_us(run: Callable[[], object], calls: int, rounds: int) -> float:
    run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in marks) * 1e3 / calls


def host_us(calls: list[Call]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(200):
        calls[i % len(calls)]()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / 200 * 1e6


# Tiles to try in place of the plan's, of these shapes: their fields that differ.
TILES: dict[str, list[dict[str, int]]] = {
    "MQA B64 8k": [
        {"warps": 4, "stages": 5, "columns": 32, "blocks_per_sm": 2},
        {"warps": 4, "stages": 4, "columns": 32, "blocks_per_sm": 2},
        {"warps": 8, "stages": 4}, {"warps": 8, "stages": 6, "columns": 32},
        {"warps": 4, "stages": 11, "columns": 32},
    ],
    "B4 4k": [
        {"warps": 4, "stages": 3, "blocks_per_sm": 2}, {"warps": 4, "stages": 2, "heads": 2, "blocks_per_sm": 2},
        {"warps": 4, "stages": 6},
    ],
    "B8 32k": [{"heads": 1, "warps": 8, "stages": 3, "blocks_per_sm": 1}, {"heads": 4}, {"heads": 1, "stages": 3}],
    "B128 1k": [{"heads": 1, "stages": 3}, {"heads": 1, "warps": 8, "stages": 3, "blocks_per_sm": 1}],
    "d64 B64 8k": [{"pair": 1, "stages": 6}, {"pair": 2, "stages": 2}],
    "MHA B32 2k": [{"heads": 4}, {"heads": 1, "stages": 3}],
}  # fmt: skip


def with_tile(facts: dict[str, int]) -> Callable[..., DecodePlan]:
    """Instead of plan_decode: the plan with this tile."""

    def planned(p: CacheProblem, device: Device, **known: Any) -> DecodePlan:
        variant = plan_decode(p, device, **known).variant
        return shared_out(p, device, replace(variant, tile=replace(variant.tile, **facts)))

    return planned


def measure(name: str, p: CacheProblem) -> str:
    """A line of the table."""
    rng = random.Random(0)
    lengths = [rng.randint(1, p.capacity) for _ in range(p.batch)] if "ragged" in name else [p.capacity] * p.batch
    whole = 2 * p.itemsize * p.batch * p.capacity * p.heads_k * p.head_dim
    sets = [Arrays.of(p, lengths, seed) for seed in range(max(1, min(32, -(-ROTATED_BYTES // whole))))]
    runs = [x.prepared() for x in sets]
    calls: dict[str, list[Call]] = {"ours": [run for _, run in runs]}
    if (
        not p.stored
        and not p.page_size
        and "ragged" not in name
        and p.seqlen_q == 1
        and p.softcap is None
        and p.window[0] is None
    ):
        calls |= {peer: [_peer(x, backend) for x in sets] for peer, backend in PEERS.items()}
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(3):
        for who in random.sample(list(calls), len(calls)):
            times[who].append((graph_us if whole < SHORT_BYTES else batches_us)(calls[who]))
    us = {who: statistics.median(t) for who, t in times.items()}
    seen = sum(min(n, (p.window[0] or n) + p.seqlen_q) for n in lengths)
    read, mine = 2 * p.itemsize * seen * p.heads_k * p.head_dim, us.pop("ours")
    peers = "".join(f" {us.get(who, float('nan')):8.1f}" for who in PEERS)
    best = f"{min(us.values()) / mine:5.2f}" if us else "    -"
    host = host_us(calls["ours"])
    return (f"{name:22s} {read / 1e6:6.0f} {mine:8.1f} {read / mine / 1e6:6.3f} |{peers} | {best} | {host:5.1f} "
            f"| {runs[0][0].kernels}")  # fmt: skip


def _peer(x: Arrays, backend: SDPBackend) -> Call:
    q, k, v = (x.named[name].transpose(1, 2) for name in ("q", "k_cache", "v_cache"))

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast does attention over a cache read K and V on this GPU?")
    parser.add_argument("--only", default="", help="shapes whose names have this text")
    parser.add_argument("--tiles", action="store_true", help="also tiles other than the plan's")
    asked, start = parser.parse_args(), time.time()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{'':22s} {'MB':>6s} {'us':>8s} {'TB/s':>6s} | {'cuDNN':>8s} {'FA2':>8s} |  best |  host | kernels")
    for name, p in SHAPES.items():
        if asked.only in name:
            print(measure(name, p), flush=True)
            torch.cuda.empty_cache()
        for facts in TILES.get(name, ()) if asked.tiles and asked.only in name else ():
            with mock.patch("cupyflash.launch.decode.plan_decode", with_tile(facts)):
                print(measure(name, p), flush=True)
            torch.cuda.empty_cache()
    print(f"{time.time() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
