"""The kernels' launch parameters: the structs of `kernels_cu/attention/params*.cuh`, made from the table of arrays.

A struct is listed once, field by field. The NumPy dtype is made of that list, and so is the C++ text
(``python -m tools.params``). What features bring comes last: kernels read their parameters at constant offsets, so a
new feature leaves the machine code of the kernels without it as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..operands import BACKWARD, FORWARD, INPUT, Number, Operand, Pass

UNBOUNDED = 1 << 30  # kUnbounded: a window side without bound
_ELEMENTS = {
    "": "void",
    "fp32": "float",
    "int32": "int",
    "int64": "long long",
    "bool": "void",
}  # "": those of q, whichever they are


class Field(NamedTuple):
    """One field: its type in C++, and what its comment says."""

    name: str
    type: str
    text: str = ""


class Struct(NamedTuple):
    """A struct by its name in C++; `text` is the comment above it, or above its first field."""

    name: str
    fields: tuple[Field, ...]
    text: str = ""
    first: str = ""


_STRIDES = Struct(
    "Strides",
    (Field("batch", "long long"), Field("row", "long long"), Field("head", "long long")),
    "In elements; the stride along the last dimension is always 1.",
)
_SCORE_STRIDES = Struct(
    "ScoreStrides",
    tuple(Field(name, "long long") for name in ("batch", "head", "row", "key")),
    "The same of what scores have: by sequence, head of q, query and key; 0 where it is broadcast.",
)
_LENGTHS = Struct(
    "Lengths",
    tuple(Field(name, "int") for name in "abcd"),
    "Of the dimensions of an array that mods read; 1 of those that it lacks.",
)
_PROBLEM = Struct(
    "Problem",
    (
        Field("batch", "int"),
        Field("seqlen_q", "int"),
        Field("seqlen_k", "int"),
        Field("heads_q", "int"),
        Field("heads_k", "int", "heads_q is a multiple of heads_k (GQA, MQA)"),
        Field("window_left", "int"),
        Field("window_right", "int", "query i sees keys [i + seqlen_k - seqlen_q - left, ... + right]; or kUnbounded"),
        Field("scale", "float", "of the scores, before the softmax"),
        Field("softcap", "float", "c in c * tanh(score / c); kSoftcap only"),
    ),
    "What was asked for: the same in every launch of one call.",
)
_SCHEDULE = Struct(
    "Schedule",
    (
        Field("section", "int"),
        Field("last_section", "int", "heads taken together; the last ones, which even out the tail (schedule.cuh)"),
        Field("first_stores", "int", "backward: whether the first share of dQ is stored (dq_accum.cuh)"),
    ),
    "What the plan chose for it.",
)
COMMON = (_STRIDES, _SCORE_STRIDES, _LENGTHS, _PROBLEM, _SCHEDULE)


def _pointer(row: Operand, which: Pass) -> Field:
    use = which.uses[row.name]
    is_like = row.like in which.rows and not row.width
    shape = f"like {row.like}" if is_like else f"[{', '.join(row.dims)}]"
    shape = f"broadcasts to {shape}" if row.broadcasts and not row.like else "of any shape" if row.free else shape
    facts = [shape if row.strided or row.hopper or row.broadcasts else f"{shape}, contiguous", use.text]
    if row.feature and "null:" not in use.text:
        facts.append("null: not given")
    return Field(
        row.member, f"{'const ' * (use.role == INPUT)}{_ELEMENTS[row.dtype]} *", "; ".join(filter(None, facts))
    )


def _strides(row: Operand) -> list[Field]:
    if row.free:
        return [Field(f"{row.member}_lengths", "Lengths")]
    kind = "ScoreStrides" if row.broadcasts else "Strides"
    return [Field(f"{row.member}_stride", kind)] * (row.strided or row.broadcasts)


def plain_struct(which: Pass) -> Struct:
    """The struct of a pass's kernels: pointers, strides, numbers; then what features bring, in their order."""
    rows = [row for row in which.rows.values() if not row.hopper]
    common = [row for row in rows if not row.feature]
    fields = [_pointer(row, which) for row in common]
    fields += [field for row in common for field in _strides(row)]
    fields += [Field("problem", "Problem"), Field("schedule", "Schedule")]
    for brought in which.brought:
        if isinstance(brought, Number):
            fields.append(Field(brought.name, brought.type, brought.text))
        else:
            fields += [_pointer(brought, which), *_strides(brought)]
    return Struct({"forward": "FwdParams", "backward": "BwdParams"}[which.name], tuple(fields))


def hopper_struct(which: Pass) -> Struct:
    """That of its sm90 kernels: tensor maps and what else this family alone has, then the plain one."""
    plain = plain_struct(which)
    boxes = {row.member: which.uses[row.name].box for row in which.rows.values()}
    fields = [Field(f"map_{name}", "ptx::TensorMap") for name, box in boxes.items() if box is not None]
    fields += [_pointer(row, which) for row in which.rows.values() if row.hopper]
    fields.append(Field("plain", plain.name, "the same arrays, for what is not TMA's"))
    by_rows: dict[Any, list[str]] = {}
    for name, box in boxes.items():
        if box is not None:
            by_rows.setdefault(box, []).append(name)
    rows = [f"{_constant(box)} ({', '.join(names)})" for box, names in by_rows.items()]
    first = (
        "[head_dim (or head_dim_v), seqlen, heads, batch], innermost first, with the 128-byte swizzle, in boxes of 64 "
        "columns by "
        f"{', '.join(rows[:-1])} or {rows[-1]} rows; kernels that share the struct share the boxes, those of the first."
        " Arrays whose rows a kernel interleaves have five dimensions (tile_sm90.cuh)."
    )
    return Struct(plain.name.replace("Params", "Sm90Params"), tuple(fields), first=first)


def _constant(box: int | str) -> str:
    return str(box) if isinstance(box, int) else "k" + "".join(word.capitalize() for word in box.split("_"))


TENSOR_MAP = np.dtype(("u8", 16))  # the driver's CUtensorMap: 128 bytes
_SCALARS: dict[str, np.dtype[Any]] = {
    "int": np.dtype("i4"),
    "unsigned": np.dtype("u4"),
    "float": np.dtype("f4"),
    "long long": np.dtype("i8"),
    "ptx::TensorMap": TENSOR_MAP,
}


def dtype_of(struct: Struct, inner: Mapping[str, np.dtype[Any]]) -> np.dtype[np.void]:
    """A struct in NumPy; `inner`: the types of its fields. Tensor maps are aligned to 64 bytes, and so is the size of
    what has any."""
    types = [np.dtype("u8") if field.type.endswith("*") else inner[field.type] for field in struct.fields]
    found = np.dtype([(field.name, kind) for field, kind in zip(struct.fields, types, strict=True)], align=True)
    if TENSOR_MAP not in types:
        return found
    fields = [(name, *place[:2]) for name, place in (found.fields or {}).items()]
    names, formats, offsets = zip(*fields, strict=True)
    size = -(-found.itemsize // 64) * 64
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


STRIDES, SCORE_STRIDES, LENGTHS, PROBLEM, SCHEDULE = (dtype_of(struct, _SCALARS) for struct in COMMON)
COMMON_DTYPES = _SCALARS | {
    struct.name: kind for struct, kind in zip(COMMON, (STRIDES, SCORE_STRIDES, LENGTHS, PROBLEM, SCHEDULE), strict=True)
}


@functools.cache
def params_of(which: Pass) -> tuple[np.dtype[np.void], np.dtype[np.void]]:
    """Both structs of a pass: the plain one, and that of the sm90 family."""
    plain = plain_struct(which)
    found = dtype_of(plain, COMMON_DTYPES)
    return found, dtype_of(hopper_struct(which), COMMON_DTYPES | {plain.name: found})


FWD_PARAMS, FWD_SM90_PARAMS = params_of(FORWARD)
BWD_PARAMS, BWD_SM90_PARAMS = params_of(BACKWARD)
