"""Many new queries over a cache take the forward of packed sequences: which calls do, and that it is one attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash import UnsupportedError, attention_with_cache
from cupyflash.arrays.adapters import NUMPY, TORCH, Signature
from cupyflash.bias import WHOLE, Bias
from cupyflash.cache.checks import make_cache_options
from cupyflash.cache.problem import CacheProblem
from cupyflash.gpu.device import Device
from cupyflash.launch import cached, cached_checks, prefill
from cupyflash.plan.extents import Extents
from cupyflash.plan.families import kernels_of, plan_of
from cupyflash.plan.prefill import Lie, Way, dequantized, problem_of, spec_of, way_of
from tests import pretended_gpu

PROBLEM = CacheProblem("bf16", 4, 256, 32, 8, 128, 128, 4, None, 4096, 0.1)
OPTIONS = dict.fromkeys(("causal", "scale", "window", "softcap", "interleaved", "num_splits", "batch_invariant"))
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (50, 7)},
    "softcap": {"softcap": 2.0, "scale": -0.3, "causal": True},
    "alibi": {"alibi_slopes": (4,)},
    "alibi of each sequence": {"alibi_slopes": (5, 4), "causal": True},
    "sink": {"sink": (4,), "window": (20, 0)},
    "range": {"kv_range": (5, 2), "causal": True},
}


HOPPER, AMPERE = (Device.synthetic(arch) for arch in ("sm_90", "sm_80"))
BY_TABLE, BESIDE = Way(paged=True), Way(paged=True, beside=True)


def signatures(capacity: int, row: int, slot: int, **q: Any) -> dict[str, Signature]:
    like = Signature((4, capacity, 8, 128), (slot, row, 128, 1), None, 0)
    queries = {"shape": (4, 256, 32, 128), "strides": (256 * 4096, 4096, 128, 1)} | q
    return {"q": Signature(queries["shape"], queries["strides"], None, 0), "k_cache": like, "v_cache": like}


def test_which_calls() -> None:
    for call in (PROBLEM, replace(PROBLEM, batch=1, slots=1)):
        assert (way_of(call, HOPPER, Lie()), way_of(call, AMPERE, Lie())) == (BY_TABLE, Way())
    for other in (
        {"seqlen_q": 32}, {"num_splits": 1}, {"batch_invariant": True},
        {"heads_q": 8, "seqlen_q": 32}, {"capacity": 2**28}, {"page_size": 8},
        {"packed": True, "seqlen_q": 130}, {"block_mask": 1, "mask_tiles": 64, "bias": Bias("bf16")},
    ):  # fmt: skip
        assert way_of(replace(PROBLEM, **other), HOPPER, Lie()) is None, other  # type: ignore[arg-type]
    for other in ({"bias": Bias("bf16")}, {"bias": Bias("bf16", beside=WHOLE)}, {"mods": "mask_mod (k < 5)"}):
        call = replace(PROBLEM, **other)  # type: ignore[arg-type]
        assert (way_of(call, HOPPER, Lie()), way_of(call, AMPERE, Lie())) == (BY_TABLE, Way())
    for by_query, rows in ((False, 64), (True, 256)):  # a mask becomes a block mask
        mask = Bias("bool", (False, True, by_query, True))
        call = replace(PROBLEM, bias=mask, max_seqlen_q=256 if by_query else PROBLEM.max_seqlen_q)
        assert way_of(call, HOPPER, Lie()) == way_of(call, AMPERE, Lie()) == BY_TABLE
        found = problem_of(call, BY_TABLE)
        assert (found.max_seqlen_q, found.max_seqlen_k) == (rows, PROBLEM.capacity)
    call = replace(PROBLEM, block_mask=2, mask_tiles=70)  # whose rows only the way by a table counts
    assert way_of(call, HOPPER, Lie()) == way_of(call, AMPERE, Lie()) == BY_TABLE
    assert way_of(call, AMPERE, Lie(aligned=False)) is None
    found = problem_of(call, BY_TABLE)
    assert (found.block_mask, found.max_seqlen_q, found.max_seqlen_k) == (2, 70 * 64, 70 * 64)


def test_how_many_queries_are_many() -> None:
    """From 33 on, if all heads have rows enough; of many keys more where a sink forbids to divide them."""
    few = replace(PROBLEM, batch=1, slots=1, seqlen_q=33, capacity=16384)
    assert way_of(few, HOPPER, Lie()) == way_of(few, AMPERE, Lie()) == BY_TABLE
    for call in (replace(few, sink=True), replace(few, seqlen_q=32), replace(few, heads_q=8)):
        assert way_of(call, HOPPER, Lie()) is None
    assert way_of(replace(few, batch=4, slots=4, sink=True), HOPPER, Lie()) == BY_TABLE
    assert way_of(replace(few, heads_q=16), HOPPER, Lie()) == BY_TABLE  # two heads share one, and are one tile there
    assert way_of(replace(few, capacity=64, sink=True), HOPPER, Lie()) == BY_TABLE  # however few the keys
    for dtype, keys in (("bf16", (64, 1000)), ("fp32", (64, 200))):  # without TMA a block takes all keys
        taken = [way_of(replace(few, seqlen_q=100, dtype=dtype, capacity=n), AMPERE, Lie()) for n in (*keys, 4096)]
        assert taken == [Way(), Way(), None]
    long = replace(few, seqlen_q=256, capacity=4096)
    assert [way_of(replace(long, seqlen_q=n), AMPERE, Lie()) for n in (255, 256)] == [None, Way()]
    assert way_of(replace(long, dtype="fp32"), AMPERE, Lie()) is None
    added = replace(few, mods="mask_mod (k < 5)")  # which pays later by the kernels without TMA
    assert way_of(added, HOPPER, Lie()) == way_of(replace(added, seqlen_q=96), AMPERE, Lie()) == BY_TABLE
    assert way_of(replace(added, seqlen_q=95), AMPERE, Lie()) is None


def test_which_calls_over_8_bits() -> None:
    """As those over a cache of 16 bits, in whole rows, wherever the 8 bits lie; unless these rows are too many."""
    stored = replace(PROBLEM, stored="int8", scale_dims=2)
    for other in ({}, {"chosen": True, "slots": 9}, {"page_size": 1, "slots": 9999}, {"packed": True}):
        call = replace(stored, **other)  # type: ignore[arg-type]
        for lie in (Lie(), Lie(in_rows=False, whole_table=False)):
            assert way_of(call, HOPPER, lie) == Way(True, call.packed, dequantized=True)
            assert way_of(call, AMPERE, lie) == Way(call.packed, call.packed, dequantized=True)
        assert way_of(call, HOPPER, Lie(aligned=False, tma=False)) is None
    assert way_of(replace(stored, seqlen_q=127), HOPPER, Lie()) is None
    for head_dim, way in ((72, None), (80, Way(paged=True, dequantized=True))):
        assert way_of(replace(stored, head_dim=head_dim, head_dim_v=head_dim), HOPPER, Lie()) == way
    for capacity, fits in ((65536, True), (65537, False)):  # 1 GiB of rows
        assert (way_of(replace(stored, capacity=capacity), HOPPER, Lie()) is not None) is fits
        assert way_of(replace(PROBLEM, capacity=capacity), HOPPER, Lie()) is not None
    mixed = replace(stored, packed=True, batch=64, seqlen_q=319, slots=64, capacity=8192)  # two may have many queries
    assert way_of(mixed, HOPPER, Lie()) == Way(True, True, True)
    assert dequantized(mixed).slots == spec_of(mixed, Way(True, True, True), Lie()).pages == 2
    assert way_of(replace(mixed, seqlen_q=64 * 500), HOPPER, Lie()) is None
    spec = spec_of(replace(stored, page_size=1, slots=9999), Way(True, dequantized=True), Lie())
    assert ((spec.page_size, spec.pages), spec.whole_pages) == ((4096, 4), True)


def test_which_calls_read_pages() -> None:
    """Where the rows of a cache do not lie one behind the other, and on Hopper all, if TMA can."""
    for other, way in (
        ({}, Way()), ({"page_size": 16}, BY_TABLE), ({"page_size": 48}, BY_TABLE), ({"chosen": True}, BY_TABLE),
        ({"packed": True}, BESIDE), ({"packed": True, "page_size": 16}, BESIDE),
        ({"packed": True, "batch": 120}, BESIDE),
    ):  # fmt: skip
        call = replace(PROBLEM, **other)  # type: ignore[arg-type]
        by_table = BESIDE if call.packed else BY_TABLE
        for lie in (Lie(), Lie(in_rows=False)):
            assert way_of(call, HOPPER, lie) == way_of(call, HOPPER, lie, "sm90") == by_table
        for known in ((HOPPER, Lie(tma=False)), (AMPERE, Lie()), (HOPPER, Lie(), "sm80")):
            assert way_of(call, *known) == way
        for lie in (Lie(whole_table=False), Lie(aligned=False, tma=False)):
            assert {way_of(call, HOPPER, lie), way_of(call, AMPERE, lie)} == {Way() if way == Way() else None}
    assert way_of(PROBLEM, AMPERE, Lie(in_rows=False)) == BY_TABLE
    alone = replace(PROBLEM, batch=1, slots=1, capacity=8192)
    assert way_of(alone, AMPERE, Lie()) == BY_TABLE  # whose keys are divided
    for other in ({"capacity": 8191}, {"seqlen_q": 512}, {"sink": True}):
        assert way_of(replace(alone, **other), AMPERE, Lie()) == Way()  # type: ignore[arg-type]


def test_the_kernel_of_a_call() -> None:
    assert not spec_of(PROBLEM, Way(), Lie()).paged
    for other, pages, whole in (
        ({}, (4096, 4), True), ({"page_size": 16, "slots": 999}, (16, 999), False),
        ({"page_size": 4096}, (4096, 4), True), ({"page_size": 64}, (64, 4), True),
        ({"page_size": 96, "capacity": 96}, (96, 4), True),
    ):  # fmt: skip
        found = spec_of(replace(PROBLEM, **other), BY_TABLE, Lie())  # type: ignore[arg-type]
        assert ((found.page_size, found.pages), found.whole_pages) == (pages, whole)
    for lie, family in ((Lie(), "sm90"), (Lie(tma=False), "sm80")):
        assert kernels_of(spec_of(PROBLEM, BY_TABLE, lie), HOPPER).variants[0].symbol.startswith(f"fwd_{family}")
    with pytest.raises(UnsupportedError, match="sm80: it reads pages where rows start at multiples of 16 bytes"):
        kernels_of(spec_of(PROBLEM, BY_TABLE, Lie(aligned=False, tma=False)), HOPPER)


def splits_of(arch: str = "sm_90", **other: Any) -> int:
    """Into how many parts the plan divides the keys of such a call, whose launches it looks at."""
    call = replace(PROBLEM, **({"batch": 1, "slots": 1, "capacity": 32768, "window": (None, 0)} | other))
    way = Way(paged=True, beside=call.packed)
    device, problem = Device.synthetic(arch), problem_of(call, way)
    plan = plan_of(kernels_of(spec_of(call, way, Lie()), device), Extents.of(problem))
    symbols = [launch.variant.symbol for launch in plan.launches if launch.grid]
    if plan.numbers.key_splits == 1:
        assert ["split_keys" in symbol for symbol in symbols] == [False]
        assert not plan.workspace
    else:
        assert ["split_keys" in symbol for symbol in symbols] == [True, False]
        assert symbols[1].startswith("fwd_parts")
        of_rows = call.heads_q, plan.numbers.key_splits, problem.seqlen_q
        assert plan.workspace == {"o_parts": ((*of_rows, call.head_dim), "fp32"), "lse_parts": (of_rows, "fp32")}
        assert 4 * math.prod(plan.workspace["o_parts"][0]) <= 128 << 20
    return plan.numbers.key_splits


def test_into_how_many_parts_keys_are_divided() -> None:
    """As few queries as leave multiprocessors idle, beside many keys. Measured on an H100: docs/performance.md."""
    assert [splits_of(seqlen_q=n) for n in (256, 512, 1024, 2048, 8192)] == [4, 4, 2, 1, 1]
    assert [splits_of(capacity=n) for n in (1024, 4096, 131072)] == [1, 2, 4]
    assert splits_of(head_dim=64, head_dim_v=64) == 4
    assert splits_of(batch=4, slots=4) == 1
    assert splits_of("sm_80", page_size=16, slots=2048) > 1
    # Many sequences of which one may have many queries; many prompts.
    assert splits_of(packed=True, batch=64, seqlen_q=319, slots=64, capacity=8192) > 1
    assert splits_of(packed=True, batch=64, seqlen_q=64 * 500, slots=64, capacity=8192) == 1
    for feature in ({"alibi": 1}, {"kv_range": True}, {"sink": True}):
        assert splits_of(**feature) == 1
    assert splits_of(softcap=3.0) == splits_of(window=(None, None)) == 4


@pytest.mark.needs("torch")
@pytest.mark.parametrize("packed", [False, True])
def test_what_the_kernels_of_parts_are_told(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    gpu = pretended_gpu.pretend(monkeypatch, "sm_90")
    like = {"dtype": torch.bfloat16}
    x = {"q": torch.zeros(1, 256, 32, 64, **like), "cache_seqlens": torch.tensor([9000], dtype=torch.int32)}
    x |= {name: torch.zeros(1, 9000, 8, 64, **like) for name in ("k_cache", "v_cache")}
    if packed:
        x |= {"q": x["q"][0], "cu_seqlens_q": torch.tensor([0, 256], dtype=torch.int32)}
    for _ in range(2):
        out, lse = attention_with_cache(**x, causal=True, return_lse=True)
        assert (out.shape, lse.shape[-1]) == (x["q"].shape, 256)
        of_parts, behind = gpu.launched[-2:]  # packed, attention over a cache comes first
        assert ("split_keys" in of_parts.symbol, behind.symbol[:9]) == (True, "fwd_parts")
        kinds = {variant.symbol: variant.params for variant in gpu.loaded}
        hopper, plain = (np.frombuffer(launched.params, kinds[launched.symbol])[0] for launched in gpu.launched[-2:])
        for params in (hopper["plain"], plain):
            assert params["key_splits"] == splits_of(head_dim=64, head_dim_v=64, capacity=9000)
            assert params["lse_parts"] != params["o_parts"] != 0 != params["lse_parts"]
        gpu.launched.clear()


def test_how_arrays_lie() -> None:
    def lie(*caches: int, aligned: bool = True, p: CacheProblem = PROBLEM, **q: Any) -> Lie:
        return prefill.lie_of(p, signatures(*caches, **q), aligned)

    assert lie(4096, 1024, 4096 * 1024) == Lie()
    assert lie(4096, 1024, 4096 * 1024 + 8) == Lie(in_rows=False)
    assert lie(4096, 128, 4096 * 1024) == Lie(in_rows=False)  # rows of one head lie together
    assert lie(4096, 1024, 8, p=replace(PROBLEM, batch=1, slots=1)) == Lie()
    for other in (lie(4096, 1024, 4096 * 1024, aligned=False), lie(4096, 1020, 4096 * 1024)):
        assert (other.tma, other.aligned) == (False, False)
    assert not lie(4096, 1024, 4096 * 1024, strides=(0, 4096, 128, 1)).tma
    packed: dict[str, Any] = {"p": replace(PROBLEM, packed=True), "shape": (1024, 32, 128)}
    assert lie(4096, 1024, 4096 * 1024, strides=(8192, 128, 1), **packed).tma
    assert not lie(4096, 1024, 4096 * 1024, strides=(0, 128, 1), **packed).tma
    for strides, whole in (((256, 1), True), ((300, 1), False)):
        given = signatures(16, 1024, 16384) | {"block_table": Signature((4, 256), strides, None, 0)}
        assert prefill.lie_of(replace(PROBLEM, page_size=16), given, True).whole_table is whole


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("features", FEATURES.values(), ids=list(FEATURES))
def test_it_is_the_same_attention(features: dict[str, Any], appends: bool, rng: np.random.Generator) -> None:
    """On the CPU path; sequences without keys, full ones, and lengths that nobody can have."""
    x: dict[str, Any] = {"q": rng.standard_normal((5, 130, 4, 16))}
    x |= {name: rng.standard_normal((5, 290, 2, 16)) for name in ("k_cache", "v_cache")}
    x["cache_seqlens"] = np.array([0, 160, 150, 37, 3], np.int32)
    given = {name: rng.standard_normal(of) for name, of in features.items() if name in ("alibi_slopes", "sink")}
    if "kv_range" in features:
        given["kv_range"] = np.array([[0, 290], [5, 100], [100, 100], [20, 30], [0, 0]], np.int32)
    call = {name: value for name, value in features.items() if name not in given}
    new = {name: rng.standard_normal((5, 130, 2, 16)) for name in ("k", "v")} if appends else {}
    expected = attention_with_cache(**x, **new, **given, **call, return_lse=True)

    options = make_cache_options(
        *({**OPTIONS, "causal": False, "interleaved": False, "batch_invariant": False} | call).values()
    )
    arrays = x | new | given
    keys = [NUMPY.signature(a) for a in arrays.values()]
    problem, _ = cached_checks.check(NUMPY, arrays, keys, options)
    found = prefill.attend(NUMPY, arrays, problem, options, Way())
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.flags.c_contiguous
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("heads", [4, 64])
def test_what_is_launched(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's tensors that seem to lie on a GPU: with heads enough to fill it the forward, by its own params."""
    import torch

    gpu = pretended_gpu.pretend(monkeypatch, "sm_80")
    like = {"dtype": torch.bfloat16}
    x = {"q": torch.zeros(2, 130, heads, 64, **like), "cache_seqlens": torch.tensor([3, 300], dtype=torch.int32)}
    x |= {name: torch.zeros(2, 2100, 2, 64, **like) for name in ("k_cache", "v_cache")}
    x |= {name: torch.zeros(2, 130, 2, 64, **like) for name in ("k", "v")}
    for _ in range(2):
        out, lse = attention_with_cache(**x, causal=True, return_lse=True)
        assert (out.shape, lse.shape) == (x["q"].shape, (2, heads, 130))
        assert out.is_contiguous()
        assert lse.is_contiguous()
        append, attend, *others = (launched.symbol for launched in gpu.launched)
        assert append.startswith("append")
        if heads == 4:
            assert attend.startswith("decode")
        else:
            assert attend.startswith("fwd_sm80")
            assert "packed" in attend
            assert not others
        gpu.launched.clear()


@pytest.mark.needs("torch")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_is_launched_over_8_bits(arch: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward reads the rows that the kernel before it makes of pages."""
    import torch

    gpu = pretended_gpu.pretend(monkeypatch, arch)
    like = {"dtype": torch.bfloat16}
    x = {"q": torch.zeros(2, 256, 64, 64, **like), "cache_seqlens": torch.tensor([3, 300], dtype=torch.int32)}
    x |= {name: torch.zeros(500, 16, 2, 64, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    x |= {name: torch.ones(500, 2) for name in ("k_scale", "v_scale")}
    x |= {name: torch.zeros(2, 256, 2, 64, **like) for name in ("k", "v")}
    x |= {name: torch.ones(1000, 16) for name in ("rotary_cos", "rotary_sin")}
    x["block_table"] = torch.zeros(2, 128, dtype=torch.int32)
    if packed:
        x |= {name: x[name].flatten(0, 1) for name in "qkv"} | {"cu_seqlens_q": torch.tensor([0, 1, 512]).int()}
    for _ in range(2):
        out, lse = attention_with_cache(**x, causal=True, return_lse=True)
        assert out.shape == x["q"].shape
        assert lse.shape == ((64, 512) if packed else (2, 64, 256))
        names = [launched.symbol.split("_")[0] for launched in gpu.launched]
        assert names == ["append", "dequantize", *["decode"] * (len(names) - 3), "fwd"]
        assert (len(names) > 3) is packed
        kinds = {variant.symbol: variant.params for variant in gpu.loaded}
        append, rows, *_, forward = (np.frombuffer(x.params, kinds[x.symbol])[0] for x in gpu.launched)
        forward = forward["plain"] if "plain" in (forward.dtype.names or ()) else forward
        assert forward["q"] == append["rotated_q"] != x["q"].data_ptr()
        for name in "kv":
            assert rows[f"{name}_cache"] == x[f"{name}_cache"].data_ptr()
            assert rows[f"{name}_scale"] == x[f"{name}_scale"].data_ptr()
            assert forward[name] == rows[f"{name}_rows"] != rows[f"{name}_cache"]
        if packed:
            assert forward["block_table"] == rows["slots"] != 0
        assert (rows["problem"]["seqlen_k"], rows["page_size"], rows["places"], rows["scale_stride"]) == (
            2048,
            16,
            500,
            2,
        )
        assert rows["appended"] == (512 if packed else 256)
        gpu.launched.clear()


@pytest.mark.needs("torch")
def test_torch_tensors(rng: np.random.Generator) -> None:
    """What is done to them on the way, on the CPU."""
    import torch

    x = {"q": rng.standard_normal((3, 130, 4, 16)), "cache_seqlens": np.array([0, 200, 77], np.int32)}
    x |= {name: rng.standard_normal((3, 200, 2, 16)) for name in ("k_cache", "v_cache")}
    arrays = {name: torch.from_numpy(a) for name, a in x.items()}
    options = make_cache_options(True, None, None, None, False, None, False)
    problem, _ = cached_checks.check(TORCH, arrays, [TORCH.signature(a) for a in arrays.values()], options)
    found = prefill.attend(TORCH, arrays, problem, options, Way())
    expected = attention_with_cache(**x, causal=True, return_lse=True)
    for a, b in zip(found, expected, strict=True):
        assert a.is_contiguous()
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-9, atol=1e-9)


def test_a_call_appends_first(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """What is launched for one only appends; the queries are those that it rotated."""
    import dataclasses

    from cupyflash.launch import decode
    from cupyflash.launch.kept import Kept

    asked: list[Any] = []

    class Launches:
        copied: tuple[str, ...] = ()

        def __init__(self, problem: Any, names: Any, signatures: Any, device: Any, **more: Any) -> None:
            self.made = [((2, 400, 16, 8), "fp16")] if problem.rotary_dim else []
            asked.append((names, more["attends"]))

        def __call__(self, addresses: list[int], stream: int, length: int | None = None) -> None:
            asked.append(len(addresses))

    device = dataclasses.replace(Device.synthetic("sm_90"), ordinal=0)
    monkeypatch.setattr(NUMPY, "signature", lambda x, of=NUMPY.signature: (*of(x)[:3], 0))
    monkeypatch.setattr(NUMPY, "stream", lambda _: 77)
    monkeypatch.setattr(Device, "of", lambda ordinal: device)
    monkeypatch.setattr(cached, "calls", Kept(100))
    monkeypatch.setattr(decode, "prepare", Launches)
    monkeypatch.setattr(prefill, "attend", lambda library, arrays, p, *_: (arrays["q"], p))
    x = {"q": np.zeros((2, 400, 16, 8), np.float16), "cache_seqlens": 0}
    x |= {name: np.zeros((2, 2700, 2, 8), np.float16) for name in ("k_cache", "v_cache")}
    new = {name: np.zeros((2, 400, 2, 8), np.float16) for name in "kv"}
    q, problem = attention_with_cache(**x, **new, return_lse=True)
    assert q is x["q"]
    assert problem.seqlen_new == 400
    names = "q", "k_cache", "v_cache", "k", "v"  # cache_seqlens is an integer
    assert asked == [(names, False), len(names)]
    tables = {name: np.zeros((500, 4), np.float16) for name in ("rotary_cos", "rotary_sin")}
    q, _ = attention_with_cache(**x, **new, **tables, return_lse=True)
    assert q is not x["q"]
    assert q.shape == x["q"].shape
    attention_with_cache(**x, **new, num_splits=1)
    assert asked[-2] == ((*names, "out", "lse"), True)
