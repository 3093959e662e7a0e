"""Prepare a call on the GPU: from signatures and options to launches that lack only addresses.

What decides which kernels run is the call's spec; the first call of one loads them. The extents of a call, its numbers,
are written into what is then prepared.

Here every fact about the arrays meets the plan: which kernel family their strides allow, and the params struct.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..arrays.adapters import TORCH, Native
from ..errors import ArgumentError
from ..gpu.device import Device
from ..options import Options
from ..plan import mod_tiles
from ..plan.extents import Extents
from ..plan.families import FAMILIES, kernels_of, plan_of
from ..plan.spec import Spec
from ..problem import HALF, MAX_SEQLEN, make_problem
from . import prepared as launch
from . import series
from .alignment import Access, Aligned, Plain, access_of, makes_blocks
from .brought import Brought, brought_by, room_of
from .checks import check
from .filled import fill, template_of
from .passes import Asked, Given, as_batch, contiguous_strides, is_contiguous, pages_of, sizes_of
from .prepared import Call, Prepared
from .template import numbers_of
from .variables import wish


def family() -> str | None:
    """The kernel family that CUPYFLASH_FAMILY insists on, for tests.

    Raises:
        ArgumentError: if the variable has another value.
    """
    wish = os.environ.get("CUPYFLASH_FAMILY") or None
    if wish is not None and wish not in FAMILIES:
        raise ArgumentError(f"CUPYFLASH_FAMILY: expected one of {', '.join(FAMILIES)}, got {wish!r}")
    return wish


Vet = Callable[[], None]


class _Asked(NamedTuple):
    """What all of a call but its extents says: of its kernels, and the numbers that `template.write` takes."""

    spec: Spec
    numbers: tuple[int, int, int]


@functools.lru_cache(maxsize=1024)
def _asked(
    backward: bool, dtype: str, widths: tuple[int, int], options: Options, of: Asked, brought: Brought,
    group: int, batch: int, tiles_fit: bool, access: Access, wish: Any,
) -> _Asked:  # fmt: skip
    """`group`: 1 where heads of q and of k are as many, else 2; `batch`: 0 for any call without work; `tiles_fit`:
    those of a mask or a mask_mod (mod_tiles.py); `wish`: another value in the environment is another question."""
    head_dim, head_dim_v = widths
    shapes: list[tuple[int, ...]] = [
        (batch, heads, 1, width) if options.layout == "bhsd" else (batch, 1, heads, width)
        for heads, width in ((group, head_dim), (1, head_dim), (1, head_dim_v))
    ]
    if of.packed:
        shapes = [shape[1:] for shape in shapes]
    features = {**brought._asdict(), "sequences": batch if of.packed else None}
    problem = make_problem(shapes, [dtype] * 3, **options._asdict(), **features)
    known = {**of.made(), **access._asdict(), "tiles_fit": tiles_fit, "family": family()}
    spec = Spec.of(problem, backward=backward, **known)
    return _Asked(spec, numbers_of(problem))


def _extents(given: Given, library: Native, keys: Sequence[tuple[Any, ...]], layout: str) -> Extents | None:
    """The extents of arrays that fit each other; None where `check` must look closer. Costs the host 1 us."""
    i, j, k = given.qkv
    shape, _, dtype, device = keys[i]
    key_shape, of_v = keys[j][0], keys[k][0]
    if len(shape) != 4 or len(key_shape) != 4 or (of_v != key_shape and of_v[:-1] != key_shape[:-1]):
        return None
    if given.own_v:
        shape = (*shape[:-1], of_v[-1])
    for i in given.alike:
        if keys[i][2] != dtype or keys[i][3] != device:
            return None
    for i in given.like_out:
        if keys[i][0] != shape:
            return None
    batch, a, b, head_dim = keys[given.qkv[0]][0]
    batch_k, c, d, head_dim_k = key_shape
    if given.packed is not None:
        batch = batch_k = math.prod(keys[given.packed][0]) - 1
    if given.table is not None:
        c = pages_of(key_shape, keys[given.table][0])[1][0]
    (seqlen_q, heads_q, seqlen_k, heads_k) = (a, b, c, d) if layout == "bshd" else (b, a, d, c)
    if batch_k != batch or head_dim_k != head_dim or heads_k < 1 or heads_q % heads_k:
        return None
    found = Extents(batch, seqlen_q, seqlen_k, heads_q, heads_k, *room_of(given, keys))
    if given.others:
        sizes = sizes_of(found, (head_dim, of_v[-1]), given.packed is not None)
        for i, row in given.others:
            own, _, kind, where = keys[i]
            fits = library.dtype_name(kind) == row.dtype if row.dtype else kind == dtype or row.free
            if row.broadcasts and not row.dtype:
                fits = fits or (library.dtype_name(kind) == "fp32" and library.dtype_name(dtype) in HALF)
            if not fits or where != device or not row.fits(own, sizes, given.packed is not None):
                return None
    return found if max(seqlen_q, seqlen_k) <= MAX_SEQLEN else None


def _copied(given: Given, signatures: Sequence[Plain]) -> tuple[int, ...]:
    """The numbers of arrays that a kernel reads as contiguous and that are not."""
    found = []
    for i, row in given.others:
        shape, strides, _, _ = signatures[i]
        if (
            not (row.strided or row.broadcasts)
            and strides != contiguous_strides(shape)
            and not is_contiguous(shape, strides)
        ):
            found.append(i)
    return tuple(found)


def prepare(
    given: Given,
    library: Native,
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    aligned: Aligned,
    stream: int,
    *,
    vet: Vet = lambda: None,
) -> Call:
    """A call from what is prepared for its spec; that is prepared first where it is new.

    Args:
        given: the names of its arrays; where clocks are wanted, it is of the sm90 family's form that records them.
        keys: what the library's `signature` says of the arrays.
        aligned: what is known of their addresses.
        vet: is called before the first call of a spec: raises where the arrays are not what they seem to be.
    """
    signatures = as_batch(given, keys)
    extents = _extents(given, library, signatures, options.layout)
    if extents is None:
        vet()
        extents = Extents.of(check(given.which, given.names, library, keys, options)[0])
    if library is not TORCH:  # whose signatures need no description
        signatures = [library.describe(name, key) for name, key in zip(given.names, signatures, strict=True)]
    for i in given.alike:
        if signatures[i][1][-1] != 1:
            check(given.which, given.names, library, keys, options)
    shape, _, dtype, ordinal = signatures[given.qkv[0]]
    widths = shape[3], signatures[given.qkv[2]][0][3]
    access = access_of(given, signatures, aligned)
    lengths, steps = given.measure(signatures, options.layout)
    batch, seqlen_q, seqlen_k, heads_q, heads_k, *_ = extents
    has_work = min(batch, seqlen_q, seqlen_k, 1)
    asked_of = given.which.name == "backward", library.dtype_name(dtype), widths, options
    if given.has_mask:
        tiles_fit = makes_blocks(given, signatures)
    else:
        tiles_fit = bool(options.mods) and mod_tiles.fit(options.mods, extents[:5], widths)
    asks = *asked_of, given.asked, brought_by(given, library, keys), 1 + (heads_q > heads_k), has_work, tiles_fit
    copied, broadcast = _copied(given, signatures) if given.others else (), given.measure_broadcast(signatures)
    while True:
        asked = _asked(*asks, access, wish())
        key = ordinal, given.kind, asked.spec
        prepared = launch.specs.find(key)
        if prepared is None:
            vet()
            prepared = _first(given, library, keys, options, asked.spec, stream)
            launch.specs.keep(key, prepared)
        call = prepared.call(given, extents, asked.numbers, lengths, steps, broadcast, copied, options.layout, stream)
        if call is not None:
            if access.tma:
                series.begin(given, keys, options, prepared, extents, call, lengths, steps)
            return call
        access = access._replace(tma=False)  # the driver makes no tensor map of one of these arrays


def _first(
    given: Given,
    library: Native,
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    spec: Spec,
    stream: int,
) -> Prepared:
    """What the first call of a spec prepares: with TMA if it can read the arrays and the driver makes maps of them."""
    which = given.which
    problem, checked = check(which, given.names, library, keys, options)
    signatures = as_batch(given, checked)
    device = Device.of(checked[0].device)
    with device.current():  # drivers encode tensor maps for a thread with a context alone
        for tma in (spec.tma, False):
            kernels = kernels_of(spec._replace(tma=tma), device)
            filled = fill(given, plan_of(kernels, Extents.of(problem)), problem, signatures, options.layout)
            template = None if filled is None else template_of(given, kernels, filled)
            if filled is not None and template is not None:
                return Prepared(kernels, filled, template, stream)
    raise AssertionError("every GPU has a plan without TMA")
