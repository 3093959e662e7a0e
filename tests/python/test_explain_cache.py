"""`cupyflash explain --with-cache`: the kernels are those of the call that the options describe, or there is none."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import cli
from cupyflash.cache.checks import CacheOptions
from cupyflash.check.cache_case import problem_of
from cupyflash.gpu import device
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import plan_append, plan_decode


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYFLASH_FAMILY", raising=False)
    monkeypatch.setattr(device, "_probe", lambda: (0, "there is no GPU in this test"))


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.main, ["explain", "--no-compile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == code, result.output
    return result


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("--with-cache", "--json", *arguments).stdout)
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_launches_are_those_of_the_plan(arch: str) -> None:
    gpu, half = Device.synthetic(arch), np.float16
    found = document(
        "--arch", arch, "--dtype", "fp16", "--batch", "3", "--seqlen", "1000", "--seqlen-q", "2", "--heads", "8",
        "--heads-k", "2", "--page-size", "16", "--sink", "--kv-range", "--alibi", "--softcap", "20", "--window", "99,0",
    )  # fmt: skip
    caches = dict.fromkeys(("k_cache", "v_cache"), np.zeros((3 * 63, 16, 2, 128), half))
    new = dict.fromkeys("kv", np.zeros((3, 2, 2, 128), half))
    places = {"block_table": np.zeros((3, 63), np.int32), "kv_range": np.zeros((3, 2), np.int32)}
    more = {name: np.zeros(8, np.float32) for name in ("alibi_slopes", "sink")} | places
    given = {"q": np.zeros((3, 2, 8, 128), half), "cache_seqlens": np.zeros(3, np.int32), **caches, **new, **more}
    p = problem_of(given, CacheOptions(window=(99, 0), softcap=20.0))
    append, plan = plan_append(p, gpu), plan_decode(p, gpu, aligned=True, tma=True, family=None)
    assert append
    assert plan.combine
    expected = [(append[0], append[1]), (plan.variant, plan.grid), (plan.combine, plan.combine_grid)]
    assert [(x["symbol"], x["grid"]) for x in found["launches"]] == [(v.symbol, grid) for v, grid in expected]


@pytest.mark.parametrize(
    ("words", "field", "mark"), [(("--sink",), "sink", "sink"), (("--kv-range",), "kv_range", "range")]
)
def test_what_a_call_has_is_in_its_kernels(words: tuple[str, ...], field: str, mark: str) -> None:
    plain, found = document(), document(*words)
    assert (plain["problem"][field], found["problem"][field]) == (False, True)
    assert [any(mark in x["symbol"] for x in y["launches"]) for y in (plain, found)] == [False, True]


def test_a_head_dim_of_v() -> None:
    """Its own kernels, bytes and words; TMA brings both, or neither."""
    words = "--head-dim", "192", "--head-dim-v", "128", "--arch", "sm_90", "--dtype", "bf16"
    found, plain = document(*words), document(*words[:2], *words[4:])
    assert found["problem"]["head_dim_v"] == 128
    assert 6 * found["bytes_at_most"] == 5 * plain["bytes_at_most"]
    assert all("_d192v128_" in x["symbol"] for x in found["launches"])
    assert found["launches"][1]["symbol"].startswith("decode_sm90")
    assert found["not_by_tma"] is None
    assert "head_dim 192 (of v 128), bf16" in run("--with-cache", *words).output
    narrow = document("--head-dim", "64", "--head-dim-v", "24", "--arch", "sm_90")
    assert narrow["not_by_tma"] == "TMA brings columns by 64 and keys of a page by 8"


def test_a_bias_and_a_mask() -> None:
    """Of the rows that all pages of a sequence have."""
    found = document("--bias", "hqk", "--mask", "bk", "--seqlen", "100", "--page-size", "16", "--dtype", "bf16")
    assert found["problem"]["bias"] == ["bf16", [False, True, False, True], [False, False, False, True]]
    assert found["launches"][1]["symbol"].endswith("_bias_mask_masked_bias_paged")


def test_mods() -> None:
    mods = "--score-mod", "score + table[h, k]", "--mask-mod", "q <= k", "--mod-array", "table:fp16:16x128"
    found = document(*mods, "--seqlen", "100", "--dtype", "bf16")
    assert (found["problem"]["mods"].count("table"), found["problem"]["mod_shapes"]) == (2, [[16, 128]])
    assert "_bias_mods_score_mod_mask_mod_" in found["launches"][1]["symbol"]
    many = document(*mods, "--seqlen", "8192", "--seqlen-q", "256", "--heads", "32", "--arch", "sm_90")
    assert many["forward"].startswith("fwd_sm90")
    assert "_mods_" in many["forward"]


@pytest.mark.parametrize("sizes", [("--batch", "0"), ("--seqlen-q", "0"), ("--batch", "0", "--page-size", "16")])
def test_calls_without_queries(sizes: tuple[str, ...]) -> None:
    found = document(*sizes)
    assert found["problem"]["batch"] * found["problem"]["seqlen_q"] == 0


def test_a_block_mask() -> None:
    found = document("--block-mask", "0.25", "--seqlen", "100", "--page-size", "16", "--bias", "hqk")
    assert (found["problem"]["block_mask"], found["problem"]["mask_tiles"]) == (1, 2)
    assert found["launches"][1]["symbol"].endswith("_bias_bias_beside_mods_paged_tile_mask")


REFUSED = (
    ("--dropout",), ("--learned",), ("--backward",), ("--deterministic",),
    ("--layout", "bhsd"), ("--packed",), ("--lengths", "3,4"), ("--lengths-k", "3,4"),
)  # fmt: skip


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: words[0])
def test_options_that_no_such_call_has(words: tuple[str, ...]) -> None:
    output = run("--with-cache", *words, code=2).output
    assert f"{words[0]}: expected none together with --with-cache" in output


def test_room_is_seqlen() -> None:
    output = run("--with-cache", "--seqlen-k", "100", code=2).output
    assert "--seqlen-k: expected none together with --with-cache, whose room is --seqlen" in output


@pytest.mark.parametrize("words", [("--page-size", "16"), ("--cache-dtype", "int8")], ids=lambda words: words[0])
def test_options_of_a_cache_alone(words: tuple[str, ...]) -> None:
    assert f"{words[0]}: expected --with-cache beside it" in run(*words, code=2).output


def test_defaults_that_are_spelled_out() -> None:
    assert document("--layout", "bshd")["launches"] == document()["launches"]


def test_what_has_no_kernel() -> None:
    assert (
        "fp32 has no GPU kernel over a cache of 8 bits, expected bf16 or fp16; cast q"
        in run("--with-cache", "--dtype", "fp32", "--cache-dtype", "int8", code=4).output
    )


@pytest.mark.parametrize(
    ("rows", "heads", "page", "forward"),
    [("256", "32", None, "paged_whole_pages_split_keys"), ("256", "32", "16", "paged_split_keys"),
     ("256", "32", "8", None), ("256", "8", None, "paged_whole_pages_split_keys"), ("64", "8", None, None),
     ("32", "32", None, None), ("64", "32", None, "paged_whole_pages_split_keys")],
)  # fmt: skip
def test_many_queries_take_the_forward(rows: str, heads: str, page: str | None, forward: str | None) -> None:
    """Said beside the kernels, and only where it is so."""
    asked = ["--arch", "sm_90", "--batch", "1", "--seqlen", "8192", "--seqlen-q", rows, "--heads-q", heads]
    asked += ["--heads-k", "8", *(["--page-size", page] if page else [])]
    said = document(*asked)
    found, splits = said["forward"], said["key_splits"]
    assert found is None if forward is None else found.startswith("fwd_sm90") and found.endswith(forward)
    assert splits == 1 if forward is None else f", by {splits} parts of the keys" in run("--with-cache", *asked).stdout
    assert (str(found) in run("--with-cache", *asked).stdout) is (forward is not None)


@pytest.mark.parametrize(("head_dim", "said"), [("128", "write the cache as rows of fp16, 32.0 MiB"), ("72", None)])
def test_many_queries_over_8_bits(head_dim: str, said: str | None) -> None:
    asked = ["--arch", "sm_90", "--batch", "1", "--seqlen", "8192", "--seqlen-q", "256", "--heads-q", "32"]
    asked += ["--heads-k", "8", "--head-dim", head_dim, "--cache-dtype", "int8", "--dtype", "fp16", "--no-compile"]
    found = run("--with-cache", *asked).stdout
    assert ("take the forward" in found, said in found if said else False) == (said is not None,) * 2


@pytest.mark.parametrize(
    ("page", "memory", "forward"),
    [("16", "unaligned", None), ("16", "broadcast", "fwd_sm80"), (None, "unaligned", "fwd_sm80"),
     ("16", "contiguous", "fwd_sm90")],
)  # fmt: skip
def test_the_forward_of_caches_that_tma_cannot_read(page: str | None, memory: str, forward: str | None) -> None:
    asked = ["--arch", "sm_90", "--batch", "1", "--seqlen", "8192", "--seqlen-q", "256", "--heads-q", "32"]
    found = document(*asked, "--heads-k", "8", "--memory", memory, *(["--page-size", page] if page else []))["forward"]
    assert found is None if forward is None else found.startswith(forward)


def test_the_line_of_the_problem() -> None:
    """One of anything is no plural, and an architecture that stands for its GPUs is named once."""
    few = run("--with-cache", "--arch", "sm_90", "--seqlen", "1", "--heads", "1").stdout
    said = "a typical GPU of sm_90: 1 sequence of at most 1 key, 1 query of 1 head over 1, head_dim 128, bf16\n"
    assert few.startswith(said)
    more = run("--with-cache", "--arch", "sm_90", "--seqlen", "4096", "--seqlen-q", "2", "--batch", "3").stdout
    assert more.startswith("a typical GPU of sm_90: 3 sequences of at most 4096 keys, 2 queries of 16 heads over 16")
    forward = run("--arch", "sm_90", "--seqlen", "1", "--heads", "1", "--packed", "--batch", "1").stdout
    assert "1 packed sequence, 1 query of 1 head, 1 key of 1 head," in forward
