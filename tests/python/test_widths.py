"""A head_dim of v, and of out, that is not that of q and k: in every library, as v padded with zeros would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import UnsupportedError
from tests import pretended_gpu

SHAPES = {"bshd": ((2, 70, 4), (2, 90, 2)), "bhsd": ((2, 4, 70), (2, 2, 90))}


def draw(rng: np.random.Generator, layout: str = "bshd", widths: tuple[int, int] = (24, 40)) -> list[np.ndarray]:
    """q, k, v and dout in float64."""
    q, k = SHAPES[layout]
    d, d_v = widths
    return [rng.standard_normal(shape) for shape in ((*q, d), (*k, d), (*k, d_v), (*q, d_v))]


def padded(x: list[np.ndarray], width: int) -> list[np.ndarray]:
    return [np.concatenate([a, np.zeros((*a.shape[:-1], width - a.shape[-1]))], -1) for a in x]


def both(x: list[Any], **options: Any) -> list[Any]:
    """out, lse, dq, dk and dv."""
    q, k, v, dout = x
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    return [out, lse, *cupyflash.attention_backward(dout, q, k, v, out, lse, **options)]


@pytest.mark.parametrize("widths", [(24, 40), (40, 24)])
@pytest.mark.parametrize("layout", SHAPES)
def test_as_padded_with_zeros(layout: str, widths: tuple[int, int], rng: np.random.Generator) -> None:
    options: dict[str, Any] = {"causal": True, "layout": layout, "scale": 0.3, "softcap": 3.0}
    x = draw(rng, layout, widths)
    found, want = both(x, **options), both(padded(x, 40), **options)
    assert [a.shape[-1] for a in found] == [widths[1], found[1].shape[-1], widths[0], widths[0], widths[1]]
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b[..., : a.shape[-1]], atol=1e-14)


def test_packed(rng: np.random.Generator) -> None:
    q, k, v, dout = (rng.standard_normal((60, heads, d)) for heads, d in ((4, 16), (2, 16), (2, 24), (4, 24)))
    cu = np.array([0, 20, 20, 57], np.int32)
    out, lse = cupyflash.attention_varlen(q, k, v, cu, causal=True, return_lse=True)
    grads = cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, cu, causal=True)
    assert not out[57:].any()
    for a, b in ((0, 20), (20, 57)):
        found = [x[a:b] for x in (out, *grads)]
        alone = both([x[None, a:b] for x in (q, k, v, dout)], causal=True)
        for x, y in zip(found, [alone[0], *alone[2:]], strict=True):
            np.testing.assert_allclose(x, y[0], atol=1e-14)


def test_the_scale_is_that_of_q(rng: np.random.Generator) -> None:
    q, k, v, _ = draw(rng)
    np.testing.assert_array_equal(cupyflash.attention(q, k, v), cupyflash.attention(q, k, v, scale=24**-0.5))


@pytest.mark.parametrize("d_v", [20, 264])
def test_what_kernels_do_not_take(d_v: int, rng: np.random.Generator) -> None:
    q, k, v, _ = draw(rng, widths=(24, d_v))
    with pytest.raises(UnsupportedError, match=f"^v: expected a head_dim that is a multiple of 8 .*, got {d_v}"):
        cupyflash.attention(q, k, v)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("layout", SHAPES)
def test_torch(layout: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, compiled for all lengths, under vmap, and by its operator."""
    import torch

    import cupyflash.torch

    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    x = draw(rng, layout)
    want = both(x, causal=True, layout=layout)
    q, k, v, dout = (torch.from_numpy(a).requires_grad_() for a in x)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v, causal=True, layout=layout)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for f in (attend, compiled):
        out = f(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        for a, b in zip((out, *grads), (want[0], *want[2:]), strict=True):
            np.testing.assert_allclose(a.detach(), b, atol=1e-13)
    axis = layout.index("s")
    short = [a.detach().narrow(axis, 0, 33) for a in (q, k, v)]
    torch.testing.assert_close(compiled(*short), attend(*short))
    torch._dynamo.reset()
    mapped = torch.func.vmap(attend)(*(a[:, None] for a in (q, k, v)))
    np.testing.assert_allclose(mapped[:, 0].detach(), want[0], atol=1e-13)
    if layout == "bhsd":
        found = cupyflash.torch.scaled_dot_product_attention(q[:, :2], k, v)
        torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q[:, :2], k, v))


@pytest.mark.needs("torch")
def test_what_torch_counts() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(2, n, h, d, requires_grad=True) for n, h, d in ((70, 4, 24), (90, 2, 24), (90, 2, 40)))
    with FlopCounterMode(display=False) as counter:
        cupyflash.attention(q, k, v).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 70 * 90 * ((24 + 40) + (3 * 24 + 2 * 40))


@pytest.mark.needs("jax")
def test_jax(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    x = [a.astype(np.float32) for a in draw(rng)]
    want = both(x, causal=True)
    q, k, v, dout = map(jnp.asarray, x)
    attend = jax.jit(lambda *y: cupyflash.attention(*y, causal=True))
    out, pull = jax.vjp(attend, q, k, v)
    for a, b in zip((out, *pull(dout)), (want[0], *want[2:]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    mapped = jax.vmap(attend)(*(a[:, None] for a in (q, k, v)))
    np.testing.assert_allclose(mapped[:, 0], want[0], atol=1e-5)


@pytest.mark.needs("cupy", "torch")
@pytest.mark.parametrize("layout", SHAPES)
def test_new_lengths_load_nothing_and_results_have_their_shape(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    gpu = pretended_gpu.pretend(monkeypatch)
    loaded = None
    for n in (70, 80, 80, 90, 70):
        sizes = {"b": 2, "h": 4, "s": n}
        q, v = (torch.zeros([*(sizes[x] for x in layout[:3]), d], dtype=torch.float16) for d in (192, 128))
        for _ in range(3):  # the last calls are found by comparison
            out, lse = cupyflash.attention(q, q, v, layout=layout, return_lse=True)
            assert (out.shape, lse.shape, out.is_contiguous()) == (v.shape, (2, 4, n), True)
            grads = cupyflash.attention_backward(out, q, q, v, out, lse, layout=layout)
            assert [x.shape for x in grads] == [q.shape, q.shape, v.shape]
        loaded = loaded or len(gpu.loaded)
        assert len(gpu.loaded) == loaded
