"""What is launched for many new queries over a cache, and on which arrays, as a pretended GPU is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import attention_with_cache
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
