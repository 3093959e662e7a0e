"""The checks of arrays by the table, as far as they say what an array's row says: shape, dtype, device and strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..arrays.adapters import Native, Signature, place
from ..bias import max_seqlens
from ..block_mask import code_of
from ..errors import ArgumentError
from ..mods.description import read
from ..operands import Operand, Pass, shape_of
from ..options import Options
from ..plan.extents import Extents
from ..problem import HALF, MAX_SEQLEN, NO_PAGES, Bias, Problem, make_problem
from ..sequences import Sequences
from .packed import check_integers
from .packed import count as packed_count
from .passes import pages_of, sizes_of


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
    shapes, pages = _shapes_by_table(found)
    alibi, dropout = (len(found[x][0]) if x in found else 0 for x in ("alibi_slopes", "dropout_seed"))
    features: dict[str, Any] = {"alibi": alibi, "dropout": dropout, "pages": pages, "sequences": packed}
    features |= {"kv_range": "kv_range" in lengths, "sink": "sink" in found}
    if "bias" in found:
        features["bias"] = Bias.of(found["bias"][0], dtypes["bias"], masked="mask" in found)
    elif "mask" in found:
        features["bias"] = Bias.of(found["mask"][0], "bool", strides=found["mask"][1])
    if packed is not None:
        tiles = found["block_tiles"][0] if "block_tiles" in found else None
        features["max_seqlens"] = max_seqlens([found[x][0] for x in ("bias", "mask") if x in found], tiles)
    if "block_tiles" in found:
        features["block_mask"] = code_of(found["block_tiles"][0])
    features["mod_shapes"] = _shapes_of_mods(options.mods, which, found, dtypes)
    problem = make_problem(shapes, [dtypes[x] for x in "qkv"], **options._asdict(), **features)
    if packed is None and problem.kv_range:
        check_integers(library, "kv_range", lengths["kv_range"], problem.batch, device)
    shape = tuple(found["q"][0])
    for name, key in found.items():
        if which.rows[name].like == "q" and (tuple(key[0]), dtypes[name]) != (shape, dtypes["q"]):
            raise ArgumentError(
                f"{name}: expected shape {shape} and dtype {dtypes['q']} of q, got {tuple(key[0])} and {dtypes[name]}"
            )
    signatures = [library.describe(name, key) for name, key in found.items()]
    for name, sig in zip(names, signatures, strict=True):
        row = which.rows[name]
        if name not in "qkv" and not row.like and not row.free and name not in lengths:
            _check_own(row, sig, dtypes[name], problem, device)
        if sig.device != device:
            raise ArgumentError(f"{name}: expected the device of q, {place(device)}, got {place(sig.device)}")
        if row.strided and sig.strides[-1] != 1 and sig.shape[-1] > 1 and 0 not in sig.shape:
            raise ArgumentError(
                f"{name}: expected a stride of 1 along {row.dims[-1]}, got {sig.strides[-1]} elements; "
                "make a contiguous copy first"
            )
    return problem, signatures


def _shapes_by_table(found: Mapping[str, tuple[Any, ...]]) -> tuple[list[Any], tuple[int, int, bool]]:
    """Of q, k and v; in pages, of the rows that a block table counts, and what `make_problem` is told of them."""
    q, k, v = (found[x][0] for x in "qkv")
    if "block_table" not in found:
        return [q, k, v], NO_PAGES
    pages, rows = pages_of(k, found["block_table"][0])
    return [q, rows, rows], pages


def _shapes_of_mods(
    mods: str, which: Pass, found: Mapping[str, tuple[Any, ...]], dtypes: Mapping[str, str]
) -> tuple[tuple[int, ...], ...]:
    """Of the arrays that mods read, which are what their text says."""
    given = [name for name in found if which.rows[name].free]
    wanted = read(mods).arrays
    if [(dtypes[x], len(found[x][0])) for x in given] != [(x.dtype, x.dims) for x in wanted]:
        said = ", ".join(f"{x.name} of {x.dtype} with {x.dims} dimensions" for x in wanted) or "none"
        got = ", ".join(f"{dtypes[x]} {tuple(found[x][0])}" for x in given) or "none"
        raise ArgumentError(f"mod_arrays: expected {said}; got {got}")
    return tuple(tuple(found[x][0]) for x in given)


def _check_own(row: Operand, sig: Signature, dtype: str, problem: Problem, device: int) -> None:
    """An array with a shape and a dtype of its own. What is fp32 beside 16-bit arrays is fp64 beside those of fp64."""
    dims = row.packed if problem.packed else row.dims
    sizes = sizes_of(Extents.of(problem), problem.head_dim, problem.packed)
    shape = shape_of(dims, sizes)
    wanted = "fp64" if (row.dtype, problem.dtype) == ("fp32", "fp64") else row.dtype or problem.dtype
    takes_fp32 = row.broadcasts and not row.dtype and problem.dtype in HALF
    if takes_fp32 and dtype == "fp32":
        wanted = "fp32"
    if not row.fits(tuple(sig.shape), sizes, problem.packed) or (dtype, sig.device) != (wanted, device):
        words = f"{_words(dims)} = {shape}".replace(str(MAX_SEQLEN), "any")
        if row.broadcasts:
            words = f"one that broadcasts to {words}"
            wanted += " or fp32" * takes_fp32
        if row.lacks:
            words += f" or {_words(dims[len(row.lacks) :])} = {shape[len(row.lacks) :]}"
        raise ArgumentError(
            f"{row.name}: expected shape {words}, dtype {wanted}, on {place(device)}; got "
            f"{tuple(sig.shape)}, {dtype}, on {place(sig.device)}"
        )


def _words(dims: Sequence[str]) -> str:
    """Dimensions as Python writes a tuple."""
    return f"({', '.join(dims)}{',' * (len(dims) == 1)})"
