"""F.scaled_dot_product_attention itself: its flash backend served by cupyflash, through torch's registry of them.

torch decides which calls are its flash backend's before it asks (no mask, fp16 or bf16, head_dim up to 256); of these,
what cupyflash does not take (dropout) goes to the kernel that stood there before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ..errors import UnsupportedError
from . import aten
from .followed import unregister

NAME = "cupyflash"


class activate:  # a function that can be used with `with`
    """Serve F.scaled_dot_product_attention's flash backend by cupyflash, eager and compiled, until `restore`.

    It reaches whoever calls F.scaled_dot_product_attention (nn.MultiheadAttention, say) or torch.nn.attention.varlen,
    where torch chooses its flash backend: ``sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` makes sure. With ``with``, what
    was active before is active again at its end.

    Raises:
        UnsupportedError: this torch has no registry of flash backends; 2.11 is the first that has.

    Example:
        >>> with activate():
        ...     ...  # F.scaled_dot_product_attention(q, k, v)
    """

    def __init__(self) -> None:
        registry = _registry()
        self._before = registry.current_flash_attention_impl()
        registry.register_flash_attention_impl(NAME, register_fn=_Kernels)
        registry.activate_flash_attention_impl(NAME)

    def __enter__(self) -> activate:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        restore()
        if self._before is not None:
            _registry().activate_flash_attention_impl(self._before)


def restore() -> None:
    """Give F.scaled_dot_product_attention its own flash kernels back; nothing if cupyflash is not active."""
    registry = _registry()
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()


def _registry() -> Any:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise UnsupportedError(
            "activate: expected torch 2.11 or newer, whose flash backend can be exchanged, got torch "
            f"{torch.__version__}; call cupyflash.torch.scaled_dot_product_attention in its place"
        )
    return torch.nn.attention


class _Kernels:
    """Our kernels in the places of torch's, until `remove`."""

    def __init__(self) -> None:
        self._libraries: list[Any] = []
        self._take("CUDA", aten.CUDA)
        if os.environ.get("CUPYFLASH_BACKEND") == "cpu":
            self._take("CPU", aten.CPU)

    def _take(self, key: str, kernels: dict[str, Callable[..., Any]]) -> None:
        library = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="[\\s\\S]*[Oo]verriding a previously registered kernel")
            for name, kernel in kernels.items():
                own = _kernel_of_torch(name, key)
                library.impl(name, _with(kernel, own), key, with_keyset=True)
        self._libraries.append(library)

    def remove(self) -> None:
        for library in self._libraries:
            unregister(library)
        self._libraries.clear()


def _kernel_of_torch(name: str, key: str) -> Any | None:
    """What stands there before; None where torch does not tell, or nothing does."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except (AttributeError, RuntimeError):
        return None


def _with(kernel: Callable[..., Any], own: Any | None) -> Callable[..., Any]:
    """A kernel for the dispatcher, of one that is given torch's own as its first argument."""

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        def by_torch(reason: str) -> Any:
            if own is None:
                raise UnsupportedError(f"scaled_dot_product_attention: {reason}; call cupyflash.torch.restore() before")
            return own.call_boxed(keys, *args, **kwargs)

        return kernel(by_torch, *args, **kwargs)

    return call
