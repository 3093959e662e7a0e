"""Removes each barrier, wait and fence of the shipped kernels, one at a time, and tells which removals the tests catch.

    PYTHONPATH=. python tests/planted/remove_sync.py [--only TEXT]

Prints one line a place: caught, by which case and what it said; or SURVIVES. Survivors belong into the table of
tests/emulator/README.md, with the reason, or out of the kernel. Exit status 1 if one survives that is not listed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cupyflash.check.accuracy import Oracle  # noqa: E402
from cupyflash.check.cases import Case  # noqa: E402
from cupyflash.plan.variant import kernel_sources  # noqa: E402
from tests.emulator import MODES, EmulatorError  # noqa: E402
from tests.emulator.attention import NONFINITE_QUERIES, Session, find_case, inputs_of, small_device  # noqa: E402
from tests.emulator.build import BuildError  # noqa: E402
from tests.planted import markers  # noqa: E402

# What is removed, and what takes its place.
EDITS = (
    (r"ptx::bar_sync\([^;]*\);", ";"),
    (r"(?<!void )\bsync\(\);", ";"),
    (r"turn\.meet\(p\);", ";"),
    (r"late = ptx::bar_red_or\([^;]*\);", "late = missing != 0;"),
    (r"(?<!void )\b(?:arrive_warp|release_\w+|wait_[kqv])\((?:[^();{]|\([^()]*\))*\);", ";"),
    (r"ptx::atomic_add_acq_rel\(", "ptx::atomic_add("),
    (r"ptx::bar_warp_sync\(\);", ";"),
    (r"ptx::bar_arrive\([^;]*\);", ";"),
    (r"ptx::cp_async_wait_group<[^;]*>\(\);", ";"),
    (r"ptx::cp_async_commit_group\(\);", ";"),
    (r"ptx::cp_async_bulk_\w*(?:wait|commit)_group\w*(?:<[^;]*>)?\(\);", ";"),
    (r"ptx::wgmma_(?:fence|wait_group<[^;]*>)\(\);", ";"),
    (r"ptx::mbarrier_(?:wait|arrive)\w*\([^;]*\);", ";"),
    (r"ptx::barrier_cluster_\w+\(\);", ";"),
    (r"ptx::fence_\w+\(\);", ";"),
    (r"while \(ptx::ld_acquire\([^;]*\) ptx::nanosleep\(\);", ";"),
    (r"ptx::ld_acquire\(((?:[^()]|\([^()]*\))*)\)", r"*(\1)"),
    (r"ptx::st_release\(([^,;]*), ([^;]*)\);", r"*(\1) = \2;"),
    (r"ptx::st_release\([^;]*\);", ";"),
)
FORWARD = ("dense-d64", "causal-d128", "nan-in-visible-key-causal", "more-queries-causal-d128", "dense-d256",
           "inf-in-visible-key-causal", "nan-in-visible-key-window")  # fmt: skip
BACKWARD = ("deterministic", "dense-d64", "causal-d128", "nan-in-visible-key-causal", "dense-d256", "gqa",
            "nan-in-visible-key-window", "window-sees-nothing", "softcap-causal", *NONFINITE_QUERIES)  # fmt: skip
FORWARD_SM90 = ("dense-d64", "causal-d128", "many-tiles", "many-tiles-d160", "many-tiles-d256", "short-tiles-d256",
                "growing-maxima", "window-left-causal", "nan-in-visible-key-causal", "growing-maxima-window",
                "more-queries-causal")  # fmt: skip
BACKWARD_WIDE = ("dense-d256", "causal-d256", "causal-d96", "many-tiles-d192", "packed-deterministic-d160",
                 "nan-in-queries-d96", "nan-in-queries-d256", "range-none-causal-d256")  # fmt: skip
BACKWARD_SM90 = ("many-tiles-d192", "many-tiles-d256", *BACKWARD)  # head_dims with kernels of their own
# Kept for reasons that the emulator cannot see; README.md says them. Markers.
EXPLAINED = (
    "additions-before-the-turn",
    "looked-at-again",
    "counter-cleared",
    "done-count-cleared",
    "registers-settled-nn",
    "registers-settled-held",
    "earlier-shares-shown-to-tma",
    "share-shown-to-others",
    "share-is-written",
    "skipped-do-full",
)


@dataclass(frozen=True)
class Removal:
    file: str
    line: int
    text: str
    edited: str  # the whole header
    explained: bool

    def __str__(self) -> str:
        return f"kernels_cu/{self.file}:{self.line}: {self.text.strip()}"


def removals() -> Iterator[Removal]:
    for file, source in kernel_sources().items():
        if file.startswith("hw/"):
            continue
        kept = [markers.span(source, name) for name in EXPLAINED if markers.files()[name] == file]
        for pattern, replacement in EDITS:
            for match in re.finditer(pattern, source):
                line_start = source.rfind("\n", 0, match.start()) + 1
                line = source[line_start : source.find("\n", match.end())]
                if "//" in source[line_start : match.start()]:
                    continue
                edited = source[: match.start()] + match.expand(replacement) + source[match.end() :]
                number, text = source.count("\n", 0, match.start()) + 1, f"{line.strip()}  [{match[0]}]"
                yield Removal(file, number, text, edited, any(a <= match.start() < b for a, b in kept))


@functools.lru_cache(maxsize=16)
def _oracle(name: str) -> Oracle:
    inputs, problem = inputs_of(find_case(name), "bf16")
    return Oracle(problem, *inputs)


def _run(c: Case, session: Session, forward: bool) -> str:
    """What is wrong, or nothing."""
    exact = _oracle(c.name)
    inputs, problem = inputs_of(c, "bf16")
    try:
        if forward:
            results = exact.judge_forward(*session.forward(inputs, problem))
        else:
            results = exact.judge_backward(*session.backward(inputs, *exact.plain_forward, problem))
    except (EmulatorError, BuildError) as e:
        return str(e).split(": ", 1)[1].splitlines()[0]
    return next((str(r) for r in results if not r.passed), "")


def caught_by(removal: Removal) -> str:
    """Case, mode and message, or nothing if it survives."""
    directions = [True, False]
    header = Path(removal.file).name
    if header.startswith("fwd"):
        directions = [True]
    elif header.startswith(("bwd", "dq")):
        directions = [False]
    hopper = "sm90" in removal.file or removal.file == "any/bwd_convert.cuh"  # which has barriers for Hopper's sake
    wide = "wide" in removal.file  # two stages have barriers that one does not need, and one has waits
    archs, family = ("sm_90",) if hopper else ("sm_100", "sm_80") if wide else ("sm_80",), "sm90" if hopper else "sm80"
    backward = BACKWARD_SM90 if hopper else BACKWARD_WIDE if wide else BACKWARD
    names = {True: FORWARD_SM90 if hopper else FORWARD, False: backward}
    modes = ("race", "late", "race lanes") if hopper else ("race", "late")
    for arch, mode, forward in itertools.product(archs, modes, directions):
        for name in names[forward]:
            session = Session(small_device(arch, 2), MODES[mode], 0, {removal.file: removal.edited}, family, family)
            if message := _run(find_case(name), session, forward):
                return f"{name}, {mode}: {message[:150]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only places whose file:line: text contains this")
    options = parser.parse_args()
    unexplained = 0
    for removal in removals():
        if options.only not in str(removal):
            continue
        message = caught_by(removal)
        unexplained += not message and not removal.explained
        verdict = f"caught by {message}" if message else "SURVIVES (explained)" if removal.explained else "SURVIVES"
        print(f"{removal}\n    {verdict}", flush=True)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
