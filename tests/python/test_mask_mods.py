"""A mask_mod becomes a block mask on a GPU: when, and how much memory that may take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.gpu.device import Device
from cupyflash.mods import bind
from cupyflash.plan import mod_tiles
from cupyflash.plan.extents import Extents
from cupyflash.plan.families import kernels_of, plan_of
from cupyflash.plan.spec import Spec
from cupyflash.problem import MAX_SEQLEN, Bias, Problem
from tests import pretended_gpu


def spec_of_mods(text: str, score: str | None = None, beside: dict[str, Any] | None = None, **known: Any) -> Spec:
    arrays = {"table": np.zeros((4, 9), np.float32)} if score and "table" in score else {}
    arrays |= {"document": np.zeros((3, 330), np.int32)} if "document" in text else {}
    mods, _ = bind(score, text, arrays)
    problem = Problem("bf16", 3, 200, 330, 4, 2, 64, 0.1, mods=mods, mod_shapes=tuple(x.shape for x in arrays.values()))
    return Spec.of(replace(problem, **beside or {}), **known)


@pytest.mark.parametrize(
    ("text", "code", "own"),
    [
        ("document[b, q] == document[b, k]", 2, (3, 1, 4, 6)),
        ("q - k < 64", 1, (1, 1, 4, 6)),
        ("k < 100 * b + 90", 2, (3, 1, 1, 6)),
        ("q % 3 == h", 3, (1, 4, 4, 1)),
        ("true", 1, (1, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize("score", [None, "score + table[h, max(0, q - k)]"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_mask_mod_becomes_a_block_mask(
    arch: str, backward: bool, score: str | None, text: str, code: int, own: tuple[int, ...]
) -> None:
    """Only the kernel that makes it is compiled for it."""
    spec = spec_of_mods(text, score, backward=backward)
    assert (spec.block_mask, spec.bias, bool(spec.mods)) == (code, bool(score), bool(score))
    plan = plan_of(kernels_of(spec, Device.synthetic(arch)), Extents(3, 200, 330, 4, 2, MAX_SEQLEN, MAX_SEQLEN))
    assert plan.workspace["block_tiles"] == ((*own[:2], 4, 6), "int32")
    assert plan.workspace["block_bits"] == ((math.prod(own), 256), "int32")
    first, *others = (launch.variant for launch in plan.launches)
    assert (first.function, first.mods) == ("mask_tiles", spec.mask_mod)
    assert not any("mask_mod" in variant.mods for variant in others)
    assert {variant.mods for variant in others} <= {"", spec.mods}


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("q - k < 64", {"beside": {"packed": True}}),
        ("q - k < 64", {"beside": {"block_mask": 1}}),
        ("q - k < 64", {"beside": {"bias": Bias("bf16")}}),
        ("document[b, q] == document[b, k]", {"dmods": (0,), "backward": True}),
        ("q - k < 64", {"tiles_fit": False}),
        ("q - k < 64", {"score": "2 * score", "beside": {"head_dim": 136}}),
    ],
    ids=str,
)
def test_a_mask_mod_that_is_not_alone_is_asked_by_element(text: str, known: dict[str, Any]) -> None:
    spec = spec_of_mods(text, **known)
    assert (spec.mask_tiles, spec.mask_mod, spec.bias) == (None, "", True)
    assert spec.mods


@pytest.mark.parametrize(
    ("text", "seqlen", "expected"),
    [
        ("q - k < 64", 1 << 14, True),
        ("q - k < 64", 1 << 16, False),
        ("q * h < k", 1 << 14, False),
        ("q * h < k", 1 << 12, True),
        ("k < 100 * b", 1 << 20, True),
    ],
)
def test_tiles_of_a_mask_mod_take_no_more_memory_than_the_arrays(text: str, seqlen: int, expected: bool) -> None:
    mods, _ = bind(None, text, {})
    assert mod_tiles.fit(mods, (2, seqlen, seqlen, 16, 4), (64, 64)) == expected
    of_scores, _ = bind("score + q", None, {})
    assert not mod_tiles.fit(of_scores, (2, 64, 64, 16, 4), (64, 64))
    assert not mod_tiles.fit("", (2, 64, 64, 16, 4), (64, 64))


def test_calls_launch_what_a_mask_mod_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    gpu = pretended_gpu.pretend(monkeypatch, "sm_90")
    q, long = np.zeros((2, 40, 1, 64), np.float16), np.zeros((1, (1 << 14) + 64, 1, 16), np.float16)
    for x, expected in ((q, ["mask_tiles", "key_lists", "fwd_sm90"]), (long, ["fwd_sm90"]), (q, ["mask_tiles"])):
        gpu.launched.clear()
        cupyflash.attention(x, x, x, mask_mod="q - k < 64 && b >= 0 && h >= 0")
        found = [launch.symbol.split("_fp16")[0] for launch in gpu.launched]
        assert found[: len(expected)] == expected


def test_a_row_of_infinite_scores_is_that_of_a_mask(rng: np.random.Generator) -> None:
    """NaN, as without either; beside a bias, and of packed sequences, it sees no key."""
    q, k, v = (rng.standard_normal((1, 8, 1, 16)) for _ in range(3))
    k[..., 0] = 0.5 + abs(k[..., 0])
    q[0, 1, 0, 0] = -np.inf
    shown = np.arange(8)[:, None] // 4 == np.arange(8) // 4
    by_mod, by_mask = (
        cupyflash.attention(q, k, v, return_lse=True, **given)
        for given in ({"mask_mod": "q / 4 == k / 4"}, {"mask": shown[None, None]})
    )
    for found, wanted in zip(by_mod, by_mask, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert np.isnan(by_mod[0][0, 1]).all()
    bias = np.zeros((1, 1, 8, 8))
    assert (cupyflash.attention(q, k, v, mask_mod="q / 4 == k / 4", bias=bias)[0, 1] == 0).all()
    packed = cupyflash.attention_varlen(q[0], k[0], v[0], np.array([0, 8], np.int32), mask_mod="q / 4 == k / 4")
    assert (packed[1] == 0).all()
