"""Exact attention, forward and backward, for any array library: `attention`, `attention_backward`, `warmup`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, CompileError, CupyflashError, DeviceError, UnsupportedError

if TYPE_CHECKING:
    from .api import Gradients, attention, attention_backward, warmup

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CompileError",
    "CupyflashError",
    "DeviceError",
    "Gradients",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "warmup",
]

# In a checkout kernels_cu/ and cli/ lie beside this package and emulator/ in tests/; once installed, all inside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "kernels_cu").is_dir() and (_root / "pyproject.toml").is_file():
    __path__ += [str(_root), str(_root / "tests")]


def __getattr__(name: str) -> Any:
    """Load `api` when one of its names is first used, so that the command line starts without it."""
    if name not in {"Gradients", "attention", "attention_backward", "warmup"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    globals()[name] = value = getattr(api, name)
    return value


def __dir__() -> list[str]:
    """The public names, those included that are not loaded yet: what completion offers."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
