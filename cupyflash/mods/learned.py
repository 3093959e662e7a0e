"""The gradient of the arrays that a score_mod reads,

    d array[i] = sum of dS * d score_mod / d read, over all scores and over the reads that are of element i,

dS the gradient by what score_mod makes of a score. The derivative is that of dual numbers whose seed is the read, here
in `evaluate` and in the kernels in `Dual`; the same element read twice in an expression is one read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .expression import FLOAT, Node

# How kernels go through a tile of scores (bwd_dmods.cuh): one thread's scores read the same element where they can.
ALONG_DIAGONALS, ALONG_KEYS, ALONG_QUERIES = range(3)


def reads_of(node: Node | None, names: Sequence[str]) -> tuple[Node, ...]:
    """The reads of arrays of these names on which the value of a tree depends smoothly."""
    return tuple(dict.fromkeys(x for x in _reads(node) if x.value in names)) if node else ()


def _reads(node: Node) -> Iterator[Node]:
    left = [node]
    while left:
        x = left.pop()
        if x.kind != FLOAT or x.op == "floor":  # what decides, counts or is rounded has no derivative
            continue
        if x.op == "load":
            yield x
        left.extend(x.args[:0:-1] if x.op == "?" else x.args[::-1])


def walk_of(reads: Sequence[Node]) -> int:
    """How to go through a tile: along keys or queries that no read asks for; else along diagonals, where distances are
    the same."""
    by_query, by_key = (any(read.uses(place) for read in reads) for place in "qk")
    return ALONG_DIAGONALS if by_query and by_key else ALONG_QUERIES if by_key else ALONG_KEYS


def source_of(score: Node, numbers: dict[str, int], reads: Sequence[Node]) -> str:
    """Members of the struct that kernels take mods from.

    Args:
        numbers: of the arrays with gradients, by name, among the call's.
    """
    given = "const Params &p, float score, int b, int h, int q, int k, Emit emit"
    derived = "".join(
        f"        emit({i}, {x.value}.place_of(p.dmod_sums_{numbers[str(x.value)]}, "
        f"{', '.join(index.text for index in x.args)}),\n            Dual({score.seeded(x)}).d);\n"
        for i, x in enumerate(reads)
    )
    listed = "".join(f"        visit({name}, p.dmod_sums_{i}, p.dmod_array_{i});\n" for name, i in numbers.items())
    return (
        "    // Of each read: emit(its number, where its element is summed up, the derivative by it).\n"
        f"    template <class Params, class Emit>\n    __device__ void derive({given}) const {{\n{derived}    }}\n"
        "    // Of each array with a gradient: visit(it, its sums, its gradient).\n"
        "    template <class Params, class Visit>\n"
        f"    __device__ void each_learned(const Params &p, Visit visit) const {{\n{listed}    }}\n"
    )
