"""Attention with the signature of `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ArgumentError, by_their_names
from ..options import flag, make_options, whole
from .op import attention_of


@by_their_names(q="query", k="key", v="value", kv_range="key_value_seq_lengths")
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None = None,
    mask: Any | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any | None = None,
    key_value_seq_lengths: Any | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` by cupyflash's kernels.

        out = softmax(scale * query key^T + bias, over the keys each query sees) value

    Args:
        query: ``(batch, T, heads, head_dim)`` or ``(T, heads, head_dim)``.
        key, value: ``(batch, S, heads_k, head_dim)``, or without the batch; heads is a multiple of heads_k.
        scale: ``head_dim ** -0.5`` by default.
        is_causal: query i sees keys up to i, as in jax.nn: aligned at the top left. `cupyflash.attention` aligns at the
            bottom right, which differs where T and S do.
        local_window_size: ``(left, right)`` or one number for both: query i sees keys from i - left to i + right.
        bias: broadcasts to ``(batch, heads, T, S)``; read where it lies, and learned where JAX asks for its gradient.
            One that is neither of query's dtype nor fp32 is cast.
        mask: of bool, which broadcasts likewise: True where a key is visible.
        query_seq_lengths, key_value_seq_lengths: ``(batch,)``, integers: how many queries and keys of each sequence
            count, the first ones. Keys behind are not read; queries behind give 0.
        implementation: None, "xla" or "cudnn", of which each is cupyflash here: so that a call can be left as it is.
        return_residual: also return lse, ``(batch, T, heads)`` in fp32 (without the batch where query has none), not
            differentiable.

    Returns:
        out, of query's shape and dtype; with `return_residual` ``(out, lse)``.

    Raises:
        ArgumentError, UnsupportedError, CompileError: as `cupyflash.attention`.

    Example:
        >>> import jax
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64))
        >>> dot_product_attention(q, k, v, is_causal=True).shape
        (2, 128, 8, 64)
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ArgumentError(f'implementation: expected None, "xla" or "cudnn", got "{implementation}"')
    is_causal, return_residual = flag("is_causal", is_causal), flag("return_residual", return_residual)
    query, key, value = map(as_jax, (query, key, value))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim not in (3, 4):
            raise ArgumentError(
                f"{name}: expected 4 dimensions (batch, length, heads, head_dim), or 3 for a batch of one, got shape "
                f"{x.shape}"
            )
    has_batch = query.ndim != 3
    arrays = {name: x[None] if x.ndim == 3 else x for name, x in (("q", query), ("k", key), ("v", value))}
    arrays |= of_scores(query, bias, mask)
    for name, lengths in (
        ("query_seq_lengths", query_seq_lengths), ("key_value_seq_lengths", key_value_seq_lengths),
    ):  # fmt: skip
        _check_lengths(name, lengths, len(arrays["q"]))
    if key_value_seq_lengths is not None:
        arrays["kv_range"] = _ranges(key_value_seq_lengths, arrays["k"].shape[1])
    window = window_of(is_causal, local_window_size, arrays["k"].shape[1] - arrays["q"].shape[1])
    out, lse = attention_of(arrays, make_options(scale=scale, window=window), return_residual)
    if query_seq_lengths is not None:
        counts = jnp.arange(out.shape[1])[None] < as_jax(query_seq_lengths)[:, None]
        out = jnp.where(counts[..., None, None], out, 0)
        lse = None if lse is None else jnp.where(counts[:, None], lse, -jnp.inf)
    out = out if has_batch else out[0]
    if lse is None:
        return out
    lse = jax.lax.stop_gradient(jnp.swapaxes(lse, 1, 2))
    return out, lse if has_batch else lse[0]


def window_of(is_causal: bool, local: int | tuple[int, int] | None, shift: int) -> tuple[int | None, int] | None:
    """Our window, aligned at the bottom right, of what is aligned at the top left; shift: keys less queries."""
    left = right = None
    if local is not None:
        sides = tuple(local) if isinstance(local, (tuple, list)) else (local, local)
        if len(sides) != 2:
            raise ArgumentError(f"local_window_size: expected an integer or a pair of them, got {local!r:.60}")
        left, right = (whole("local_window_size", n) for n in sides)
        if left + right < 0:
            raise ArgumentError(f"local_window_size: expected left + right of at least 0, got ({left}, {right})")
        left, right = left + shift, right - shift
    if is_causal:
        right = -shift if right is None else min(right, -shift)
    if left is not None and right is not None and left + right < 0:
        raise ArgumentError(
            f"local_window_size: expected a window with keys that is_causal shows, got {local}, which hides every key"
        )
    return None if right is None else (left, right)


def _check_lengths(name: str, lengths: Any | None, batch: int) -> None:
    """Refuse lengths that are not one integer a sequence."""
    if lengths is not None:
        x = as_jax(lengths)
        if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ArgumentError(f"{name}: expected integers of shape ({batch},), got {x.dtype} of shape {x.shape}")


def _ranges(lengths: Any, most: int) -> Any:
    """Of each sequence the keys from 0 to its length."""
    lengths = as_jax(lengths)
    end = jnp.clip(lengths, 0, min(most, jnp.iinfo(lengths.dtype).max)).astype(jnp.int32)
    return jnp.stack([jnp.zeros_like(end), end], -1)


def of_scores(query: Any, bias: Any | None, mask: Any | None) -> dict[str, Any]:
    """A bias, of a dtype that kernels take, and a mask, by name."""
    found = {} if mask is None else {"mask": as_jax(mask)}
    if bias is not None:
        bias = as_jax(bias)
        if jnp.issubdtype(bias.dtype, jnp.complexfloating):
            raise ArgumentError(f"bias: expected real numbers, got {bias.dtype}")
        half = query.dtype in (jnp.float16, jnp.bfloat16)
        fits = bias.dtype == query.dtype or (half and bias.dtype == jnp.float32)
        found["bias"] = bias if fits else bias.astype(query.dtype)
    return found


def as_jax(x: Any) -> Any:
    """What JAX makes of a NumPy array or a number, as its own functions do."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)
