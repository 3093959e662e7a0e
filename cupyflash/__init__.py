"""Exact attention, forward and backward, for any array library: `attention`, `attention_varlen`, `warmup`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, CacheFullError, CompileError, CupyflashError, DeviceError, UnsupportedError
from .version import VERSION as __version__

if TYPE_CHECKING:
    from .ahead import warmup
    from .api import Gradients, attention, attention_backward
    from .block_mask import BlockMask
    from .kvcache import attention_with_cache
    from .pages import PagedCache
    from .partials import combine
    from .raw import RawKernel, raw_kernel
    from .varlen import attention_varlen, attention_varlen_backward

__all__ = [
    "ArgumentError",
    "BlockMask",
    "CacheFullError",
    "CompileError",
    "CupyflashError",
    "DeviceError",
    "Gradients",
    "PagedCache",
    "RawKernel",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_with_cache",
    "combine",
    "raw_kernel",
    "warmup",
]

# In a checkout kernels_cu/ and cli/ lie beside this package and emulator/ in tests/; once installed, all inside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "kernels_cu").is_dir() and (_root / "pyproject.toml").is_file():
    __path__ += [str(_root), str(_root / "tests")]


_HOMES = {"Gradients": "api", "attention": "api", "attention_backward": "api", "warmup": "ahead"}
_HOMES |= {"attention_with_cache": "kvcache", "combine": "partials", "PagedCache": "pages"}
_HOMES |= {"attention_varlen": "varlen", "attention_varlen_backward": "varlen"}
_HOMES |= {"BlockMask": "masks", "RawKernel": "raw", "raw_kernel": "raw"}


_MODULES = "compat", "jax", "masks", "mods", "torch", "transformers"  # that users name without importing them


def __getattr__(name: str) -> Any:
    """Load the module of a public function when it is first used, so that the command line starts without it."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_HOMES[name]}", __name__)
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    """The public names, those included that are not loaded yet: what completion offers."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
