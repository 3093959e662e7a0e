"""The examples on a GPU, at the sizes that they are for but shorter; the products of matrices of the CuPy one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

pytestmark = [
    pytest.mark.gpu,
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")),
]


def test_products_of_matrices(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from examples import gpt_cupy

    monkeypatch.setattr(gpt_cupy, "has_cublas", lambda: False)
    for m, n, depth in ((1, 1, 1), (33, 65, 31), (100, 257, 130)):
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, depth), (depth, n)))
        for turned in (False, True):
            x, y = (cupy.asarray(z.T.copy()).T if turned else cupy.asarray(z) for z in (a, b))
            np.testing.assert_allclose(gpt_cupy.matmul(x, y).get(), a @ b, rtol=1e-4, atol=1e-4)


def test_the_gpt_is_the_same_in_cupy() -> None:
    """But for fp16 in attention: losses and gradients as of NumPy in fp32."""
    import cupy

    from examples import gpt_cupy

    text = np.array(gpt_cupy.corpus()[: 4 * 65]).reshape(4, 65)
    models = [gpt_cupy.Gpt(xp, layers=2, heads=4, head_dim=32, longest=64) for xp in (np, cupy)]
    losses = [model.loss(*(model.xp.asarray(x) for x in (text[:, :-1], text[:, 1:]))) for model in models]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        error, size = np.linalg.norm(q.gradient.get() - p.gradient), np.linalg.norm(p.gradient)
        assert error <= 1e-2 * size + 1e-7


def test_the_gpt_learns() -> None:
    from examples import gpt_cupy

    options = ("--steps", "300", "--batch", "8", "--array", "cupy", "--json")
    found = json.loads(CliRunner().invoke(gpt_cupy.main, options, catch_exceptions=False).stdout)
    assert np.mean(found["losses"][-5:]) < found["losses"][0] / 2


@pytest.mark.needs("torch", "transformers")
def test_phi_learns_factorial_and_writes_the_same_as_eager() -> None:
    from examples import train_phi

    found = json.loads(CliRunner().invoke(train_phi.main, ("--steps", "400", "--json"), catch_exceptions=False).stdout)
    assert found["same"]
    assert all(found["known"])


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize(
    ("name", "options"),
    [("rerank_qwen3", ("--pairs", "8", "--longest", "1024")), ("step_gpt2", ("--batch", "2", "--seqlen", "1024"))],
)
def test_less_memory_than_eager(name: str, options: tuple[str, ...]) -> None:
    import importlib

    example = importlib.import_module(f"examples.{name}")
    found = json.loads(CliRunner().invoke(example.main, (*options, "--json"), catch_exceptions=False).stdout)["results"]
    assert found["cupyflash"]["peak_bytes"] < found["eager"]["peak_bytes"]
    if name == "rerank_qwen3":
        assert found["cupyflash"]["largest_difference"] <= max(0.02, 2 * found["sdpa"]["largest_difference"])
    else:
        assert found["cupyflash"]["gradient_apart"] <= 0.05
