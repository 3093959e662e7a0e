"""Features that meet, through the public API: against the formula written out, autograd, and in JAX."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import BlockMask, masks
from cupyflash.dropout import STEPS, kept, limit_of, words_of

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SQ, SK, P, SEED = 21, 34, 0.3, 99
SHAPES = {"bias": (4, SQ, SK), "mask": (2, 1, 1, SK)}  # as T5 adds positions, as padding hides
TOGETHER = [("bias",), ("mask",), ("bias", "mask")]


@pytest.fixture
def three(rng: np.random.Generator) -> list[Any]:
    return [rng.standard_normal((2, n, h, 16)) for n, h in ((SQ, 4), (SK, 2), (SK, 2))]


def given(names: tuple[str, ...], rng: np.random.Generator) -> dict[str, Any]:
    """What each of these is."""
    drawn = {"bias": rng.standard_normal(SHAPES["bias"]), "mask": rng.random(SHAPES["mask"]) < 0.7}
    return {name: drawn[name] for name in names if name in drawn}


def blocks(rng: np.random.Generator) -> BlockMask:
    """A block mask of each head, of which each query sees half."""
    return masks.from_dense(rng.random((4, SQ, SK)) < 0.5)


def dropped() -> Any:
    """Z of the batch: (2, 4, SQ, SK)."""
    sequence, head = np.repeat(np.arange(2), 4), np.tile(np.arange(4), 2)
    Z = kept(words_of(SEED), limit_of(P), sequence, head, slice(0, SQ), slice(0, SK))
    return Z.reshape(2, 4, SQ, SK) * (STEPS / (STEPS - limit_of(P)))


def plain(q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None, block_mask: Any = None) -> Any:
    """Causal attention with dropout in torch, score by score."""
    import torch

    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    s = s if bias is None else s + bias
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    for h in range(4 if block_mask else 0):
        s[:, h] = s[:, h].masked_fill(~torch.tensor(block_mask.of(0, h)), -torch.inf)
    s = s.masked_fill(torch.ones(SQ, SK, dtype=torch.bool).triu(SK - SQ + 1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1) * torch.tensor(dropped()), v)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("names", "compiled"),
    [*itertools.product(TOGETHER, (False, True)), (("block_mask",), False), (("bias", "mask", "block_mask"), False)],
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else "compiled" if x else "eager",
)
def test_torch(names: tuple[str, ...], compiled: bool, three: list[Any], rng: np.random.Generator) -> None:
    import torch

    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in zip("qkv", three, strict=True)}
    more = {name: torch.tensor(x) for name, x in given(names, rng).items()}
    if "bias" in more:
        leaves["bias"] = more.pop("bias").requires_grad_()

    own = {"block_mask": blocks(rng)} if "block_mask" in names else {}

    def ours(**arrays: Any) -> Any:
        return cupyflash.attention(**arrays, **own, causal=True, dropout_p=P, dropout_seed=SEED)

    torch._dynamo.reset()
    f = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    out, want = f(**leaves, **more), plain(**leaves, **more, **own)
    torch.testing.assert_close(out, want)
    found, exact = (torch.autograd.grad(x.square().sum(), list(leaves.values())) for x in (out, want))
    torch.testing.assert_close(found, exact)
    torch._dynamo.reset()


@pytest.mark.needs("jax")
@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_jax(names: tuple[str, ...], three: list[Any], rng: np.random.Generator) -> None:
    """Inside jit, with gradients: those of NumPy arrays."""
    import jax
    import jax.numpy as jnp

    arrays = {name: x.astype(np.float32) for name, x in zip("qkv", three, strict=True)}
    arrays |= {name: x if x.dtype == bool else x.astype(np.float32) for name, x in given(names, rng).items()}
    learned = {name: jnp.asarray(x) for name, x in arrays.items() if name != "mask"}
    fixed = {name: jnp.asarray(x) for name, x in arrays.items() if name == "mask"}
    options = {"causal": True, "dropout_p": P, "dropout_seed": SEED}

    def loss(learned: Any) -> Any:
        out = cupyflash.attention(**learned, **fixed, **options)
        return (out**2).sum(), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(learned)
    q, k, v = (arrays.pop(name) for name in "qkv")
    want, lse = cupyflash.attention(q, k, v, **arrays, **options, return_lse=True)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    asked = {"gradients_of": ("bias",)} if "bias" in arrays else {}
    exact = cupyflash.attention_backward(2 * want, q, k, v, want, lse, **arrays, **options, **asked)
    for name, found in grads.items():
        np.testing.assert_allclose(found, getattr(exact, f"d{name}"), rtol=1e-4, atol=1e-5, err_msg=name)
