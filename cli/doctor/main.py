"""``cupyflash doctor``: what this machine has, what is wrong with it, and how to fix that."""

from __future__ import annotations

from dataclasses import asdict

import click

from cupyflash import __version__

from ..output import Exit, emit, exit_codes, human, json_option
from .checks import CHECKS, FAIL, OK, WARN, Finding

STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@click.command(epilog=exit_codes("0 nothing is broken (warnings or not), 7 something is"))
@json_option
def command(as_json: bool) -> None:
    """Look at GPUs, driver, packages and cache.

    Each line is OK, WARN (something is missing that cupyflash can do without) or FAIL (something is broken), the
    latter two with the way to fix it. Works on a machine that has nothing but Python.
    """
    console = human(as_json)
    findings = []
    for name, check in CHECKS:
        for finding in _run(name, check):
            findings.append(finding)
            console.print(f"{finding.status:<5}", style=STYLES[finding.status], end="")
            console.print(f"{finding.name:<12}{finding.text}", soft_wrap=True)
            if finding.fix:
                console.print(f"{'':<17}-> {finding.fix}", soft_wrap=True)
    failed = sum(f.status == FAIL for f in findings)
    warned = sum(f.status == WARN for f in findings)
    verdict = f"{failed} broken, {warned} warnings" if failed or warned else "all is well"
    console.print(f"\n{verdict}", style=STYLES[FAIL if failed else WARN if warned else OK])
    code = Exit.ENVIRONMENT if failed else Exit.OK
    if as_json:
        document = {"command": "doctor", "version": __version__, "findings": [asdict(f) for f in findings]}
        emit(document | {"verdict": verdict, "exit_code": int(code)})
    raise SystemExit(code)


def _run(name: str, check: object) -> list[Finding]:
    """A check that cannot finish is a finding too: this command always reaches its end."""
    assert callable(check)
    try:
        return list(check())
    except Exception as e:
        return [Finding(name, FAIL, f"could not be looked at: {type(e).__name__}: {e}")]
