"""How arrays lie in memory, as far as it decides which kernels read them.

Rows, and neighbours of a bias, may start where kernels can read many bytes at once, and TMA reads some strides alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..arrays.adapters import Native
from ..bias import becomes_blocks, own_of_mask
from ..cache.arrays import BY_NAME
from ..gpu import tensormap
from ..operands import BACKWARD, FORWARD, Pass
from ..plan.mod_tiles import have_room, own_tiles
from ..plan.spec import CHUNKS, ONE_ROW, PAIRS
from .passes import Given, as_batch, score_steps

Plain = tuple[Any, ...]  # a Signature, or the same as a plain tuple


def _is_aligned(signatures: Sequence[Plain]) -> bool:
    """Whether every row starts at a multiple of 16 bytes if the array does: 8 elements of 16 bits."""
    for (a, b, c, _), (i, j, k, _), _, _ in signatures:
        if (a > 1 and i % 8) or (b > 1 and j % 8) or (c > 1 and k % 8):
            return False
    return True


def _of_rows(signatures: Sequence[Plain], others: Sequence[Plain]) -> tuple[bool, bool]:
    """Of arrays at multiples of 16: whether every row starts at one, and whether TMA can read them; `others`: arrays
    that no kernel reads by TMA."""
    unread = [s for s in signatures if not tensormap.readable(s[0], s[1])]
    aligned = _is_aligned([*unread, *others])
    return aligned, aligned and not unread


class Aligned(NamedTuple):
    """Whether addresses are multiples of 16, of the arrays with strides; and what those of a bias and a mask allow
    (`Access`): of a mask alone, as of a bias."""

    rows: bool = True
    bias: int = CHUNKS
    mask: int = CHUNKS


ALIGNED = Aligned()


def aligned_at(which: Pass, names: Iterable[str], addresses: Iterable[int]) -> Aligned:
    """What is so of arrays of these names at these addresses."""
    bits, of_added = 0, []
    for name, address in zip(names, addresses, strict=True):
        row = which.rows[name]
        bits |= address if row.strided else 0
        if row.broadcasts:
            of_added.append(CHUNKS if address & 15 == 0 else PAIRS if address & 7 == 0 else 0)
    return Aligned(bits & 15 == 0, *of_added)


class Access(NamedTuple):
    """How the arrays of a call lie: all that its spec knows of it, by the names of `Spec.of`.

    Attributes:
        aligned: every row of the arrays with strides starts at a multiple of 16 bytes.
        tma: TMA can read those that some kernel reads by it.
        paired_bias: how neighbouring keys of a bias lie, and of a mask that is read beside it: PAIRS, two in an aligned
            pair; CHUNKS, eight in four of them; 0: neither, or there are none. With the bit ONE_ROW: side by side, and
            queries share them.
    """

    aligned: bool
    tma: bool
    paired_bias: int


def access_of(given: Given, signatures: Sequence[Plain], aligned: Aligned) -> Access:
    """That of arrays; `signatures`: strides in elements, as `as_batch` gives them."""
    rows = _of_rows(given.by_tma(signatures), given.by_hand(signatures)) if aligned.rows else (False, False)
    read = given.added[:1] if makes_blocks(given, signatures) else given.added
    added = [(x[0], score_steps(x[0], x[1])) for x in (signatures[i] for i in read)]
    alignment = min(aligned.bias, aligned.mask) if len(read) > 1 else aligned.bias
    return Access(*rows, _lie_of(added, alignment) if added else 0)


def makes_blocks(given: Given, signatures: Sequence[Plain]) -> bool:
    """Whether there is a mask that becomes a block mask, so that other kernels do not read it."""
    if not given.has_mask or given.block_mask is not None:
        return False
    if given.table is not None:
        return len(given.added) == 1
    shape, strides = signatures[given.added[-1]][:2]
    own = own_of_mask(shape, strides)
    if given.packed is None or not becomes_blocks(own, packed=True):
        return given.packed is None
    q, k, v = (signatures[i][0] for i in given.qkv)
    elements = (math.prod(q) + math.prod(k)) // max(1, q[-1]) * (q[-1] + v[-1])
    return have_room(own_tiles(own, *[1] * (4 - len(shape)), *shape), elements)


def known_of(given: Given, library: Native, arrays: Iterable[Any]) -> dict[str, Any]:
    """All that `Spec.of` is told of a call beside its problem and a family, as `prepare` does; `arrays`: those of
    `given`, in its order."""
    keys, addresses = library.look(arrays)
    signatures = [library.describe(name, key) for name, key in zip(given.names, keys, strict=True)]
    access = access_of(given, as_batch(given, signatures), aligned_at(given.which, given.names, addresses))
    return {"backward": given.which is BACKWARD, **given.asked.made(), **access._asdict()}


def cache_aligned_at(names: Iterable[str], addresses: Iterable[int]) -> bool:
    """Whether q, k, v and the caches, of the arrays of these names, lie at multiples of 16."""
    return not any(x & 15 for name, x in zip(names, addresses, strict=True) if BY_NAME[name].dtype in ("", "cache"))


def access_to_cache(signatures: Mapping[str, Plain], aligned: bool, itemsize: int) -> dict[str, bool]:
    """What `plan_decode` is told of how arrays lie.

    Args:
        signatures: of the arrays given, by their names; strides in elements.
        aligned: as `cache_aligned_at` says.
        itemsize: the bytes of an element of the caches.
    """
    q, *caches = (signatures[name] for name in ("q", "k_cache", "v_cache"))
    aligned = aligned and _rows_aligned(q, 2) and all(_rows_aligned(x, itemsize) for x in caches)
    return {"aligned": aligned, "tma": all(tensormap.readable(x[0], x[1], itemsize) for x in caches)}


def known_of_cache(library: Native, arrays: Mapping[str, Any], itemsize: int) -> dict[str, bool]:
    """The same of arrays, as `launch.decode` does."""
    keys, addresses = library.look(arrays.values())
    signatures = {name: library.describe(name, key) for name, key in zip(arrays, keys, strict=True)}
    return access_to_cache(signatures, cache_aligned_at(arrays, addresses), itemsize)


def pairs_over_cache(library: Native, arrays: Mapping[str, Any]) -> int:
    """`Access.paired_bias` of a bias and a mask over a cache, for calls that take the forward."""
    added = {name: arrays[name] for name in ("bias", "mask") if name in arrays}
    keys, addresses = library.look(added.values())
    signatures = [library.describe(name, key) for name, key in zip(added, keys, strict=True)]
    lie = [(x[0], score_steps(x[0], x[1])) for x in signatures]
    return _lie_of(lie, min(aligned_at(FORWARD, added, addresses)[1:])) if lie else 0


def _rows_aligned(signature: Plain, itemsize: int) -> bool:
    """Whether every row starts at a multiple of 16 bytes if the array does."""
    shape, strides, _, _ = signature
    return all(s * itemsize % 16 == 0 for s, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1)


def _lie_of(added: Sequence[tuple[Sequence[int], Sequence[int]]], alignment: int) -> int:
    """How neighbouring keys lie of arrays of these shapes and steps, which begin at multiples of as many bytes."""
    rows, keys = ([steps[i] for _, steps in added] for i in (-2, -1))

    def in_units_of(n: int) -> bool:
        return all(shape[-1] % n == 0 and not any(step % n for step in steps[:-1]) for shape, steps in added)

    if any(key != 1 for key in keys):
        return 0
    if alignment == CHUNKS and all(rows) and in_units_of(8):
        return CHUNKS
    found = PAIRS if alignment and in_units_of(2) else 0
    return found if any(rows) else found | ONE_ROW
