"""What the emulator runs: the case table, the shipped variants, and shapes that one family's kernels need besides."""

from __future__ import annotations

import itertools

from cupyflash.check.cases import Case, select
from cupyflash.plan import shipped
from cupyflash.problem import Problem, Window

from .attention import EXTRA


def shipped_case(problem: Problem, aligned: bool) -> Case:
    """Small shapes for one shipped problem: partial tiles, at least five tiles of keys and, for d < 200, of queries."""
    window = None if problem.window == (None, None) else problem.window
    own_v = problem.head_dim_v if problem.head_dim_v != problem.head_dim else None
    width = f"d{problem.head_dim}" + f"v{own_v}" * (own_v is not None)
    name = f"shipped-{problem.dtype}-{width}-{problem.window[0]}-{problem.window[1]}".replace("None", "all")
    name += "-softcap" * (problem.softcap is not None) + "-packed" * problem.packed
    name += "-alibi" * problem.alibi + "-range" * problem.kv_range + "-sink" * problem.sink
    of_bias = ""
    if problem.bias:
        of_bias = "".join(itertools.compress("bhqk", problem.bias.own)) + " bool" * (problem.bias.dtype == "bool")
    name += "-bias" * bool(of_bias) + "-mask" * ("bool" in of_bias)
    name += "-dropout" * bool(problem.dropout)
    name += "-block-mask" * (problem.block_mask > 0) + "-group" * (problem.heads_q > problem.heads_k)
    lengths = ((150, 0, 173), (67, 60, 204)) if problem.packed else (None, None)
    mask = "squares_of_heads" if 64 < problem.head_dim <= 128 else "tiles_of_heads"  # one that is not tall
    return Case(
        name, "full", 323 if problem.head_dim < 200 else 131, 332 if problem.bias else 331, problem.head_dim,
        heads_q=2, heads_k=2 * problem.heads_k // problem.heads_q, window=window, head_dim_v=own_v,
        scale=problem.scale if problem.scale != 1 else None, deterministic=problem.deterministic,
        memory="contiguous" if aligned else "misaligned", dlse=True, dtypes=(problem.dtype,),
        softcap=problem.softcap, alibi=problem.alibi, batch=len(lengths[0] or "1"), lengths_q=lengths[0],
        lengths_k=lengths[1], ranges=((65, 297),) if problem.kv_range else None, sink=problem.sink,
        bias=of_bias,
        dropout_p=problem.dropout_p,
        mask=mask if problem.block_mask else "",
    )  # fmt: skip


SHIPPED = {case.name: case for case in (shipped_case(*each) for each in shipped.shipped_problems())}
TABLE = {case.name: case for case in select(tag="emulator")} | EXTRA

# ---- For fwd_sm90.cuh ----

_HEAD_DIMS = (8, 16, 40, 72, 80, 96, 112, 160, 192, 200, 248, 256)
# Lengths so that warpgroups have no rows, or rows that see nothing, in one tile or in several.
_LENGTHS = ((301, 301), (330, 111), (111, 330))
_WINDOWS: tuple[Window, ...] = (
    (0, 0), (100, -37), (-37, 100), (5, -5), (None, 90), (64, None), (None, -200), (1000, 1000), (-20, 30), (0, 64),
    (63, 1), (130, -100), (200, 20), (170, None),
)  # fmt: skip


def _options(i: int) -> dict[str, object]:
    masks: tuple[dict[str, object], ...] = ({}, {"causal": True}, {"window": (150, 20)})
    return {**masks[i % 3], "heads_q": 4, "heads_k": (1, 2, 4)[i // 3 % 3]}


HOPPER_SHAPES: dict[str, Case] = {
    case.name: case
    for case in (
        *(Case(f"hopper-d{d}", "full", 301, 333, d, **_options(i)) for i, d in enumerate(_HEAD_DIMS)),  # type: ignore[arg-type]
        *(
            Case(f"hopper-window{i}-{sq}x{sk}", "full", sq, sk, (64, 128, 256)[i % 3], window=window)
            for i, window in enumerate(_WINDOWS)
            for sq, sk in _LENGTHS
        ),
        *(
            Case(f"hopper-scale{scale}-d{d}", "full", 207, 303, d, scale=scale, values="overflow", causal=d == 128)
            for d in (64, 128, 256)
            for scale in (0.0, -0.01, 0.0003)
        ),
        Case("hopper-decode", "full", 5, 1500, 128, batch=2, heads_q=8, heads_k=2),
        Case("hopper-padded-rows", "full", 203, 199, 72, batch=2, memory="padded_rows", causal=True),
        Case("hopper-every-second-row", "full", 203, 199, 128, batch=2, memory="every_second_row"),
        Case("hopper-nonfinite-window", "full", 307, 303, 128, window=(150, -30), values="nan_in_visible_key"),
        Case("hopper-inf-window", "full", 307, 303, 256, window=(150, -30), values="inf_in_visible_key"),
    )
}


def can_use_tma(case: Case) -> bool:
    """Whether TMA can read all arrays, and there is something of 16 bits to compute: what the sm90 family needs."""
    if case.dtypes == ("fp32",):
        return False
    return "empty" not in case.tags and case.memory != "misaligned" and not case.memory.startswith("broadcast")
