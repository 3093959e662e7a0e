"""One door to the plan: what `cupyflash compile` makes and `explain` names are the kernels that calls launch."""

from __future__ import annotations

import functools
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import cupyflash
from cupyflash import cli
from cupyflash.cli.compile import variants_of
from cupyflash.gpu import device
from cupyflash.gpu.device import ARCHS, Device
from cupyflash.plan.variant import Variant
from tests import pretended_gpu

pytestmark = pytest.mark.needs("cupy")
DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (7, 3)},
    {"window": (None, 5)},
    {"window": (9, 0)},
)
MEMORY = ("contiguous", "unaligned", "broadcast")


def array(shape: tuple[int, ...], dtype: str, memory: str = "contiguous") -> np.ndarray:
    """An array (batch, seqlen, heads, head_dim) that lies as `explain --memory` has it."""
    if memory == "broadcast":
        return np.broadcast_to(np.zeros((*shape[:2], 1, shape[3]), DTYPES[dtype]), shape)
    size = int(np.prod(shape))
    return np.zeros(size + 8, DTYPES[dtype])[1 if memory == "unaligned" else 0 :][:size].reshape(shape)


def call(q: tuple[int, ...], k: tuple[int, ...], dtype: str, memory: str, **options: Any) -> None:
    """A forward and a backward; in "broadcast", k and v have one head for all."""
    like_q = array(q, dtype, "contiguous" if memory == "broadcast" else memory)
    key = array(k, dtype, memory)
    options, of = dict(options), options.get("learned", False)
    options.pop("learned", None)
    if options.pop("alibi", False):
        options["alibi_slopes"] = np.zeros(q[2], np.float32)
    if options.pop("sink", False):
        options["sink"] = np.zeros(q[2], np.float32)
    cupyflash.attention(like_q, key, key, **options)
    lse = np.zeros((q[0], q[2], q[1]), np.float32)
    more = {"gradients_of": [x for x in ("alibi_slopes", "sink") if x in options]} if of else {}
    cupyflash.attention_backward(like_q, like_q, key, key, like_q, lse, **more, **options)


def draw(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Shapes of q and k, and options; one length in eight is 0."""
    batch, heads_k = (int(n) for n in rng.integers(1, 3, 2))
    seqlen_q, seqlen_k = (int(n) * bool(rng.integers(8)) for n in rng.integers(1, 300, 2))
    head_dim, heads_q = int(rng.choice([8, 64, 72, 96, 128, 160, 200, 256])), heads_k * int(rng.integers(1, 3))
    options = MASKS[int(rng.integers(len(MASKS)))] | {"deterministic": bool(rng.integers(2))}
    options["softcap"] = float(rng.integers(1, 90)) if rng.integers(2) else None
    options |= {"alibi": bool(rng.integers(2)), "sink": bool(rng.integers(2))}
    options["learned"] = (options["alibi"] or options["sink"]) and bool(rng.integers(2))
    return (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_k, heads_k, head_dim), options


@functools.cache
def compiled(arch: str, dtype: str, head_dim: int) -> frozenset[Variant]:
    return frozenset(
        variants_of("all", Device.synthetic(arch), (dtype,), (head_dim,), softcap=True, alibi=True, sink=True)
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_compile_makes_what_calls_take(arch: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dense and causal calls wherever their arrays lie, of windows and deterministic ones where that is usual."""
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    for _ in range(60):
        q, k, options = draw(rng)
        dtype, memory = str(rng.choice(Device.synthetic(arch).halves)), str(rng.choice(MEMORY))
        if "window" in options or options["deterministic"]:
            q, k, memory = (q[0], max(q[1], 1), *q[2:]), (k[0], max(k[1], 1), *k[2:]), "contiguous"
        gpu.loaded.clear()
        pretended_gpu.forget(monkeypatch)
        call(q, k, dtype, memory, **options)
        is_grouped = q[2] > k[2]
        assert len(gpu.loaded) == 4 + is_grouped + options["learned"] * (options["alibi"] + options["sink"])
        missing = set(gpu.loaded) - compiled(arch, dtype, q[3])
        assert not missing, (missing, q, k, memory, options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_explain_names_what_calls_launch(arch: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    monkeypatch.setattr(device, "_probe", lambda: (1, ""))
    for _ in range(40):
        q, k, options = draw(rng)
        dtype, memory = str(rng.choice(list(DTYPES))), str(rng.choice(MEMORY))
        monkeypatch.setenv("CUPYFLASH_FAMILY", str(rng.choice(["", "sm80"])))
        gpu.launched.clear()
        call(q, k, dtype, memory, **options)
        sizes = {"batch": q[0], "seqlen-q": q[1], "seqlen-k": k[1], "heads-q": q[2], "heads-k": k[2], "head-dim": q[3]}
        words = [f"--{name}={n}" for name, n in (sizes | {"dtype": dtype, "memory": memory}).items()]
        words += [f"--{name}" for name in ("causal", "deterministic", "alibi", "sink", "learned") if options.get(name)]
        words += [f"--softcap={options['softcap']}"] if options["softcap"] else []
        if bounds := options.get("window"):
            words.append("--window=" + ",".join("" if bound is None else str(bound) for bound in bounds))
        done = CliRunner().invoke(cli.main, ["explain", "--json", "--no-compile", "--backward", *words])
        shown = [x for p in json.loads(done.stdout)["passes"] for x in p["launches"]]
        assert [(x["symbol"], x["grid"]) for x in shown if x["grid"]] == [(n.symbol, n.grid) for n in gpu.launched]
