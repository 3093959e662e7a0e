"""What `explain` computes without a GPU: FLOPs, bytes, the least time they take, and how many blocks share an SM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cupyflash.arrays.adapters import Signature
from cupyflash.bias import Own
from cupyflash.gpu.device import Device, reserved_smem
from cupyflash.plan.extents import Workspace
from cupyflash.plan.families import Plan
from cupyflash.plan.kernels import round_up
from cupyflash.plan.variant import Variant
from cupyflash.problem import ITEMSIZE, Problem

REGISTERS_PER_SM = 65536
REGISTER_UNIT = 8  # a warp's registers come in multiples of 256
SMEM_UNIT = 128  # bytes
# Resident threads of an SM; 1536 elsewhere (CUDA C++ Programming Guide, table "Technical Specifications per Compute
# Capability"). The limit of 16 or more blocks never matters: what forms scores has many threads, or much shared memory.
MANY_THREADS = {(7, 5): 1024, (8, 0): 2048, (9, 0): 2048, (10, 0): 2048, (10, 3): 2048}


class Gpu(NamedTuple):
    """Peak rates of a GPU: NVIDIA's data sheets, dense fp16 and bf16 with fp32 sums."""

    capability: tuple[int, int]
    tflops: float
    gb_per_s: float


GPUS = {  # by the name that the driver gives
    "Tesla T4": Gpu((7, 5), 65, 320),
    "NVIDIA A100-PCIE-40GB": Gpu((8, 0), 312, 1555),
    "NVIDIA A100-SXM4-40GB": Gpu((8, 0), 312, 1555),
    "NVIDIA A100 80GB PCIe": Gpu((8, 0), 312, 1935),
    "NVIDIA A100-SXM4-80GB": Gpu((8, 0), 312, 2039),
    "NVIDIA L40S": Gpu((8, 9), 362, 864),
    "NVIDIA H100 PCIe": Gpu((9, 0), 756, 2000),
    "NVIDIA H100 NVL": Gpu((9, 0), 835, 3900),
    "NVIDIA H100 80GB HBM3": Gpu((9, 0), 989, 3350),
    "NVIDIA H200": Gpu((9, 0), 989, 4800),
    "NVIDIA B200": Gpu((10, 0), 2250, 8000),
}


class Work(NamedTuple):
    """What one launch has to do at least."""

    flops: float
    bytes: int  # every array read once and written once, as far as the launch touches it


def visible_pairs(problem: Problem) -> int:
    """How many (query, key) pairs the mask lets through of one sequence: the sum of `Problem.visible`'s lengths."""
    left, right = problem.window
    n, m = problem.seqlen_q, problem.seqlen_k
    offset = m - n

    def clamped_sum(start: int) -> int:  # of i + start over the queries i, each clamped to [0, m]
        return _clamped_below(n + start, m) - _clamped_below(start, m)

    ends = n * m if right is None else clamped_sum(offset + right + 1)
    return ends - (0 if left is None else clamped_sum(offset - left))


def _clamped_below(x: int, m: int) -> int:
    """The sum of min(t, m) over 0 <= t < x."""
    rising = min(max(x, 0), m)
    return rising * (rising - 1) // 2 + max(0, x - m) * m


def distinct_bytes(signature: Signature, item: int) -> int:
    """Bytes of an array's elements, those counted once that a stride of 0 repeats."""
    return item * math.prod(n for n, step in zip(signature.shape, signature.strides, strict=True) if step or n == 0)


def workspace_bytes(workspace: Workspace) -> dict[str, int]:
    """Of each array; all have 4 bytes an element."""
    return {name: 4 * math.prod(shape) for name, (shape, _) in workspace.items()}


def added_shape(problem: Problem, own: Own) -> tuple[int, ...]:
    """Of a bias or a mask that has 1 along dimensions along which it is broadcast, packed with room for the longest
    sequence."""
    whole = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    if problem.packed:
        whole = *whole[:2], problem.max_seqlen_q, problem.max_seqlen_k
    return tuple(n if has_own else 1 for n, has_own in zip(whole, own, strict=True))


def added_bytes(problem: Problem, options: Mapping[str, Any]) -> int:
    """Of a bias, a mask and the arrays of mods; 0 without."""
    found: int = options["mod_bytes"]
    if problem.bias is not None:
        found += math.prod(added_shape(problem, problem.bias.own)) * ITEMSIZE[problem.bias.dtype]
        found += math.prod(added_shape(problem, problem.bias.beside)) if problem.bias.beside else 0
    return found


def forward_work(problem: Problem, signatures: Sequence[Signature], pairs: int, added: int) -> list[Work]:
    """Reads q, k and v, and so many bytes that are added to scores, writes out and lse: 2 (head_dim + head_dim_v) FLOPs
    for each of so many visible pairs and query head."""
    item = ITEMSIZE[problem.dtype]
    rows = math.prod(problem.rows)
    moved = sum(distinct_bytes(s, item) for s in signatures[:3]) + rows * problem.head_dim_v * item + 4 * rows
    return [Work(_forward_flops(problem, pairs), moved + added)]


def backward_work(problem: Problem, signatures: Sequence[Signature], plan: Plan, pairs: int, added: int) -> list[Work]:
    """Of delta, main and convert, or of delta, dK and dV, dQ, and of the sums of shares and for what is learned;
    `signatures`: of q, k, v, out and dout."""
    item, size = ITEMSIZE[problem.dtype], workspace_bytes(plan.workspace)
    q, k, v, out, dout = (distinct_bytes(s, item) for s in signatures)
    rows = math.prod(problem.rows)
    dq, dkv = rows * problem.head_dim * item, item * sum(math.prod(s.shape) for s in signatures[1:3])
    lse, stats = 4 * rows, size["row_stats"]
    of_q, of_v = (2.0 * width * pairs * problem.heads_q for width in problem.widths)  # of a product
    read = q + k + v + dout + stats + added
    parts = size.get("dalibi_parts", 0)  # written by the last that forms scores, read by a launch of its own
    shares = sum(n for name, n in size.items() if name.endswith("_shares"))  # in place of dK and dV, or 0
    of_mods = sum(n for name, n in size.items() if name.startswith("dmod_sums"))
    read_by_sums = {"slopes": parts, "sinks": stats, "elements": of_mods}
    sums = []
    for variant in (launch.variant for launch in plan.launches):
        if variant.over in read_by_sums:
            sums.append(Work(0.0, read_by_sums[variant.over]))
        elif variant.function == "bwd_shares":
            sums.append(Work(0.0, shares + dkv))
        elif variant.function in ("bwd_dbias", "bwd_dmods"):  # by two products
            sums.append(Work(of_q + of_v, read + added))
    if "dq_accum" not in size:  # both recompute the scores and dP: four products, then three
        return [
            Work(0.0, out + dout + lse + stats),
            Work(2 * (of_q + of_v), read + (shares or dkv)),
            Work(2 * of_q + of_v, read + dq + parts),
            *sums,
        ]
    accum = size["dq_accum"]
    keys = problem.seqlen_k // max(1, problem.batch) if problem.packed else 0
    cleared = 0 if plan.numbers.first_stores > keys else accum  # written by the first, read by the second
    return [
        Work(0.0, out + dout + lse + stats + cleared),
        Work(3 * of_q + 2 * of_v, read + (shares or dkv) + cleared + accum + parts),
        Work(0.0, accum + dq),
        *sums,
    ]


def _forward_flops(problem: Problem, pairs: int) -> float:
    return 2.0 * sum(problem.widths) * pairs * problem.heads_q


def least_times(work: Sequence[Work], device: Device, dtype: str) -> tuple[list[dict[str, Any]], str]:
    """The least time of launches one after the other by GPU, and why there is none: each takes its FLOPs / peak rate or
    its bytes / bandwidth, whichever is more. Products of fp32 are made of six of bf16.

    For a GPU of this machine its own, for a stand-in those of all known GPUs of that compute capability.
    """
    found, products = [], 6 if dtype == "fp32" else 1
    for name, gpu in GPUS.items():
        if name == device.name or (device.ordinal < 0 and gpu.capability == device.capability):
            pairs = [(products * w.flops / gpu.tflops / 1e9, w.bytes / gpu.gb_per_s / 1e6) for w in work]
            total = sum(map(max, pairs))
            computing = sum(compute for compute, memory in pairs if compute > memory)
            found.append({"gpu": name, "ms": total, "bound": "tensor cores" if computing > total / 2 else "memory"})
    return found, "" if found else f"no data sheet of {device.name} here"


def resident_blocks(variant: Variant, device: Device, registers: int) -> dict[str, int]:
    """How many blocks fit an SM by each resource; `registers` a thread, at launch."""
    smem = round_up(max(1, variant.smem_bytes + reserved_smem(device.capability)), SMEM_UNIT)
    return {
        "registers": REGISTERS_PER_SM // (variant.threads * round_up(registers, REGISTER_UNIT)),
        "shared memory": device.smem_per_sm_bytes // smem,
        "threads": MANY_THREADS.get(device.capability, 1536) // variant.threads,
    }
