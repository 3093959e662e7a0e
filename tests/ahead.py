"""Kernels of the next tests are compiled with those of the present one: a quarter of the time that the kernels of one
test take goes into the start of the compiler and into headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cupyflash.gpu.device import Device
from cupyflash.plan.variant import Variant
from tests.emulator.attention import units_of
from tests.emulator.build import Unit, build

COUNT = 12  # tests; more would save little, and two processes would more often compile the same


class _Silent:
    """A kernel that does nothing."""

    stats = SimpleNamespace(collectives=0, matrix_ops=0)

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


def units(rehearse: Callable[..., Any], params: Mapping[str, Any], modules: Sequence[ModuleType]) -> list[Unit]:
    """The kernels that would be launched, by functions of some modules of the emulator."""
    found: list[Unit] = []

    def kernels_of(
        variants: Sequence[Variant], device: Device, headers: Mapping[str, str] | None = None
    ) -> list[_Silent]:
        found.extend(units_of(variants, device, headers))
        return [_Silent() for _ in variants]

    def kernel_of(variant: Variant, device: Device, headers: Mapping[str, str] | None = None) -> _Silent:
        return kernels_of((variant,), device, headers)[0]

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "kernels_of", kernels_of)
            patch.setattr(module, "kernel_of", kernel_of)
        rehearse(**params)
    return found


class Ahead:
    """Called by a test, compiles its kernels and those of the tests of the same function that stand behind it, unless
    that has been done.

    Args:
        rehearse: takes a test's parameters and launches what the test launches; results are not judged.
        modules: of the emulator, that launch.
    """

    def __init__(self, rehearse: Callable[..., Any], *modules: ModuleType) -> None:
        self.rehearse, self.modules = rehearse, modules
        self.done: set[str] = set()

    def __call__(self, request: pytest.FixtureRequest) -> None:
        if request.node.nodeid in self.done:
            return
        items = request.session.items
        at = items.index(request.node)
        some = [
            item
            for item in items[at : at + COUNT]
            if isinstance(item, pytest.Function) and item.function is request.function
        ]
        build(unit for item in some for unit in units(self.rehearse, item.callspec.params, self.modules))
        self.done.update(item.nodeid for item in some)
