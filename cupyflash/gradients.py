"""What a backward gives back, and which of its gradients are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import options
from .arrays.imported import constant_in_programs
from .errors import ArgumentError
from .mods.description import read
from .operand import MOD_GRADIENTS
from .operands import BACKWARD
from .problem import DTYPES


class _Required(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


class Gradients(_Required):
    """Gradients with respect to q, k and v, of their shapes and dtypes; those of optional arrays are attributes, those
    of arrays of mods in `dmod_arrays`, by their names there."""

    dmod_arrays: dict[str, Any]

    def _replace(self, **changed: Any) -> Gradients:
        """The same with others in the place of these; a gradient that is an attribute stays one."""
        more = {name: changed.pop(name, x) for name, x in vars(self).items()}
        found = super()._replace(**changed)
        vars(found).update(more)
        return found

    @classmethod
    def of(cls, named: Mapping[str, Any], mods: str = "") -> Gradients:
        """Gradients by their names in the table of arrays; `mods`: the text of those that were given."""
        found = cls(*(named[name] for name in cls._fields))
        of_mods = {name: named[made] for name, made, _ in _arrays_of(mods) if made in named}
        for name in named:
            if name not in cls._fields and name not in MOD_GRADIENTS:
                setattr(found, name, named[name])
        if of_mods:
            found.dmod_arrays = of_mods
        return found


def wanted_of(gradients_of: Any, given: Mapping[str, Any], mods: str = "") -> tuple[str, ...]:
    """The names of the gradients that are asked for by `gradients_of`, in the table's order.

    Args:
        given: the arrays by their names in the table.
        mods: the text of the mods, whose arrays are asked for by the names that they have there.

    Raises:
        ArgumentError: it names what has no such gradient, or was not given.
    """
    is_empty = isinstance(gradients_of, (tuple, list, set, frozenset)) and not gradients_of
    return () if is_empty else _wanted(gradients_of, tuple(given), mods)


@constant_in_programs
def _wanted(gradients_of: Any, given: tuple[str, ...], mods: str) -> tuple[str, ...]:
    names = {name: made for name, made, _ in _arrays_of(mods)}
    of = {name: made for name, made in BACKWARD.gradient_of.items() if made in BACKWARD.optional}
    of = {name: made for name, made in of.items() if not BACKWARD.rows[name].free and name not in names} | names
    asked = options.several("gradients_of", gradients_of, lambda name, x: options.choice(name, x, tuple(of)))
    for name in asked:
        if name not in given and name not in names:
            raise ArgumentError(f"gradients_of: expected the names of arrays that are given, and {name} is not")
    for name, _, dtype in _arrays_of(mods):
        if name in asked and dtype not in DTYPES:
            raise ArgumentError(f"gradients_of: expected arrays of floats, and {name} is {dtype}")
        if name in asked and name in given:
            raise ArgumentError(f"gradients_of: {name} is an argument and one of mod_arrays; rename it there")
    return tuple(made for name, made in of.items() if name in asked)


@constant_in_programs
def _arrays_of(mods: str) -> tuple[tuple[str, str, str], ...]:
    """Of each array that mods read: its name, that of its gradient in the table, its dtype."""
    arrays = read(mods).arrays if mods else ()
    return tuple((x.name, made, x.dtype) for x, made in zip(arrays, MOD_GRADIENTS, strict=False))
