"""The gradients of the arrays that mods read, as plain attention sums them up: head by head, element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mods.description import read
from ..problem import Problem
from .features import Features

Array = NDArray[Any]


def none_of(of: Features) -> list[Array]:
    """Gradients to which nothing was added."""
    return [] if of.mods is None else [np.zeros(of.mods.mod_arrays[name].shape) for name in of.mods.learned]


def dtypes_of(of: Features) -> list[np.dtype[Any]]:
    """Those of the arrays."""
    return [] if of.mods is None else [of.mods.mod_arrays[name].dtype for name in of.mods.learned]


def before_mods(p: Problem) -> Problem:
    """A problem whose scores are those that mods are given."""
    return replace(p, mods="", mod_shapes=(), alibi=0)


def add_head(totals: list[Array], by_score: Array, S: Array, p: Problem, of: Features, b: int, h: int) -> None:
    """Add what a head of q gives; `S`: its scores as mods are given them, `by_score`: the gradient by what they make of
    them."""
    for i, elements, derivative in _reads(S, p, of, b, h):
        terms = np.where(by_score == 0, 0, by_score * derivative)
        totals[i] += np.bincount(elements.ravel(), terms.ravel(), totals[i].size).reshape(totals[i].shape)


def add_bounds(
    totals: tuple[list[Array], list[Array]], S: Array, P: Array, E: Array, difference: Array, dOO: Array,
    of_mods: Array, p: Problem, of: Features, b: int, h: int,
) -> None:  # fmt: skip
    """Add a head's bounds of the errors, and the squares of what the rounding of O does to them by delta.

    Args:
        S: as mods are given them.
        E: of the gradient by the scores that mods make.
        difference: dP - delta.
        dOO: |dO_i O_i|, a column.
        of_mods: the error of mods and of what they are given, in roundings.
    """
    for i, elements, derivative in _reads(S, p, of, b, h):
        size, shape, slope = totals[0][i].size, totals[0][i].shape, np.where(P == 0, 0, np.abs(derivative))
        terms = E * slope + P * np.abs(difference) * of_mods * (1 + slope)
        totals[0][i] += np.bincount(elements.ravel(), terms.ravel(), size).reshape(shape)
        in_row = elements + size * np.arange(len(P))[:, None]
        weights = np.bincount(in_row.ravel(), (P * slope).ravel(), size * len(P)).reshape(len(P), size)
        totals[1][i] += np.square(dOO * weights).sum(axis=0).reshape(shape)


def _reads(S: Array, p: Problem, of: Features, b: int, h: int) -> list[tuple[int, Array, Array]]:
    """Of each read: the number of its total, the elements and the derivative by them."""
    learned = tuple(of.mods.learned.values())
    found = read(p.mods).by_reads(S, *of.at(p, b, h), learned)
    return [(learned.index(number), elements, derivative) for number, elements, derivative in found]
