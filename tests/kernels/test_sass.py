"""The main loop of the Hopper forward, as the machine runs it: unused features leave no instruction behind; and when
kernels over a cache let others begin.

The opcodes of the loop over ordinary key blocks, without mask, window or score hooks, are pinned in golden/. A change
that means to touch them writes the file again, with ``python tests/kernels/test_sass.py``, and shows it in its commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cupyflash.compile import jit, nvrtc
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import plan_decode
from cupyflash.plan.families import kernels_of
from cupyflash.plan.shipped_cache import problem
from cupyflash.plan.spec import Spec
from tests.sass import opcodes

NVRTC = (12, 9)  # another compiler makes another sequence
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
HEAD_DIMS = (64, 128, 256)


def main_loop(found: list[str], head_dim: int) -> list[str]:
    """From S = Q K^T of an ordinary block to the vote on its softmax: there alone both products stand together."""
    products = [i for i, op in enumerate(found) if op.startswith("HGMMA")]
    count = head_dim // 16 + 64 // 16
    first = next(i for i, j in zip(products, products[count - 1 :], strict=False) if j - i < 150)
    end = next(i for i in range(first, len(found)) if found[i] == "VOTE.ALL")
    return found[first : end + 1]


def compiled_loop(head_dim: int, folder: Path) -> list[str]:
    (variant,) = kernels_of(Spec("bf16", head_dim), Device.synthetic("sm_90")).variants
    return main_loop(opcodes(jit.compile_kernel(variant, "sm_90").data, folder), head_dim)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_loop_without_features_is_pinned(head_dim: int, tmp_path: Path) -> None:
    if nvrtc.find().version != NVRTC:
        pytest.skip(f"the sequence is that of NVRTC {NVRTC[0]}.{NVRTC[1]}; this is {nvrtc.find().version}")
    expected = (GOLDEN / f"fwd_sm90_d{head_dim}.txt").read_text().split()
    assert compiled_loop(head_dim, tmp_path) == expected


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_the_loop_is_made_of(head_dim: int, tmp_path: Path) -> None:
    """One multiply-add and one exponential an element, four sums; no mask, no maximum, no second scale, no spill."""
    loop = [op.split(".")[0] for op in compiled_loop(head_dim, tmp_path)]
    elements = 64 * 64 // 128
    assert loop.count("HGMMA") == head_dim // 16 + 64 // 16
    assert loop.count("MUFU") == loop.count("FFMA") == elements
    assert loop.count("F2FP") <= elements // 2  # some come after the vote
    assert elements <= loop.count("FADD") <= elements + 8
    assert not {"FSEL", "SHFL", "STL", "LDL", "LDG", "BAR", "I2F"} & set(loop)
    assert loop.count("FMUL") + loop.count("FMNMX") <= 4  # the bases of two rows, and the test of their sums


def test_a_kernel_over_a_cache_waits_before_anything_else(tmp_path: Path) -> None:
    """For all that stands in front of it: before it reads, and before the kernel behind it may begin, which reads
    lengths without waiting for those who wrote them."""
    plan = plan_decode(problem("bf16", 128), Device.synthetic("sm_90"), aligned=True, tma=True)
    found = [op.split(".")[0] for op in opcodes(jit.compile_kernel(plan.variant, "sm_90").data, tmp_path)]
    waits, allows = found.index("ACQBULK"), found.index("PREEXIT")
    assert waits < allows < found.index("LDG")
    assert waits < min(found.index(op) for op in ("UTMALDG", "UBLKCP", "STG"))


if __name__ == "__main__":
    import tempfile

    for each in HEAD_DIMS:
        with tempfile.TemporaryDirectory() as name:
            (GOLDEN / f"fwd_sm90_d{each}.txt").write_text("\n".join(compiled_loop(each, Path(name))) + "\n")
