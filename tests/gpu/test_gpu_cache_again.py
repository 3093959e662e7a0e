"""Calls of many queries over a cache that come again: their forward is known (launch/attending.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import attention_with_cache
from cupyflash.launch import attending, cached
from tests.gpu.test_gpu_cache import same
from tests.gpu_arrays import on_gpu

pytestmark = pytest.mark.gpu

CALLS: dict[str, dict[str, Any]] = {
    "whole": {"queries": (2, 200), "slots": (2, 4096)},
    "one": {"queries": (1, 300), "slots": (1, 12288)},
    "chosen": {"queries": (2, 200), "slots": (5, 4096)},
    "pages": {"queries": (2, 200), "slots": (600, 16)},
    "packed": {"queries": (500,), "slots": (900, 16)},
    "8 bits": {"queries": (2, 200), "slots": (2, 4096), "stored": "int8"},
    "8 bits, packed": {"queries": (500,), "slots": (900, 16), "stored": "int8"},
}
HEADS, KEYS = (32, 64), (4, 64)


def given(
    rng: np.random.Generator,
    library: str,
    queries: tuple[int, ...],
    slots: tuple[int, int],
    more: str,
    stored: str = "",
) -> dict[str, Any]:
    """The arrays of a call, new ones each time."""
    packed = len(queries) == 1
    batch = 3 if packed else queries[0]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(np.float16)

    x: dict[str, Any] = {"q": normal(*queries, *HEADS)}
    for name in "kv":
        whole = (*slots, *KEYS)
        x[f"{name}_cache"] = rng.integers(-127, 128, whole).astype(np.int8) if stored else normal(*whole)
        if stored:
            x[f"{name}_scale"] = rng.random(KEYS[0], dtype=np.float32) / 50
    x["cache_seqlens"] = rng.integers(0, 3000, batch).astype(np.int32)
    if slots[1] == 16:
        x["block_table"] = rng.permutation(slots[0])[: batch * 200].reshape(batch, 200).astype(np.int32)
    elif slots[0] > batch or packed:
        x["cache_batch_idx"] = rng.permutation(slots[0])[:batch].astype(np.int32)
    if packed:
        x["cu_seqlens_q"] = np.array([0, 1, rng.integers(200, 400), queries[0]], np.int32)
    if more == "appends":
        x |= {name: normal(*queries, *KEYS) for name in "kv"}
    if more == "sink":
        x["sink"] = rng.standard_normal(HEADS[0], dtype=np.float32)
    return {name: on_gpu(a, library) for name, a in x.items()}


@pytest.mark.parametrize("more", ["", "appends", "sink", "length"])
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_call_that_comes_again(
    library: str, kind: str, more: str, family: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit what the same call gives whose forward is looked for; caches that are written, too."""
    cached.calls.clear()
    inputs = [given(rng, library, more=more, **CALLS[kind]) for _ in range(4)]
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    if more == "length":
        options["cache_seqlens"] = 1234
    expected = []
    with monkeypatch.context() as patch:
        patch.setattr(attending, "_TRIES", 0)
        for x in inputs:
            own = {name: a.copy() if library == "cupy" else a.clone() for name, a in x.items()}
            found = attention_with_cache(**own | options)
            expected.append((*found, own["k_cache"], own["v_cache"]))
    assert all(call.attending is None for call in cached.calls.values())
    cached.calls.clear()
    for x, wanted in zip([*inputs, inputs[0]], [*expected, None], strict=True):
        found = attention_with_cache(**x | options)
        if wanted is not None:
            for a, b in zip((*found, x["k_cache"], x["v_cache"]), wanted, strict=True):
                same(a, b)
    assert [call.attending is not None for call in cached.calls.values()] == [True]
    out = attention_with_cache(**x | options | {"return_lse": False})
    if more != "appends":
        same(out, expected[0][0])


def test_a_call_that_is_new_in_a_graph(rng: np.random.Generator) -> None:
    """Captured when new, by a stream on which nothing may be copied; then again outside, and captured once more."""
    import torch

    cached.calls.clear()
    x = given(rng, "torch", (2, 200), (2, 4096), "")
    attention_with_cache(**x)  # loads its kernels
    cached.calls.clear()
    graphs, found = [], []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(attention_with_cache(**x))
        graphs.append(graph)
        attention_with_cache(**x)
    for lengths in ((0, 3000), (17, 1)):
        x["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        x["q"].normal_()
        expected = attention_with_cache(**x)
        for graph, out in zip(graphs, found, strict=True):
            graph.replay()
            same(out, expected, str(lengths))
