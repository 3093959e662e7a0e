"""attention_with_cache: what is wrong is named, by the argument, with what was expected and what came."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, attention_with_cache
from tests.small_cache import small


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


ROWS = np.zeros((3, 1, 2, 16), np.float32)
TABLE = np.zeros((3, 2), np.int32)
EIGHT = {name: np.zeros((3, 20, 2, 16), np.int8) for name in ("k_cache", "v_cache")}
SCALES = {name: np.ones(2, np.float32) for name in ("k_scale", "v_scale")}
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (EIGHT, "k_scale: expected an fp32 array of shape (heads_k,) or (slots, heads_k), since k_cache is int8"),
    (EIGHT | {"k_scale": SCALES["k_scale"]}, "v_scale: expected an fp32 array"),
    (SCALES, "k_scale: expected None, since k_cache is fp32; only caches of 8 bits have scales"),
    (EIGHT | SCALES | {"v_cache": np.zeros((3, 20, 2, 16), np.uint8)},
     "v_cache: expected dtype int8, that of k_cache, got uint8; cast it"),
    ({"k_cache": np.zeros((3, 20, 2, 16), np.int16)},
     "k_cache: expected dtype fp32 or int8 or float8_e4m3fn or uint8, q's or one of 8 bits with k_scale and v_scale, "
     "got int16"),
    (EIGHT | SCALES | {"k_scale": np.ones(3, np.float32)},
     "k_scale: expected shape (slots, heads_k) = (3, 2) or (heads_k,) = (2,), got (3,)"),
    (EIGHT | {name: np.ones((2, 2), np.float32) for name in SCALES},
     "k_scale: expected shape (slots, heads_k) = (3, 2) or (heads_k,) = (2,), got (2, 2)"),
    (EIGHT | SCALES | {"v_scale": np.ones((3, 2), np.float32)},
     "v_scale: expected as many dimensions as k_scale has, 1, got shape (3, 2); expand it"),
    (EIGHT | SCALES | {"v_scale": np.ones(2, np.float16)}, "v_scale: expected dtype fp32, got fp16; cast it"),
    ({"cache_seqlens": np.array([0, 7, 20], np.int32)},
     "cache_seqlens: expected lengths of 0 to 19, a capacity of 20 less 1 new keys, got cache_seqlens[2] = 20; a "
     "longer sequence needs a larger cache"),
    ({"cache_seqlens": np.array([0, -1, 2], np.int32)}, "got cache_seqlens[1] = -1"),
    ({"cache_seqlens": 20}, "cache_seqlens: expected lengths of 0 to 19"),
    ({"cache_seqlens": 2.0}, "cache_seqlens: expected an int32 array or an integer, got 2.0"),
    ({"cache_seqlens": True}, "cache_seqlens: expected an int32 array or an integer, got True"),
    ({"cache_seqlens": None}, "cache_seqlens: expected an array of CuPy, NumPy, PyTorch or JAX"),
    ({"cache_seqlens": [0, 1, 2]}, "cache_seqlens: expected an int32 array or an integer, got [0, 1, 2]"),
    ({"cache_seqlens": np.zeros(3, np.int64)}, "cache_seqlens: expected dtype int32, got int64; cast it"),
    ({"cache_seqlens": np.zeros(4, np.int32)}, "cache_seqlens: expected shape (batch,) = (3,), got (4,)"),
    ({"k": None}, "k: expected an array, since v is given"),
    ({"v": None}, "v: expected an array, since k is given"),
    ({"k": ROWS[:2]}, "k: expected shape (batch, seqlen_new, heads_k, head_dim) = (3, 1, 2, 16), got (2, 1, 2, 16)"),
    ({"v": ROWS[:, :, :1]}, "v: expected shape (batch, seqlen_new, heads_k, head_dim_v) = (3, 1, 2, 16)"),
    ({"k": np.zeros((3, 21, 2, 16), np.float32), "v": np.zeros((3, 21, 2, 16), np.float32)},
     "k: expected at most 20 new keys, the capacity of the cache, got 21"),
    ({"k": ROWS.astype(np.float16)}, "k: expected dtype fp32 of q, got fp16; cast it"),
    ({"q": np.zeros((3, 4, 16), np.float32)}, "q: expected shape (batch, seqlen_q, heads_q, head_dim), got (3, 4, 16)"),
    ({"q": np.zeros((3, 1, 4, 16), np.int8)}, "q: expected a floating-point dtype (fp16, bf16, fp32, fp64), got int8"),
    ({"q": np.zeros((2, 1, 4, 16), np.float32)}, "cache_seqlens: expected shape (batch,) = (2,), got (3,)"),
    ({"q": np.zeros((3, 1, 3, 16), np.float32)}, "k_cache: expected heads_k to divide heads_q = 3, got heads_k = 2"),
    ({"q": np.zeros((3, 1, 4, 24), np.float32)}, "k_cache: expected the head_dim of q, 24, got 16"),
    ({"v_cache": np.zeros((3, 21, 2, 24), np.float32)},
     "v_cache: expected the shape of k_cache but for head_dim, (3, 20, 2, 24), got (3, 21, 2, 24)"),
    ({"v_cache": np.zeros((3, 20, 2, 24), np.float32)},
     "v: expected shape (batch, seqlen_new, heads_k, head_dim_v) = (3, 1, 2, 24), got (3, 1, 2, 16)"),
    ({"v_cache": np.zeros((3, 20, 2, 0), np.float32)}, "v_cache: expected a head_dim of at least 8, got 0"),
    ({"k_cache": np.zeros((3, 20, 32), np.float32)},
     "k_cache: expected shape (batch of the cache, capacity, heads_k, head_dim), got (3, 20, 32)"),
    ({"k_cache": np.zeros((3, 20, 2, 32), np.float32)[..., ::2]},
     "k_cache: expected a stride of 1 along its last dimension, got 2"),
    ({"k_cache": read_only(np.zeros((3, 20, 2, 16), np.float32))},
     "k_cache: expected an array that can be written, since k is appended to it"),
    ({"v_cache": np.broadcast_to(np.zeros((1, 20, 2, 16), np.float32), (3, 20, 2, 16))},
     "v_cache: expected memory of its own for each row, since k is appended, got a stride of 0 along dimension "
     "0; copy it first"),
    ({"cache_batch_idx": np.array([0, 1, 3], np.int32)},
     "cache_batch_idx: expected numbers of the 3 sequences of the cache, from 0, got cache_batch_idx[2] = 3"),
    ({"cache_batch_idx": np.array([0, 1, 2], np.int32), "block_table": TABLE},
     "cache_batch_idx: expected None together with block_table"),
    ({"block_table": TABLE + np.array([[0, 0], [3, 9], [0, 0]], np.int32)},
     "block_table: expected numbers of the 3 pages of the pool, from 0, got block_table[1, 0] = 3"),
    ({"cache_batch_idx": np.array([2, 1, 2], np.int32)},
     "cache_batch_idx: expected each sequence of the cache once, since k is appended to it, got cache_batch_idx[0] = "
     "cache_batch_idx[2] = 2; append in one call for each"),
    ({"block_table": np.array([[0, 1], [2, 0], [0, 2]], np.int32), "cache_seqlens": np.array([3, 23, 7], np.int32)},
     "block_table: expected pages that no other sequence of the call has, where k is appended, but sequences 0 and 1 "
     "both write row 3 of page 0; copy the page first, as PagedCache.append does"),
    ({"block_table": np.array([[0, 1], [2, 0], [0, 0]], np.int32), "cache_seqlens": np.array([3, 7, 8], np.int32)},
     "but sequence 0 writes row 3 of page 0, which sequence 2 has in use"),
    ({"block_table": np.array([[0, 0], [1, 1], [2, 0]], np.int32), "cache_seqlens": np.array([25, 7, 8], np.int32)},
     "but sequence 0 writes row 5 of page 0, which sequence 0 has in use"),
    ({"block_table": TABLE.astype(np.int64)}, "block_table: expected dtype int32, got int64"),
    ({"block_table": TABLE[:2]}, "block_table: expected shape (batch, pages_per_sequence) = (3, 2), got (2, 2)"),
    ({"rotary_cos": np.ones((20, 8), np.float32)}, "rotary_sin: expected an array, since rotary_cos is given"),
    ({"rotary_cos": np.ones((20, 9), np.float32), "rotary_sin": np.ones((20, 9), np.float32)},
     "rotary_cos: expected at most head_dim / 2 = 8 columns, got 9"),
    ({"rotary_cos": np.ones((20, 8), np.float32), "rotary_sin": np.ones((20, 8), np.float32), "k": None, "v": None},
     "rotary_cos: expected None, since there is no k to append"),
    ({"rotary_cos": np.ones((20, 8), np.float16), "rotary_sin": np.ones((20, 8), np.float16)},
     "rotary_cos: expected dtype fp32, got fp16"),
    ({"rotary_cos": np.ones((20, 8), np.float32), "rotary_sin": np.ones((20, 8), np.float32),
      "q": np.zeros((3, 2, 4, 16), np.float32)},
     "rotary_cos: expected as many new keys as queries, 2, got 1: which positions have the queries?"),
    ({"kv_range": np.array([[0, 20], [3, 2], [0, 0]], np.int32)},
     "kv_range: expected [start, end) with 0 <= start <= end <= 20, the capacity of the cache, got kv_range[1] = [3, "
     "2]"),
    ({"alibi_slopes": np.zeros(3, np.float32)},
     "alibi_slopes: expected shape (batch, heads_q) = (3, 4) or (heads_q,) = (4,), got (3,)"),
    ({"sink": np.zeros(3, np.float32)}, "sink: expected shape (heads_q,) = (4,), got (3,)"),
    ({"sink": np.zeros(4)}, "sink: expected dtype fp32, got fp64; cast it"),
    ({"num_splits": 0}, "num_splits: expected 1 to 1024, or None for the best for the lengths, got 0"),
    ({"num_splits": 1.5}, "num_splits: expected an integer or None, got 1.5"),
    ({"batch_invariant": 2}, "batch_invariant: expected True or False, got 2"),
    ({"rotary_interleaved": "yes"}, "rotary_interleaved: expected True or False, got 'yes'"),
    ({"softcap": 0.0}, "softcap: expected a number from 0.001 to 1000, got 0.0"),
    ({"window": (3, -4)}, "window: expected left + right >= 0, got (3, -4)"),
    ({"scale": float("nan")}, "scale: expected a finite number"),
    ({"return_lse": None}, "return_lse: expected True or False, got None"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(change: dict[str, Any], message: str, rng: np.random.Generator) -> None:
    x = small(rng)
    caches = x["k_cache"].copy(), x["v_cache"].copy()
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention_with_cache(**x | change)
    np.testing.assert_array_equal(x["k_cache"], caches[0])
    np.testing.assert_array_equal(x["v_cache"], caches[1])


PACKED_WRONG = (
    (
        {"cu_seqlens_q": np.array([0, 2, 1, 3], np.int32)},
        "cu_seqlens_q: expected at least cu_seqlens_q[1] = 2 as entry 2",
    ),
    ({"cu_seqlens_q": np.zeros(0, np.int32)}, "cu_seqlens_q: expected shape (batch + 1,), got (0,)"),
    (
        {"k": ROWS[:2, 0], "v": ROWS[:2, 0]},
        "k: expected as many rows as q has, 3, since both are packed by cu_seqlens_q",
    ),
    ({"k": ROWS, "v": ROWS}, "k: expected shape (total_new, heads_k, head_dim), got (3, 1, 2, 16)"),
    ({"cache_seqlens": np.array([0, 7, 20], np.int32)}, "a capacity of 20 less 1 new keys, got cache_seqlens[2] = 20"),
)


@pytest.mark.parametrize(("change", "message"), PACKED_WRONG, ids=range(len(PACKED_WRONG)))
def test_what_is_wrong_of_packed_queries(change: dict[str, Any], message: str, rng: np.random.Generator) -> None:
    x = small(rng)
    packed = x | {name: x[name][:, 0] for name in "qkv"} | {"cu_seqlens_q": np.arange(4, dtype=np.int32)}
    attention_with_cache(**packed)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention_with_cache(**packed | change)


def test_shared_pages_that_are_read_are_no_error(rng: np.random.Generator) -> None:
    """Nor those that others write behind what each has, nor, where a window hides the first keys, what they become."""
    x = small(rng) | {"cache_seqlens": np.array([21, 22, 5], np.int32)}
    pool = {name: rng.standard_normal((4, 20, 2, 16)).astype(np.float32) for name in ("k_cache", "v_cache")}
    attention_with_cache(**x | pool, block_table=np.array([[0, 1], [0, 2], [3, 9]], np.int32))
    without = {name: y for name, y in x.items() if name not in "kv"}
    attention_with_cache(**without | pool, block_table=np.array([[0, 1], [0, 1], [0, 9]], np.int32))
    attention_with_cache(**x | pool, block_table=np.array([[0, 0], [1, 1], [3, 9]], np.int32), window=(0, None))
    attention_with_cache(**without | {"cache_batch_idx": np.zeros(3, np.int32), "cache_seqlens": 7})
    same = without | {"cache_seqlens": 7, "v_cache": x["k_cache"]}
    attention_with_cache(**same)


def test_two_caches_at_one_address(rng: np.random.Generator) -> None:
    x = small(rng)
    message = "v_cache: expected memory of its own, since k and v are appended, got that of k_cache"
    with pytest.raises(ArgumentError, match=message):
        attention_with_cache(**x | {"v_cache": x["k_cache"][:]})
    attention_with_cache(**{name: y[:0] for name, y in x.items()})


@pytest.mark.needs("torch")
def test_an_expanded_cache(rng: np.random.Generator) -> None:
    """Sequences would write over each other's rows; to read it is no error."""
    import torch

    x = {name: torch.from_numpy(y) for name, y in small(rng).items()}
    x |= {"k_cache": x["k_cache"][:, :, :1].expand(-1, -1, 2, -1)}
    message = (
        "k_cache: expected memory of its own for each row, since k is appended, got a stride of 0 along dimension 2"
    )
    with pytest.raises(ArgumentError, match=message):
        attention_with_cache(**x)
    del x["k"], x["v"]
    attention_with_cache(**x)
    one = {name: y[:1] for name, y in small(rng, k_cache=np.zeros((1, 20, 2, 16), np.float32)).items()}
    one["k_cache"] = np.lib.stride_tricks.as_strided(one["k_cache"], strides=(0, *one["k_cache"].strides[1:]))
    attention_with_cache(**one)  # of one sequence the stride says nothing
    none = {name: y[:0] for name, y in small(rng).items()}
    none["k_cache"] = np.lib.stride_tricks.as_strided(none["k_cache"], strides=(0, 0, 0, none["k_cache"].itemsize))
    attention_with_cache(**none)  # nor do those of none


@pytest.mark.needs("torch")
def test_a_tensor_without_dimensions() -> None:
    import torch

    cache = torch.zeros(3, 20, 2, 16)
    for lengths in (3, torch.zeros(3, dtype=torch.int32), torch.tensor(3)):
        with pytest.raises(ArgumentError, match=r"q: expected shape \(batch, seqlen_q, heads_q, head_dim\), got \(\)"):
            attention_with_cache(torch.tensor(1.0), cache, cache, cache_seqlens=lengths)


def test_libraries_do_not_mix(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = small(rng)
    with pytest.raises(ArgumentError, match="v_cache: expected an array of numpy like q, got one of torch"):
        attention_with_cache(**x | {"v_cache": torch.from_numpy(x["v_cache"])})


def test_a_sequence_more_in_the_cache_is_said_which(rng: np.random.Generator) -> None:
    x = small(rng)
    one = {name: y if "cache" in name and name != "cache_seqlens" else y[:2] for name, y in x.items()}
    with pytest.raises(ArgumentError, match=re.escape("k_cache: expected the caches of 2 sequences, as q has, got 3")):
        attention_with_cache(**one)
