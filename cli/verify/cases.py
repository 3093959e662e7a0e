"""One named case through the public API, judged by the 2x rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from cupyflash import api, varlen
from cupyflash.check.accuracy import Comparison, Oracle
from cupyflash.check.cases import Case, Inputs

from ..frameworks import Framework
from ..memory import Array


class Results(NamedTuple):
    """What the API returned, as NumPy arrays in bshd or, packed, (total, heads, head_dim)."""

    out: Array
    lse: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    learned: Any = ()  # those of what features bring, a tuple


@dataclass
class CaseResult:
    """The verdict on one case in one dtype."""

    case: str
    dtype: str
    comparisons: list[Comparison] = field(default_factory=list)
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error is None and all(c.passed for c in self.comparisons)

    @property
    def worst(self) -> Comparison | None:
        """The result that used most of what is allowed; one that failed before any other."""
        return max(self.comparisons, key=lambda c: (not c.passed, c.share), default=None)

    @property
    def badness(self) -> tuple[bool, float]:
        """Sorts failures: errors and misplaced NaN first, then by how far beyond the bound."""
        share = max((c.share for c in self.comparisons), default=0.0)
        lost = self.error is not None or any(c.reason and not c.share > 1 for c in self.comparisons)
        return lost, share

    def document(self) -> dict[str, Any]:
        """This verdict in JSON."""
        results = {c.name: {k: v for k, v in asdict(c).items() if k != "name"} | {"ratio": c.ratio, "share": c.share}
                   for c in self.comparisons}  # fmt: skip
        return {
            "case": self.case,
            "dtype": self.dtype,
            "passed": self.passed,
            "seconds": round(self.seconds, 4),
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "results": results,
        }


def call(case: Case, inputs: Inputs, framework: Framework, options: dict[str, Any] | None = None) -> Results:
    """Forward and, if the case has one, backward, with arrays of the framework, in the case's layout."""
    options = case.options() if options is None else options
    attention: Callable[..., Any] = api.attention
    backward: Callable[..., Any] = api.attention_backward
    if case.packed:
        attention, backward = varlen.attention_varlen, varlen.attention_varlen_backward
    options = options | inputs.given(framework.from_numpy)
    q, k, v, dout = (framework.from_numpy(case.in_layout(x)) for x in inputs[:4])
    dlse = None if inputs.dlse is None else framework.from_numpy(inputs.dlse)
    out, lse = attention(q, k, v, **options, return_lse=True)
    if not case.backward:
        return Results(case.in_layout(framework.to_numpy(out)), framework.to_numpy(lse))
    grads = backward(dout, q, k, v, out, lse, dlse=dlse, gradients_of=inputs.learned, **options)
    tensors = [case.in_layout(framework.to_numpy(x)) for x in (out, *grads)]
    learned = tuple(framework.to_numpy(x) for x in inputs.learned_in(grads).values())
    return Results._make((tensors[0], framework.to_numpy(lse), *tensors[1:], learned))


def run_case(case: Case, dtype: str, framework: Framework, seed: int) -> CaseResult:
    """Run a case in poisoned memory; whatever it raises becomes part of the result."""
    result = CaseResult(case.name, dtype)
    start = time.perf_counter()
    try:
        inputs = case.inputs(dtype, seed)
        with framework.poisoned():
            got = call(case, inputs, framework)
        oracle = Oracle(case.problem(dtype), *inputs)
        result.comparisons = oracle.judge_forward(got.out, got.lse)
        result.comparisons += oracle.judge_backward(*(x for x in got[2:5] if x is not None), *got.learned)
    except Exception as e:
        result.error = e
    result.seconds = time.perf_counter() - start
    return result
