"""The sm80 family on the CPU: the case table and one problem a shipped variant, against float64.

Two modes: asynchronous copies as late as allowed with warps in random order; and the same under the race detector. What
is shipped runs under the race detector, with gradients of all that features bring, and without them in the other mode;
the table in turn, and cases that bring this family nothing new in the other one alone.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from cupyflash.check.accuracy import Comparison, Oracle
from cupyflash.check.cases import Case
from cupyflash.gpu.device import Device
from cupyflash.plan import forward_sm80, shipped, sm80, variant
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.key_ranges import KEY_RANGES
from cupyflash.plan.spec import CHUNKS, LEARNED
from tests.ahead import Ahead
from tests.emulator import MODES, attention
from tests.emulator.attention import Session, inputs_of, small_device
from tests.emulator.cases import SHIPPED, TABLE
from tests.emulator.require import require_compiler
from tests.table_turns import learns, not_in
from tests.turns import in_turn

require_compiler()

ARCHS = ("sm_80", "sm_86", "sm_90")  # much shared memory, little, and 16-byte reductions
TESTED_MODES = ("race", "late")
# The tiles for little shared memory; 104 and 192 are not multiples of what tiles at their limits are.
SMALL_HEAD_DIMS = sorted({104, 192, *(limit for limit, _ in (*forward_sm80._SMALL, *sm80._BACKWARD_SMALL))})
# Those for Turing; beyond 224 and 240 the backward and the forward have fewer keys a block.
TINY_HEAD_DIMS = (16, 64, 80, 112, 128, 160, 224, 240, 256)
# Forwards have other tiles with much; two of them have yet others with dropout.
LARGE_HEAD_DIMS = 16, 48, 64, 104, 160, 176, 192, 224
SMALL, TINY, LARGE = (
    {
        case.name: case
        for case in (Case(f"{name}-d{d}", "full", 301, 333, d, causal=True, heads_q=2, heads_k=1) for d in head_dims)
    }
    for name, head_dims in (("small", SMALL_HEAD_DIMS), ("tiny", TINY_HEAD_DIMS), ("large", LARGE_HEAD_DIMS))
)
LARGE |= {
    f"{name}-dropout": replace(case, name=f"{name}-dropout", dropout_p=0.3)
    for name, case in LARGE.items()
    if case.head_dim in (48, 104)
}
# In fp32 with little, gradients of biases and of mods have blocks of one warp, and rows more pieces than it has lanes.
ONE_WARP = {
    case.name: case
    for case in (
        Case("one-warp-bias", "full", 37, 70, 200, causal=True, bias="qk"),
        Case("one-warp-mods", "full", 37, 70, 200, mods="heated"),
        Case("one-warp-unaligned", "full", 37, 70, 200, memory="misaligned", bias="qk"),
    )
}


SHIPPED_RUNS = [
    pytest.param(name, mode, marks=() if mode == "race" or learns(case) else pytest.mark.thorough)
    for name, case in SHIPPED.items()
    for mode in TESTED_MODES
]


@functools.lru_cache(maxsize=4)
def oracle(name: str, dtype: str) -> Oracle:
    inputs, problem = inputs_of((SHIPPED | TABLE | SMALL | TINY | LARGE | ONE_WARP)[name], dtype)
    return Oracle(problem, *inputs)


def check(results: list[Comparison]) -> None:
    wrong = [str(r) for r in results if not r.passed]
    assert not wrong, "\n".join(wrong)


def session_of(arch: str, mode: str, seed: int = 0) -> Session:
    """Slopes and sinks that are learned under the race detector, and fixed ones."""
    learns = mode == "race"
    return Session(Device.synthetic(arch), MODES[mode], seed, family="sm80", backward_family="sm80", learns=learns)


def run(case: Case, dtype: str, arch: str, mode: str, seed: int) -> None:
    exact = oracle(case.name, dtype)
    inputs, problem = inputs_of(case, dtype)
    session = session_of(arch, mode, seed)
    out, lse = session.forward(inputs, problem)
    check(exact.judge_forward(out, lse))
    if case.backward:
        check(exact.judge_backward(*session.backward(inputs, out, lse, problem)))


def shipped_way(name: str, mode: str) -> tuple[Case, str, str]:
    """Case, dtype and architecture."""
    case, turn = SHIPPED[name], list(SHIPPED).index(name) + TESTED_MODES.index(mode)
    return case, case.dtypes[0], ARCHS[turn % 3]


def way_of(name: str) -> tuple[Case, str, str]:
    case, index = TABLE[name], list(TABLE).index(name)
    arch, dtype = ARCHS[index % 3], ("bf16", "fp16", "fp32")[(index + index // 3) % 3]
    if dtype == "fp32" and arch == "sm_86" and max(case.head_dim, case.head_dim_v or 0) > 224:
        dtype = "fp16"  # of these there is no backward in fp32
    return case, dtype if dtype in case.dtypes else "bf16", arch


def _rehearse(name: str, mode: str, **_: int) -> None:
    case, dtype, arch = shipped_way(name, mode) if name in SHIPPED else way_of(name)
    inputs, problem = inputs_of(case, dtype)
    session = session_of(arch, mode)
    out, lse = session.forward(inputs, problem)
    if case.backward:
        session.backward(inputs, out, lse, problem)


AHEAD = Ahead(_rehearse, attention)


@pytest.mark.parametrize(("name", "mode"), SHIPPED_RUNS)
def test_shipped_variant(name: str, mode: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    run(*shipped_way(name, mode), mode, seed)


@pytest.mark.parametrize(("name", "mode"), in_turn(TABLE, [(mode,) for mode in TESTED_MODES], spare=not_in("sm80")))
def test_case(name: str, mode: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    run(*way_of(name), mode, seed)


@pytest.mark.parametrize("name", SMALL)
def test_every_tile_for_little_shared_memory(name: str, seed: int) -> None:
    run(SMALL[name], "bf16", "sm_86", "race", seed)


@pytest.mark.parametrize("name", LARGE)
def test_more_keys_a_block_where_there_is_room(name: str, seed: int) -> None:
    run(LARGE[name], "bf16", "sm_90", "race", seed)


@pytest.mark.parametrize("name", ONE_WARP)
def test_rows_of_more_pieces_than_a_block_has_threads(name: str, seed: int) -> None:
    run(ONE_WARP[name], "fp32", "sm_86", "race", seed)


@pytest.mark.parametrize("name", TINY)
def test_every_tile_of_turing(name: str, seed: int) -> None:
    run(TINY[name], "fp16", "sm_75", "race", seed)


def test_every_shipped_variant_is_run() -> None:
    """The cases of `SHIPPED`, in both families, lead to the variants that are shipped; but to `KEY_RANGES`, which has
    tests of its own."""
    for arch in ARCHS:
        device, symbols = Device.synthetic(arch), set()
        for case in SHIPPED.values():
            problem, aligned = case.problem(case.dtypes[0]), case.memory == "contiguous"
            for family, learned in itertools.product(("sm80", None), (False, True)):
                more = dict.fromkeys(LEARNED, learned) | {"family": family}
                more["paired_bias"] = CHUNKS if case.bias else 0
                symbols |= {v.symbol for v in variants_of_calls(problem, device, aligned=aligned, **more)}
        assert symbols >= {v.symbol for v in shipped.shipped(device)} - {KEY_RANGES.symbol}


@pytest.mark.parametrize("mode", ["any", "priority", "starve", "lanes", "race lanes"])
def test_results_do_not_depend_on_the_schedule(mode: str, seed: int) -> None:
    """Forward, and the backward that promises it, give the same bits in every order."""
    case = TABLE["deterministic"]
    inputs, problem = inputs_of(case, "bf16")
    results = []
    for i, how in enumerate(("early", mode, mode)):
        session = Session(small_device("sm_90"), MODES[how], seed + i)
        out, lse = session.forward(inputs, problem)
        results.append((out, lse, *session.backward(inputs, out, lse, problem)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_inputs_are_read_only(rng: np.random.Generator) -> None:
    """The emulator refuses writes to inputs, so a kernel that passes has written none."""
    from tests.emulator import EmulatedKernel, EmulatorError, Memory

    source = '#include "hw/ptx.cuh"\nextern "C" __global__ void k(float *x) { x[ptx::thread_index()] = 0.f; }\n'
    with Memory() as memory:
        address = memory.input("x", rng.standard_normal(32).astype(np.float32))
        with pytest.raises(EmulatorError, match="writes to the input 'x'"):
            EmulatedKernel(source, variant.kernel_sources(), "k")(1, 32, 0, [np.uint64(address)])
