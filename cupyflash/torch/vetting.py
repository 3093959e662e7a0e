"""What torch may be following in these tensors, and what of it is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..arrays.torch_private import is_dual
from ..arrays.vetting import vet_tracing, vet_transforms
from ..errors import ArgumentError, UnsupportedError
from .followed import are_transforms_active, fake_mode, is_compiling, is_dual_level


def vet(arrays: Mapping[str, Tensor]) -> None:
    """Raise if what follows these tensors would get a wrong answer, or if one is a negative view.

    Raises:
        UnsupportedError: torch would not see what happens here.
        ArgumentError: the memory holds other values than the tensor, or they are not all of one kind.
    """
    for name, x in arrays.items():
        vet_tracing(name)
        vet_transforms(name, x)
        if x.is_neg():
            raise ArgumentError(f"{name}: expected a tensor without the negative bit; give x.resolve_neg()")
    vet_dual(arrays)
    if not are_transforms_active():  # which hide what they wrap
        _vet_kinds(arrays)


def _vet_kinds(arrays: Mapping[str, Tensor]) -> None:
    """Raise where FakeTensors or DTensors meet plain tensors, which they do not compute with."""
    plain = [name for name, x in arrays.items() if type(x) is Tensor or type(x) is Parameter]
    for kind in ("DTensor", "FakeTensor"):
        found = [name for name, x in arrays.items() if type(x).__name__ == kind]
        if kind == "FakeTensor":
            mode = arrays[found[0]].fake_mode if found else fake_mode()
            if mode is None or mode.allow_non_fake_inputs:
                continue
            if plain and not found:
                raise ArgumentError(
                    f"{plain[0]}: expected a FakeTensor in FakeTensorMode, got a tensor with data; give "
                    "mode.from_tensor(x), or FakeTensorMode(allow_non_fake_inputs=True)"
                )
        if found and plain:
            raise ArgumentError(f"{found[0]}: expected a plain tensor as {plain[0]} is, got a {kind}; give all alike")


def vet_dual(arrays: Mapping[str, Tensor]) -> None:
    """Raise if one has a forward-mode derivative.

    Raises:
        UnsupportedError: it would be lost.
    """
    if is_dual_level():
        for name, x in arrays.items():
            if is_dual(x):
                raise UnsupportedError(f"{name}: forward-mode derivatives (dual tensors, jvp) are not supported yet")


def vet_mods(score_mod: Any, mask_mod: Any) -> None:
    """Raise where torch.compile follows, which lets nobody read a Python function.

    Raises:
        UnsupportedError: a mod is one.
    """
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if callable(mod) and is_compiling():
            raise UnsupportedError(
                f"{name}: expected an expression, as text, inside torch.compile, which lets nobody read a Python "
                "function; or compile without fullgraph=True, which calls it in between"
            )
