"""A short fuzzing run with fixed seeds, and that the fuzzer can fail. Long runs: ``python -m tests.fuzz``."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupyflash.check.case_masks import MASKS
from cupyflash.cpu import attention as cpu
from cupyflash.dropout import kept, limit_of
from tests.ahead import units
from tests.emulator import attention
from tests.emulator.build import build
from tests.fuzz import arrays, emulated, generate, loop, modding, run
from tests.fuzz.dropping import factors
from tests.fuzz.spec import Spec
from tests.planted.markers import change, planted

CPU_BATCHES, CPU_SIZE = 8, 5
EMULATOR_BATCHES, EMULATOR_SIZE = 4, 7  # each compiles what its problems need


def failures(where: str, number: int, size: int) -> list[str]:
    found = [(spec, run.check(spec, where)) for spec in loop.batch(11, where, number, size)]
    return [f"{spec}\n{wrong}" for spec, wrong in found if wrong]


@pytest.mark.parametrize("number", range(CPU_BATCHES))
def test_cpu(number: int) -> None:
    assert not failures("cpu", number, CPU_SIZE)


@pytest.mark.needs("g++")
@pytest.mark.parametrize("number", range(EMULATOR_BATCHES))
def test_emulator(number: int) -> None:
    specs = loop.batch(11, "emulator", number, EMULATOR_SIZE)
    each = (units(emulated.run, {"spec": spec, "x": arrays.draw(spec)}, [attention]) for spec in specs)
    build(itertools.chain(*each))  # their kernels, of all problems at once
    assert not failures("emulator", number, EMULATOR_SIZE)


@pytest.mark.parametrize(
    "line",
    [
        "sq=3 sk=1 group=4 softcap=9.33 dropout=0.1225 values=cliff seed=680426",
        "dtype=fp64 d=8 sq=2 sk=2 heads=4 scale=0.001 mods=scaled seed=57",
        "dtype=fp32 d=40 sq=1 sk=1 packed=0:16:16,2:2:2 right=0 bias=bhqk+bool values=infinite_scores seed=126000",
    ],
    ids=["a cap that is reached", "small gradients in an array's own fp16", "a packed mask hides as a block mask"],
)
def test_bounds_have_room_for(line: str) -> None:
    """What right results once were called wrong for."""
    assert not run.check(Spec.parse(line), "cpu")


@pytest.mark.needs("g++")
def test_bounds_have_room_for_weights_below_fp32() -> None:
    """A sink's weight of less than 2^-126 may count as 0 in kernels of 16 bits, whatever it is multiplied by."""
    assert not run.check(Spec.parse("d=96 sq=1 sk=1 heads=2 sink=1 values=cliff seed=737672"), "emulator")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(4))
def test_gpu(number: int) -> None:
    assert not failures("gpu", number, 12)


@pytest.mark.parametrize("where", run.WHERE)
def test_a_line_says_all(where: str) -> None:
    for number in range(20):
        for spec in loop.batch(5, where, number, 10):
            assert Spec.parse(str(spec)) == spec
            spec.problem()


def test_every_kind_of_everything_is_drawn() -> None:
    specs = [spec for number in range(60) for spec in loop.batch(0, "emulator", number)]
    assert {s.values for s in specs} == set(arrays.VALUES)
    for name in ("q", "k", "v", "dout"):
        assert {getattr(s, name) for s in specs} == set(arrays.MEMORY)
    assert {s.mode for s in specs} == set(emulated.MODES)
    assert {s.group for s in specs} == set(generate.GROUPS)
    assert {s.d for s in specs} == set(generate.HEAD_DIMS)
    assert {-1, 0, 1} == {int(np.sign(s.factor)) for s in specs}
    assert 0.1 < sum(s.softcap is not None for s in specs) / len(specs) < 0.35
    assert 0.1 < sum(s.alibi > 0 for s in specs) / len(specs) < 0.35
    assert 0.1 < sum(s.sink for s in specs) / len(specs) < 0.35
    assert 0.1 < sum(s.dropout > 0 for s in specs) / len(specs) < 0.35
    assert {s.seed_dims for s in specs} == {0, 1, 2}
    assert 0.1 < sum(bool(s.blocks) for s in specs) / len(specs) < 0.35
    assert {s.blocks for s in specs} == {"", *MASKS}
    assert 0.1 < sum(bool(s.mods) for s in specs) / len(specs) < 0.35
    assert {s.mods for s in specs} == {"", *modding.MODS}
    assert any((s.left or 0) < 0 for s in specs)
    assert any((s.right or 0) < 0 for s in specs)
    assert {0, 1} <= {s.sq for s in specs} & {s.sk for s in specs}
    lengths = [x for s in specs for x in s.lengths]
    assert {0, 1} <= {a for a, _, _ in lengths} & {b for _, b, _ in lengths}
    assert any(0 < used < b for _, b, used in lengths)
    assert any(s.packed and s.sq > 0 for s in specs)
    assert 0.2 < sum(bool(s.packed) for s in specs) / len(specs) < 0.4


@pytest.mark.parametrize("seed", [np.array([5, -9], np.int32), np.array([[5, -9], [3, 7]], np.int32)])
def test_what_is_kept_is_what_cupyflash_keeps(seed: np.ndarray) -> None:
    """Two ways to write the same function."""
    for sequence, head, shape in ((0, 0, (1, 1)), (2, 5, (77, 53))):
        of = np.array([sequence]), np.array([head]), slice(0, shape[0]), slice(0, shape[1])
        np.testing.assert_array_equal(factors(seed, 0.3, sequence, head, shape) > 0, kept(seed, limit_of(0.3), *of)[0])


def test_packed_sequences_shrink() -> None:
    """Every way is simpler: fewer sequences, shorter ones, or all keys used; and each is a problem."""
    spec = Spec(packed="9:8:5,0:3:3", sq=7)
    found = {s.packed for s in generate.simpler(spec)} - {spec.packed}
    assert found == {"4:8:5,0:3:3", "9:4:4,0:3:3", "9:8:8,0:3:3", "0:3:3", "9:8:5,0:1:1", "9:8:5"}
    for s in generate.simpler(spec):
        s.problem()


def test_ranges_of_keys_that_are_not_there_are_no_problem() -> None:
    assert generate.has_its_ranges(Spec(packed="9:8:5", sq=7, ranges="1:5"))
    assert not generate.has_its_ranges(Spec(packed="9:8:5", sq=7, ranges="1:6"))
    assert not generate.has_its_ranges(Spec(sk=4, ranges="1:5"))


def planted_in_the_cpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are one percent too large where P is recomputed."""
    original = cpu._backward_tile

    def wrong(Q: np.ndarray, K: np.ndarray, *more: object) -> np.ndarray:
        return original(Q, K * 1.01, *more)

    monkeypatch.setattr(cpu, "_backward_tile", wrong)


def test_a_fault_in_the_cpu_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_in_the_cpu_path(monkeypatch)
    assert any(failures("cpu", number, CPU_SIZE) for number in range(CPU_BATCHES))


@pytest.mark.needs("g++")
def test_a_fault_in_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas without the gradient of lse, in the kernel that all backwards share."""
    wrong = planted((change("delta-less-dlse", "sum - dlse[i]", "sum"),))
    session = emulated.session
    monkeypatch.setattr(emulated, "session", lambda spec: session(spec, wrong))
    assert any(failures("emulator", number, EMULATOR_SIZE) for number in range(EMULATOR_BATCHES))
