"""Gradients as trees of JAX: those that are attributes are leaves, too, which programs return and maps visit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.tree_util import GetAttrKey, register_pytree_with_keys

from ..gradients import Gradients


def _flatten(x: Gradients) -> tuple[tuple[tuple[GetAttrKey, Any], ...], tuple[str, ...]]:
    named = x._asdict() | vars(x)
    return tuple((GetAttrKey(name), child) for name, child in named.items()), tuple(vars(x))


def _unflatten(more: tuple[str, ...], children: Iterable[Any]) -> Gradients:
    dq, dk, dv, *others = children
    found = Gradients(dq, dk, dv)
    vars(found).update(zip(more, others, strict=True))
    return found


register_pytree_with_keys(Gradients, _flatten, _unflatten)
