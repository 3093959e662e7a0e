"""Random calls in random order launch what each launches where nothing is kept of the others.

`--thorough` draws more of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import CupyflashError, masks
from cupyflash.launch import prepared as launch
from tests import pretended_gpu
from tests.pretended_gpu import Gpu, found_in

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("cupy")
LENGTHS = (1, 5, 64, 65, 70, 129, 200, 256)
HEADS = ((1, 1), (2, 2), (4, 4), (3, 1), (8, 2))

# How an array of batch, seqlen, heads and head_dim lies.
FORMS: dict[str, Callable[[int, int, int, int, Any], Any]] = {
    "dense": lambda b, n, h, d, t: torch.zeros(b, n, h, d, dtype=t),
    "whole heads": lambda b, n, h, d, t: torch.zeros(b, h, n, d, dtype=t).transpose(1, 2),
    "rows first": lambda b, n, h, d, t: torch.zeros(n, b, h, d, dtype=t).transpose(0, 1),
    "longer rows": lambda b, n, h, d, t: torch.zeros(b, n, h, d + 8, dtype=t)[..., :d],
    "rows at odd places": lambda b, n, h, d, t: torch.zeros(b, n, h, d + 4, dtype=t)[..., :d],
    "an odd address": lambda b, n, h, d, t: torch.zeros(b * n * h * d + 1, dtype=t)[1:].view(b, n, h, d),
    "a buffer": lambda b, n, h, d, t: torch.zeros(b, n + 3, h + 1, d, dtype=t)[:, :n, 1:],
    "of q, k and v": lambda b, n, h, d, t: torch.zeros(b, n, h, 3, d, dtype=t)[:, :, :, 1],
    "one head": lambda b, n, h, d, t: torch.zeros(b, n, 1, d, dtype=t).expand(b, n, h, d),
    "one sequence": lambda b, n, h, d, t: torch.zeros(1, n, h, d, dtype=t).expand(b, n, h, d),
}
DENSE = ("dense",) * 3
# Under what a call of tensors runs.
AROUND: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("cpu"),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call, by value. What its function does not take is passed over.

    Attributes: the name in `FUNCTIONS`, the library, the dtype, sequences, queries and keys of each, heads of q and k,
    head_dims of q and v, how q, k and v lie, the layout, under what of `AROUND` it runs, options, names of `ARRAYS`,
    and what of `CACHED` is so of a cache.
    """

    function: str = "forward"
    library: str = "torch"
    dtype: str = "float16"
    batch: int = 2
    lengths: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (4, 4)
    head_dims: tuple[int, int] = (64, 64)
    forms: tuple[str, str, str] = DENSE
    layout: str = "bshd"
    around: str = "grad"
    options: tuple[tuple[str, Any], ...] = ()
    arrays: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()

    @property
    def is_packed(self) -> bool:
        return self.function == "packed" or (self.function == "cache" and "packed" in self.cached)

    @property
    def places(self) -> tuple[int, int]:
        """Queries and keys of an array that has both."""
        m, n = self.lengths
        return m, 16 * n if self.function == "cache" and "paged" in self.cached else n

    def make(self, *shape: int, dtype: str = "") -> Any:
        return torch.zeros(shape, dtype=getattr(torch, dtype or self.dtype))

    def lies(self, form: str, length: int, heads: int, head_dim: int) -> Any:
        """An array that does so; sequences that are packed are all one."""
        dtype = getattr(torch, self.dtype)
        if self.is_packed:
            return FORMS[form](1, self.batch * length, heads, head_dim, dtype)[0]
        x = FORMS[form](self.batch, length, heads, head_dim, dtype)
        return x.transpose(1, 2) if self.layout == "bhsd" and self.function != "cache" else x

    def starts(self, length: int) -> Any:
        return torch.arange(self.batch + 1, dtype=torch.int32) * length


ARRAYS: dict[str, Callable[[Call], tuple[str, Any]]] = {
    "sink": lambda of: ("sink", of.make(of.heads[0], dtype="float32")),
    "slopes": lambda of: ("alibi_slopes", of.make(of.heads[0], dtype="float32")),
    "slopes of each": lambda of: ("alibi_slopes", of.make(of.batch, of.heads[0], dtype="float32")),
    "kv_range": lambda of: ("kv_range", of.make(of.batch, 2, dtype="int32")),
    "bias of keys": lambda of: ("bias", of.make(1, 1, 1, of.places[1])),
    "bias": lambda of: ("bias", of.make(of.batch, of.heads[0], *of.places)),
    "mask of keys": lambda of: ("mask", of.make(of.batch, 1, 1, of.places[1], dtype="bool")),
    "mask": lambda of: ("mask", of.make(*of.places, dtype="bool")),
    "block_mask": lambda of: ("block_mask", masks.local(*of.lengths, left=9, right=9)),
}
OPTIONS = (
    *[("causal", True), ("window", (3, 0)), ("window", (None, 2)), ("softcap", 30.0), ("scale", 0.3), ("scale", -0.5)],
    *[("deterministic", True), ("score_mod", "score + 1"), ("score_mod", "score * 0.5"), ("mask_mod", "q >= k + b")],
    *[("dropout_p", 0.1), ("num_splits", 3), ("batch_invariant", True)],
)
CACHED = ("append", "packed", "paged", "int8", "one length", "some sequences")
OF_CACHES = ("num_splits", "batch_invariant")
OF_OTHERS = ("deterministic", "dropout_p", "dropout_seed", "block_mask")


class Draw:
    """Draws calls, of values that come again."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one(self, *of: Any) -> Any:
        return of[self.rng.integers(len(of))]

    def some(self, of: Any, part: float) -> tuple[Any, ...]:
        return tuple(x for x in of if self.rng.random() < part)

    def lengths(self) -> tuple[int, int]:
        m, n = (self.one(*LENGTHS, int(self.rng.integers(1, 300))) for _ in "mn")
        return (m, self.one(m, n))

    def forms(self) -> tuple[str, ...]:
        one = self.one("dense", *FORMS)
        return self.one(DENSE, (one,) * 3, tuple(self.one("dense", *FORMS) for _ in "qkv"))

    def fields(self) -> dict[str, Any]:
        return {
            "function": self.one("forward", "lse", "backward", "gradients", "packed", "cache", "cache"),
            "library": self.one("torch", "torch", "numpy"),
            "dtype": self.one("float16", "float16", "bfloat16"),
            "batch": self.one(1, 2, 2, 4),
            "lengths": self.lengths(),
            "heads": self.one(*HEADS),
            "head_dims": self.one((64, 64), (64, 64), (128, 128), (72, 72), (128, 64)),
            "forms": self.forms(),
            "layout": self.one("bshd", "bshd", "bhsd"),
            "around": self.one("grad", "grad", *AROUND),
            "options": tuple(dict(self.some(OPTIONS, 0.1)).items()),
            "arrays": self.some(ARRAYS, 0.07),
            "cached": self.some(CACHED, 0.2),
        }

    def alike(self) -> list[Call]:
        """A call and what is like it: of other lengths, or different in one respect."""
        calls = [Call(**self.fields())]
        for _ in range(self.one(4, 9)):
            name = self.one("lengths", "lengths", self.one(*calls[0].__dict__))
            calls.append(dataclasses.replace(self.one(*calls), **{name: self.fields()[name]}))
        return calls


def performed(call: Call) -> list[Any]:
    """Performs the call. Returns its q, k and v."""
    (m, n), (heads, heads_k), (d, d_v) = call.lengths, call.heads, call.head_dims
    d_v = d if call.function == "cache" else d_v
    sizes = (m, heads, d), (n, heads_k, d), (n, heads_k, d_v)
    q, k, v = (call.lies(form, *size) for form, size in zip(call.forms, sizes, strict=True))
    given = dict(call.options) | dict(ARRAYS[name](call) for name in call.arrays)
    given |= {"dropout_seed": 3} if "dropout_p" in given else {}
    for name in OF_OTHERS if call.function == "cache" else OF_CACHES:
        given.pop(name, None)
    with AROUND[call.around]():
        FUNCTIONS[call.function](call, q, k, v, given)
    return [q, k, v]


def as_library(call: Call, *arrays: Any, **given: Any) -> tuple[list[Any], dict[str, Any]]:
    """The same as arrays of NumPy, where the call is of them, which knows no bfloat16."""

    def of(x: Any) -> Any:
        is_its = call.library == "numpy" and call.dtype == "float16" and isinstance(x, torch.Tensor)
        return x.numpy() if is_its else x

    return [of(x) for x in arrays], {name: of(x) for name, x in given.items()}


def forward(call: Call, q: Any, k: Any, v: Any, given: dict[str, Any]) -> None:
    arrays, given = as_library(call, q, k, v, **given)
    cupyflash.attention(*arrays, **given, layout=call.layout, return_lse=call.function == "lse")


def backward(call: Call, q: Any, k: Any, v: Any, given: dict[str, Any]) -> None:
    out = call.lies("dense", call.lengths[0], call.heads[0], call.head_dims[1])
    lse = call.make(call.batch, call.heads[0], call.lengths[0], dtype="float32")
    arrays, given = as_library(call, out, q, k, v, out, lse, **given)
    cupyflash.attention_backward(*arrays, **given, layout=call.layout)


def gradients(call: Call, q: Any, k: Any, v: Any, given: dict[str, Any]) -> None:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = cupyflash.attention(q, k, v, **given, layout=call.layout)
    if out.requires_grad:
        out.sum().backward()


def packed(call: Call, q: Any, k: Any, v: Any, given: dict[str, Any]) -> None:
    arrays, given = as_library(call, q, k, v, *(call.starts(n) for n in call.lengths), **given)
    cupyflash.attention_varlen(*arrays, **given)


def over_cache(call: Call, q: Any, k: Any, v: Any, given: dict[str, Any]) -> None:
    (m, n), heads_k, d = call.lengths, call.heads[1], call.head_dims[0]
    dtype = "int8" if "int8" in call.cached else call.dtype
    if "packed" in call.cached:
        given["cu_seqlens_q"] = call.starts(m)
    if "append" in call.cached:
        given |= {name: call.lies("dense", m, heads_k, d) for name in "kv"}
    if "paged" in call.cached:
        k, v = (call.make(call.batch * n, 16, heads_k, d, dtype=dtype) for _ in "kv")
        given["block_table"] = call.make(call.batch, n, dtype="int32")
    elif "int8" in call.cached or "packed" in call.cached:
        k, v = (FORMS[form](call.batch, n, heads_k, d, getattr(torch, dtype)) for form in call.forms[1:])
    if "int8" in call.cached:
        given |= {name: call.make(heads_k, dtype="float32") for name in ("k_scale", "v_scale")}
    if "some sequences" in call.cached:
        given["cache_batch_idx"] = call.make(call.batch, dtype="int32")
    given["cache_seqlens"] = 0 if "one length" in call.cached else call.make(call.batch, dtype="int32")
    (q, k, v), given = as_library(call, q, k, v, **given)
    cupyflash.attention_with_cache(q, k, v, **given, return_lse=True)


FUNCTIONS: dict[str, Callable[[Call, Any, Any, Any, dict[str, Any]], None]] = {
    "forward": forward,
    "lse": forward,
    "backward": backward,
    "gradients": gradients,
    "packed": packed,
    "cache": over_cache,
}


def outcome(gpu: Gpu, call: Call) -> dict[str, Any]:
    """What it launches, and where its kernels read q, k and v in place; or the words in which it is refused."""
    gpu.launched.clear()
    try:
        given = performed(call)
    except CupyflashError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    kinds = {variant.symbol: variant.params for variant in gpu.loaded}
    outcome: dict[str, Any] = {}
    for i, (symbol, grid, facts) in enumerate(found_in(gpu.launched, gpu)):
        params = np.frombuffer(gpu.launched[i].params, kinds[symbol])[0]
        params = params["plain"] if "plain" in params.dtype.names else params
        places = {name: x.data_ptr() for name, x in zip("qkv", given, strict=True) if name in params.dtype.names}
        if 1 in (call.batch, call.lengths[0], call.heads[0]):  # a stride of what is there once says nothing
            facts.pop("o_stride", None)
        outcome[f"{i} {symbol}"] = grid, tuple(name for name, place in places.items() if params[name] == place)
        outcome |= {f"{i} {symbol} {name}": x for name, x in facts.items()}
    return outcome


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_calls_in_random_order(
    arch: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    gpu, draw = pretended_gpu.pretend(monkeypatch, arch), Draw(rng)
    rounds, launching = 100 if request.config.getoption("--thorough") else 12, 0.0
    for _ in range(rounds):
        calls, alone = [*draw.alike(), *draw.alike()], {}
        for call in calls:
            launch.forget()
            pretended_gpu.forget(monkeypatch)
            alone[call] = outcome(gpu, call)
        launching += sum("error" not in found for found in alone.values()) / len(alone) / rounds
        launch.forget()
        pretended_gpu.forget(monkeypatch)
        before, at = [], 0
        for _ in range(60):
            at = draw.one(at, at + 1, at + 1, int(rng.integers(len(calls)))) % len(calls)
            differences = outcome(gpu, calls[at]).items() ^ alone[calls[at]].items()
            assert not differences, f"{calls[at]} after {before[-4:]}"
            before.append(calls[at])
    assert launching > 0.8  # others are refused
