"""Mods in the kernels as on the CPU path, where a rounding error would show: behind it something jumps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.check.case_mods import ModInputs
from cupyflash.check.features import Features
from cupyflash.check.inputs import Inputs
from cupyflash.problem import make_problem
from tests.emulator import MODES
from tests.emulator.attention import Session, small_device
from tests.emulator.require import require_compiler

require_compiler()

LENGTH, HEADS, HEAD_DIM = 192, 2, 64
MODS: dict[str, dict[str, Any]] = {
    "root": {"score_mod": "score - sqrt(0.3f * (q - k))", "causal": True},
    "mask": {"mask_mod": "0.3f * (q - k) >= 0"},
    "choice": {"score_mod": "0.3f * (q - k) >= 0 ? score : -inf"},
    "buckets": {"score_mod": "score + floor(0.1f * (q - k))"},
    "equal": {"score_mod": "slopes[h] * (q - k) == 0 ? score + 3 : score", "causal": True},
    "score": {"score_mod": "score * (q - k) == 0 ? score + 3 : score"},
    "term": {"score_mod": "score + 0.3f * (k - q)"},
    "infinite": {"score_mod": "score + falls[h] * (q + 1)"},
    "no power": {"score_mod": "k % 2 == 0 ? score + pow(sqrt(score), 0) : score"},
}
ARRAYS = {
    "slopes": np.array([0.3, 0.7], np.float32), "falls": np.array([-np.inf, -1e-3], np.float32),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", MODS)
def test_as_on_the_cpu(name: str, arch: str, rng: np.random.Generator) -> None:
    """lse tells which keys were seen, and dq whether the backward saw the same."""
    q, k, v, dout = rng.standard_normal((4, 1, LENGTH, HEADS, HEAD_DIM)).astype(np.float16)
    mods = {"score_mod": None, "mask_mod": None} | MODS[name]
    causal = bool(mods.pop("causal", False))
    read = {label: x for label, x in ARRAYS.items() if label in str(mods)}
    given = ModInputs(mods["score_mod"], mods["mask_mod"], read)
    x = Inputs(q, k, v, dout, None, Features(mods=given))
    text, arrays = given.bound()
    shapes = tuple(a.shape for a in arrays.values())
    problem = make_problem((q.shape,) * 3, ("fp16",) * 3, causal=causal, mods=text, mod_shapes=shapes)
    session = Session(small_device(arch), MODES["early"], 0)
    _, lse = session.forward(x, problem)
    options: dict[str, Any] = {**mods, "causal": causal, "mod_arrays": read or None}
    out, expected = cupyflash.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(lse, expected, atol=2e-3)
    with np.errstate(all="ignore"):
        wanted = cupyflash.attention_backward(dout, q, k, v, out, expected, **options).dq
    dq = session.backward(x, out, expected, problem)[0]
    np.testing.assert_allclose(dq.astype(np.float32), wanted.astype(np.float32), atol=2e-2)
