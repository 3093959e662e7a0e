"""Layers of a step of generation that are like the one before: they launch what is launched where nothing is known."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402

from cupyflash.launch import cached  # noqa: E402
from cupyflash.torch import sdpa  # noqa: E402
from cupyflash.transformers import attention as adapter  # noqa: E402
from cupyflash.transformers import ranges, steps  # noqa: E402
from tests.pretended_gpu import Gpu, launched_by  # noqa: E402

pytestmark = pytest.mark.needs("cupy")
HALF = torch.float16
Layer = dict[str, Any]
MODULE = types.SimpleNamespace(is_causal=True, config=types.SimpleNamespace(sliding_window=32), layer_idx=0)


@pytest.fixture(autouse=True)
def _taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    monkeypatch.setattr(sdpa, "_told", set())
    monkeypatch.setattr(steps, "_known", {})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers whose arguments are looked at."""
    found: list[Any] = []
    real = adapter._form
    monkeypatch.setattr(adapter, "_form", lambda *x: found.append(x) or real(*x))
    return found


def mask_of(batch: int = 2) -> Any:
    return ranges.as_range_mask(torch.tensor([[0, 90]] * batch), False, 1)


def layer(keys: int = 100, queries: int = 1, mask: Any = None, dtype: Any = HALF, **more: Any) -> Layer:
    """New tensors, as each layer has them."""
    found = {"query": torch.zeros(2, 8, queries, 64, dtype=dtype), "attention_mask": mask, "scaling": 0.1}
    found |= {name: torch.zeros(2, 2, keys, 64, dtype=dtype) for name in ("key", "value")}
    return (
        found
        | {"dropout": 0.0, "position_ids": torch.zeros(2, 1), "output_attentions": False, "head_mask": None}
        | more
    )


def run(x: Layer) -> Any:
    with torch.no_grad():
        out, weights = adapter.attention(MODULE, **x)
    assert weights is None
    assert out.shape == (x["query"].shape[0], x["query"].shape[2], 8, 64)
    return out


MASK = mask_of()
KINDS: dict[str, Callable[[], Layer]] = {
    "no mask": layer,
    "mask": lambda: layer(mask=MASK),
    "softcap": lambda: layer(mask=MASK, softcap=20.0),
    "window, in the mask": lambda: layer(mask=MASK, sliding_window=32),
    "sinks": lambda: layer(s_aux=torch.zeros(8, dtype=HALF)),
    "not causal": lambda: layer(is_causal=False),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_third_layer_is_known(name: str, gpu: Gpu, read: list[Any]) -> None:
    make = KINDS[name]
    first = launched_by(gpu, lambda: run(make()))
    run(make())
    read.clear()
    for _ in range(3):
        assert launched_by(gpu, lambda: run(make())) == first
    assert not read


def test_caches_grow(gpu: Gpu, read: list[Any]) -> None:
    """What is asked is looked at with a mask, and without, until calls are known to grow."""
    found = []
    for n in range(100, 106):
        mask = mask_of()
        found += [launched_by(gpu, lambda n=n, mask=mask: run(layer(n, mask=mask))) for _ in range(4)]
        found.append(launched_by(gpu, lambda n=n: run(layer(n))))
    assert len(read) == 3 + 2  # two more, and one more, before it is known what grows
    for i, got in enumerate(found):
        cached.calls.clear()
        steps._known.clear()
        n, mask = 100 + i // 5, mask_of() if i % 5 < 4 else None
        assert launched_by(gpu, lambda n=n, mask=mask: run(layer(n, mask=mask))) == got


def test_each_step_has_a_mask_of_its_own(gpu: Gpu, read: list[Any]) -> None:
    masks = [mask_of() for _ in range(6)]
    for mask in masks:
        for _ in range(2):
            run(layer(mask=mask))
            kinds = {variant.symbol: variant.params for variant in gpu.loaded}
            symbol, _, data = next(x for x in gpu.launched[::-1] if "combine" not in x.symbol)
            plain = np.frombuffer(data, kinds[symbol])[0]["plain"]
            assert int(plain["kv_range"]) == mask.data_ptr()
    assert len(read) == 2


OTHERS: dict[str, Callable[[], Layer]] = {
    "scaling": lambda: layer(mask=MASK, scaling=0.2),
    "softcap": lambda: layer(mask=MASK, softcap=20.0),
    "no mask": layer,
    "sinks": lambda: layer(mask=MASK, s_aux=torch.zeros(8, dtype=HALF)),
    "two queries": lambda: layer(queries=2, mask=ranges.as_range_mask(torch.zeros(2, 2, dtype=torch.int32), True, 100)),
    "dtype": lambda: layer(mask=MASK, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_differs_is_looked_at(name: str, gpu: Gpu, read: list[Any]) -> None:
    make = OTHERS[name]
    for _ in range(3):
        run(layer(mask=MASK))
    read.clear()
    found = launched_by(gpu, lambda: run(make()))
    assert len(read) == 1
    cached.calls.clear()
    steps._known.clear()
    assert launched_by(gpu, lambda: run(make())) == found


def test_two_queries_are_no_step_of_one(gpu: Gpu) -> None:
    """Though the last call of the kind that one query takes had two, and no window."""
    wide = ranges.as_range_mask(torch.tensor([[0, 90]] * 2), False, 100)
    for _ in range(3):
        run(layer(mask=MASK, is_causal=False, sliding_window=8))
    for _ in range(3):
        run(layer(queries=2, mask=wide, is_causal=False))
    found = launched_by(gpu, lambda: run(layer(queries=2, mask=wide, is_causal=False, sliding_window=8)))
    cached.calls.clear()
    steps._known.clear()
    afresh = launched_by(gpu, lambda: run(layer(queries=2, mask=wide, is_causal=False, sliding_window=8)))
    assert found == afresh


@pytest.mark.parametrize("given", [{"output_attentions": True}, {"head_mask": torch.ones(8)}, {"autocast": True}])
def test_what_is_not_ours_is_not_taken(given: dict[str, Any], gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        run(layer())
    launches, taken = len(gpu.launched), []
    monkeypatch.setattr(
        adapter.fallback, "by_transformers", lambda *x: taken.append(x) or (x[1].q.transpose(1, 2), None)
    )
    monkeypatch.setattr(adapter.api, "attention", lambda q, *x, **more: taken.append(q) or q)
    with torch.autocast("cpu", enabled=given.pop("autocast", False)):
        run(layer(**given))
    assert len(taken) == 1
    assert len(gpu.launched) == launches


def test_a_window_without_a_mask_follows_the_keys(gpu: Gpu, read: list[Any]) -> None:
    for n in (30, 30, 30, 32, 33, 40):
        found = launched_by(gpu, lambda n=n: run(layer(n, sliding_window=32)))
        assert ("window" in found[0][0]) == (n > 32)
    assert len(read) == 6


def test_gradients_are_not_lost(gpu: Gpu, read: list[Any]) -> None:
    for _ in range(3):
        run(layer())
    read.clear()
    x = layer()
    x["query"].requires_grad_()
    out, _ = adapter.attention(MODULE, **x)
    assert out.requires_grad
    assert len(read) == 1
