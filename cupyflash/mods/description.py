"""What mods compute, and what they read: from their text to trees and to C++."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..operand import MOD_LIMIT
from .evaluate import SCORE, evaluate, place_of
from .expression import BOOL, FUNCTIONS, NAMES, PLACES, Node
from .learned import reads_of, source_of
from .parse import parse, taken
from .places import of_places

# Element types that a mod reads, in C++.
ELEMENTS = {
    "fp32": "float", "fp64": "double", "fp16": "Fp16", "bf16": "Bf16", "int32": "int", "int64": "long long",
    "bool": "unsigned char",
}  # fmt: skip
_HEADS = (
    "template <class S>\n    __device__ S score_mod(S score, int b, int h, Place at_q, Place at_k) const",
    "__device__ bool mask_mod(int b, int h, Place at_q, Place at_k) const",
)


# From this cost on an expression is a function that kernels call. Otherwise they hold it once for each score of a lane,
# 64 times and more, and the compiler takes minutes. Below, a call makes them slower (docs/performance.md).
_CALLED_FROM = 12.0

# A score_mod that gives -inf to each of these scores hides the key, whatever its score is.
_PROBES = 0, 1, -1, 1024, -1024

Places = tuple[Any, Any, Any, Any]  # b, h, q, k


class Read(NamedTuple):
    """An array that mods read."""

    name: str
    dtype: str
    dims: int


class Mods(NamedTuple):
    """`score` is None where only keys are hidden, `mask` where none are; arrays are in the order of a call's."""

    arrays: tuple[Read, ...]
    score: Node | None
    mask: Node | None

    @property
    def text(self) -> str:
        lines = [f"array {x.name} {x.dtype} {x.dims}" for x in self.arrays]
        lines += [f"{what} {node.text}" for what, node in (("score_mod", self.score), ("mask_mod", self.mask)) if node]
        return "\n".join(lines)

    def uses(self, word: str) -> bool:
        """Whether they ask for one of the places b, h, q and k."""
        return any(node.uses(word) for node in (self.score, self.mask) if node is not None)

    def check(self, arrays: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Refuse arrays, each its dtype and shape, that are not `self.arrays`.

        Raises:
            ArgumentError: their number, a dtype or a number of dimensions is another.
        """
        if [(dtype, len(shape)) for dtype, shape in arrays] != [(x.dtype, x.dims) for x in self.arrays]:
            said = ", ".join(f"{x.name} of {x.dtype} with {x.dims} dimensions" for x in self.arrays) or "none"
            got = ", ".join(f"{dtype} {tuple(shape)}" for dtype, shape in arrays) or "none"
            raise ArgumentError(f"mod_arrays: expected {said}; got {got}")

    def reads(self, learned: Sequence[int]) -> tuple[Node, ...]:
        """What score_mod reads of the arrays of these numbers that have gradients."""
        return reads_of(self.score, [self.arrays[i].name for i in learned])

    @property
    def learned(self) -> tuple[int, ...]:
        """The numbers of all arrays that have a gradient other than 0."""
        names = [x.name for x in self.arrays]
        found = {x.value for x in reads_of(self.score, names)}
        return tuple(i for i, name in enumerate(names) if name in found)

    def source(self, learned: Sequence[int] = ()) -> str:
        """The struct that kernels take them from; `learned`: the numbers of the arrays whose gradients they make."""
        members = "".join(f"    ModArray<{ELEMENTS[x.dtype]}, {x.dims}> {x.name};\n" for x in self.arrays)
        made = [f"{x.name}(p.mod_array_{i}, p.mod_array_{i}_lengths)" for i, x in enumerate(self.arrays)]
        functions = "".join(
            f"    {_called(head, node)} {{\n        const int q = at_q.whole(), k = at_k.whole();\n"
            f"        return {of_places(node)};\n    }}\n"
            for head, node in zip(_HEADS, (self.score, self.mask), strict=True)
            if node is not None
        )
        if self.score is not None and learned:
            functions += source_of(self.score, {self.arrays[i].name: i for i in learned}, self.reads(learned))
        return (
            f"namespace mods {{\nstruct Mods {{\n{members}    template <class Params>\n"
            f"    __device__ explicit Mods(const Params &p){' : ' * bool(made)}{', '.join(made)} {{}}\n{functions}}};\n"
            "}  // namespace mods\n\n"
        )

    def of_scores(self, scores: Any, places: Places, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """What becomes of scores, and its derivative by them, in NumPy.

        Args:
            scores: of the type in which to compute.
            places: b, h, q and k, which broadcast to their shape.
            arrays: those of `self.arrays`.
        """
        if self.score is None:
            return scores, np.ones_like(scores)
        return self._evaluated(self.score, scores, places, arrays)

    def by_reads(
        self, scores: Any, places: Places, arrays: Sequence[Any], learned: Sequence[int]
    ) -> list[tuple[int, Any, Any]]:
        """Of each of `reads`: its array's number, the numbers of the elements and the derivative of the score by them,
        each of the shape of the scores; other arguments as above."""
        found = []
        names, named = self._named(scores, places, arrays)
        numbers = {x.name: i for i, x in enumerate(self.arrays)}
        for read in self.reads(learned):
            if named[str(read.value)].size and self.score is not None:
                elements = place_of(read, names, named, scores.dtype.type)
                derivative = self._evaluated(self.score, scores, places, arrays, read)[1]
                found.append((numbers[str(read.value)], np.broadcast_to(elements, scores.shape), derivative))
        return found

    def shown(self, shape: tuple[int, ...], dtype: Any, places: Places, arrays: Sequence[Any]) -> Any:
        """Which keys are visible, whatever their scores are; arguments as above."""
        scores = (np.full(shape, x, dtype) for x in _PROBES)
        zeros = next(scores)
        found = np.ones(shape, bool)
        if self.score is not None:
            found = ~np.isneginf(self._evaluated(self.score, zeros, places, arrays)[0])
            for x in scores if not found.all() else ():
                found |= ~np.isneginf(self._evaluated(self.score, x, places, arrays)[0])
        if self.mask is not None:
            found &= self._evaluated(self.mask, zeros, places, arrays)[0] != 0
        return found

    def _named(self, scores: Any, places: Places, arrays: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the names in a tree say, those of values and those of arrays."""
        names = dict(zip(PLACES, places, strict=True), score=scores)
        return names, {x.name: array for x, array in zip(self.arrays, arrays, strict=True)}

    def _evaluated(
        self, node: Node, scores: Any, places: Places, arrays: Sequence[Any], by: Node = SCORE
    ) -> tuple[Any, Any]:
        """The value of a tree and its derivative, each of the shape and type of the scores."""
        with np.errstate(all="ignore"):
            found = evaluate(node, *self._named(scores, places, arrays), scores.dtype.type, by)
        value, derivative = (np.broadcast_to(np.asarray(x, scores.dtype), scores.shape) for x in found)
        return value, derivative


def _called(head: str, node: Node) -> str:
    """The head of a tree's function."""
    return head.replace("__device__", "__device__ __noinline__") if node.cost >= _CALLED_FROM else head


@functools.lru_cache(maxsize=256)
def read(text: str) -> Mods:
    """The mods of a text.

    Raises:
        ArgumentError: it is none.
    """
    arrays, nodes = [], {}
    for line in text.splitlines():
        what, _, rest = line.partition(" ")
        if what == "array":
            label, dtype, dims = rest.split()
            arrays.append(Read(label, dtype, int(dims)))
        else:
            nodes[what] = parse(rest, what, {x.name: (x.dtype, x.dims) for x in arrays})
    return make(tuple(arrays), nodes.get("score_mod"), nodes.get("mask_mod"))


def make(arrays: tuple[Read, ...], score: Node | None, mask: Node | None) -> Mods:
    """Mods of these trees, checked.

    Raises:
        ArgumentError: names, kinds or counts are not what they must be.
    """
    if score is not None and score.kind == BOOL:
        raise ArgumentError("score_mod: expected a number for each score, got a bool; hide keys by mask_mod")
    if mask is not None and mask.uses("score"):
        raise ArgumentError("mask_mod: expected an expression of b, h, q, k, got one of the score; use score_mod")
    if mask is not None and mask.kind != BOOL:
        raise ArgumentError(f"mask_mod: expected True or False for each key, got {mask.kind}; compare it")
    if len(arrays) > MOD_LIMIT:
        raise ArgumentError(
            f"mod_arrays: expected at most {MOD_LIMIT} that are read, got {len(arrays)}; put some together"
        )
    for label, dtype, dims in arrays:
        if not _is_free(label):
            if _is_taken(label):
                raise taken(label)
            raise ArgumentError(
                "mod_arrays: expected names of ASCII letters, digits and _ that begin with a letter, but none with "
                f"CUPYFLASH_, got {label!r}; rename it"
            )
        if dtype not in ELEMENTS:
            raise ArgumentError(
                f"mod_arrays: {label}: expected one of the dtypes {', '.join(ELEMENTS)}, got {dtype}; cast it"
            )
        if not 1 <= dims <= MOD_LIMIT:
            raise ArgumentError(f"mod_arrays: {label}: expected 1 to {MOD_LIMIT} dimensions, got {dims}")
    return Mods(arrays, score, mask)


# Words of C++, up to C++20, and those that macros of its headers take.
_OF_CPP = {
    "alignas", "alignof", "and", "and_eq", "asm", "assert", "auto", "bitand", "bitor", "bool", "break", "case",
    "catch", "char", "char8_t", "char16_t", "char32_t", "class", "co_await", "co_return", "co_yield", "compl",
    "concept", "const", "const_cast", "consteval", "constexpr", "constinit", "continue", "decltype", "default",
    "delete", "do", "double", "dynamic_cast", "else", "enum", "explicit", "export", "extern", "false", "float",
    "for", "friend", "goto", "if", "inline", "int", "long", "mutable", "namespace", "new", "noexcept", "not",
    "not_eq", "nullptr", "NULL", "operator", "or", "or_eq", "private", "protected", "public", "register",
    "reinterpret_cast", "requires", "return", "short", "signed", "sizeof", "static", "static_assert", "static_cast",
    "struct", "switch", "template", "this", "thread_local", "throw", "true", "try", "typedef", "typeid", "typename",
    "union", "unsigned", "using", "virtual", "void", "volatile", "wchar_t", "while", "xor", "xor_eq",
}  # fmt: skip
# CUDA's own variables and types, and what the generated struct and what reads it call theirs.
_OF_KERNELS = {
    "Bf16", "Dual", "Emit", "Fp16", "ModArray", "Mods", "Params", "Place", "S", "Variant", "Visit", "at_k", "at_q",
    "blockDim", "blockIdx", "derive", "dim3", "each_learned", "emit", "gridDim", "kv", "kv_idx", "lane",
    "mask_mod", "mods", "p", "ptx", "q_idx", "real", "score_mod", "threadIdx", "times", "visit", "warp",
    "warpSize",
}  # fmt: skip


def _is_taken(label: str) -> bool:
    """Whether a place, a function, or a word of C++ or of kernels has this name."""
    return label in NAMES or label in FUNCTIONS or label in _OF_CPP or label in _OF_KERNELS


def _is_free(label: str) -> bool:
    """Whether an array may have this name, which is that of a member in C++."""
    is_name = label.isascii() and label.isidentifier() and not label.startswith(("_", "CUPYFLASH_"))
    return is_name and not _is_taken(label)
