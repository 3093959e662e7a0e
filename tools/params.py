"""Writes the C++ of the launch parameters, kernels_cu/*/params*.cuh, from the table of arrays and lists of fields.

    python -m tools.params

`cupyflash/operands.py` and `cupyflash/plan/params_decode.py` say what is in them, `tests/kernels/test_params.py` that
they are what this makes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from cupyflash.operands import BACKWARD, FORWARD, Pass
from cupyflash.plan import key_ranges, params_decode
from cupyflash.plan.params import COMMON, UNBOUNDED, Field, Struct, hopper_struct, plain_struct

FOLDER = Path(__file__).resolve().parents[1] / "kernels_cu"
WIDTH, INDENT = 120, "    "
HEAD = """\
// {what}. Made from {source}, by
// `python -m tools.params`; the generated entry unit asserts the sizes.
#ifndef CUPYFLASH_{guard}_CUH
#define CUPYFLASH_{guard}_CUH
"""


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}// ", subsequent_indent=f"{indent}// ") if text else []


def _declarations(fields: Iterable[Field]) -> list[tuple[str, str]]:
    """(declaration, comment), where neighbours of one type share a declaration up to the first that has a comment."""
    groups: list[list[Field]] = []
    for field in fields:
        last = groups[-1][-1] if groups else None
        if last and last.type == field.type and not last.text and not field.type.endswith("*"):
            groups[-1].append(field)
        else:
            groups.append([field])
    found = []
    for group in groups:
        kind = group[0].type
        names = ", ".join(field.name for field in group)
        found.append((f"{kind}{'' if kind.endswith('*') else ' '}{names};", group[-1].text))
    return found


def _body(struct: Struct) -> list[str]:
    """The fields' lines; comments beside declarations are aligned in each run of them, as clang-format does."""
    lines = _comment(struct.first, INDENT)
    for has_text, run in groupby(_declarations(struct.fields), key=lambda pair: bool(pair[1])):
        pairs = list(run)
        column = max(len(declaration) for declaration, _ in pairs)
        for declaration, text in pairs:
            if not has_text:
                lines += textwrap.wrap(declaration, WIDTH, initial_indent=INDENT, subsequent_indent=2 * INDENT)
                continue
            start = f"{INDENT}{declaration:{column}}  // "
            first, *more = textwrap.wrap(text, WIDTH - len(start))
            lines += [start + first, *(" " * (len(start) - 3) + "// " + line for line in more)]
    return lines


def text_of(struct: Struct) -> str:
    """A struct in C++."""
    body = _body(struct)
    lines = [f"struct {struct.name} {{", *body, "};"]
    if len(body) == 1 and "//" not in body[0]:
        lines = [" ".join(line.strip() for line in lines)]
    return "\n".join([*_comment(struct.text), *lines]) + "\n"


def headers(forward: Pass = FORWARD, backward: Pass = BACKWARD) -> dict[str, str]:
    """The text of all files, by their paths in kernels_cu."""
    passes = (forward, backward)
    unbounded = (
        f"constexpr int kUnbounded = 1 << {UNBOUNDED.bit_length() - 1};"
        "  // larger than any sequence; i + kUnbounded still fits an int\n"
    )
    plain = [*map(text_of, COMMON), unbounded, *(text_of(plain_struct(which)) for which in passes)]
    hopper = ['#include "attention/params.cuh"\n#include "hw/ptx_sm90.cuh"\n']
    hopper += [text_of(hopper_struct(which)) for which in passes]
    table, fields = "the table of arrays, cupyflash/operands.py", "the fields in cupyflash/plan/params_decode.py"
    start = HEAD.format(what="Launch-time arguments, one struct by value a kernel", source=table, guard="PARAMS")
    start90 = HEAD.format(what="Launch-time arguments of the sm90 family", source=table, guard="PARAMS_SM90")
    decode = HEAD.format(what="Launch-time arguments of attention over a cache", source=fields, guard="PARAMS_DECODE")
    ranges = HEAD.format(
        what="Launch-time arguments of key_ranges.cuh", source="cupyflash/plan/key_ranges.py", guard="PARAMS_RANGES"
    )
    return {
        "attention/params.cuh": "\n".join([start, *plain, "#endif  // CUPYFLASH_PARAMS_CUH\n"]),
        "attention/params_sm90.cuh": start90 + "\n".join([*hopper, "#endif  // CUPYFLASH_PARAMS_SM90_CUH\n"]),
        "any/params_ranges.cuh": "\n".join(
            [ranges, text_of(key_ranges.KEY_RANGE), "#endif  // CUPYFLASH_PARAMS_RANGES_CUH\n"]
        ),
        "decode/params_decode.cuh": decode
        + "\n".join([hopper[0], *map(text_of, params_decode.STRUCTS), "#endif  // CUPYFLASH_PARAMS_DECODE_CUH\n"]),
    }


if __name__ == "__main__":
    for name, text in headers().items():
        (FOLDER / name).write_text(text)
