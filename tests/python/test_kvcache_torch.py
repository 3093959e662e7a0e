"""attention_with_cache where torch looks on: its operators, torch.compile, export, fakes, and what has no rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import cupyflash.torch.cached
from cupyflash import ArgumentError, UnsupportedError, attention_with_cache, masks
from tests.small_cache import small

pytestmark = pytest.mark.needs("torch")


def tensors(rng: np.random.Generator, **more: Any) -> dict[str, Any]:
    return {name: torch.from_numpy(x) for name, x in (small(rng) | more).items()}


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: y.clone() for name, y in x.items()}


def without_new(x: dict[str, Any]) -> dict[str, Any]:
    return {name: y for name, y in x.items() if name not in "kv"}


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "window": (5, None), "softcap": 2.0, "num_splits": 3, "batch_invariant": True},
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "options"])
@pytest.mark.parametrize("append", [False, True])
def test_compile_takes_it_whole(append: bool, options: Any, backend: str, rng: np.random.Generator) -> None:
    """And what follows sees the rows that were appended."""
    x = tensors(rng)
    x = x if append else without_new(x)

    def step(given: dict[str, Any]) -> Any:
        out, lse = attention_with_cache(**given, **options, return_lse=True)
        return out * 2, lse, given["k_cache"].sum(), given["v_cache"] + 1

    a, b = copied(x), copied(x)
    found, expected = torch.compile(step, backend=backend, fullgraph=True)(a), step(b)
    for y, z in zip((*found, *a.values()), (*expected, *b.values()), strict=True):
        torch.testing.assert_close(y, z)


def test_one_program_for_all_lengths(rng: np.random.Generator) -> None:
    programs = []

    def backend(graph: Any, _: Any) -> Any:
        programs.append(graph)
        return graph

    step = torch.compile(attention_with_cache, backend=backend, fullgraph=True, dynamic=True)
    for batch, capacity in ((3, 20), (5, 31), (2, 64)):
        q, k, v = (torch.randn(batch, 1, 2, 16) for _ in range(3))
        caches = torch.randn(2, batch, capacity, 2, 16)
        lengths = torch.arange(batch, dtype=torch.int32)
        given = {"cache_seqlens": lengths, "k": k, "v": v, "causal": True}
        torch.testing.assert_close(step(q, *caches, **given), attention_with_cache(q, *caches.clone(), **given))
    assert len(programs) == 1


@pytest.mark.parametrize("append", [False, True])
def test_one_length_inside_compile(append: bool, rng: np.random.Generator) -> None:
    """It goes to the operator as a number; one program for all that come after the first."""
    x = tensors(rng)
    x = x if append else without_new(x)
    del x["cache_seqlens"]
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.graph)
        return graph

    step = torch.compile(lambda n: attention_with_cache(**x, cache_seqlens=n), backend=backend, fullgraph=True)
    for n in (3, 4, 9, 7):
        torch.testing.assert_close(step(n), attention_with_cache(**x, cache_seqlens=n))
    assert len(graphs) <= 2
    assert not [node for graph in graphs for node in graph.nodes if "full" in node.name]


@pytest.mark.parametrize("append", [False, True])
def test_the_operators_take_one_length(append: bool, rng: np.random.Generator) -> None:
    x = tensors(rng)
    x = x if append else without_new(x)
    del x["cache_seqlens"]
    op = cupyflash.torch.cached.APPEND_OP if append else cupyflash.torch.cached.READ_OP
    values = [x.get(row.name) for row in cupyflash.torch.cached._INPUTS]
    torch.library.opcheck(op, (*values, True, None, None, None, None, False, None, False, "", 5))


@pytest.mark.parametrize("append", [False, True])
def test_the_operators_are_what_they_say(append: bool, rng: np.random.Generator) -> None:
    """By torch's own checks: which arguments are written, and what a fake of it returns."""
    mask = masks.local(20, left=5)
    x = tensors(rng, block_tiles=mask.tiles.copy(), block_bits=mask.bits.copy())
    op = cupyflash.torch.cached.APPEND_OP if append else cupyflash.torch.cached.READ_OP
    given = x if append else without_new(x)
    values = [given.get(row.name) for row in cupyflash.torch.cached._INPUTS]
    torch.library.opcheck(op, (*values, True, None, None, None, None, False, None, False, "", None))


def test_export(rng: np.random.Generator) -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, k: Any, v: Any) -> Any:
            return attention_with_cache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, k=k, v=v, causal=True)

    x = tensors(rng)
    given = tuple(x[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens", "k", "v"))
    program = torch.export.export(Step(), tuple(y.clone() for y in given)).module()
    a, b = [y.clone() for y in given], [y.clone() for y in given]
    torch.testing.assert_close(program(*a), Step()(*b))
    torch.testing.assert_close(a, b)


def test_fakes_are_checked_as_calls_are(rng: np.random.Generator) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = tensors(rng)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(y) for name, y in x.items()}
        out, lse = attention_with_cache(**fakes, return_lse=True)
        assert (out.shape, lse.shape, lse.dtype) == (x["q"].shape, (3, 4, 1), torch.float32)
        with pytest.raises(ArgumentError, match="k_cache: expected the head_dim of q"):
            attention_with_cache(**fakes | {"q": mode.from_tensor(torch.zeros(3, 1, 4, 24))})


def test_there_are_no_gradients(rng: np.random.Generator) -> None:
    x = tensors(rng)
    x["q"].requires_grad_()
    with pytest.raises(UnsupportedError, match="q: expected a tensor without requires_grad"):
        attention_with_cache(**x)
    with torch.no_grad():
        assert not attention_with_cache(**x).requires_grad
    with torch.inference_mode():
        assert attention_with_cache(**x).is_inference()


def test_transforms_are_refused_by_name(rng: np.random.Generator) -> None:
    x = tensors(rng)
    with pytest.raises(
        UnsupportedError, match=r"q: attention over a cache has no rule for the transforms of torch.func"
    ):
        torch.func.vmap(lambda q: attention_with_cache(**x | {"q": q}))(torch.zeros(2, 3, 1, 4, 16))
    with pytest.raises(
        UnsupportedError, match=r"q: (expected a tensor without requires_grad|attention over a cache has)"
    ):
        torch.func.grad(lambda q: attention_with_cache(**x | {"q": q}).sum())(x["q"])


def test_a_subclass_without_rules(rng: np.random.Generator) -> None:
    """Its memory is written."""

    class Named(torch.Tensor):
        pass

    x = tensors(rng)
    x["k_cache"] = x["k_cache"].as_subclass(Named)
    assert type(attention_with_cache(**x)) is torch.Tensor
    assert torch.equal(x["k_cache"][1, 7].as_subclass(torch.Tensor), x["k"][1, 0])
