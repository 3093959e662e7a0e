"""Base of the families of kernels: what each answers about a spec."""

from __future__ import annotations

from typing import ClassVar

from ..gpu.device import Device
from .extents import Kernels
from .first_shares import StoredFirst
from .spec import Spec
from .variant import Tile, Variant


class Family:
    """Kernels for the same hardware, with one table of tiles for the forward and one for the backward."""

    name: ClassVar[str]

    def why_not(self, spec: Spec, device: Device) -> str | None:
        """Why it cannot take a spec; None if it can."""
        raise NotImplementedError

    def forward_tile(self, spec: Spec, device: Device) -> Tile:
        """The tile of the forward's main kernel."""
        raise NotImplementedError

    def variants(self, spec: Spec, device: Device) -> tuple[Variant, ...]:
        """The kernels that a spec takes, in launch order."""
        raise NotImplementedError

    def mixed_bytes(self, spec: Spec, device: Device) -> int:
        """As of `Kernels`: half of the L2 where tiles differ in length; else a head goes by itself."""
        return device.l2_bytes // 2 if spec.uneven else 0

    def first_stores_limit(self, spec: Spec, device: Device) -> int:
        """Up to so many keys it pays that dQ's accumulator need not be cleared (first_shares.py)."""
        return -1

    def kernels(self, spec: Spec, device: Device) -> Kernels:
        """The kernels that a spec takes, with what the plan needs to know of them."""
        stored_first = StoredFirst.of(spec, self.first_stores_limit(spec, device))
        return Kernels(self.variants(spec, device), spec, device, self.mixed_bytes(spec, device), stored_first)
