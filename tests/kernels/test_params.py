"""The params structs: the C++ text is what the table of arrays makes, and NumPy's dtypes mirror it: names, order, types
and offsets."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupyflash.operands import BACKWARD, FORWARD, Number, Pass
from cupyflash.plan import key_ranges, params, params_decode
from cupyflash.plan.variant import kernel_sources
from tools.params import headers

FILES = ("attention/params.cuh", "attention/params_sm90.cuh", "decode/params_decode.cuh", "any/params_ranges.cuh")
SOURCE = re.sub(r"//.*", "", "".join(kernel_sources()[name] for name in FILES))
MIRRORS: dict[str, np.dtype[np.void]] = {
    "Strides": params.STRIDES,
    "ScoreStrides": params.SCORE_STRIDES,
    "Lengths": params.LENGTHS,
    "Problem": params.PROBLEM,
    "Schedule": params.SCHEDULE,
    "FwdParams": params.FWD_PARAMS,
    "BwdParams": params.BWD_PARAMS,
    "FwdSm90Params": params.FWD_SM90_PARAMS,
    "BwdSm90Params": params.BWD_SM90_PARAMS,
    "Shares": params_decode.SHARES_DTYPE,
    "DecodeParams": params_decode.DECODE_PARAMS,
    "DecodeSm90Params": params_decode.DECODE_SM90_PARAMS,
    "AppendParams": params_decode.APPEND_PARAMS,
    "DequantizeParams": params_decode.DEQUANTIZE_PARAMS,
    "KeyRangeParams": key_ranges.KEY_RANGE_PARAMS,
}
SCALARS: dict[str, np.dtype[Any]] = {
    "int": np.dtype("i4"),
    "unsigned": np.dtype("u4"),
    "long long": np.dtype("i8"),
    "float": np.dtype("f4"),
    "ptx::TensorMap": params.TENSOR_MAP,
}


def declared(struct: str) -> list[tuple[str, np.dtype[Any]]]:
    """(name, type) of a C++ struct's fields; pointers are 8-byte addresses."""
    body = re.search(rf"struct {struct} \{{(.*?)\}};", SOURCE, re.DOTALL)
    assert body is not None, f"no header has a struct {struct}"
    found: list[tuple[str, np.dtype[Any]]] = []
    for statement in filter(None, map(str.strip, body[1].split(";"))):
        base, names = re.fullmatch(r"(?:const )?(long long|[\w:]+) (.*)", statement, re.DOTALL).groups()  # type: ignore[union-attr]
        for name in map(str.strip, names.split(",")):
            pointer = name.startswith("*")
            kind = np.dtype("u8") if pointer else SCALARS[base] if base in SCALARS else MIRRORS[base]
            found.append((name.lstrip("*"), kind))
    return found


def alignment(kind: np.dtype[Any]) -> int:
    """In C++, where a tensor map is alignas(64) and gives that to what holds one; NumPy knows of no such thing."""
    if kind == params.TENSOR_MAP:
        return 64
    if kind.names is None:
        return kind.alignment
    return max(alignment(kind[name]) for name in kind.names)


def test_every_struct_has_a_mirror() -> None:
    assert re.findall(r"struct (\w+) \{", SOURCE) == list(MIRRORS)


@pytest.mark.parametrize("struct", MIRRORS)
def test_mirror(struct: str) -> None:
    fields, mirror = declared(struct), MIRRORS[struct]
    assert mirror.names == tuple(name for name, _ in fields)
    offset = 0
    for name, kind in fields:  # the rule of C: each field at the next multiple of its alignment
        offset = -(-offset // alignment(kind)) * alignment(kind)
        assert mirror.fields is not None
        assert mirror.fields[name][:2] == (kind, offset), name
        offset += kind.itemsize
    assert mirror.itemsize == -(-offset // alignment(mirror)) * alignment(mirror)


def test_the_headers_are_those_of_the_table() -> None:
    for name, text in headers().items():
        assert kernel_sources()[name] == text, "python -m tools.params"


@pytest.mark.parametrize("which", [FORWARD, BACKWARD], ids=lambda which: which.name)
def test_what_features_bring_comes_last(which: Pass) -> None:
    """In the order of the table, so that nothing that others have moves."""
    plain, hopper = params.params_of(which)
    names = [row.name if isinstance(row, Number) else row.member for row in which.brought]
    behind = (plain.names or ())[(plain.names or ()).index("schedule") + 1 :]
    assert [name for name in behind if not name.endswith(("_stride", "_lengths"))] == names
    assert (hopper.names or ())[-1] == "plain"


def test_tensor_map() -> None:
    declaration = "struct alignas(64) TensorMap { u64 opaque[16]; };"
    assert declaration in kernel_sources()["hw/ptx_sm90.cuh"]
    assert params.TENSOR_MAP.itemsize == 128


def test_unbounded() -> None:
    shift = re.search(r"kUnbounded = 1 << (\d+);", SOURCE)
    assert shift is not None
    assert int(shift[1]) == params.UNBOUNDED.bit_length() - 1
