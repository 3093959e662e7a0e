"""The door to the plan: which kernels a call takes, on which grid, with which workspace. Pure arithmetic.

Whoever wants to know asks here, with a `Spec` or a problem, and gets what a call gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError
from ..gpu.device import MIN_CAPABILITY, Device
from ..problem import Problem
from .extents import Extents, Kernels
from .family import Family
from .numbers import Numbers, Workspace
from .sm80 import SM80
from .sm90 import SM90
from .spec import Spec
from .variant import Variant

GPU_DTYPES = ("bf16", "fp16", "fp32")
FAMILIES: dict[str, Family] = {family.name: family for family in (SM80, SM90)}  # from the slowest to the fastest


@dataclass(frozen=True)
class Launch:
    """One kernel launch; a grid of 0 blocks is left out. `tiles`: of work, which persistent blocks share."""

    variant: Variant
    grid: int
    tiles: int


@dataclass(frozen=True)
class Plan:
    """The launches of one call, in order, and the `Numbers` chosen for it."""

    launches: tuple[Launch, ...]
    numbers: Numbers
    block_mask: int = 0  # of the spec

    @property
    def workspace(self) -> Workspace:
        """The arrays that the launches share."""
        return self.numbers.workspace

    def chosen(self, name: str) -> int:
        """A number of the params struct that the plan chooses."""
        return self.block_mask if name == "block_mask" else int(getattr(self.numbers, name))


def check_device(device: Device) -> None:
    """Refuse a GPU that no kernel runs on."""
    if device.capability < MIN_CAPABILITY:
        raise UnsupportedError(
            f"{device.name} has compute capability {device.capability[0]}.{device.capability[1]}; the GPU kernels need "
            "7.5 (Turing) or newer. Set CUPYFLASH_BACKEND=cpu and pass NumPy arrays to run on the CPU"
        )


def one_of(dtypes: tuple[str, ...]) -> str:
    """Them in words."""
    return " or ".join(filter(None, (", ".join(dtypes[:-1]), dtypes[-1])))


def check_dtype(dtype: str, device: Device, arrays: str) -> None:
    """Refuse a dtype of q that no kernel of this device has; `arrays`: what to cast."""
    if dtype not in GPU_DTYPES:
        raise UnsupportedError(
            f"q: {dtype} has no GPU kernel yet, expected {one_of(device.dtypes)}; cast {arrays}, "
            "or pass arrays that live on the CPU"
        )
    if dtype not in device.dtypes:
        raise UnsupportedError(
            f"q: expected fp16 on {device.name}, got {dtype}, for which tensor cores need compute capability 8.0 "
            f"(Ampere) and this GPU has {device.capability[0]}.{device.capability[1]}; cast {arrays} to fp16"
        )


def dtypes_on(device: Device, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `asked` that the device has kernels for; an error if it has none for any."""
    found = tuple(dtype for dtype in asked if dtype in device.dtypes)
    if not found:
        check_dtype(asked[0], device, "q, k and v")
    return found


def check_supported(call: Problem | Spec, device: Device) -> None:
    """Refuse what no kernel of this device can do."""
    check_device(device)
    check_dtype(call.dtype, device, "q, k and v")


def _check_order(spec: Spec) -> None:
    """Refuse sums in no order where the order must always be the same."""
    if spec.deterministic and spec.dmods:
        raise UnsupportedError(
            "deterministic: expected False where gradients of mod_arrays are wanted, which a GPU sums up by atomic "
            "additions; leave them out of gradients_of (on PyTorch .detach() the arrays), or give a bias, whose "
            "gradient is reproducible"
        )


def choose(spec: Spec, device: Device) -> tuple[Family, dict[str, str]]:
    """The family that calls of a spec take, and why they take none of those that are faster: name -> reason.

    Raises:
        UnsupportedError: if the device, the dtype or the family asked for cannot do it.
    """
    check_supported(spec, device)
    _check_order(spec)
    reasons: dict[str, str] = {}
    for family in reversed(FAMILIES.values()):
        reason = family.why_not(spec, device)
        if reason is None and spec.family in (None, family.name):
            return family, reasons
        reasons[family.name] = reason or f"CUPYFLASH_FAMILY={spec.family}"
    if spec.family is None:
        raise UnsupportedError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    raise UnsupportedError(
        f"CUPYFLASH_FAMILY={spec.family}: {reasons[spec.family]}; unset it to let the library choose"
    )


def is_taken(problem: Problem, device: Device, *, backward: bool) -> bool:
    """Whether this device has kernels for a problem, if nobody asks for a family.

    Raises:
        UnsupportedError: it has none at all.
    """
    check_device(device)
    try:
        choose(Spec.of(problem, backward=backward), device)
    except UnsupportedError:
        return False
    return True


def kernels_of(spec: Spec, device: Device) -> Kernels:
    """The kernels that calls of a spec take; errors as of `choose`."""
    return choose(spec, device)[0].kernels(spec, device)


def variants_of_calls(problem: Problem, device: Device, **known: Any) -> tuple[Variant, ...]:
    """The kernels that a forward and then a backward of `problem` take; `known`: what `Spec.of` may be told."""
    specs = (Spec.of(problem, backward=backward, **known) for backward in (False, True))
    return tuple(variant for spec in specs for variant in kernels_of(spec, device).variants)


def plan_of(kernels: Kernels, extents: Extents) -> Plan:
    """The plan of a call of these extents.

    Raises:
        UnsupportedError: if it has too many tiles of work.
    """
    numbers = kernels.numbers(extents)
    launches = (Launch(v, kernels.grid(v, n), n) for v, n in zip(kernels.variants, numbers.tiles, strict=True))
    return Plan(tuple(launches), numbers, kernels.spec.block_mask)


def plan_call(problem: Problem, device: Device, **known: Any) -> Plan:
    """The plan of one problem; `known` as of `variants_of_calls`, errors as of `kernels_of` and `plan_of`."""
    return plan_of(kernels_of(Spec.of(problem, **known), device), Extents.of(problem))
