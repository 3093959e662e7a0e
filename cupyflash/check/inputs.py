"""The arrays of one case, and what a call and the table of arrays call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..operand import MOD_GRADIENTS
from ..sequences import Sequences
from .case_mods import ModInputs

Array = NDArray[Any]


class Inputs(NamedTuple):
    """Arrays of one case, indexed as bshd or, packed, as (total, heads, head_dim); strides as its `memory` says."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    sequences: Sequences | None = None
    alibi_slopes: Array | None = None
    sink: Array | None = None
    bias: Array | None = None
    dropout_seed: Array | None = None
    block_mask: BlockMask | None = None
    mask: Array | None = None
    mods: ModInputs | None = None

    def brought(self) -> dict[str, Any]:
        """What features bring, as a call's further arguments: arrays, a block mask, mods with their arrays."""
        found = {} if self.sequences is None else self.sequences.named()
        found |= {} if self.block_mask is None else {"block_mask": self.block_mask}
        found |= {} if self.mods is None else self.mods._asdict()
        found |= {name: x for name in ("dropout_seed", "mask") if (x := getattr(self, name)) is not None}
        return found | {name: getattr(self, name) for name in self.arguments}

    def given(self, convert: Callable[[Array], Any]) -> dict[str, Any]:
        """`brought`, each array as `convert` makes it; a block mask finds its way to the arrays' device by itself."""

        def converted(x: Any) -> Any:
            if isinstance(x, dict):
                return {name: convert(array) for name, array in x.items()}
            return convert(x) if isinstance(x, np.ndarray) else x

        return {name: converted(x) for name, x in self.brought().items()}

    def arrays(self) -> dict[str, Array]:
        """The same by the names of the table of arrays."""
        found = self.brought()
        mask = found.pop("block_mask", None)
        if self.mods is not None:
            found = {name: x for name, x in found.items() if name not in ModInputs._fields} | self.mods.bound()[1]
        return found if mask is None else found | {"block_tiles": mask.tiles, "block_bits": mask.bits}

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of what a backward makes if it is asked for all, in their order."""
        return "dq", "dk", "dv", *(f"d{name}" for name in self.learned)

    @property
    def learned(self) -> tuple[str, ...]:
        """What has gradients beside q, k and v, as the backward's `gradients_of`."""
        return *self.arguments, *(() if self.mods is None else self.mods.learned)

    @property
    def wanted(self) -> tuple[str, ...]:
        """These gradients by the names of the table of arrays."""
        of_mods = () if self.mods is None else self.mods.learned.values()
        return *(f"d{name}" for name in self.arguments), *(MOD_GRADIENTS[i] for i in of_mods)

    def learned_in(self, gradients: Any) -> dict[str, Any]:
        """The same, of what a backward gave back, by the names of `gradients`."""
        of_mods = () if self.mods is None else self.mods.learned
        found = {f"d{name}": getattr(gradients, f"d{name}") for name in self.arguments}
        return found | {f"d{name}": gradients.dmod_arrays[name] for name in of_mods}

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments with gradients that are arrays."""
        return tuple(name for name in ("alibi_slopes", "sink", "bias") if getattr(self, name) is not None)
