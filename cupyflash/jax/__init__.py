"""Attention for JAX: inside jit, differentiable, under vmap, sharded; and functions with JAX's own signatures.

`cupyflash.attention` and `attention_varlen` take JAX arrays, concrete or traced, and come here.
"""

from importlib import import_module
from typing import Any

_MODULES = {"dot_product_attention": ".sdpa", "flax_attention": ".flax"}
__all__ = ["dot_product_attention", "flax_attention", "register"]


def register() -> None:
    """Make the custom calls known to XLA, for programs that another process has exported (`jax.export`): whoever traces
    calls itself needs none of this."""
    for name in ("call", "cached"):
        import_module(f".{name}", __name__).register()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
