"""flax's own attention modules with our attention_fn, against the same modules with theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_jax import agree

from cupyflash import ArgumentError, UnsupportedError

pytestmark = pytest.mark.needs("jax", "flax")

BATCH, LENGTH, HEADS, FEATURES = 2, 21, 4, 64


@pytest.fixture
def x(rng: np.random.Generator) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(rng.standard_normal((BATCH, LENGTH, FEATURES), dtype=np.float32))


def nnx_pair(**options: Any) -> list[Callable[..., Any]]:
    """A module of nnx with theirs, and one with ours."""
    from flax import nnx

    from cupyflash.jax import flax_attention

    options = {"decode": False, **options}
    return [
        nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **options, **given)
        for given in ({}, {"attention_fn": flax_attention})
    ]


def linen_pair(x: Any, **options: Any) -> list[Callable[..., Any]]:
    import jax
    from flax import linen

    from cupyflash.jax import flax_attention

    modules = [
        linen.MultiHeadDotProductAttention(num_heads=HEADS, **options, **given)
        for given in ({}, {"attention_fn": flax_attention})
    ]
    weights = modules[0].init(jax.random.key(0), x, deterministic=True)
    return [lambda *x, module=module, **given: module.apply(weights, *x, **given) for module in modules]


def pair(kind: str, x: Any) -> list[Callable[..., Any]]:
    return nnx_pair() if kind == "nnx" else linen_pair(x)


KINDS = pytest.mark.parametrize("kind", ["nnx", "linen"])


@KINDS
def test_masks_as_flax_makes_them(kind: str, x: Any) -> None:
    """They are of float32."""
    import jax.numpy as jnp
    from flax import linen

    theirs, ours = pair(kind, x)
    tokens = jnp.ones((BATCH, LENGTH))
    causal = linen.make_causal_mask(tokens)
    valid = tokens.at[0, 17:].set(0)
    combined = linen.combine_masks(causal, linen.make_attention_mask(tokens, valid))
    for mask in (causal, combined, causal.astype(bool), np.asarray(combined)):
        agree(ours(x, mask=mask), theirs(x, mask=mask))


@pytest.mark.parametrize("keys", [LENGTH, 13, 40])
def test_is_causal_is_aligned_at_the_top_left(keys: int, x: Any, rng: np.random.Generator) -> None:
    import jax.numpy as jnp

    theirs, ours = nnx_pair()
    other = jnp.asarray(rng.standard_normal((BATCH, keys, FEATURES), dtype=np.float32))
    agree(ours(x, other, is_causal=True), theirs(x, other, is_causal=True))
    mask = jnp.asarray(rng.random((BATCH, 1, LENGTH, keys)) < 0.7).at[..., 0].set(True)
    agree(ours(x, other, mask=mask, is_causal=True), theirs(x, other, mask=mask, is_causal=True))


def test_gradients_of_a_module(x: Any) -> None:
    from flax import nnx

    def loss(module: Any) -> Any:
        return (module(x, is_causal=True) ** 2).sum()

    # Without biases: the gradient of key's is 0 but for rounding.
    theirs, ours = (nnx.state(nnx.grad(loss)(module)) for module in nnx_pair(num_kv_heads=2, use_bias=False))
    agree(ours, theirs)


@KINDS
def test_more_leading_dimensions_and_none(kind: str, rng: np.random.Generator) -> None:
    import jax.numpy as jnp

    x = jnp.asarray(rng.standard_normal((2, 3, LENGTH, FEATURES), dtype=np.float32))
    theirs, ours = pair(kind, x)
    visible = jnp.asarray(rng.random((2, 3, HEADS, LENGTH, LENGTH)) < 0.7).at[..., 0].set(True)
    for mask in (visible, visible[:1, :, :1], visible[:1, :1]):
        mask = jnp.broadcast_to(mask, visible.shape) if kind == "nnx" else mask  # theirs takes no other
        agree(ours(x, mask=mask), theirs(x, mask=mask))
    agree(ours(x[0, 0]), theirs(x[0, 0]))


@pytest.mark.parametrize(("rows", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_behind_leading_dimensions(rows: int, keys: int) -> None:
    import jax.numpy as jnp

    from cupyflash.jax import flax_attention

    q, k = jnp.ones((2, 3, rows, 4, 8)), jnp.ones((2, 3, keys, 4, 8))
    mask = jnp.ones((2, 3, 1, rows, keys), bool)
    found = flax_attention(q, k, k, mask=mask)
    assert found.shape == q.shape
    assert not found.any()


def test_a_bias_may_be_a_number_or_a_list(rng: np.random.Generator) -> None:
    from cupyflash.jax import flax_attention

    q = rng.standard_normal((2, 3, 4, 8), dtype=np.float32)
    agree(flax_attention(q, q, q, bias=1.0), flax_attention(q, q, q))
    agree(flax_attention(q, q, q, bias=[0.0, 1.0, 2.0]), flax_attention(q, q, q, bias=np.arange(3, dtype=np.float32)))


def test_nnx_decodes_over_its_cache(x: Any) -> None:
    modules = nnx_pair(decode=True)
    for module in modules:
        module.init_cache(x.shape)
    for i in range(5):
        theirs, ours = (module(x[:, i : i + 1]) for module in modules)
        agree(ours, theirs)


def test_linen_decodes_over_its_cache(x: Any) -> None:
    import jax
    from flax import linen

    from cupyflash.jax import flax_attention

    found = []
    for given in ({}, {"attention_fn": flax_attention}):
        module = linen.MultiHeadDotProductAttention(num_heads=HEADS, decode=True, **given)
        variables = module.init(jax.random.key(0), x)
        outs = []
        for i in range(5):
            out, cache = module.apply(variables, x[:, i : i + 1], mutable=["cache"])
            variables = {**variables, **cache}
            outs.append(out)
        found.append(outs)
    agree(found[1], found[0])


def test_dropout_of_nnx(x: Any) -> None:
    import jax
    from flax import nnx

    theirs, ours = nnx_pair(dropout_rate=0.5)
    agree(ours(x, deterministic=True), theirs(x, deterministic=True))
    dropped, again = (ours(x, deterministic=False, rngs=nnx.Rngs(dropout=3)) for _ in range(2))
    np.testing.assert_array_equal(dropped, again)
    other = ours(x, deterministic=False, rngs=nnx.Rngs(dropout=4))
    assert float(abs(dropped - other).max()) > 0.01
    # Over many draws it is what it is without.
    many = nnx.Rngs(dropout=5)
    mean = sum(ours(x, deterministic=False, rngs=many) for _ in range(100)) / 100
    whole = ours(x, deterministic=True)
    assert float(jax.numpy.abs(mean - whole).mean()) < 0.3 * float(jax.numpy.abs(dropped - whole).mean())


def test_dropout_of_linen(x: Any) -> None:
    import jax

    theirs, ours = linen_pair(x, dropout_rate=0.5)
    agree(ours(x, deterministic=True), theirs(x, deterministic=True))
    dropped, again, other = (ours(x, deterministic=False, dropout_rng=jax.random.key(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(dropped, again)
    assert float(abs(dropped - other).max()) > 0.01


def test_dtype_is_that_of_the_computation(x: Any) -> None:
    import jax.numpy as jnp

    theirs, ours = nnx_pair(dtype=jnp.bfloat16)
    got, want = ours(x, is_causal=True), theirs(x, is_causal=True)
    assert got.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype("float32"), want.astype("float32"), rtol=0.1, atol=0.02)


def test_what_is_not_taken_is_refused_by_name(x: Any) -> None:
    import jax

    from cupyflash.jax import flax_attention

    _, ours = nnx_pair()
    with pytest.raises(UnsupportedError, match=r"module: expected None.*sow_weights"):
        ours(x, sow_weights=True)
    q = x.reshape(BATCH, LENGTH, HEADS, -1)
    with pytest.raises(UnsupportedError, match="qk_attn_weights_einsum: expected None"):
        flax_attention(q, q, q, qk_attn_weights_einsum=lambda *x: x)
    with pytest.raises(TypeError, match="something_new"):
        flax_attention(q, q, q, something_new=True)
    with pytest.raises(ArgumentError, match="query, key, value: expected the same leading dimensions"):
        flax_attention(q, q[:1], q[:1])
    with pytest.raises(ArgumentError, match=r"^key: expected the head_dim of query"):
        flax_attention(q, q[..., :-1], q)
    with pytest.raises(ArgumentError, match=r"^dropout_rate: expected a number .*, got 1\.5"):
        flax_attention(q, q, q, dropout_rate=1.5, dropout_rng=jax.random.key(0), deterministic=False)


def test_all_arguments_of_flax_are_known() -> None:
    from flax import linen, nnx

    from cupyflash.jax import flax_attention

    known = set(inspect.signature(flax_attention).parameters)
    for theirs in (nnx.dot_product_attention, linen.dot_product_attention):
        found = set(inspect.signature(theirs).parameters) - {"promote_dtype"}  # which modules do not hand over
        assert found <= known, found - known
