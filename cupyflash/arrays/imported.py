"""Array libraries that somebody else has imported: whoever has an array of one has done so; none is imported here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def imported(name: str) -> Any | None:
    """The module if somebody has imported it; while another thread is at it, this waits."""
    module = sys.modules.get(name)
    if module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False):
        try:
            return importlib.import_module(name)
        except Exception:  # the import failed there; what it raised is that thread's
            return None
    return module


def torch_itself() -> Any:
    """torch, for who has a tensor: in `sys.modules` torch.compile would watch all, while there may become more."""
    import torch

    return torch


def is_instance(x: Any, module: str, name: str) -> bool:
    """Whether x is an instance of a class of a module that may be absent, or no more than a stand-in for it.

    A plain tensor is known by its name: torch.compile, which follows this, could not look into `sys.modules`.
    """
    if is_tensor(type(x)):
        return (module, name) == ("torch", "Tensor")
    kind = getattr(imported(module), name, None)
    return isinstance(kind, type) and isinstance(x, kind)


def is_tensor(kind: type) -> bool:
    """Whether this is the type of torch's plain tensors, by its name alone: what torch.compile need not watch."""
    return kind.__module__ == "torch" and kind.__name__ == "Tensor"


def shape_of(x: Any) -> Any:
    """Of an array; () of what has none. torch 2.4 compiles no question whether a tensor has one."""
    return x.shape if is_tensor(type(x)) else getattr(x, "shape", ())


def is_parameter(kind: type) -> bool:
    """Likewise of its parameters."""
    return kind.__module__ == "torch.nn.parameter" and kind.__name__ == "Parameter"


def constant_in_programs(f: F) -> F:
    """To torch.compile a call of f is a constant of the program: f is called while it compiles, and never again.

    As torch.compiler.assume_constant_result has it, without importing torch. Before 2.6 torch makes the result a global
    of the caller's module, by the name in f's code: one that nobody else has.
    """
    f.__code__ = f.__code__.replace(co_name=f"_cupyflash_{f.__name__}")
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f
