"""The shipped kernels on the CPU: the case table and one problem a shipped variant, against float64.

Two modes each: the race detector; and asynchronous copies as late as allowed with warps in random order.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from emulator import MODES
from emulator.attention import NONFINITE_QUERIES, Session, inputs_of
from emulator.require import require_compiler

from cupyflash import shipped, variant
from cupyflash.accuracy import Comparison, Oracle
from cupyflash.cases import Case, select
from cupyflash.device import Device
from cupyflash.plan import backward_plan, forward_plan
from cupyflash.problem import Problem

require_compiler()

ARCHS = ("sm_80", "sm_86", "sm_90")  # much shared memory, little, and 16-byte reductions
TESTED_MODES = ("race", "late")
CASES = {case.name: case for case in select(tag="emulator")} | NONFINITE_QUERIES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--emulator-seeds")))


def shipped_case(problem: Problem, aligned: bool) -> Case:
    """Small shapes for one shipped problem: partial tiles, at least five tiles of keys and, for d < 200, of queries."""
    window = None if problem.window == (None, None) else problem.window
    name = f"shipped-{problem.dtype}-d{problem.head_dim}-{problem.window[0]}-{problem.window[1]}".replace("None", "all")
    return Case(
        name, "full", 323 if problem.head_dim < 200 else 131, 331, problem.head_dim,
        heads_q=2, heads_k=1, window=window,
        scale=problem.scale if problem.scale != 1 else None, deterministic=problem.deterministic,
        memory="contiguous" if aligned else "misaligned", dlse=True, dtypes=(problem.dtype,),
    )  # fmt: skip


SHIPPED = {case.name: case for case in (shipped_case(*each) for each in shipped.shipped_problems())}


@functools.lru_cache(maxsize=4)
def oracle(name: str, dtype: str) -> Oracle:
    inputs, problem = inputs_of((SHIPPED | CASES)[name], dtype)
    return Oracle(problem, *inputs)


def check(results: list[Comparison]) -> None:
    wrong = [str(r) for r in results if not r.passed]
    assert not wrong, "\n".join(wrong)


def run(case: Case, dtype: str, arch: str, mode: str, seed: int) -> None:
    exact = oracle(case.name, dtype)
    inputs, problem = inputs_of(case, dtype)
    session = Session(Device.synthetic(arch), MODES[mode], seed)
    out, lse = session.forward(inputs, problem)
    check(exact.judge_forward(out, lse))
    if case.backward:
        check(exact.judge_backward(*session.backward(inputs, out, lse, problem)))


@pytest.mark.parametrize("mode", TESTED_MODES)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_variant(name: str, mode: str, seed: int) -> None:
    case = SHIPPED[name]
    arch = ARCHS[(list(SHIPPED).index(name) + TESTED_MODES.index(mode)) % 2 * 2]
    run(case, case.dtypes[0], arch, mode, seed)


@pytest.mark.parametrize("mode", TESTED_MODES)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, mode: str, seed: int) -> None:
    index = list(CASES).index(name)
    dtype = ("bf16", "fp16")[index % 2]
    if dtype not in CASES[name].dtypes:
        dtype = "bf16"
    run(CASES[name], dtype, ARCHS[index % 3], mode, seed)


def test_every_shipped_variant_is_run() -> None:
    """What `shipped_case` makes leads to the variants that are shipped."""
    for arch in ARCHS:
        device, symbols = Device.synthetic(arch), set()
        for case in SHIPPED.values():
            problem, aligned = case.problem(case.dtypes[0]), case.memory == "contiguous"
            plans = forward_plan(problem, device, aligned=aligned), backward_plan(problem, device, aligned=aligned)
            symbols |= {launch.variant.symbol for plan in plans for launch in plan.launches}
        assert symbols == {v.symbol for v in shipped.shipped(device)}


@pytest.mark.parametrize("mode", ["any", "priority", "starve", "lanes", "race lanes"])
def test_results_do_not_depend_on_the_schedule(mode: str) -> None:
    """Forward, and the backward that promises it, give the same bits in every order."""
    case = CASES["deterministic"]
    inputs, problem = inputs_of(case, "bf16")
    results = []
    for how, seed in (("early", 0), (mode, 1), (mode, 2)):
        session = Session(Device.synthetic("sm_90"), MODES[how], seed)
        out, lse = session.forward(inputs, problem)
        results.append((out, lse, *session.backward(inputs, out, lse, problem)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_inputs_are_read_only(rng: np.random.Generator) -> None:
    """The emulator refuses writes to inputs, so a kernel that passes has written none."""
    from emulator import EmulatedKernel, EmulatorError, Memory

    source = '#include "ptx.cuh"\nextern "C" __global__ void k(float *x) { x[ptx::thread_index()] = 0.f; }\n'
    with Memory() as memory:
        address = memory.input("x", rng.standard_normal(32).astype(np.float32))
        with pytest.raises(EmulatorError, match="writes to the input 'x'"):
            EmulatedKernel(source, variant.kernel_sources(), "k")(1, 32, 0, [np.uint64(address)])
