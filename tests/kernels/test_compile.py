"""Every shipped kernel compiles, without register spills, or few beside its products, and within the shared memory.

A spill shows as slow code only, so nothing else would report it. Which tile spills is a matter of a few registers: see
`fresh_thread` in kernels_cu/tile/tile.cuh before changing a tile or a main loop. Architectures share most kernels. One
that has few registers left is compiled for an architecture of each generation that takes it, any other for one of them,
but for each sixth; with --thorough all are compiled for all. What NVRTC made of a kernel is kept (`tests/compiled.py`):
only those that have changed since, and a sample of the others, are compiled.

Every kernel's machine code is pinned for one architecture a family: a new feature leaves that of all kernels without it
as it was. A change that means to touch it writes the digests again, with
``PYTHONPATH=. python tests/kernels/test_compile.py``, and shows them in its commit.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.compile import nvrtc
from cupyflash.gpu.device import Device
from cupyflash.mods import bind
from cupyflash.plan.decode import plan_decode
from cupyflash.plan.decode_kernels import Dequantize, DequantizeTile
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.shipped import shipped
from cupyflash.plan.shipped_cache import problem as over_cache
from cupyflash.plan.shipped_cache import shipped_over_cache
from cupyflash.plan.variant import Variant, kernel_sources
from cupyflash.problem import Problem
from tests import compiled
from tests.compiled import Facts, Made, facts_of
from tests.shipped_kernels import ARCHS, PINNED, all_shipped, generations, kernels

try:
    nvrtc.pick()
except cupyflash.UnsupportedError as reason:
    pytest.skip(str(reason), allow_module_level=True)

MARGIN = 40  # registers; on another generation a kernel takes up to 38 more (NVRTC 12.9), which the test watches
PARTS = 12  # tests that share the kernels, for processes side by side
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "machine_code.json"
WIDE = ("sm_80", "sm_90", "sm_100")  # with one stage; with two, of two generations
NVRTC = (12, 9)  # another compiler makes other code
REGISTERS_PER_SM, REGISTERS_PER_THREAD = 65536, 255
# What ptxas says where it waits for each wgmma, because it cannot tell that the next one's registers are free.
SERIALISED = {"C7508", *(f"C75{number}" for number in range(10, 17))}


def test_few_variants_are_shipped() -> None:
    """Each costs CI a compilation an architecture, and a run in the emulator."""
    for arch in ARCHS:
        symbols = [v.symbol for v in all_shipped(arch)]
        assert len(set(symbols)) == len(symbols)
        assert len(shipped(Device.synthetic(arch))) <= 200
        assert len(shipped_over_cache(Device.synthetic(arch))) <= 95


@pytest.mark.parametrize("arch", ARCHS)
def test_shipped_variants_fit_the_shared_memory(arch: str) -> None:
    device = Device.synthetic(arch)
    for v in all_shipped(arch):
        assert v.smem_bytes <= device.smem_bytes, v.symbol


def registers_left(v: Variant, facts: Facts) -> int:
    limit = REGISTERS_PER_SM // (v.threads * v.tile.blocks_per_sm) // 8 * 8
    return min(limit, REGISTERS_PER_THREAD) - facts.registers


def test_all_architectures_have_their_turn() -> None:
    assert generations(ARCHS[1:], 0) == ["sm_86", "sm_90", "sm_100", "sm_120", "sm_75"]
    assert generations(ARCHS[1:], 1) == ["sm_89", "sm_90", "sm_103", "sm_120", "sm_75"]
    assert all(generations(ARCHS, turn)[0] == "sm_80" for turn in range(2))


@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_knows(arch: str) -> None:
    if arch not in nvrtc.find().archs:
        pytest.skip(f"NVRTC {nvrtc.find().version} does not know {arch}; pip install -U 'cupyflash[cu13]'")


def made_of_part(part: int, *, thorough: bool = False) -> list[Made]:
    """Of `kernels`, each `PARTS`-th."""
    archs = nvrtc.find().archs
    mine = [{arch: v for arch, v in on.items() if arch in archs} for on in list(kernels().values())[part::PARTS]]
    if thorough:
        return facts_of((v, arch) for on in mine for arch, v in on.items())
    now, later = [], []
    for turn, on in enumerate(filter(None, mine)):
        first, *others = generations(on, turn)
        pinned = [arch for arch in others if arch in PINNED]
        now += [(on[arch], arch) for arch in (first, *pinned)]
        later.append([(on[arch], arch) for arch in others if arch not in pinned])
    made = facts_of(now)
    tight = {v.source() for v, _, facts in made if registers_left(v, facts) < MARGIN}
    return made + facts_of(
        each for turn, some in enumerate(later) for each in some if turn % 6 == 0 or each[0].source() in tight
    )


def may_spill(v: Variant, arch: str) -> bool:
    """On Turing nothing was tuned beyond head_dim 192: over a cache, and with a block mask (docs/performance.md). The
    fastest tiles of fp32 spill a few registers."""
    return v.dtype == "fp32" or (arch == "sm_75" and v.head_dim > 192)


@pytest.mark.parametrize("part", range(PARTS))
def test_shipped_variants_compile_without_spills(part: int, pytestconfig: pytest.Config) -> None:
    """And, where the architecture's machine code is pinned, into that."""
    made = made_of_part(part, thorough=pytestconfig.getoption("--thorough"))
    spilled = [(v.symbol, arch) for v, arch, facts in made if facts.spills == "yes" and not may_spill(v, arch)]
    assert not spilled, f"register spills, NVRTC {nvrtc.find().version}: {spilled}"
    first: dict[str, int] = {}
    for v, arch, facts in made:
        assert 0 < facts.registers * v.threads * v.tile.blocks_per_sm <= REGISTERS_PER_SM, (v.symbol, arch)
        more = facts.registers - first.setdefault(v.source(), facts.registers)
        assert more < MARGIN, f"{v.symbol}, {arch}: {more} registers more than elsewhere; raise MARGIN"
    if nvrtc.find().version != NVRTC:
        pytest.skip(f"the code is that of NVRTC {NVRTC[0]}.{NVRTC[1]}; this is {nvrtc.find().version}")
    golden = json.loads(GOLDEN.read_text())
    for v, arch, facts in made:
        assert arch not in PINNED or facts.code == golden[arch].get(v.symbol), (v.symbol, arch)


@pytest.mark.parametrize("arch", PINNED)
def test_what_is_shipped_is_pinned(arch: str) -> None:
    """And the tests above compile all of it."""
    symbols = {v.symbol for v in all_shipped(arch)}
    assert set(json.loads(GOLDEN.read_text())[arch]) == symbols <= set(compiled.kept()[arch])
    for turn in range(2):
        assert all(arch in generations(on, turn) for on in kernels().values() if arch in on)


def reading_mods(arch: str) -> list[Variant]:
    """Kernels of gradients of what mods read."""
    arrays = {"scale": np.zeros(2, np.float32), "table": np.zeros((2, 2, 40), np.float16)}
    text, _ = bind("tanh(score * scale[h]) * 20 + table[b, h, q - k] + scale[0]", "k % 3 != 1", arrays)
    shapes = (2,), (2, 2, 40)
    variants: list[Variant] = []
    more: tuple[dict[str, Any], ...] = ({"window": (None, 0)}, {"packed": True}, {"block_mask": 4, "dropout": 1})
    for head_dim, options in zip((64, 128, 256), more, strict=True):
        problem = Problem("bf16", 1, 1, 1, 1, 1, head_dim, 1.0, mods=text, mod_shapes=shapes, **options)
        of = variants_of_calls(problem, Device.synthetic(arch), dmods=(0, 1))
        variants += [v for v in of if v.header == "bwd_dmods"]
    return variants


@pytest.mark.parametrize("arch", PINNED)
def test_gradients_of_what_mods_read_compile_without_spills(arch: str) -> None:
    made = facts_of((v, arch) for v in reading_mods(arch))
    assert len(made) == 3
    assert [v.symbol for v, _, facts in made if facts.spills != "no"] == []


def modding_over_a_cache(arch: str) -> list[Variant]:
    """Main kernels over a cache with mods: rows of O of each width, 16 and 8 bits."""
    table = np.zeros((32, 100), np.float32)
    text, _ = bind("score + table[h, max(0, q - k)]", "(q + k) % 5 != 0", {"table": table})
    more: tuple[dict[str, Any], ...] = ({}, {"stored": "int8", "scale_dims": 1}, {"seqlen_q": 16})
    found = []
    for head_dim, options in zip((256, 128, 64), more, strict=True):
        p = over_cache("bf16", head_dim, mods=text, mod_shapes=(table.shape,), **options)
        found.append(plan_decode(p, Device.synthetic(arch), aligned=True, tma=True).variant)
    return list(found)


@pytest.mark.parametrize("arch", PINNED)
def test_mods_over_a_cache_compile_without_spills(arch: str) -> None:
    made = facts_of((v, arch) for v in modding_over_a_cache(arch))
    assert len(made) == 3
    assert [v.symbol for v, _, facts in made if facts.spills != "no"] == []


def dequantizing() -> list[Variant]:
    """Kernels that write caches of 8 bits as rows of 16."""
    asked = itertools.product(("bf16", "fp16"), (64, 128), ("int8", "e4m3"), (False, True))
    return [
        Dequantize(dtype, d, DequantizeTile(), packed=some, paged=some, **{stored: True})
        for dtype, d, stored, some in asked
    ]


@pytest.mark.parametrize("arch", PINNED)
def test_kernels_that_dequantize_compile_without_spills(arch: str) -> None:
    made = facts_of((v, arch) for v in dequantizing())
    assert [v.symbol for v, _, facts in made if facts.spills != "no"] == []
    assert max(facts.registers for _, _, facts in made) <= 64


def wide_backwards(arch: str) -> list[Variant]:
    """The sm80 family's at head_dim 256 with what takes registers and is not shipped."""
    asked: tuple[tuple[bool, dict[str, Any]], ...] = (
        (True, {"packed": True}),
        (True, {"packed": True, "window": (None, 0)}),
        (True, {"window": (64, 64), "deterministic": True}),
        (False, {"window": (None, 0)}),
        (False, {"window": (64, 64), "deterministic": True, "kv_range": True, "alibi": 1}),
        (True, {"softcap": 30.0, "packed": True, "window": (64, 64)}),
        (True, {"softcap": 30.0, "window": (64, 64), "deterministic": True, "kv_range": True, "alibi": 1}),
        (True, {"dropout": 1, "packed": True, "window": (None, 0)}),
    )
    variants: list[Variant] = []
    for aligned, options in asked:
        problem = Problem("bf16", 1, 1, 1, 1, 1, 256, 1.0, **options)
        of = variants_of_calls(problem, Device.synthetic(arch), aligned=aligned, family="sm80")
        variants += [v for v in of if v.header == "bwd_wide_sm80"]
    return variants


@pytest.mark.parametrize("arch", WIDE)
def test_wide_backwards_compile_without_spills(arch: str) -> None:
    made = facts_of((v, arch) for v in wide_backwards(arch))
    assert len(made) == 8
    assert [v.symbol for v, _, facts in made if facts.spills not in ("no", "few")] == []


def of_hopper() -> list[Variant]:
    """All masks and both dtypes, and head_dims that are no multiple of 64."""
    windows = ((None, None), (None, 0), (64, 64))
    asked = [(dtype, d, w) for dtype in ("bf16", "fp16") for d in (64, 128, 256) for w in windows]
    asked += [("bf16", d, (None, 0)) for d in (8, 40, 80, 112, 160, 192)]
    variants: list[Variant] = []
    for dtype, head_dim, window in asked:
        problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, 1.0, window)
        variants += [v for v in variants_of_calls(problem, Device.synthetic("sm_90")) if v.arch_suffix]
    ordered = Problem("bf16", 1, 1, 1, 1, 1, 192, 1.0, deterministic=True, head_dim_v=128)
    variants += [v for v in variants_of_calls(ordered, Device.synthetic("sm_90")) if v.header == "bwd_sm90"]
    return variants


def test_the_products_of_hopper_kernels_overlap() -> None:
    made = facts_of((v, "sm_90") for v in of_hopper())
    assert made
    serialised = {v.symbol: facts.advice for v, _, facts in made if SERIALISED.intersection(facts.advice)}
    assert not serialised, f"ptxas serialises wgmma, NVRTC {nvrtc.find().name}: {serialised}"
    spilled = [v.symbol for v, _, facts in made if facts.spills != "no" and "window" not in v.symbol]
    assert not spilled, f"register spills, NVRTC {nvrtc.find().name}: {spilled}"


def one_of_each() -> list[Variant]:
    """A variant of every kernel."""
    found = {v.header: v for arch in PINNED for v in all_shipped(arch)}
    return list(found.values())


@pytest.mark.parametrize("variant", one_of_each(), ids=lambda v: v.header)
def test_shared_memory_is_what_the_kernel_lays_out(variant: Variant) -> None:
    size = f"kSmemBytes = {variant.smem_bytes};"
    source = variant.source()
    assert source.count(size) == 1
    options = ["-arch=sm_90a", "-std=c++17", "-default-device"]
    wrong = source.replace(size, f"kSmemBytes = {variant.smem_bytes + 16};")
    with pytest.raises(nvrtc.NvrtcError) as error:
        nvrtc.find().compile(wrong, f"{variant.symbol}.cu", kernel_sources(), options)
    assert re.search(r"static assertion failed", error.value.log)


@pytest.mark.parametrize("variant", one_of_each(), ids=lambda v: v.header)
def test_what_is_kept_is_what_nvrtc_makes(variant: Variant) -> None:
    """Of every kernel at least one: `facts_of` compares a sample of all."""
    arch = "sm_90" if variant in all_shipped("sm_90") else "sm_80"
    ((_, _, facts),) = compiled.compiled([(variant, arch)])
    assert facts == (compiled.known(variant, arch) or facts)


def test_a_kernel_that_has_changed_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own text, and by that of a header that another one includes; words in comments make no code."""
    variant = next(v for v in one_of_each() if v.header == "fwd_sm80")
    before = compiled.key(variant, "sm_80")
    assert compiled.key(variant, "sm_90") != before
    keys = set()
    for more in ("", "// more words\n", "struct More {};\n"):
        for name in ("_header", "_reached", "_digest"):
            getattr(compiled, name).cache_clear()
        headers = {**kernel_sources(), "tile/tile.cuh": kernel_sources()["tile/tile.cuh"] + more}
        monkeypatch.setattr(compiled, "kernel_sources", lambda headers=headers: headers)
        keys.add(compiled.key(variant, "sm_80"))
        monkeypatch.undo()
    for name in ("_header", "_reached", "_digest"):
        getattr(compiled, name).cache_clear()
    assert len(keys) == 2
    assert before in keys


if __name__ == "__main__":
    made = [each for part in range(PARTS) for each in made_of_part(part)]
    made += facts_of(
        [
            *((v, arch) for arch in PINNED for v in (*reading_mods(arch), *dequantizing())),
            *((v, arch) for arch in PINNED for v in modding_over_a_cache(arch)),
            *((v, "sm_90") for v in of_hopper()),
            *((v, arch) for arch in WIDE for v in wide_backwards(arch)),
        ]
    )
    compiled.keep(made)
    code = {(v.symbol, arch): facts.code for v, arch, facts in made}
    found = {arch: {v.symbol: code[v.symbol, arch] for v in all_shipped(arch)} for arch in PINNED}
    GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
