"""The seed of dropout, whatever it was given as, in the form that the table of arrays has: words of 32 bits."""

from __future__ import annotations

from typing import Any

from .arrays.adapters import TORCH
from .arrays.libraries import JAX, Foreign
from .options import Options


def with_seed(arrays: dict[str, Any], library: Any, call: Options, seed: Any, *, draw: bool) -> dict[str, Any]:
    """The arrays and, where anything is dropped, the seed among them; where there is none and `draw`, a new one.

    Those of a library that is adopted get it once they are.
    """
    if not call.dropout_p or (isinstance(library, Foreign) and library is not JAX):
        return arrays
    return {**arrays, "dropout_seed": _words(library, seed, arrays["q"], draw)}


def _words(library: Any, seed: Any, q: Any, draw: bool) -> Any:
    if library is TORCH:
        import cupyflash.torch.seeds

        return cupyflash.torch.seeds.words(seed, q, draw)
    if library is JAX:
        from .jax.seeds import words

        return words(seed)
    from .launch import seeds

    return seeds.words(library, seed, q, draw)


def adopted_seed(library: Foreign, seed: Any) -> Any:
    """A seed for arrays that are adopted: if it is an array, it is, too."""
    return library.adopt({"dropout_seed": seed})["dropout_seed"] if library.owns(seed) else seed
