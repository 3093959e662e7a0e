"""Attention as flax's attention modules call it: an `attention_fn` with the arguments of flax's own."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from ..errors import ArgumentError, UnsupportedError, by_their_names
from ..options import flag, make_options, number
from .op import attention_of
from .sdpa import as_jax, of_scores, window_of
from .seeds import words


@by_their_names(q="query", k="key", v="value", dropout_p="dropout_rate", dropout_seed="dropout_rng")
def flax_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None = None,
    mask: Any | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: Any | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any | None = None,
    precision: Any | None = None,
    module: Any | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any | None = None,
    qk_attn_weights_einsum: Any | None = None,
    attn_weights_value_einsum: Any | None = None,
) -> Any:
    """`dot_product_attention` of flax, of nnx and of linen, by cupyflash's kernels.

    Args:
        query, key, value: ``(..., length, heads, head_dim)``, any leading dimensions, the same of all.
        bias: broadcasts to ``(..., heads, query length, key length)``.
        mask: broadcasts likewise, of bool or of numbers, as flax makes them: 0 hides a key. A query that sees no key
            gives 0, where flax gives the mean of value.
        is_causal: query i sees keys up to i, as in flax: aligned at the top left.
        dropout_rng: a key of jax.random; needed where `dropout_rate` is above 0 and `deterministic` is not set.
        dtype: to which query, key and value are cast; by default that to which JAX promotes them together.
        broadcast_dropout: has no effect: each sequence and head drops its own elements, as flax does with False.
        precision, force_fp32_for_softmax: have no effect: kernels add up and take the softmax in fp32.
        module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: only None.

    Returns:
        Of query's shape.

    Raises:
        ArgumentError, UnsupportedError, CompileError: as `cupyflash.attention`.

    Example:
        >>> from flax import nnx
        >>> attend = nnx.MultiHeadAttention(4, 64, attention_fn=flax_attention, decode=False, rngs=nnx.Rngs(0))
        >>> attend(jnp.ones((2, 9, 64)), is_causal=True).shape
        (2, 9, 64)
    """
    if module is not None:
        raise UnsupportedError("module: expected None, since no attention weights are formed; leave out sow_weights")
    for name, given in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if given is not None:
            raise UnsupportedError(f"{name}: expected None, since kernels have products of their own, got {given!r}")
    is_causal = flag("is_causal", is_causal)
    query, key, value = map(as_jax, (query, key, value))
    lead = query.shape[:-3]
    if not lead == key.shape[:-3] == value.shape[:-3]:
        raise ArgumentError(
            f"query, key, value: expected the same leading dimensions, got {lead}, {key.shape[:-3]} and "
            f"{value.shape[:-3]}"
        )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (x.reshape(math.prod(lead), *x.shape[-3:]).astype(dtype) for x in (query, key, value))
    mask = None if mask is None else _folded(mask, lead) != 0
    arrays = {"q": query, "k": key, "v": value, **of_scores(query, _folded(bias, lead), mask)}
    p = 0.0 if deterministic else number("dropout_rate", dropout_rate, "a number")
    if p:
        arrays["dropout_seed"] = words(dropout_rng)
    window = window_of(is_causal, None, key.shape[1] - query.shape[1])
    out, _ = attention_of(arrays, make_options(dropout_p=p, window=window), False)
    return out.reshape(*lead, *out.shape[1:])


def _folded(x: Any | None, lead: tuple[int, ...]) -> Any | None:
    """What broadcasts to (*lead, heads, s, t), as what broadcasts to (batch, heads, s, t)."""
    if x is None:
        return None
    x = as_jax(x)
    if x.ndim < 4 or (x.ndim == 4 and len(lead) == 1):
        return x
    if all(n == 1 for n in x.shape[:-3]):
        return x.reshape(x.shape[-3:])
    return jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(math.prod(lead), *x.shape[-3:])
