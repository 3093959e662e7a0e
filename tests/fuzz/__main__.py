"""``python -m tests.fuzz``: random problems until the time is up or one of them fails. See README.md."""

from __future__ import annotations

import argparse
import json
import sys

from .loop import fuzz, shrunk
from .run import WHERE, check
from .spec import Spec


def command(spec: Spec, where: str) -> str:
    """The line that repeats a failure."""
    return f'python -m tests.fuzz --where {where} --one "{spec}"'


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--problems", type=int, help="at most so many in each place")
    parser.add_argument("--where", default="cpu,emulator", help="cpu, emulator, gpu, or several with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", metavar="SPEC", help="this problem alone")
    parser.add_argument("--no-shrink", action="store_true", help="report failures as they were met")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.places = options.where.split(",")
    if unknown := set(options.places) - set(WHERE):
        parser.error(f"--where: expected some of {', '.join(WHERE)}, got {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    options = _arguments()
    if options.one is not None:
        spec = Spec.parse(options.one)
        found = {where: check(spec, where) for where in options.places}
        seen = dict.fromkeys(options.places, 1)
        failures = [{"where": where, "spec": str(spec), "wrong": wrong} for where, wrong in found.items() if wrong]
    else:
        seen, failures = fuzz(options.places, options.seed, options.minutes, options.problems)
        if failures and failures[0]["spec"] and not options.no_shrink:
            first, where = failures[0], failures[0]["where"]
            small = shrunk(Spec.parse(first["spec"]), where)
            failures.insert(0, {"where": where, "spec": str(small), "wrong": check(small, where)})
    for failure in failures:
        failure["command"] = command(Spec.parse(failure["spec"]), failure["where"])
    if options.json:
        print(json.dumps({"problems": seen, "failures": failures}))
    else:
        for failure in failures:
            print(f"\n{failure['where']}: {failure['wrong']}\n    {failure['command']}")
        print(f"\n{'FAILED' if failures else 'passed'}: " + ", ".join(f"{n} problems ({w})" for w, n in seen.items()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
