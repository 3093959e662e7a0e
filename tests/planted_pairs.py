"""Plants the bugs of `planted/mutants_pairs.py`, one at a time: ``python -m tests.planted_pairs [--find] [NAME ...]``.

Without options every bug must be caught by its case; with `--find` all fitting cases of the covering set are tried, for
bugs without a case. Five minutes, most of them the compiler's; `tests/kernels/test_planted_pairs.py` takes a sample.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Inputs
from cupyflash.problem import Problem
from tests.fuzz import arrays, covering, oracle
from tests.fuzz.emulated import EmulatorError, session
from tests.fuzz.spec import Spec
from tests.planted.mutants_pairs import PAIRS, PairBug

SHARP = ("normal", "outliers")  # judged by the 2x rule, too
Exact = tuple[Inputs, Problem, oracle.Bounded, oracle.Bounded, NDArray[Any], NDArray[Any]]


@functools.lru_cache(maxsize=4)
def exact(spec: Spec) -> Exact:
    """Inputs, the exact out and lse, and both as a forward would store them."""
    x = arrays.draw(spec)
    out, lse = oracle.forward(spec, x)
    with np.errstate(all="ignore"):
        stored = out.exact.astype(spec.numpy_dtype), lse.exact.astype(np.float32)
    return x, spec.problem(), out, lse, *stored


def caught(bug: PairBug, spec: Spec) -> str:
    """What the case says of the kernels with the bug; "" if they pass."""
    x, problem, out, lse, stored_out, stored_lse = exact(spec)
    how = session(spec, bug.headers())
    judge = Oracle(problem, *x)
    try:
        if not bug.backward:
            got = how.forward(x, problem)
            wrong = [oracle.judge("out", got[0], out, spec.dtype), oracle.judge("lse", got[1], lse, "fp32")]
            sharp = judge.judge_forward(*got) if spec.values in SHARP else []
        else:
            grads = how.backward(x, stored_out, stored_lse, problem)
            bounds = oracle.backward(spec, x, stored_out)
            wrong = [oracle.judge(n, g, e, spec.dtype) for n, g, e in zip(x.gradients, grads, bounds, strict=False)]
            sharp = judge.judge_backward(*grads) if spec.values in SHARP else []
    except EmulatorError as e:
        return str(e)
    return "\n".join([text for text in wrong if text] + [str(c) for c in sharp if not c.passed])


def fits(bug: PairBug, spec: Spec) -> bool:
    """Whether a case may run the lines of a bug at all."""
    wide, sm90 = spec.d > 128, spec.family != "sm80"
    return {
        "bwd_sm80": not sm90, "bwd_wide_sm80": not sm90 and spec.d >= 128, "bwd_load_sm80": not sm90,
        "fwd_sm80": not sm90,
        "bwd_sm90": sm90 and not wide,
        "bwd_dkv_sm90": sm90 and wide, "bwd_dq_sm90": sm90 and wide, "bwd_convert": not (sm90 and wide),
        "dq_accum": not (sm90 and wide), "fwd_sm90": sm90, "fwd_load_sm90": sm90, "pipeline_sm90": sm90,
        "tile": not sm90, "epilogue": not sm90,
    }.get(Path(bug.file).stem, True)  # fmt: skip


def find(bug: PairBug) -> str:
    """The first case that catches it, the cheap ones first."""
    fitting = {name: spec for name, spec in covering.cases().items() if fits(bug, spec)}
    for name in sorted(fitting, key=lambda name: np.prod([*fitting[name].shapes[0], fitting[name].sk])):
        if caught(bug, fitting[name]):
            return name
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_pairs", description=__doc__)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("names", nargs="*", help="words of the bugs' names; all by default")
    options = parser.parse_args()
    missed = 0
    for bug in PAIRS:
        if options.names and not all(word in bug.name for word in options.names):
            continue
        if options.find:
            name = bug.case or find(bug)
            print(f"{name or 'NONE':12} {bug.name}", flush=True)
        else:
            said = caught(bug, covering.cases()[bug.case])
            name = said and bug.case
            print(f"{said.splitlines()[0][:100] if said else 'NOT CAUGHT'}: {bug.name}", flush=True)
        missed += not name
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
