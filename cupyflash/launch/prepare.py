"""Prepare a call on the GPU: from signatures and options to launches that lack only addresses.

What decides which kernels run is the call's spec; the first call of one loads them. The extents of a call, its numbers,
are written into what is then prepared.

Here every fact about the arrays meets the plan: which kernel family their strides allow, and the params struct.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..arrays.adapters import TORCH, Native, Signature, place
from ..errors import ArgumentError
from ..gpu import tensormap
from ..gpu.device import Device
from ..options import Options
from ..plan.extents import Extents
from ..plan.families import FAMILIES, kernels_of, plan_of
from ..plan.spec import Spec
from ..problem import MAX_SEQLEN, Problem, make_problem
from ..sequences import Sequences
from . import prepared as launch
from .packed import count as packed_count
from .passes import BACKWARD, FORWARD, Pass, fill, steps_of, template_of
from .prepared import Call, Prepared
from .template import numbers_of


def family() -> str | None:
    """The kernel family that CUPYFLASH_FAMILY insists on, for tests.

    Raises:
        ArgumentError: if the variable has another value.
    """
    wish = os.environ.get("CUPYFLASH_FAMILY") or None
    if wish is not None and wish not in FAMILIES:
        raise ArgumentError(f"CUPYFLASH_FAMILY: expected one of {', '.join(FAMILIES)}, got {wish!r}")
    return wish


def wish() -> Any:
    """What CUPYFLASH_FAMILY holds, unchecked, as part of the keys under which calls are kept."""
    return _look_up(_FAMILY)


try:  # `os.environ.get` takes 0.8 us where the variable is not set, its own dictionary 0.05 us
    _look_up, _FAMILY = os.environ._data.get, os.environ.encodekey("CUPYFLASH_FAMILY")  # type: ignore[attr-defined]
except AttributeError:
    _look_up, _FAMILY = os.environ.get, "CUPYFLASH_FAMILY"


_Plain = tuple[Any, ...]  # a Signature, or the same as a plain tuple


def _is_aligned(signatures: Sequence[_Plain]) -> bool:
    """Whether every row starts at a multiple of 16 bytes if the array does: 8 elements of 16 bits."""
    for (a, b, c, _), (i, j, k, _), _, _ in signatures:
        if (a > 1 and i % 8) or (b > 1 and j % 8) or (c > 1 and k % 8):
            return False
    return True


def access(signatures: Sequence[_Plain], aligned: bool, others: Sequence[_Plain] = ()) -> tuple[bool, bool]:
    """(aligned, tma): whether every row of the arrays starts at a multiple of 16 bytes, and whether TMA can read them.

    Args:
        aligned: whether their addresses are multiples of 16.
        others: arrays that no kernel reads by TMA.
    """
    if not aligned:
        return False, False
    unread = [s for s in signatures if not tensormap.readable(s[0], s[1])]
    aligned = _is_aligned([*unread, *others])
    return aligned, aligned and not unread


def check(
    names: Sequence[str],
    library: Native,
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    sequences: Sequences | None = None,
) -> tuple[Problem, list[Signature]]:
    """All checks of q, k, v and what goes with them, by their library's signatures (in this order: q, k, v, then arrays
    shaped like q); returns the problem and the signatures spelled out."""
    dtypes = [library.dtype_name(key[2]) for key in keys]
    packed = None if sequences is None else packed_count(library, sequences, keys[0][3])
    problem = make_problem([key[0] for key in keys[:3]], dtypes[:3], **options._asdict(), sequences=packed)
    shape = tuple(keys[0][0])
    for name, key, dtype in zip(names[3:], keys[3:], dtypes[3:], strict=True):
        if (tuple(key[0]), dtype) != (shape, dtypes[0]):
            raise ArgumentError(
                f"{name}: expected shape {shape} and dtype {dtypes[0]} of q, got {tuple(key[0])} and {dtype}"
            )
    signatures = [library.describe(name, key) for name, key in zip(names, keys, strict=True)]
    q = signatures[0]
    for name, sig in zip(names, signatures, strict=True):
        if sig.device != q.device:
            raise ArgumentError(f"{name}: expected the device of q, {place(q.device)}, got {place(sig.device)}")
        if sig.strides[-1] != 1 and sig.shape[-1] > 1 and 0 not in sig.shape:
            raise ArgumentError(
                f"{name}: expected a stride of 1 along head_dim, got {sig.strides[-1]} elements; "
                "make a contiguous copy first"
            )
    return problem, signatures


Vet = Callable[[], None]


class _Asked(NamedTuple):
    """What all of a call but its extents says: of its kernels, and the numbers that `template.write` takes."""

    spec: Spec
    numbers: tuple[int, int, int]


@functools.lru_cache(maxsize=1024)
def _asked(
    backward: bool, dtype: str, head_dim: int, options: Options, batch: int, aligned: bool, tma: bool, clocks: bool,
    wish: Any,
) -> _Asked:  # fmt: skip
    """`batch`: 0 for any call without work; `wish`: so that another value in the environment is another question."""
    problem = make_problem([(batch, 1, 1, head_dim)] * 3, [dtype] * 3, **options._asdict())
    spec = Spec.of(problem, backward=backward, aligned=aligned, tma=tma, family=family(), clocks=clocks)
    return _Asked(spec, numbers_of(problem))


def _extents(keys: Sequence[tuple[Any, ...]], layout: str) -> Extents | None:
    """The extents of arrays that fit each other; None where `check` must look closer. Costs the host 1 us."""
    (shape, _, dtype, device), (key_shape, *_), v, *like_q = keys
    if len(shape) != 4 or len(key_shape) != 4 or v[0] != key_shape:
        return None
    for key in keys[1:]:
        if key[2] != dtype or key[3] != device:
            return None
    for key in like_q:
        if key[0] != shape:
            return None
    batch, a, b, head_dim = shape
    batch_k, c, d, head_dim_k = key_shape
    (seqlen_q, heads_q, seqlen_k, heads_k) = (a, b, c, d) if layout == "bshd" else (b, a, d, c)
    if batch_k != batch or head_dim_k != head_dim or heads_k < 1 or heads_q % heads_k:
        return None
    return Extents(batch, seqlen_q, seqlen_k, heads_q, heads_k) if max(seqlen_q, seqlen_k) <= MAX_SEQLEN else None


def prepare_forward(
    library: Native,
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    aligned: bool,
    stream: int,
    *,
    vet: Vet = lambda: None,
    clocks: bool = False,
) -> Call:
    """A forward of arrays q, k and v.

    Args:
        keys: what the library's `signature` says of them.
        aligned: whether their addresses are multiples of 16.
        vet: is called before the first call of a spec: raises where the arrays are not what they seem to be.
    """
    return _prepare(FORWARD, library, keys, options, aligned, stream, vet, clocks)


def prepare_backward(
    library: Native,
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    aligned: bool,
    stream: int,
    *,
    vet: Vet = lambda: None,
) -> Call:
    """A backward of arrays q, k, v, out and dout; arguments as of `prepare_forward`."""
    return _prepare(BACKWARD, library, keys, options, aligned, stream, vet)


def _prepare(
    which: Pass,
    library: Native,
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    aligned: bool,
    stream: int,
    vet: Vet,
    clocks: bool = False,
) -> Call:
    """A call from what is prepared for its spec; that is prepared first where it is new."""
    extents = _extents(keys, options.layout)
    if extents is None:
        vet()
        extents = Extents.of(check(which.names, library, keys, options)[0])
    signatures: Sequence[_Plain] = keys
    if library is not TORCH:  # whose signatures need no description
        signatures = [library.describe(name, key) for name, key in zip(which.names, keys, strict=True)]
    for _, strides, _, _ in signatures:
        if strides[3] != 1:
            check(which.names, library, keys, options)
    shape, _, dtype, ordinal = signatures[0]
    unread = signatures[3:4]  # no kernel reads out by TMA
    aligned, tma = access([*signatures[:3], *signatures[4:]] if unread else signatures, aligned, unread)
    steps = steps_of(which, signatures, options.layout, extents)
    batch, seqlen_q, seqlen_k, heads_q, heads_k = extents
    lengths = which.each(((seqlen_q, heads_q, batch), (seqlen_k, heads_k, batch)))
    asks = which is BACKWARD, library.dtype_name(dtype), shape[3], options, min(batch, seqlen_q, seqlen_k, 1), aligned
    while True:
        asked = _asked(*asks, tma, clocks, wish())
        key = ordinal, asked.spec
        prepared = launch.specs.find(key)
        if prepared is None:
            vet()
            prepared = _first(which, library, keys, options, asked.spec, stream)
            launch.specs.keep(key, prepared)
        call = prepared.call(extents, asked.numbers, lengths, steps, stream)
        if call is not None:
            return call
        tma = False  # the driver makes no tensor map of one of these arrays


def _first(
    which: Pass,
    library: Native,
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    spec: Spec,
    stream: int,
) -> Prepared:
    """What the first call of a spec prepares: with TMA if it can read the arrays and the driver makes maps of them."""
    problem, signatures = check(which.names, library, keys, options)
    device = Device.of(signatures[0].device)
    with device.current():  # drivers encode tensor maps for a thread with a context alone
        for tma in (spec.tma, False):
            kernels = kernels_of(spec._replace(tma=tma), device)
            filled = fill(which, plan_of(kernels, Extents.of(problem)), problem, signatures, options.layout)
            template = None if filled is None else template_of(which, kernels, filled)
            if filled is not None and template is not None:
                return Prepared(kernels, filled, template, stream)
    raise AssertionError("every GPU has a plan without TMA")
