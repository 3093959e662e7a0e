"""What `verify` found: tables, the verdict, the command that reproduces the worst failure, the JSON document."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from cupyflash import __version__
from cupyflash.emulator.build import BuildError
from cupyflash.errors import CompileError

from ..output import Exit, emit, human
from ..watchdog import Progress, tell
from .cases import CaseResult
from .checks import CheckResult
from .emulator import EmulatorResult
from .kernels import KernelResult

KINDS = ("cases", "checks", "emulator", "kernels")
RESULTS = ("out", "dq", "dk", "dv")
_ERRORS = "".join(f"{name:>8}" for name in RESULTS)
_COLUMNS = f"{'dtype':<5}{_ERRORS}  {'worst':<7}{'plain':>8}{'ratio':>6}{'used':>5} result"
NAME_WIDTH = 27  # few names are longer
CASE_HEADER = f"\n{'case':<{NAME_WIDTH}} {_COLUMNS}"
CHECK_HEADER = f"\n{'check':<88}result"


def emulator_header(family: str) -> str:
    """Above the cases of one family of kernels."""
    return f"\n{f'{family} kernels, emulated':<{NAME_WIDTH}} {_COLUMNS}"


def count(things: Sized, name: str) -> str:
    """How many there are, in words."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


@dataclass
class Report:
    """Everything that was run."""

    options: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    emulator: list[EmulatorResult] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)
    gpu: str | None = None
    no_kernel_ran: str | None = None  # why, neither on a GPU nor in the emulator
    no_compiler: str | None = None  # why no kernel was compiled although some should have been
    broken: str | None = None  # why the run ended early

    def add(self, kind: str, result: CaseResult | CheckResult | KernelResult) -> None:
        """Keep a result in the list of that name; the watchdog's parent hears of it."""
        getattr(self, kind).append(result)
        tell(result=(kind, result.document()))

    @property
    def failed(self) -> list[CaseResult | CheckResult | KernelResult]:
        """What went wrong; a check that could not be made is not among it."""
        results: list[CaseResult | CheckResult | KernelResult] = [*self.cases, *self.emulator, *self.kernels]
        return [x for x in (*results, *(c for c in self.checks if c.shown)) if not x.passed]

    @property
    def exit_code(self) -> Exit:
        refused = any(isinstance(c.error, CompileError | BuildError) for c in (*self.cases, *self.emulator))
        if self.no_compiler or refused or not all(k.passed for k in self.kernels):
            return Exit.COMPILE
        return Exit.FAILED if self.failed else Exit.OK

    @property
    def verdict(self) -> str:
        if self.broken:
            return f"FAILED: {self.broken}"
        if self.no_compiler:
            return f"NOT VERIFIED: {self.done}, {len(self.failed)} failed; no kernel was compiled: {self.no_compiler}"
        if self.failed:
            return f"FAILED: {len(self.failed)} failed of {self.done}"
        if not self.cases and not self.emulator and not any(c.shown for c in self.checks):
            return f"NOT SHOWN: {self.done}"
        return f"{'VERIFIED' if self.gpu or self.emulator else 'CPU PATH VERIFIED'}: {self.done}"

    @property
    def done(self) -> str:
        """What was run, where, and what was not."""
        parts = [f"{count(self.cases, 'case')} and {count(self.checks, 'check')} on {self.gpu or 'the CPU path'}"]
        if self.emulator:
            families = " and ".join(dict.fromkeys(r.family for r in self.emulator))
            parts.append(f"{count(self.emulator, 'case')} of the {families} kernels in the emulator, on the CPU")
        elif not self.gpu:
            parts.append(f"no kernel ran ({self.no_kernel_ran})")
        if self.kernels:
            archs = {k.arch for k in self.kernels}
            parts.append(f"{count(self.kernels, 'kernel')} compiled for {count(archs, 'architecture')}")
        if self.emulator:
            parts.append("nothing ran on a GPU")
        parts += [f"not shown: {c.name}" for c in self.checks if not c.shown]
        return "; ".join(parts)

    def command(self, case: str, dtype: str | None = None) -> str:
        """The command that runs one case or check again."""
        parts = [f"cupyflash verify --case {case}", *([f"--dtype {dtype}"] if dtype else [])]
        parts += [f"--framework {self.options['framework']}", f"--backend {self.options['backend']}"]
        return " ".join([*parts, *([f"--seed {self.options['seed']}"] if self.options["seed"] else [])])

    @property
    def reproduce(self) -> str | None:
        """The command that runs the worst failure again."""
        bad = [c for c in (*self.cases, *self.emulator) if not c.passed]
        if bad:
            worst = max(bad, key=lambda c: c.badness)
            return self.command(worst.case, worst.dtype)
        for check in self.checks:
            if check.shown and not check.passed:
                return self.command(check.name)
        for kernel in self.kernels:
            if not kernel.passed:
                return f"cupyflash compile --preset all --arch {kernel.arch}"
        return None

    def header(self) -> dict[str, Any]:
        """What is known before anything has run."""
        return {"command": "verify", "version": __version__, **self.options, "gpu": self.gpu}

    def document(self) -> dict[str, Any]:
        results = {kind: [r.document() for r in getattr(self, kind)] for kind in KINDS}
        return document(self.header(), results, self.verdict, self.reproduce, self.exit_code)


def document(
    header: dict[str, Any], results: dict[str, list[Any]], verdict: str, reproduce: str | None, exit_code: int
) -> dict[str, Any]:
    """The JSON document."""
    calls = results["cases"] or results["checks"]
    ran = {"gpu": calls and header.get("gpu"), "emulator": results["emulator"], "cpu": calls and not header.get("gpu")}
    return {
        **header,
        "ran": [where for where, did in ran.items() if did],
        **results,
        "verdict": verdict,
        "reproduce": reproduce,
        "exit_code": int(exit_code),
    }


def report_end(progress: Progress, why: str, code: Exit, as_json: bool) -> None:
    """Say what was being done when the process hung or was ended; what was found until then is in the document."""
    facts, console = progress.facts, human(as_json)
    verdict = f"FAILED: {progress.step} {why}; what comes after it was not run"
    console.print(f"\n{verdict}", style="bold red", soft_wrap=True)
    if reproduce := facts.get("reproduce"):
        console.print(f"reproduce: {reproduce}", soft_wrap=True)
    if as_json:
        header = facts.get("header") or Report(dict.fromkeys(("level", "framework", "backend", "seed"))).header()
        emit(document(header, {kind: facts.get(kind, []) for kind in KINDS}, verdict, reproduce, code))


def case_line(result: CaseResult) -> str:
    """One row of the table, with a line below it that explains a failure."""
    head = f"{result.case:<{NAME_WIDTH}} {result.dtype:<5}"
    if result.error is not None:
        return f"{head} FAIL\n    {type(result.error).__name__}: {result.error}"
    errors = {c.name: f"{c.max_error:.1e}" for c in result.comparisons}
    worst = result.worst
    assert worst is not None
    head += "".join(f"{errors.get(name, '-'):>8}" for name in RESULTS)
    ratio = f"{worst.ratio:.2f}" if worst.ratio < 100 else f"{worst.ratio:.0e}"
    name = worst.name.removesuffix("_cache").replace("alibi_", "")
    line = f"{head}  {name:<7}{worst.plain_max_error:>8.1e}{ratio:>6}{min(worst.share, 9.99):>5.0%}"
    failures = "".join(f"\n    {c}" for c in result.comparisons if not c.passed)
    return f"{line} {'PASS' if result.passed else 'FAIL'}{failures}"


def check_line(result: CheckResult) -> str:
    """One row of the checks, likewise."""
    outcome = "PASS" if result.passed else "FAIL" if result.shown else "NOT SHOWN"
    line = f"{result.name:<88}{outcome}"
    return f"{line}\n    {result.detail}" if result.detail else line


def print_kernels(kernels: list[KernelResult], console: Console) -> None:
    """One row for each architecture."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("architecture", "kernels", "most registers", "with spills", "result"):
        table.add_column(name, justify="left" if name in ("architecture", "result") else "right")
    for arch in dict.fromkeys(k.arch for k in kernels):
        group = [k for k in kernels if k.arch == arch]
        cubins = [k.cubin for k in group if k.cubin is not None]
        registers = str(max((c.registers for c in cubins), default=0))
        spills = str(sum(c.spill_bytes > 0 for c in cubins))
        passed = all(k.passed for k in group)
        verdict = "PASS" if passed else "FAIL"
        table.add_row(arch, str(len(group)), registers, spills, verdict, style=None if passed else "red")
    console.print(table)
