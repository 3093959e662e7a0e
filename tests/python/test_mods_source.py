"""What a kernel's source has of mods: names that C++ takes, and what is said where a compiler refuses it."""

from __future__ import annotations

import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, CompileError, UnsupportedError
from cupyflash.arrays.adapters import NUMPY
from cupyflash.cache.checks import CacheOptions, make_cache_problem
from cupyflash.compile import jit, nvrtc
from cupyflash.gpu.device import Device
from cupyflash.launch import run
from cupyflash.mods import bind, description, read
from cupyflash.mods.expression import FUNCTIONS, NAMES
from cupyflash.mods.parse import parse
from cupyflash.mods.places import of_places
from cupyflash.options import Options
from cupyflash.plan.families import plan_call
from cupyflash.plan.variant import kernel_sources
from cupyflash.problem import make_problem

# Names that only look taken.
FREE = ("table", "bias", "kernel", "threads", "size_t", "std", "float4", "isnan", "main", "out", "lse", "params",
        "emits", "Table", "lengths", "at", "count", "store", "place_of", "mod_value", "x1", "final")  # fmt: skip


def struct_of(label: str) -> str:
    """A struct with an array of this name among those of other dtypes."""
    text = (
        "array X_ fp32 1\narray a_ fp16 1\narray b_ bf16 1\narray c_ fp64 1\n"
        "score_mod tanh(score) * abs(X_(k) + a_(k) + b_(k) + c_(k)) + pow(score, max(0, q % 3)) + 2.0f * (q - k)"
        "+ sqrt(k - q)\nmask_mod X_[q] < inf && q < k"
    )
    return read(text).source().replace("X_", label)


def refused(structs: list[str]) -> set[int]:
    """Numbers of the structs that NVRTC refuses; of several, perhaps the first alone."""
    members = "".join(f"const void *mod_array_{i}; Lengths mod_array_{i}_lengths; " for i in range(4))
    lines = [f'#include "attention/mods.cuh"\nstruct Given {{ {members} }};']
    for i, struct in enumerate(structs):
        start, end = f"namespace mods {{ namespace n{i} {{", "} }"
        inside = struct.replace("namespace mods {", start).replace("}  // namespace mods", end).replace("\n", " ")
        score = f"mods::n{i}::Mods(p).score_mod(mods::Dual(1.f), 0, 1, 2, 3).d"
        lines.append(f"{inside} __device__ float use{i}(Given p) {{ return {score}; }}")
    try:
        nvrtc.find().compile("\n".join(lines), "t.cu", kernel_sources(), jit._options("sm_80"))
    except nvrtc.NvrtcError as e:
        return {int(n) - 3 for n in re.findall(r"t\.cu\((\d+)\): (?:catastrophic )?error", e.log)}
    return set()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("score + 0.5f * (k - q)", "(score + times(0.5f, (at_k - at_q)))"),
        ("score + 1.5f * (k - q)", "(score + (1.5f * real((at_k - at_q))))"),
        ("score + sqrt(0.5f * (k - q))", "(score + sqrt((0.5f * real((at_k - at_q)))))"),
        (
            "0.5f * (k - q) < 1.f ? score : score + -0.5f * (k - q)",
            "(((0.5f * real((at_k - at_q))) < 1.0f) ? score : (score + times((-0.5f), (at_k - at_q))))",
        ),
        ("(k - q + 3) * score", "(real(((at_k - at_q) + Place(3))) * score)"),
        ("score - inf * (k - q)", "(score - (inf() * real((at_k - at_q))))"),
        ("score / (1 + abs(q - k))", "divide(score, (1 + abs((q - k))))"),
        ("score - abs(q - k)", "(score - abs(real((at_q - at_k))))"),
        ("score + min(q - k, 7)", "(score + min(real((at_q - at_k)), 7))"),
        ("-q < 5 ? score : q", "(((-at_q) < Place(5)) ? score : real(at_q))"),
        ("score + (q - 20000000)", "(score + (q - 20000000))"),
        ("score + 2 * q", "(score + (2 * q))"),
        ("score + (1 - 2)", "(score + (1 - 2))"),
        ("score + x[max(0, q - k)]", "(score + x(max(0, (q - k))))"),
        ("q / 2 == k ? score : 0", "((quotient(q, 2) == k) ? score : 0)"),
        ("1 < 2 && b != h ? score : 0", "(((1 < 2) && (b != h)) ? score : 0)"),
    ],
)
def test_sums_of_places_are_floats_and_compared_at_once(expression: str, expected: str) -> None:
    assert of_places(parse(expression, "score_mod", {"x": ("fp32", 1)})) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("pow(score, 3)", "mods::whole_power<3>(score)"),
        ("pow(score, 1)", "pow(score, 1)"),
        ("pow(score, -2)", "pow(score, (-2))"),
        ("pow(score, 1.5f)", "mods::known_power(score, 1.5f)"),
        ("pow(x[k], -0.5f)", "mods::known_power(x(k), -0.5f)"),
        ("pow(score, 3.0000000000000004)", "mods::whole_power<3>(score)"),
        ("pow(score, 7.5f)", "pow(score, 7.5f)"),
        ("pow(score, x[k])", "pow(score, x(k))"),
        ("score / -4", "(score * -0.25f)"),
        ("x[k] / -3", "mods::divide_by(x(k), -3.0f, 1.f / -3.0f)"),
        ("score / x[k]", "divide(score, x(k))"),
    ],
)
def test_powers_and_quotients_by_numbers_are_less_work(expression: str, expected: str) -> None:
    assert of_places(parse(expression, "score_mod", {"x": ("fp32", 1)})) == expected


@pytest.fixture(scope="module")
def _with_nvrtc() -> None:
    try:
        nvrtc.find()
    except UnsupportedError as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("_with_nvrtc")
def test_free_names_compile() -> None:
    assert all(map(description._is_free, FREE))
    assert not refused([struct_of(label) for label in FREE])


@pytest.mark.usefixtures("_with_nvrtc")
def test_names_of_headers_are_free_or_compile() -> None:
    """Every word of the headers, so that one that a header takes tomorrow is missed today no longer."""
    words = {word for text in kernel_sources().values() for word in re.findall(r"\b[A-Za-z]\w*", text)}
    free = sorted(word for word in words if description._is_free(word))
    assert len(free) > 2000
    assert not [free[i] for i in refused([struct_of(word) for word in free])]


@pytest.mark.usefixtures("_with_nvrtc")
@pytest.mark.parametrize(
    "label", ["and_eq", "xor_eq", "NULL", "wchar_t", "thread_local", "static_cast", "ModArray", "Fp16"]
)
def test_names_that_c_takes_would_not_compile(label: str) -> None:
    assert refused([struct_of(label)])


TAKEN = (
    "and_eq", "bitand", "bitor", "char8_t", "char16_t", "char32_t", "co_await", "compl", "concept", "const_cast",
    "consteval", "constinit", "dynamic_cast", "ModArray", "not_eq", "NULL", "or_eq", "reinterpret_cast", "requires",
    "static_assert", "static_cast", "thread_local", "wchar_t", "xor_eq", "blockIdx", "Fp16",
    "double", *NAMES, *FUNCTIONS,
)  # fmt: skip
NO_NAMES = ("CUPYFLASH_MODS_CUH", "_table", "größe", "table.x", "2nd", "a table", "")


@pytest.mark.parametrize("label", [*TAKEN, *NO_NAMES])
def test_names_that_no_array_may_have_are_refused(label: str) -> None:
    what = f"their own, and {label!r} is taken; rename it" if label in TAKEN else "ASCII letters, digits and _"
    with pytest.raises(ArgumentError, match=f"^mod_arrays: expected names of {what}"):
        description.make((description.Read(label, "fp32", 1),), None, None)


# ---- Arrays beside a text that names others ----


OTHERS: tuple[tuple[tuple[np.ndarray, ...], str], ...] = (
    ((), "none"),
    ((np.zeros((2, 3)),), "fp64 (2, 3)"),
    ((np.zeros(3, np.float32),), "fp32 (3,)"),
    ((np.zeros((2, 3), np.float32),) * 2, "fp32 (2, 3), fp32 (2, 3)"),
)


def to_attention(x: np.ndarray, of_mods: dict[str, np.ndarray], text: str) -> None:
    run.forward(NUMPY, {"q": x, "k": x, "v": x, **of_mods}, Options(mods=text), False)


def to_a_cache(x: np.ndarray, of_mods: dict[str, np.ndarray], text: str) -> None:
    arrays = {"q": x, "k_cache": x, "v_cache": x, "cache_seqlens": np.ones(1, np.int32), **of_mods}
    dtypes = {name: NUMPY.dtype_name(y.dtype) for name, y in arrays.items()}
    make_cache_problem({name: y.shape for name, y in arrays.items()}, dtypes, CacheOptions(mods=text))


@pytest.mark.parametrize(("given", "got"), OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("call", [to_attention, to_a_cache])
def test_arrays_are_those_that_the_text_reads(given: tuple[np.ndarray, ...], got: str, call: Any) -> None:
    """A user's `bind` writes the text of the arrays; a program may bring a text and others."""
    text = "array t fp32 2\nscore_mod score + t(h, k)"
    message = f"mod_arrays: expected t of fp32 with 2 dimensions; got {got}"
    with pytest.raises(ArgumentError, match=re.escape(message) + "$"):
        call(np.zeros((1, 4, 2, 16), np.float32), {f"mod_array_{i}": y for i, y in enumerate(given)}, text)


# ---- Errors of a compiler ----


def test_what_a_compiler_refuses_is_said_with_the_mods() -> None:
    def refuses(*_: Any) -> tuple[bytes, str]:
        raise nvrtc.NvrtcError("kernel.cu(7): error: expression must have a constant value")

    text, _ = bind("score + table[h]", "q >= k", {"table": np.ones(4, np.float32)})
    problem = make_problem(((1, 64, 4, 136),) * 3, ("fp16",) * 3, mods=text, mod_shapes=((4,),))
    variant = next(x.variant for x in plan_call(problem, Device.synthetic("sm_80")).launches if x.variant.mods)
    compiler: Any = SimpleNamespace(archs=("sm_80",), name="12.9", compile=refuses)
    with pytest.raises(CompileError) as error:
        jit._compile(variant, "sm_80", compiler)
    for words in (
        "constant value\nIt has array table",
        "It has score_mod (score + table(h))\nIt has mask_mod (q >= k)\nPlease",
    ):
        assert words in str(error.value)
    assert error.value.mods == text
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert "It has" not in str(CompileError("fwd", "sm_80", "error: no"))
