"""What is launched for many new queries over a cache, and on which arrays, as a pretended GPU is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import attention_with_cache
from cupyflash.launch import prefill, run
from cupyflash.problem import MAX_SEQLEN
from tests import pretended_gpu

torch = pytest.importorskip("torch")
LIKE = {"dtype": torch.bfloat16}
HEADS, KEYS = (32, 64), (2, 64)


def encode(longs: Any, words: Any, lengths: list[int], strides: list[int]) -> None:
    """Attention over a cache has maps of five dimensions, of which nobody asks here."""
    if len(lengths) == 4:
        pretended_gpu.plain(longs, words, lengths, strides)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pretended_gpu.Gpu:
    """An H100. Its driver makes no map of an array without elements."""
    found = pretended_gpu.pretend(monkeypatch)
    found.place, found.refuses = encode, lambda lengths: 0 in lengths
    return found


def ints(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def caches(*slots: int) -> dict[str, Any]:
    return {name: torch.zeros(*slots, *KEYS, **LIKE) for name in ("k_cache", "v_cache")}


def launched(gpu: pretended_gpu.Gpu, **arrays: Any) -> tuple[list[str], list[Any], Any]:
    """The kernels of a call by what they do, their params without tensor maps, and its results."""
    gpu.launched.clear()
    results = attention_with_cache(**arrays, return_lse=True)
    kinds = {variant.symbol: variant for variant in gpu.loaded}
    found = []
    for symbol, _, data in gpu.launched:
        params = np.frombuffer(data, kinds[symbol].params)[0]
        found.append(params["plain"] if "plain" in (params.dtype.names or ()) else params)
    return [kinds[x.symbol].header for x in gpu.launched], found, results


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("lies", ["whole", "pages", "chosen"])
def test_sequences_of_many_queries_beside_others(lies: str, rotary: bool, gpu: pretended_gpu.Gpu) -> None:
    """Attention over a cache leaves them out, and all kernels read and write the same arrays; so of a kept call."""
    x: dict[str, Any] = {"q": torch.zeros(2000, *HEADS, **LIKE), "cache_seqlens": ints(3, 4, 5)}
    x |= caches(999, 16) if lies == "pages" else caches(9 if lies == "chosen" else 3, 4096)
    x |= {name: torch.zeros(2000, *KEYS, **LIKE) for name in "kv"}
    x["cu_seqlens_q"] = ints(0, 1, 1900, 2000)
    if lies == "pages":
        x["block_table"] = torch.zeros(3, 256, dtype=torch.int32)
    elif lies == "chosen":
        x["cache_batch_idx"] = ints(7, 2, 0)
    if rotary:
        x |= {name: torch.zeros(4096, 16, **LIKE) for name in ("rotary_cos", "rotary_sin")}
    for _ in range(2):
        kernels, (append, decode, combine, forward), (out, lse) = launched(gpu, **x)
        assert kernels == ["append", "decode_sm90", "decode_combine", "fwd_sm90"]
        assert decode["most_queries"] == combine["most_queries"] == 32
        q = int(append["rotated_q"]) if rotary else x["q"].data_ptr()
        assert (q != x["q"].data_ptr()) is rotary
        for params in (decode, combine, forward):
            assert params["q"] == q
            assert (params["o"], params["lse"]) == (out.data_ptr(), lse.data_ptr())
            assert params["cu_seqlens_q"] == x["cu_seqlens_q"].data_ptr()
        for name in "kv":
            where = x[f"{name}_cache"].data_ptr()
            assert append[f"{name}_cache"] == decode[name] == forward[name] == where
        assert forward["seqused_k"] == x["cache_seqlens"].data_ptr()
        assert forward["cu_seqlens_k"] == x["cu_seqlens_q"].data_ptr()  # as many are new as queries
        assert (forward["page_size"], forward["pages"]) == tuple(x["k_cache"].shape[1::-1])
        if lies != "whole":
            table = x["block_table" if lies == "pages" else "cache_batch_idx"]
            assert forward["block_table"] == table.data_ptr()


def test_others_leave_nothing_out(gpu: pretended_gpu.Gpu) -> None:
    x = {"q": torch.zeros(2000, *HEADS, **LIKE), "cache_seqlens": ints(3, 4), "cu_seqlens_q": ints(0, 1, 2000)}
    _, (decode, combine), _ = launched(gpu, **x, **caches(2, 4096), num_splits=3)
    assert decode["most_queries"] == combine["most_queries"] == MAX_SEQLEN


@pytest.mark.parametrize("slots", [(0, 4096), (3, 4096), (0, 16), (30, 16)])
def test_a_batch_of_none(slots: tuple[int, int], gpu: pretended_gpu.Gpu) -> None:
    """Rows of q that belong to no sequence, and so to attention over a cache."""
    x = {"q": torch.zeros(2000, *HEADS, **LIKE), "cache_seqlens": ints(), "cu_seqlens_q": ints(0)} | caches(*slots)
    if slots[1] == 16:
        x["block_table"] = torch.zeros(0, 256, dtype=torch.int32)
    elif slots[0]:
        x["cache_batch_idx"] = ints()
    kernels, _, (out, lse) = launched(gpu, **x)
    assert kernels[0].startswith("decode_sm")
    assert (out.shape, lse.shape) == ((2000, *HEADS), (32, 2000))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_cache_without_room(page_size: int | None, packed: bool, gpu: pretended_gpu.Gpu) -> None:
    """Nobody sees a key in a pool of no pages."""
    x = {"q": torch.zeros(*((2000,) if packed else (2, 1000)), *HEADS, **LIKE), "cache_seqlens": ints(0, 0)}
    x |= caches(0, page_size or 4096)
    x |= {"block_table": torch.zeros(2, 256, dtype=torch.int32)} if page_size else {"cache_batch_idx": ints(0, 0)}
    if packed:
        x["cu_seqlens_q"] = ints(0, 1, 2000)
    assert launched(gpu, **x)[0][0].startswith("decode_sm")


# Of calls that take the forward: q, the caches, and what says where their rows are.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"queries": (2, 200), "slots": (2, 4096)},
    "one": {"queries": (1, 300), "slots": (1, 4096)},
    "few of many": {"queries": (2, 200), "slots": (9, 4096), "chosen": True},
    "pages": {"queries": (2, 200), "slots": (600, 16)},
    "packed": {"queries": (2000,), "slots": (600, 16)},
    "packed, chosen": {"queries": (2000,), "slots": (9, 4096), "chosen": True},
}


def given_of(queries: tuple[int, ...], slots: tuple[int, int], chosen: bool = False) -> dict[str, Any]:
    """New arrays each time."""
    packed = len(queries) == 1
    batch = 3 if packed else queries[0]
    x: dict[str, Any] = {"q": torch.zeros(*queries, *HEADS, **LIKE), "cache_seqlens": ints(*range(3, 3 + batch))}
    x |= caches(*slots)
    if slots[1] == 16:
        x["block_table"] = torch.zeros(batch, 256, dtype=torch.int32)
    if chosen:
        x["cache_batch_idx"] = ints(*range(batch))
    if packed:
        x["cu_seqlens_q"] = ints(0, 1, 1900, 2000)
    return x


def told(params: Any, x: dict[str, Any], results: Any, gpu: pretended_gpu.Gpu) -> dict[str, Any]:
    """What the forward's params say, addresses by what lies there."""
    names = {a.data_ptr(): name for name, a in x.items()} | {a.data_ptr(): i for i, a in enumerate(results)}
    names |= {a.ctypes.data: tuple(a) for a in gpu.constants}
    addresses = ("q", "k", "v", "o", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sink")
    found = {name: names.get(int(params[name]), "new" if params[name] else None) for name in addresses}
    return found | {name: params[name].tobytes() for name in params.dtype.names if params.dtype[name] != np.uint64}


@pytest.mark.parametrize("more", ["", "appends", "sink", "length", "rotary", "appends fewer"])
@pytest.mark.parametrize("want_lse", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_call_made_before_is_launched_as_it_was(
    arch: str, way: str, want_lse: bool, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other arrays: from the third time on nobody looks for the forward, which is told the same as at first."""
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    gpu.place, gpu.refuses = encode, lambda lengths: 0 in lengths
    seen = []
    for i in range(6):
        x = given_of(**WAYS[way])
        q = x["q"]
        if "appends" in more or more == "rotary":
            rows = (*q.shape[:-3], 7) if more == "appends fewer" and q.dim() == 4 else q.shape[:-2]
            x |= {name: torch.zeros(*rows, *KEYS, **LIKE) for name in "kv"}
        if more == "rotary":
            x |= {name: torch.zeros(4096, 16, **LIKE) for name in ("rotary_cos", "rotary_sin")}
        if more == "sink":
            x["sink"] = torch.zeros(HEADS[0])
        length = x.pop("cache_seqlens") if more == "length" else None
        if i > 2:
            monkeypatch.setattr(prefill, "rows_of", None)
            monkeypatch.setattr(run, "forward", None)
        gpu.launched.clear()
        results = attention_with_cache(**x, **({} if length is None else {"cache_seqlens": 5}), return_lse=want_lse)
        results = results if want_lse else (results,)
        shape = (HEADS[0], 2000) if q.dim() == 3 else (len(q), HEADS[0], q.shape[1])
        assert [tuple(r.shape) for r in results] == [tuple(q.shape), shape][: len(results)]
        assert all(r.is_contiguous() for r in results)
        kinds = {variant.symbol: variant for variant in gpu.loaded}
        params = np.frombuffer(gpu.launched[-1].params, kinds[gpu.launched[-1].symbol].params)[0]
        params = params["plain"] if "plain" in (params.dtype.names or ()) else params
        kernels = [(one.symbol, one.grid) for one in gpu.launched]
        assert kinds[kernels[-1][0]].header.startswith("fwd")
        seen.append((kernels, told(params, x, results, gpu)))
    (first_kernels, first), *_ = seen
    new, batch = 0 if "k" not in x else x["k"].shape[1], 3 if q.dim() == 3 else len(q)
    steps = {"cu_seqlens_q": q.shape[1], "cu_seqlens_k": new if first["block_table"] else 4096, "block_table": 1}
    for kernels, params in seen[3:]:
        assert kernels == first_kernels
        for name, value in params.items():
            if type(value) is tuple:  # which the first made itself
                assert first[name] == "new"
                assert value == tuple(steps[name] * i for i in range(batch + (name != "block_table")))
            else:
                assert value == first[name] or name == "lse", name
