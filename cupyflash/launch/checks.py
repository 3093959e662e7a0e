"""The checks of arrays by the table, as far as they say what an array's row says: shape, dtype, device and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.adapters import Native, Signature, place
from ..errors import ArgumentError
from ..mods.description import read
from ..operand import MASK_TILE
from ..operands import Operand, Pass, shape_of
from ..options import Options
from ..plan.extents import Extents
from ..problem import HALF, MAX_SEQLEN, Problem, make_problem
from ..sequences import Sequences
from .brought import brought_by, room_of
from .packed import check_integers
from .packed import count as packed_count
from .passes import given_of, pages_of, sizes_of


def check(
    which: Pass, names: Sequence[str], library: Native, keys: Sequence[tuple[Any, ...]], options: Options
) -> tuple[Problem, list[Signature]]:
    """All checks of the arrays given to a pass, by the table and their library's signatures.

    Returns:
        The problem, and the signatures spelled out.
    """
    found = dict(zip(names, keys, strict=True))
    dtypes = {name: library.dtype_name(key[2]) for name, key in found.items()}
    device, lengths = found["q"][3], {name: key for name, key in found.items() if name in Sequences._fields}
    packed = packed_count(library, lengths, device) if "cu_seqlens_q" in lengths else None
    given = given_of(which, tuple(names))
    read_by_mods = [given.names[i] for i in given.of_mods]
    read(options.mods).check([(dtypes[name], found[name][0]) for name in read_by_mods])
    features = {**brought_by(given, library, keys)._asdict(), "sequences": packed, "max_seqlens": room_of(given, keys)}
    shapes = [keys[i][0] for i in given.qkv]
    if given.table is not None:
        shapes[1:] = [pages_of(shape, keys[given.table][0])[1] for shape in shapes[1:]]
    problem = make_problem(shapes, [dtypes[x] for x in "qkv"], **options._asdict(), **features)
    if packed is None and problem.kv_range:
        check_integers(library, "kv_range", lengths["kv_range"], problem.batch, device)
    shape = (*found["q"][0][:-1], problem.head_dim_v)
    for name, key in found.items():
        if which.rows[name].like == "q" and (tuple(key[0]), dtypes[name]) != (shape, dtypes["q"]):
            of_v = "" if problem.head_dim_v == problem.head_dim else ", with the head_dim of v"
            raise ArgumentError(
                f"{name}: expected shape {shape} and dtype {dtypes['q']} of q{of_v}, got {tuple(key[0])} and "
                f"{dtypes[name]}" + (f"; give {library.cast(name, dtypes['q'])}" if tuple(key[0]) == shape else "")
            )
    signatures = [library.describe(name, key) for name, key in found.items()]
    for name, sig in zip(names, signatures, strict=True):
        row = which.rows[name]
        if name not in "qkv" and not row.like and not row.free and name not in lengths:
            _check_own(library, row, sig, dtypes[name], problem, device)
        if sig.device != device:
            raise ArgumentError(f"{name}: expected the device of q, {place(device)}, got {place(sig.device)}")
        if row.strided and sig.strides[-1] != 1 and sig.shape[-1] > 1 and 0 not in sig.shape:
            raise ArgumentError(
                f"{name}: expected a stride of 1 along {row.dims[-1]}, got {sig.strides[-1]} elements; "
                "make a contiguous copy first"
            )
    return problem, signatures


def _check_own(
    library: Native, row: Operand, sig: Signature, dtype: str, problem: Problem, device: int
) -> None:  # fmt: skip
    """An array with a shape and a dtype of its own. What is fp32 beside 16-bit arrays is fp64 beside those of fp64."""
    dims = row.packed if problem.packed else row.dims
    sizes = sizes_of(Extents.of(problem), problem.widths, problem.packed)
    shape = shape_of(dims, sizes)
    wanted = "fp64" if (row.dtype, problem.dtype) == ("fp32", "fp64") else row.dtype or problem.dtype
    if row.name == "block_tiles" and problem.packed:
        _check_room(sig.shape, shape, problem)
    takes_fp32 = row.broadcasts and not row.dtype and problem.dtype in HALF
    if takes_fp32 and dtype == "fp32":
        wanted = "fp32"
    fits = row.fits(tuple(sig.shape), sizes, problem.packed)
    if not fits or (dtype, sig.device) != (wanted, device):
        way_out = (
            "give it as mask" if (row.name, dtype) == ("bias", "bool") else f"give {library.cast(row.name, wanted)}"
        )
        words = f"{_words(dims)} = {shape}".replace(str(MAX_SEQLEN), "any")
        if row.broadcasts:
            words = f"one that broadcasts to {words}"
            wanted += " or fp32" * takes_fp32
        if row.lacks:
            words += f" or {_words(dims[len(row.lacks) :])} = {shape[len(row.lacks) :]}"
        raise ArgumentError(
            f"{row.name}: expected shape {words}, dtype {wanted}, on {place(device)}; got "
            f"{tuple(sig.shape)}, {dtype}, on {place(sig.device)}"
            + (f"; {way_out}" if fits and dtype != wanted.split()[0] and sig.device == device else "")
        )


def _check_room(tiles: Sequence[int], wanted: Sequence[int], problem: Problem) -> None:
    """Refuse a block mask with room for longer or shorter sequences than a bias or a mask beside it has."""
    for axis, (what, room) in enumerate((("queries", problem.max_seqlen_q), ("keys", problem.max_seqlen_k)), 2):
        if tiles[axis] != wanted[axis] and problem.bias is not None:
            raise ArgumentError(
                f"block_mask: expected {wanted[axis]} tiles of {MASK_TILE} {what}, since {problem.bias.argument} has "
                f"room for {room}, got {tiles[axis]}; make both for sequences of the same length"
            )


def _words(dims: Sequence[str]) -> str:
    """Dimensions as Python writes a tuple."""
    return f"({', '.join(dims)}{',' * (len(dims) == 1)})"
