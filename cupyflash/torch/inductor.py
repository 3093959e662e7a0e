"""How Inductor writes our operators into its programs: as calls of `programs.py`, which leave torch's dispatcher out.

What Inductor keeps to itself stands here and nowhere else. Without one of these names, and in programs of C++, our
operators are written as any that Inductor does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from ..arrays import torch_private
from ..operands import Pass
from .arguments import flat, read

_PROGRAMS = "cupyflash.torch.programs"
_OLDEST = 2, 11  # of the versions of torch with which this was run
_WRITTEN = bool, int, float, str, type(None)
_ready: set[Any] = set()


def ready(which: Pass, op: Any) -> None:
    """Tell Inductor how to write a pass's operator, once it is there, before it writes the first."""
    if op in _ready or "torch._inductor.lowering" not in sys.modules:
        return
    _ready.add(op)
    if torch_private.version() < _OLDEST:
        return
    try:
        _register(which, op)
    except (AttributeError, ImportError):  # torch has other names for it
        return


def _register(which: Pass, op: Any) -> None:
    from torch._inductor import ir, lowering
    from torch._library.utils import get_layout_constraint_tag
    from torch.utils._pytree import tree_map

    kernel, box = _kernel(which, ir), ir.TensorBox.create
    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
    lowering.make_fallback(op, layout_constraint=constraint)
    as_fallback = lowering.lowerings[op]

    def lower(*args: Any, **kwargs: Any) -> Any:
        return as_fallback(*args, **kwargs) if kwargs else tree_map(box, kernel.create(op, *args))

    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    lowering.lowerings[op] = lower


def writes_python(graph: Any) -> bool:
    """Whether Inductor writes this graph's program in Python, not in C++ or as another graph."""
    return not graph.cpp_wrapper and not getattr(graph, "fx_wrapper", False)


def _kernel(which: Pass, ir: Any) -> Any:
    """The node of Inductor's that stands for a call of the operator."""
    from torch._inductor.virtualized import V

    class Kernel(ir.FallbackKernel):
        direct: str = ""  # name of the call in its place; "": there is none
        given: Sequence[Any] = ()  # the arrays that it takes

        def codegen(self, wrapper: Any) -> None:
            if writes_python(V.graph):
                values, _ = self.unflatten_args(self.inputs, self.constant_args)
                names, tensors, options, wanted = read(which, tuple(values))
                known = (names, flat(options), wanted)
                if all(type(value) in _WRITTEN for part in known for value in part):
                    made = f"cupyflash_{which.name}{known!r}"
                    self.direct = f"cupyflash_{which.name}_{sha256(made.encode()).hexdigest()[:8]}"
                    self.given = tensors
                    wrapper.add_import_once(f"from {_PROGRAMS} import {which.name} as cupyflash_{which.name}")
                    wrapper.add_import_once(f"{self.direct} = {made}")
            super().codegen(wrapper)

        def get_kernel_name(self) -> str:
            return self.direct or str(super().get_kernel_name())

        def codegen_args(self) -> list[str]:
            return [x.codegen_reference() for x in self.given] if self.direct else list(super().codegen_args())

    return Kernel
