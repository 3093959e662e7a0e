"""The examples run at a toy size, and tell the truth; the gradients of the CuPy one are those of its loss."""

from __future__ import annotations

import importlib
import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash.compile import nvrtc
from examples import gpt_cupy

of_transformers = pytest.mark.needs("torch", "transformers")
quiet = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
pytestmark = quiet


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")


def run(name: str, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(importlib.import_module(f"examples.{name}").main, options)
    assert result.exit_code == code, result.output
    return result.stdout


_CPU = ("--device", "cpu")
TOYS: dict[str, tuple[str, ...]] = {
    "rerank_qwen3": ("--size", "toy", "--pairs", "3", "--longest", "24", "--rounds", "1", *_CPU),
    "step_gpt2": ("--size", "toy", "--batch", "2", "--seqlen", "24", "--rounds", "1", *_CPU),
    "train_phi": ("--size", "toy", "--steps", "3", "--batch", "2", "--characters", "60", "--longest", "6", *_CPU),
    "gpt_cupy": ("--size", "toy", "--steps", "6", "--batch", "2", "--longest", "4", "--array", "numpy"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt_cupy" else of_transformers) for name in TOYS]
)
def test_a_table_for_people(name: str) -> None:
    shown = run(name, *TOYS[name])
    assert "━" in shown
    assert max(map(len, shown.splitlines())) <= 120


@of_transformers
def test_scores_are_the_same() -> None:
    found = json.loads(run("rerank_qwen3", *TOYS["rerank_qwen3"], "--json"))
    assert 0.2 < found["padding"] < 0.6
    scores = np.array([found["scores"][name] for name in ("eager", "sdpa", "cupyflash")])
    assert scores.std(1).min() > 0.01, "all pairs score the same: this would not tell much"
    np.testing.assert_allclose(scores, scores[[0, 0, 0]], rtol=0, atol=1e-5)
    assert all(each["seconds"] > 0 for each in found["results"].values())


@of_transformers
def test_a_step_has_the_same_gradient() -> None:
    found = json.loads(run("step_gpt2", *TOYS["step_gpt2"], "--json"))["results"]
    assert set(found) == {"eager", "sdpa", "cupyflash"}
    assert all(each["gradient_apart"] < 1e-5 for each in found.values())
    assert all(each["seconds"] > 0 for each in found.values())


@of_transformers
def test_phi_learns_and_writes_the_same_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import train_phi

    found = json.loads(run("train_phi", *TOYS["train_phi"], "--json"))
    assert found["same"]
    assert found["eager"] == found["cupyflash"]
    assert [text.startswith(prompt) for text, prompt in zip(found["eager"], train_phi.PROMPTS, strict=True)] == [
        True
    ] * 3
    assert len(found["losses"]) == 3
    assert found["losses"][-1] < found["losses"][0]
    monkeypatch.setattr(train_phi, "complete", lambda model, name, longest: [name] * 3)
    assert not json.loads(run("train_phi", *TOYS["train_phi"], "--json", code=1))["same"]


@of_transformers
def test_what_phi_is_taught() -> None:
    from examples import train_phi

    texts = train_phi.functions(1000)
    assert len(texts) > 20
    names: dict[str, Any] = {}
    exec("\n".join(texts), names)
    assert names["factorial"](5) == 120
    assert [n for n in range(20) if names["is_prime"](n)] == names["sieve"](19)
    assert all(any(text.startswith(prompt) for text in texts) for prompt in train_phi.PROMPTS)
    ids, mask = train_phi.encode(["ab", "abcd"], "left", "cpu", end=False)
    assert ids.tolist() == [[0, 0, 1, 97, 98], [1, 97, 98, 99, 100]]
    assert mask.tolist() == [[0, 0, 1, 1, 1], [1] * 5]
    ids, _ = train_phi.encode(["ab", "abcd"], "right", "cpu", end=True)
    assert ids.tolist() == [[1, 97, 98, 2, 0, 0], [1, 97, 98, 99, 100, 2]]
    assert train_phi.decode(ids[0]) == "ab"


def test_gradients_of_the_gpt(rng: np.random.Generator) -> None:
    """Along a random direction for each parameter, against the difference of two losses, in float64."""
    model = gpt_cupy.Gpt(np, layers=2, heads=2, head_dim=8, longest=12, dtype=np.float64)
    ids, targets = rng.integers(0, 128, (2, 2, 9))
    parameters = model.parameters()
    assert len(parameters) == 2 + 2 * 12 + 4
    for p in parameters:
        p.value += rng.normal(0, 0.1, p.value.shape)
    model.loss(ids, targets)
    gradients = [p.gradient.copy() for p in parameters]
    for p, gradient in zip(parameters, gradients, strict=True):
        assert gradient.shape == p.value.shape
        direction, before = rng.standard_normal(p.value.shape), p.value.copy()
        losses = []
        for h in (1e-5, -1e-5):
            p.value[...] = before + h * direction
            losses.append(model.loss(ids, targets))
        p.value[...] = before
        np.testing.assert_allclose((losses[0] - losses[1]) / 2e-5, (gradient * direction).sum(), rtol=1e-6, atol=1e-9)


def test_the_gpt_learns() -> None:
    found = json.loads(
        run("gpt_cupy", "--size", "toy", "--steps", "60", "--rate", "0.01", "--array", "numpy", "--json")
    )
    assert found["array"] == "numpy"
    assert np.mean(found["losses"][-5:]) < 0.7 * np.mean(found["losses"][:5])
    assert found["text"].startswith("def factorial(n):")


def test_the_optimiser() -> None:
    """Its first step is the rate in each direction, whatever the gradient's size, less the decay."""
    p = gpt_cupy.Parameter(np.array([2.0, -2.0, 2.0]))
    p.gradient[...] = [1e-3, 1e3, -1.0]
    gpt_cupy.AdamW([p], rate=0.1, decay=0.5).step()
    np.testing.assert_allclose(p.value, [2 - 0.1 - 0.1, -2 - 0.1 + 0.1, 2 + 0.1 - 0.1], rtol=1e-4)
    assert not p.gradient.any()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_its_product_of_matrices_compiles(arch: str) -> None:
    cubin, log = nvrtc.find().compile(gpt_cupy.MATMUL, "matmul.cu", {}, (f"-arch={arch}",))
    assert cubin
    assert "error" not in log


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.needs("torch"))])
def test_text_from_a_cache(library: str) -> None:
    """The model repeats what it has read, as it does without a cache; a fork goes another way."""
    prompts = [word for text in ("one two three. one t", "a cat and a c") for word in ("--prompt", text)]
    assert run("generate", "--library", library, "--letters", "9", *prompts).splitlines() == [
        "one two three. one three. one",
        "a cat and a cat a cat ",
        "one two three. one tdree. one",
    ]


def test_a_cache_that_changes_what_is_said_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import generate

    real = generate.Cached.step

    def step(self: Any, sequences: list[int], texts: list[list[int]]) -> list[int]:
        self.cache.k[1, :, 3] = 0  # one key of each page
        return real(self, sequences, texts)

    monkeypatch.setattr(generate.Cached, "step", step)
    with pytest.raises(AssertionError, match="the cache changed what the model says"):
        generate.generate("numpy", generate.PROMPTS, 20)
