"""Seeds of dropout as JAX arrays of the table's form: words of 32 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import options
from ..dropout import missing_seed, vet_seed, words_of


def words(seed: Any) -> Any:
    """The words of a seed: an integer, of JAX too, a key of jax.random, or an array of integers.

    Raises:
        ArgumentError: it is no seed, or None: JAX has no generator of its own to draw one from.
    """
    if seed is None:
        raise missing_seed("a key of jax.random or an integer")
    if not isinstance(seed, jax.Array):
        return jnp.asarray(words_of(options.whole("dropout_seed", seed)))
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if seed.ndim == 0 and seed.dtype in (jnp.int32, jnp.uint32):  # an integer, where JAX has no 64 bits
        above = jnp.where(seed < 0, -1, 0)
        seed = jnp.stack([jax.lax.bitcast_convert_type(seed, jnp.int32), above.astype(jnp.int32)])
    vet_seed(seed.shape, seed.dtype.name)
    found = jax.lax.bitcast_convert_type(seed.reshape(-1), jnp.int32).reshape(-1)
    return found if found.shape[0] == 2 else found.reshape(2, 2)
