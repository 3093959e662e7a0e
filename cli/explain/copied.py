"""What `explain` says of the call with NumPy arrays: by way of the GPU, or on the CPU path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from cupyflash.launch import where
from cupyflash.launch.run import asked_backend
from cupyflash.problem import Problem
from cupyflash.sequences import Sequences

from ..output import gib
from . import work as explain_work


def facts(problem: Problem, options: dict[str, Any], directions: Sequence[bool]) -> list[dict[str, Any]]:
    """For each pass: bytes that are copied, what each way is taken to need, which one a call takes and who says so."""
    sequences, wish = None, asked_backend()
    if problem.packed:
        cu_seqlens = (np.array([*accumulate(options[name], initial=0)]) for name in ("lengths_q", "lengths_k"))
        sequences = Sequences.of(*cu_seqlens)
    sizes, added = where.sizes_of(problem, sequences), explain_work.added_bytes(problem, options)
    found = []
    for backward in directions:
        about = estimated(problem, sizes, added, backward=backward)
        if backward and options["learned"]:
            about["taken"] = "cuda"
        if wish != "auto":
            about["taken"] = wish
        found.append({"direction": "backward" if backward else "forward", **about, "forced": wish != "auto"})
    return found


def estimated(problem: Problem, sizes: where.Sizes, more_bytes: int = 0, *, backward: bool) -> dict[str, Any]:
    """What is predicted of a pass, and which way it takes if nobody says so."""
    guess = where.estimate(problem, sizes, more_bytes, backward=backward)
    return {
        "bytes": where.copied_bytes(problem, backward=backward) + more_bytes,
        "least_gpu_ms": 1e3 * guess.gpu_s, "about_cpu_ms": 1e3 * guess.cpu_s,
        "taken": "cuda" if guess.on_gpu else "cpu",
    }  # fmt: skip


def sentences(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The same for people."""
    for x in found:
        way = "go by way of the GPU" if x["taken"] == "cuda" else "take the CPU path"
        why = ", as CUPYFLASH_BACKEND says" if x["forced"] else ""
        yield (
            f"NumPy arrays, {x['direction']}: they {way}{why}. Copies of {gib(x['bytes'])} take at least "
            f"{_time(x['least_gpu_ms'])}, the CPU path about {_time(x['about_cpu_ms'])} on one thread"
        )


def _time(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1e3 else f"{ms / 1e3:.3g} s"
