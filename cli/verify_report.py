"""What `verify` found: tables, the verdict, the command that reproduces the worst failure, the JSON document."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from cupyflash import __version__
from cupyflash.errors import CompileError

from .output import Exit
from .verify_cases import CaseResult
from .verify_checks import CheckResult
from .verify_kernels import KernelResult

RESULTS = ("out", "dq", "dk", "dv")
_ERRORS = "".join(f"{name:>8}" for name in RESULTS)
CASE_HEADER = f"\n{'case':<26}{'dtype':<5}{_ERRORS}  worst  plain  ratio  used  result"
CHECK_HEADER = f"\n{'check':<88}result"


def count(things: Sized, name: str) -> str:
    """How many there are, in words."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


@dataclass
class Report:
    """Everything that was run."""

    options: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)
    gpu: str | None = None
    no_compiler: str | None = None  # why no kernel was compiled although some should have been
    broken: str | None = None  # why the run ended early

    @property
    def results(self) -> list[CaseResult | CheckResult | KernelResult]:
        return [*self.cases, *self.checks, *self.kernels]

    @property
    def exit_code(self) -> Exit:
        compile_failed = any(isinstance(c.error, CompileError) for c in self.cases)
        if self.no_compiler or compile_failed or not all(k.passed for k in self.kernels):
            return Exit.COMPILE
        return Exit.OK if all(x.passed for x in self.results) else Exit.FAILED

    @property
    def verdict(self) -> str:
        where = f"on {self.gpu}" if self.gpu else "on the CPU path"
        failed = sum(not x.passed for x in self.results)
        done = f"{count(self.cases, 'case')} and {count(self.checks, 'check')} {where}"
        if self.kernels:
            archs = {k.arch for k in self.kernels}
            done += f"; {count(self.kernels, 'kernel')} compiled for {count(archs, 'architecture')}"
        if self.broken:
            return f"FAILED: {self.broken}"
        if self.no_compiler:
            return f"NOT VERIFIED: {done}, {failed} failed; no kernel was compiled: {self.no_compiler}"
        if failed:
            return f"FAILED: {failed} failed of {done}"
        return f"VERIFIED: {done}" + ("" if self.gpu else "; nothing ran on a GPU")

    @property
    def reproduce(self) -> str | None:
        """The command that runs the worst failure again."""
        parts = [f"--framework {self.options['framework']}", f"--backend {self.options['backend']}"]
        if self.options["seed"]:
            parts.append(f"--seed {self.options['seed']}")
        bad = [c for c in self.cases if not c.passed]
        if bad:
            worst = max(bad, key=lambda c: c.badness)
            return " ".join(["cupyflash verify --case", worst.case, "--dtype", worst.dtype, *parts])
        for check in self.checks:
            if not check.passed:
                return " ".join(["cupyflash verify --case", check.name, *parts])
        for kernel in self.kernels:
            if not kernel.passed:
                return f"cupyflash compile --preset all --arch {kernel.arch}"
        return None

    def document(self) -> dict[str, Any]:
        return {
            "command": "verify",
            "version": __version__,
            **self.options,
            "gpu": self.gpu,
            "cases": [c.document() for c in self.cases],
            "checks": [c.document() for c in self.checks],
            "kernels": [k.document() for k in self.kernels],
            "verdict": self.verdict,
            "reproduce": self.reproduce,
            "exit_code": int(self.exit_code),
        }


def case_line(result: CaseResult) -> str:
    """One row of the table, with a line below it that explains a failure."""
    head = f"{result.case:<26}{result.dtype:<5}"
    if result.error is not None:
        return f"{head} FAIL\n    {type(result.error).__name__}: {result.error}"
    errors = {c.name: f"{c.max_error:.1e}" for c in result.comparisons}
    worst = result.worst
    assert worst is not None
    head += "".join(f"{errors.get(name, '-'):>8}" for name in RESULTS)
    ratio = f"{worst.ratio:.2f}" if worst.ratio < 100 else f"{worst.ratio:.0e}"
    line = f"{head}  {worst.name:<3}{worst.plain_max_error:>9.1e}{ratio:>7}{min(worst.share, 9.99):>6.0%}"
    failures = "".join(f"\n    {c}" for c in result.comparisons if not c.passed)
    return f"{line}  {'PASS' if result.passed else 'FAIL'}{failures}"


def check_line(result: CheckResult) -> str:
    """One row of the checks, likewise."""
    line = f"{result.name:<88}{'PASS' if result.passed else 'FAIL'}"
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
