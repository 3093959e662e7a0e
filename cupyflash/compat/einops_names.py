"""einops' functions, which flash-attn's modules hand on to those who import from them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..errors import UnsupportedError


def _named(name: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(import_module("einops"), name)
        return found
    except ImportError:  # no error before it is called: most who import it do not

        def missing(*_: Any, **__: Any) -> Any:
            raise UnsupportedError(f"{name}: it is einops', which is not installed; pip install einops")

        return missing


rearrange, repeat = _named("rearrange"), _named("repeat")
