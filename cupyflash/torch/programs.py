"""What programs of torch.compile call in place of our operators: calls whose arrays and options are known beforehand.

An operator's call goes through torch's dispatcher, which makes new objects of each argument for Python. A program names
the arrays that it gives, and the options, once, where it begins (`inductor.py` writes it so); then it gives the arrays.
Where torch looks on after all, or where arrays are unlike those of the last call, the operator is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..launch import run
from ..operands import BACKWARD
from . import ops
from .followed import is_followed

Call = Callable[..., tuple[Tensor, ...]]


def forward(names: tuple[str, ...], values: tuple[Any, ...], wanted: tuple[str, ...]) -> Call:
    """What computes (out, lse) of arrays with these names, given in this order.

    Args:
        values: of the options, as an operator has them.
        wanted: as of `backward`; here nothing.
    """
    options = ops.options_of(values)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = None if is_followed() else run.forward_again(names, tensors, options, True, False)
        if found is None:
            found = ops.forward(dict(zip(names, tensors, strict=True)), options)
        return found

    return call


def backward(names: tuple[str, ...], values: tuple[Any, ...], wanted: tuple[str, ...]) -> Call:
    """What computes all that the operator returns, likewise; what is not made is an empty tensor.

    Args:
        wanted: the gradients that are made only where somebody asks for them.
    """
    options, results = ops.options_of(values), ops.results_of(BACKWARD)
    empty: dict[int, Tensor] = {}  # by GPU

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = None if is_followed() else run.backward_again(names, tensors, options, wanted)
        if found is None:
            given = ops.arguments(BACKWARD, dict(zip(names, tensors, strict=True)), options, wanted)
            return ops.operator(BACKWARD, given)(*given)
        q = tensors[0]
        none = empty.get(q.get_device())
        if none is None:
            none = empty[q.get_device()] = q.new_empty(0)
        return tuple([found.get(name, none) for name in results])

    return call
