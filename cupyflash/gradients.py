"""What a backward gives back, and which of its gradients are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import options
from .errors import ArgumentError
from .operands import BACKWARD


class _Required(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


class Gradients(_Required):
    """Gradients with respect to q, k and v, of their shapes and dtypes; those of optional arrays are attributes."""

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Gradients:
        """Gradients by their names in the table of arrays."""
        found = cls(*(named[name] for name in cls._fields))
        for name in named.keys() - set(cls._fields):
            setattr(found, name, named[name])
        return found


def wanted_of(gradients_of: Any, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the gradients that are asked for by `gradients_of`, in the table's order.

    Raises:
        ArgumentError: it names what has no such gradient, or was not given.
    """
    if gradients_of == ():
        return ()
    of = {name: made for name, made in BACKWARD.gradient_of.items() if made in BACKWARD.optional}
    asked = options.several("gradients_of", gradients_of, lambda name, x: options.choice(name, x, tuple(of)))
    for name in asked:
        if name not in given:
            raise ArgumentError(f"gradients_of: expected the names of arrays that are given, and {name} is not")
    return tuple(made for name, made in of.items() if name in asked)
