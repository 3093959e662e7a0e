"""The arrays of one case, and what a call and the table of arrays call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..operand import MOD_GRADIENTS
from .case_mods import ModInputs
from .features import Features

Array = NDArray[Any]


class Inputs(NamedTuple):
    """Arrays of one case, indexed as bshd or, packed, as (total, heads, head_dim); strides as its `memory` says."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    features: Features = Features()

    def having(self, **features: Any) -> Inputs:
        """The same with these features, by the names of `Features`, in place of its own."""
        return self._replace(features=self.features._replace(**features))

    def brought(self) -> dict[str, Any]:
        """What features bring, as a call's further arguments: arrays, a block mask, mods with their arrays."""
        found = {name: x for name, x in self.features.named().items() if name not in ("sequences", "mods")}
        found |= {} if self.features.sequences is None else self.features.sequences.named()
        return found | ({} if self.features.mods is None else self.features.mods._asdict())

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
        if (mods := self.features.mods) is not None:
            found = {name: x for name, x in found.items() if name not in ModInputs._fields} | mods.bound()[1]
        return found if mask is None else found | {"block_tiles": mask.tiles, "block_bits": mask.bits}

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of what a backward makes if it is asked for all, in their order."""
        return "dq", "dk", "dv", *(f"d{name}" for name in self.learned)

    @property
    def learned(self) -> tuple[str, ...]:
        """What has gradients beside q, k and v, as the backward's `gradients_of`."""
        return *self.features.learned, *self._of_mods

    @property
    def wanted(self) -> tuple[str, ...]:
        """These gradients by the names of the table of arrays."""
        return *(f"d{name}" for name in self.features.learned), *(MOD_GRADIENTS[i] for i in self._of_mods.values())

    def learned_in(self, gradients: Any) -> dict[str, Any]:
        """The same, of what a backward gave back, by the names of `gradients`."""
        found = {f"d{name}": getattr(gradients, f"d{name}") for name in self.features.learned}
        return found | {f"d{name}": gradients.dmod_arrays[name] for name in self._of_mods}

    @property
    def _of_mods(self) -> dict[str, int]:
        return {} if self.features.mods is None else self.features.mods.learned
