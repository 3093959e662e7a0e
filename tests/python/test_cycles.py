"""tools/cycles.py, with a stand-in for ncu: trees are run one after the other, and their kernels are told apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tools.cycles import METRIC, calls_of, main
from tools.cycles_calls import CALLS

ROW = '"{id}","python","{name}","{metric}","cycle","{value}"\n'
HEAD = '"ID","Process Name","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'


def report(calls: list[dict[str, int]]) -> str:
    """As ncu writes it, between lines of the program's own."""
    rows, i = ["==PROF== Connected\n", HEAD], 0
    for call in calls:
        for name, cycles in {"spin_kernel(long)": 100, **call}.items():
            rows.append(ROW.format(id=i, name=name, metric=METRIC, value=f"{cycles:,}"))
            i += 1
    return "".join(rows)


def test_calls_are_told_apart_by_what_sleeps_before_them() -> None:
    text = report(
        [{"bwd_delta(BwdParams)": 1500, "bwd_sm90(BwdSm90Params)": 2_000_000}, {"bwd_delta(BwdParams)": 1600}]
    )
    assert calls_of(text) == [{"bwd_delta": 1500.0, "bwd_sm90": 2_000_000.0}, {"bwd_delta": 1600.0}]


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two folders, and an ncu on the PATH that prints what lies in the one it runs in."""
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!{sys.executable}\nprint(open('report.csv').read(), end='')\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    before, after = tmp_path / "before", tmp_path / "after"
    for tree, cycles in ((before, 3000), (after, 2000)):
        tree.mkdir()
        (tree / "report.csv").write_text(report([{"fwd(FwdParams)": cycles + 10 * i} for i in range(CALLS)]))
    return before, after


ONE = ("--pass", "fwd", "--head-dim", "64", "--seqlens", "1024", "--mask", "full")


def test_ratios_of_medians(trees: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(main, [*map(str, trees), *ONE, "--json"])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(result.stdout)["cells"]
    assert cell["cell"] == "fwd 64 full 1024"
    assert cell["cycles"] == [3005, 2005]
    assert cell["ratios"] == [pytest.approx(3005 / 2005)]
    assert cell["spread"] == pytest.approx(10 / 2005)
    table = CliRunner().invoke(main, [*map(str, trees), *ONE])
    assert "1.499" in table.output
    assert "geometric mean" in table.output


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda tree: (tree / "report.csv").write_text(""), "the run ended with 0"), (lambda tree: None, "")],
    ids=["no kernels", "all there"],
)
def test_a_tree_that_could_not_be_measured(trees: tuple[Path, Path], change: Any, message: str) -> None:
    change(trees[1])
    result = CliRunner().invoke(main, [*map(str, trees), *ONE])
    assert (result.exit_code != 0) == bool(message)
    assert message in result.output


def test_without_ncu(trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    result = CliRunner().invoke(main, [*map(str, trees)])
    assert result.exit_code == 1
    assert "ncu is not on the PATH" in result.output
