"""What a call over a cache writes: nothing where it is refused, nothing that another has, and all of it or none."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, PagedCache, UnsupportedError, attention_with_cache
from tests.small_cache import small

SHARED = "expected pages that no other sequence of the call has"
OWN = "v_cache: expected memory of its own, since k and v are appended, got that of k_cache"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"window": (100, 0)}, "sequence 1 writes row 0 of page 0, which sequence 0 has in use"),
        ({"window": (5, 0)}, "which sequence 0 has in use"),
        ({"window": (4, 0)}, None),  # sequence 0 sees rows 1 to 5
        ({"window": (None, 0)}, "which sequence 0 has in use"),
        ({"kv_range": np.array([[0, 8], [0, 8]], np.int32)}, "which sequence 0 has in use"),
        ({"kv_range": np.array([[1, 8], [0, 8]], np.int32)}, None),
    ],
)
def test_rows_that_a_query_may_see_are_not_written_over(
    more: dict[str, Any], message: str | None, rng: np.random.Generator
) -> None:
    """Of sequence 0 six rows count, its new one among them; the first lies in a page that sequence 1 writes."""
    caches = rng.standard_normal((2, 3, 4, 1, 8)).astype(np.float32)
    x: dict[str, Any] = {"cache_seqlens": np.array([5, 4], np.int32)}
    x["block_table"] = np.array([[0, 1], [2, 0]], np.int32)
    q, k, v = rng.standard_normal((3, 2, 1, 1, 8)).astype(np.float32)
    before = caches.copy()
    if message is None:
        attention_with_cache(q, *caches, k=k, v=v, **x, **more)
        assert np.array_equal(caches[0, 0, 0], k[1, 0])
        return
    with pytest.raises(ArgumentError, match=f"{SHARED}.*{message}"):
        attention_with_cache(q, *caches, k=k, v=v, **x, **more)
    assert np.array_equal(caches, before)


def test_caches_with_memory_in_common(rng: np.random.Generator) -> None:
    """They may lie between each other's rows, and are read wherever they lie."""
    whole = rng.standard_normal((4, 10, 2, 24)).astype(np.float32)
    columns, slots = (whole[:2, ..., :16], whole[:2, ..., 8:]), (whole[:3, ..., :16], whole[1:, ..., :16])
    for k_cache, v_cache in (columns, slots, (columns[0], columns[0][::-1]), (columns[0], columns[0])):
        q, k, v = rng.standard_normal((3, len(k_cache), 1, 2, 16)).astype(np.float32)
        before = whole.copy()
        with pytest.raises(ArgumentError, match=re.escape(OWN)):
            attention_with_cache(q, k_cache, v_cache, cache_seqlens=3, k=k, v=v)
        assert np.array_equal(whole, before)
        attention_with_cache(q, k_cache, v_cache, cache_seqlens=3)
    q, k, v = rng.standard_normal((3, 2, 1, 2, 8)).astype(np.float32)
    attention_with_cache(q, whole[:2, ..., :8], whole[:2, ..., 8:16], cache_seqlens=3, k=k, v=v)
    assert np.array_equal(whole[:2, 3, :, :8], k[:, 0])
    assert np.array_equal(whole[:2, 3, :, 8:16], v[:, 0])


@pytest.mark.filterwarnings("error")
def test_rows_that_are_not_finite_are_appended_in_silence(rng: np.random.Generator) -> None:
    x = small(rng)
    angle = rng.standard_normal((20, 4)).astype(np.float32)
    x["k"][1, 0, 0, 0], x["k"][2, 0, 1, 1] = np.inf, np.nan
    attention_with_cache(**x, rotary_cos=np.cos(angle), rotary_sin=np.sin(angle))
    assert np.isnan(x["k_cache"][2, 19, 1, 1])


def test_new_rows_that_lie_in_the_cache(rng: np.random.Generator) -> None:
    """They are read before the first is written."""
    k_cache, v_cache = rng.standard_normal((2, 2, 10, 1, 8)).astype(np.float32)
    before = k_cache.copy()
    new = {"k": k_cache[:, 3:4], "v": v_cache[:, 3:4]}
    attention_with_cache(
        before[:, :1], k_cache, v_cache, cache_seqlens=3, **new, cache_batch_idx=np.array([1, 0], np.int32)
    )
    assert np.array_equal(k_cache[:, 3], before[::-1, 3])


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, where the first dual tensor is made
def test_forward_mode_derivatives_are_refused(rng: np.random.Generator) -> None:
    import torch
    from torch.autograd import forward_ad

    x = {name: torch.from_numpy(a) for name, a in small(rng).items()}
    with forward_ad.dual_level():
        for name in "qkv":
            dual = x | {name: forward_ad.make_dual(x[name], torch.ones_like(x[name]))}
            with pytest.raises(UnsupportedError, match=f"{name}: forward-mode derivatives"):
                attention_with_cache(**dual)


@pytest.mark.needs("torch")
def test_a_paged_cache_made_in_inference_mode() -> None:
    """It is written outside of it, too."""
    import torch

    with torch.inference_mode():
        pool = PagedCache(4, 4, heads_k=1, head_dim=8, like=torch.zeros(1))
        first = pool.allocate()
        places = pool.append([first], 2)
        second = pool.fork(first)
    pool.append([first], 1, into=places)
    pool.append([second], 1)
    assert (pool.length(first), pool.length(second), pool.free_pages) == (3, 3, 2)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("copies", [False, True])
def test_an_append_that_fails_changes_nothing(copies: bool) -> None:
    """Whatever torch refuses: here to write where all entries are one."""
    import torch

    pool = PagedCache(9, 4, heads_k=1, head_dim=8, like=torch.zeros(1))
    sequences = [pool.allocate(), pool.allocate()]
    pool.append(sequences, [2, 7])
    if copies:
        sequences = [*map(pool.fork, sequences)]
    places = pool.places(sequences)
    pages = places["block_table"].clone()
    wrong = places | {"cache_seqlens": torch.zeros(1, dtype=torch.int32).expand(2)}
    free = pool.free_pages
    with pytest.raises(RuntimeError):
        pool.append(sequences, 6, into=wrong)
    assert [*map(pool.length, sequences)] == [2, 7]
    assert pool.free_pages == free
    assert torch.equal(pool.places(sequences)["block_table"], pages)
    pool.append(sequences, 6)
    for sequence in range(len(sequences) * (1 + copies)):
        pool.free(sequence)
    assert pool.free_pages == 9


def test_an_error_names_the_sequences() -> None:
    pool = PagedCache(4, 4, heads_k=1, head_dim=8, like=np.zeros(1))
    with pytest.raises(ArgumentError, match=r"^sequences: expected a number that allocate or fork gave, .* got 7"):
        pool.append([7], 1)
    with pytest.raises(ArgumentError, match=r"^sequence: expected a number that allocate or fork gave, .* got 7"):
        pool.length(7)


@pytest.mark.needs("torch")
def test_tensors_of_a_class_of_ones_own() -> None:
    import torch

    class Own(torch.Tensor):
        pass

    pool = PagedCache(4, 4, heads_k=1, head_dim=8, like=torch.zeros(1).as_subclass(Own))
    assert type(pool.k) is torch.Tensor


@pytest.mark.needs("torch")
def test_sparse_results_are_not_combined() -> None:
    import torch

    out = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ArgumentError, match=r"outs.*: expected a dense tensor, got layout torch.sparse_coo"):
        cupyflash.combine([out.to_sparse(), out], [torch.zeros(1, 1, 2)] * 2)
