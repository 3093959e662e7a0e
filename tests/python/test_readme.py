"""The README's examples run as they stand, and its promises match the package."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from cupyflash.check import cases
from cupyflash.cli.verify import ahead, cached
from cupyflash.gpu import device
from cupyflash.gpu.device import Device

README = Path(__file__).resolve().parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(import (\w+).*?)```", README.read_text(), re.DOTALL)
INFERENCE = README.parent / "docs" / "inference.md"
MARKS = {
    "cupy": pytest.mark.gpu,
    "torch": pytest.mark.needs("torch"),
    "jax": pytest.mark.needs("jax"),
    "transformers": pytest.mark.needs("torch", "transformers"),
}


def test_there_is_an_example_for_each_library() -> None:
    assert {library for _, library in EXAMPLES} == {"numpy", "cupy", "torch", "jax", "transformers"}


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=f"{library}-{i}", marks=MARKS.get(library, ()))
        for i, (code, library) in enumerate(EXAMPLES)
    ],
)
def test_example(code: str) -> None:
    names: dict[str, object] = {}
    exec(code, names)
    if "model" not in names:
        assert names["out"].shape == names["q"].shape  # type: ignore[attr-defined]


@pytest.mark.needs("torch", "jax")
def test_the_examples_of_inference() -> None:
    examples = re.findall(r"```python\n(.*?)```", INFERENCE.read_text(), re.DOTALL)
    assert len(examples) == 6
    for code in examples:
        names: dict[str, object] = {}
        exec(code, names)
        assert names["out"].shape == names["q"].shape  # type: ignore[attr-defined]


def test_how_much_verify_does() -> None:
    """Cases of all dtypes of Hopper, and their kernels."""
    gpu, cases_of, kernels = Device.synthetic("sm_90"), [], []
    needed = functools.cache(lambda *one: frozenset(ahead.needed([one], gpu)))  # the levels have most in common
    for level in cases.LEVELS:
        wanted = [(c, d) for c in cases.select(level) for d in gpu.dtypes if d in c.dtypes]
        work = [*wanted, *cached.chosen(level, gpu.dtypes, (), None, gpu)]
        cases_of.append(len(work))
        kernels.append(len(frozenset().union(*(needed(*one) for one in work))))
    text = README.read_text()
    said = re.findall(r"(\d+) for `--level smoke`, (\d+) for `quick` \(the default\), (\d+) for `full`", text)
    assert [[*map(int, numbers)] for numbers in said] == [cases_of]
    said = re.findall(r"compiles their kernels, (\d+), (\d+) and (\d+) on Hopper", text)
    assert [[*map(int, numbers)] for numbers in said] == [kernels]


def test_the_support_table_names_only_known_architectures() -> None:
    rows = re.findall(r"^\| (sm_[^|]*)\|.*\| (?:run|compiled)", README.read_text(), re.MULTILINE)
    named = {arch for row in rows for arch in re.findall(r"sm_\d+", row)}
    assert named == {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"}
    assert named <= set(device.ARCHS)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(f"docs/{name}.md" for name in ("results", "performance", "cli", "flash_attn", "inference", "transformers")),
        "examples/README.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    """Files are there, and so are the headings that the links name."""
    start = README.parent / page
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", start.read_text()):
        path = (start.parent / target) if target else start
        assert path.is_file(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page}: {target}#{anchor}"
