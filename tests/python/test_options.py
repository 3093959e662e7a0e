"""Options are plain values before anything looks at them: what is taken, what is refused, and by which name."""

from __future__ import annotations

import enum
import itertools
import re
import sys
import types
import warnings
from collections import deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, DeviceError, UnsupportedError, options
from cupyflash.bias import WHOLE, Bias
from cupyflash.check.accuracy import Oracle
from cupyflash.compile import jit
from cupyflash.gpu import device
from cupyflash.gpu.device import Device
from cupyflash.mods import bind
from cupyflash.options import Options, make_options
from cupyflash.plan.decode import variants_over_cache
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.shipped_cache import problem as over_cache
from cupyflash.plan.spec import CHUNKS
from cupyflash.problem import Problem, make_problem


class Everything:
    """Equal to all, and with every attribute."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Everything()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("bshd")


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError


class Layout(str, enum.Enum):
    BHSD = "bhsd"


class Four(enum.IntEnum):
    FOUR = 4


Pair = namedtuple("Pair", "left right")

TAKEN: list[tuple[str, Any, Any]] = [
    *((name, x, bool(x)) for name in ("causal", "deterministic")
      for x in (True, 0, 1, np.True_, np.False_, np.array(True), np.array(0), np.int8(1))),
    ("scale", 2, 2.0),
    ("scale", np.float32(0.1), float(np.float32(0.1))),
    ("scale", np.float64(0.1), 0.1),
    ("scale", np.longdouble(0.25), 0.25),
    ("scale", np.int64(3), 3.0),
    ("scale", ml_dtypes.bfloat16(0.25), 0.25),
    ("scale", np.array(0.25, ml_dtypes.bfloat16), 0.25),
    ("scale", np.array(-3), -3.0),
    ("scale", np.array(0.5, object), 0.5),
    ("scale", Fraction(1, 8), 0.125),
    ("scale", Decimal("0.125"), 0.125),
    ("scale", type("Float", (float,), {})(0.5), 0.5),
    ("softcap", 50, 50.0),
    ("softcap", np.float32(0.1), float(np.float32(0.1))),
    ("softcap", np.array(30), 30.0),
    ("softcap", np.array(0.25, ml_dtypes.bfloat16), 0.25),
    ("softcap", Fraction(3, 2), 1.5),
    ("window", [1, None], (1, None)),
    ("window", Pair(1, 2), (1, 2)),
    ("window", (np.int32(1), np.array(2)), (1, 2)),
    ("window", (np.uint8(3), np.uint8(255)), (3, 255)),
    ("window", (Four.FOUR, 10**30), (4, 10**30)),
    ("layout", Layout.BHSD, "bhsd"),
    ("layout", np.str_("bhsd"), "bhsd"),
]  # fmt: skip

NOT_A_FLAG = ["False", "causal", "", None, 2, -1, 0.0, 1.0, float("nan"), [], [False], (), np.array([False]),
              np.array([True, False]), np.array(1.0), np.float32(0), 1j, MagicMock(), Everything(), Unprintable(), bool,
              np.timedelta64(1, "s"), np.ma.masked]  # fmt: skip
REFUSED: list[tuple[str, Any]] = [
    *((name, x) for name in ("causal", "deterministic") for x in NOT_A_FLAG),
    *(("scale", x) for x in ("0.1", "1e-3", b"1", np.str_("0.1"), True, np.True_, np.array(True), 1j, np.complex64(1),
                             [0.1], (0.1,), np.array([0.1]), np.array(["0.1"]), np.array("0.1"), np.array(None),
                             np.timedelta64(5, "s"), np.array(5, "m8[s]"), np.datetime64(5, "s"), np.ma.masked,
                             np.ma.array(0.1), MagicMock(), Everything(), Unprintable(), float, lambda: 1,
                             10**400, -(10**400), float("inf"), float("-inf"), Decimal("nan"), Decimal("sNaN"),
                             Decimal("1e999"), Fraction(10**400), np.float32("inf"))),
    *(("softcap", x) for x in ("50", b"50", True, False, np.True_, np.array(True), 1j, [50.0], (50.0,),
                               np.array([50.0]), np.array("50"), MagicMock(), Everything(), Unprintable(),
                               float("nan"), float("inf"), 10**400, 0, 0.0, -50.0, 1000.1, 1e30, 9.9e-4, 1e-30)),
    *(("window", x) for x in (5, 0, True, "12", "", b"ab", {1, 2}, {1: 2, 3: 4}, range(2), deque([1, 2]), slice(1, 2),
                              (x for x in (1, 2)), (), (1,), (1, 2, 3), [1], np.array([1, 2]), Four.FOUR, MagicMock(),
                              Everything(), (1.0, 2), (1, 2.0), (np.float32(1), 2), (np.array(2.9), 0),
                              (np.array(2.0), 0),
                              (np.array([1]), 2), (True, 2), (1, np.True_), ("1", 2), (None, "2"), ((1,), 2), (1j, 2),
                              (float("inf"), 0), (float("nan"), 0), (MagicMock(), 1), (Everything(), 1),
                              (1, Fraction(2)),
                              (Decimal(1), 2), (np.timedelta64(1, "s"), 2), (1, np.ma.masked))),
    *(("layout", x) for x in (None, "BSHD", "sbhd", "", b"bshd", ["bshd"], 0, MagicMock(), Everything(), Unprintable(),
                              np.array("bshd"))),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    monkeypatch.setattr(options, "_minus_one_is_known", False)


@pytest.fixture
def qkv(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal((3, 1, 9, 2, 8)).astype(np.float32))


def _label(x: Any) -> str:
    """The repr without addresses: each process has its own, and pytest-xdist compares ids between processes."""
    try:
        return re.sub(r" id='\d+'| at 0x[0-9a-f]+", "", repr(x))[:30]
    except Exception:
        return "unprintable"


@pytest.mark.parametrize(("name", "given", "value"), TAKEN, ids=_label)
def test_taken(name: str, given: Any, value: Any) -> None:
    found = make_options(**{name: given})
    assert found == Options(**{name: value})
    assert [type(x) for x in found] == [type(x) for x in Options(**{name: value})]
    if name == "window":
        assert [type(x) for x in found.window or ()] == [type(x) for x in value]


@pytest.mark.parametrize(("name", "given"), REFUSED, ids=_label)
def test_refused(name: str, given: Any, qkv: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^{name}: expected "):
        cupyflash.attention(*qkv, **{name: given})
    out, lse = cupyflash.attention(*qkv, return_lse=True)
    with pytest.raises(ArgumentError, match=rf"^{name}: expected "):
        cupyflash.attention_backward(out, *qkv, out, lse, **{name: given})


@pytest.mark.parametrize("given", NOT_A_FLAG, ids=_label)
def test_return_lse_is_a_flag(given: Any, qkv: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^return_lse: expected True or False, got "):
        cupyflash.attention(*qkv, return_lse=given)


@pytest.mark.parametrize("given", [1, np.True_, np.array(True)], ids=repr)
def test_return_lse(given: Any, qkv: Any) -> None:
    assert len(cupyflash.attention(*qkv, return_lse=given)) == 2


def test_messages_stay_short(qkv: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        cupyflash.attention(*qkv, scale=np.zeros((100, 100)))
    assert len(str(caught.value)) < 200


def test_a_scale_that_the_arithmetic_cannot_hold(qkv: Any) -> None:
    with pytest.raises(ArgumentError, match=r"scale: expected a number of at most 1e\+38 for fp32, got 1e\+300"):
        cupyflash.attention(*qkv, scale=1e300)
    assert np.isfinite(cupyflash.attention(*(x.astype(np.float64) for x in qkv), scale=1e-300)).all()
    with pytest.raises(
        ArgumentError, match=r"^scale: expected a number of at most 1e\+38 times the softcap, got -1e\+36"
    ):
        cupyflash.attention(*qkv, scale=-1e36, softcap=1e-3)
    assert np.isfinite(cupyflash.attention(*qkv, scale=-1e36, softcap=0.1)).all()
    assert np.isfinite(cupyflash.attention(*(x.astype(np.float64) for x in qkv), scale=-1e36, softcap=1e-3)).all()


@pytest.mark.parametrize("softcap", [1e-3, 1000])
def test_the_ends_of_softcap(softcap: float, qkv: Any) -> None:
    out, lse = cupyflash.attention(*qkv, softcap=softcap, return_lse=True)
    oracle = Oracle(Problem("fp32", 1, 9, 9, 2, 2, 8, 8**-0.5, softcap=softcap), *qkv)
    assert all(verdict.passed for verdict in oracle.judge_forward(out, lse))


# ---- 0-d arrays of other libraries ----


@pytest.mark.needs("torch")
def test_torch_scalars() -> None:
    import torch

    scale, left = torch.tensor(0.1, dtype=torch.float64), torch.tensor(3)
    first = make_options(torch.tensor(True), scale, (left, None), "bshd", torch.tensor(False))
    assert first == Options(True, 0.1, (3, None))
    assert hash(first) == hash(make_options(True, torch.tensor(0.1, dtype=torch.float64), (torch.tensor(3), None)))
    scale.fill_(0.2)
    left.fill_(4)
    assert first == Options(True, 0.1, (3, None))
    assert make_options(scale=scale, window=(left, None)) == Options(scale=0.2, window=(4, None))
    wrong = {"causal": torch.tensor([True]), "scale": torch.ones(1), "window": (torch.tensor(1.0), 2)}
    for name, x in (wrong | {"deterministic": torch.tensor(0.0)}).items():
        with pytest.raises(ArgumentError, match=rf"^{name}: expected "):
            make_options(**{name: x})
    with pytest.raises(ArgumentError, match="scale: expected a value that can be read now"):
        make_options(scale=torch.ones((), device="meta"))
    for x in (
        torch.nn.parameter.UninitializedParameter(),
        torch.tensor(1j),
        torch.ones(1, 1),
        torch.Tensor,
        torch.float32,
    ):
        with pytest.raises(ArgumentError, match=r"^scale: expected a number"):
            make_options(scale=x)


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.func.jvp, at its first use
def test_a_gradient_of_scale_is_not_lost() -> None:
    import torch

    scale = torch.nn.Parameter(torch.tensor(0.5))
    q = torch.ones(1, 3, 2, 8)
    with pytest.raises(UnsupportedError, match=r"^scale: .* for its gradient multiply q by it and give scale=1\.0"):
        cupyflash.attention(q, q, q, scale=scale)
    with torch.no_grad():
        assert make_options(scale=scale).scale == 0.5
    with pytest.raises(UnsupportedError, match=r"^softcap: expected a plain Python value, .* autograd"):
        cupyflash.attention(q, q, q, softcap=scale)
    assert make_options(softcap=scale.detach()).softcap == 0.5
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.tensor(0.5), torch.tensor(1.0))
        with pytest.raises(UnsupportedError, match=r"^scale: "):
            cupyflash.attention(q, q, q, scale=dual)
    for transform in (torch.func.grad, torch.func.hessian):
        with pytest.raises(UnsupportedError, match=r"^scale: "):
            transform(lambda s: cupyflash.attention(q, q, q, scale=s).sum())(torch.tensor(0.5))
    with pytest.raises((ArgumentError, UnsupportedError), match=r"^scale: "):
        torch.func.vmap(lambda s: cupyflash.attention(q, q, q, scale=s))(torch.ones(2))


@pytest.mark.needs("jax")
def test_jax_scalars() -> None:
    import jax
    import jax.numpy as jnp

    assert make_options(jnp.asarray(True), jnp.float32(0.5), (jnp.int32(3), None)) == Options(True, 0.5, (3, None))
    q = jnp.ones((1, 3, 2, 8))
    for name, x in {"causal": True, "scale": 0.5, "deterministic": True, "softcap": 0.5}.items():
        with pytest.raises(UnsupportedError, match=rf"^{name}: "):
            jax.jit(lambda x, name=name: cupyflash.attention(q, q, q, **{name: x}))(x)
    with pytest.raises(UnsupportedError, match=r"^scale: "):
        jax.grad(lambda s: cupyflash.attention(q, q, q, scale=s).sum())(0.5)
    with pytest.raises(UnsupportedError, match=r"^window: "):
        jax.vmap(lambda x: cupyflash.attention(q, q, q, window=(x, 0)))(jnp.arange(2))


def test_stand_ins_for_libraries(monkeypatch: pytest.MonkeyPatch, qkv: Any) -> None:
    """Programs that put mocks, empty modules or None where a library would be still run."""

    class Scalar:
        shape = ()

        def item(self) -> float:
            return 0.5

    for stand_in in (None, MagicMock(), types.ModuleType("nothing")):
        for name in ("torch", "jax", "cupy"):
            monkeypatch.setitem(sys.modules, name, stand_in)
        assert make_options(scale=Scalar()).scale == 0.5
        assert cupyflash.attention(*qkv).shape == qkv[0].shape
        with pytest.raises(ArgumentError, match="q: expected an array"):
            cupyflash.attention([1], [2], [3])


# ---- A bound of -1 ----


@pytest.mark.parametrize("window", [(-1, 128), (256, -1), (None, -1), [-1, None], (np.int64(-1), 5)], ids=repr)
def test_minus_one_is_questioned_once(window: Any, qkv: Any) -> None:
    with pytest.warns(UserWarning, match=r"window: .*-1.*flash-attn, write None") as said:
        out, lse = cupyflash.attention(*qkv, window=window, return_lse=True)
    assert said[0].filename == __file__
    cupyflash.attention(*qkv, window=window)
    cupyflash.attention_backward(out, *qkv, out, lse, window=window)


def test_minus_one_is_questioned_in_the_backward(qkv: Any) -> None:
    out, lse = cupyflash.attention(*qkv, return_lse=True)
    with pytest.warns(UserWarning, match="window: ") as said:
        cupyflash.attention_backward(out, *qkv, out, lse, window=(3, -1))
    assert said[0].filename == __file__


def test_minus_one_as_an_error_stays_one(qkv: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="window: "):
                cupyflash.attention(*qkv, window=(-1, 5))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, -4)], ids=repr)
def test_windows_that_hide_every_key(window: Any, qkv: Any) -> None:
    with pytest.raises(ArgumentError, match="hides every key; write None, not -1"):
        cupyflash.attention(*qkv, window=window)


@pytest.mark.parametrize("window", [(-2, 5), (5, -2), (-1, 5), (3, -1)], ids=repr)
def test_negative_bounds_are_bounds(window: Any, qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_minus_one_is_known", -1 in window)  # all but -1 are taken without a word
    out, lse = cupyflash.attention(*qkv, window=window, return_lse=True)
    oracle = Oracle(Problem("fp32", 1, 9, 9, 2, 2, 8, 8**-0.5, window), *qkv)
    assert all(verdict.passed for verdict in oracle.judge_forward(out, lse))


# ---- warmup ----


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Two H200s that compile nothing: (ordinal, variant) of all that `warmup` would load."""
    found: list[tuple[int, Any]] = []

    def load_all(variants: Any, dev: Device) -> list[Any]:
        found.extend((dev.ordinal, v) for v in variants)
        return []

    hopper = Device.synthetic("sm_90")
    monkeypatch.setattr(device, "count", lambda: 2)
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, n: type(hopper)(**{**vars(hopper), "ordinal": n})))
    monkeypatch.setattr(jit, "load_all", load_all)
    return found


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ({"dtypes": "bf16"}, {"dtypes": ["bf16"]}),
        ({"dtypes": "fp32"}, {"dtypes": ["fp32"]}),
        ({"dtypes": np.str_("fp16")}, {"dtypes": ("fp16",)}),
        ({"head_dims": 64}, {"head_dims": [64]}),
        ({"head_dims": np.array(64)}, {"head_dims": np.array([64])}),
        ({"head_dims": (d for d in (64, 96))}, {"head_dims": [64, 96]}),
        ({"head_dims": range(64, 65)}, {"head_dims": {64}}),
        ({"causal": True}, {"causal": [True]}),
        ({"causal": iter([False, True])}, {}),
        ({"devices": 0}, {"devices": [0]}),
        ({"devices": np.int64(1)}, {"devices": (1,)}),
        ({"devices": None}, {"devices": range(2)}),
        ({"window": 1, "backward": np.False_}, {"window": True, "backward": False}),
        ({"softcap": np.array(1)}, {"softcap": True}),
        ({"packed": np.True_}, {"packed": True}),
    ],
    ids=lambda x: "-".join(x),
)
def test_warmup_takes_one_or_several(one: Any, several: Any, prepared: list[Any]) -> None:
    cupyflash.warmup(**one)
    first = prepared.copy()
    prepared.clear()
    cupyflash.warmup(**several)
    assert first == prepared
    assert first


@pytest.mark.parametrize(
    ("name", "given", "kind"),
    [
        *(("dtypes", x, ArgumentError) for x in ("float16", "bfloat16", "float32", ["fp64"], "bf16,fp16", [], "",
                                                 [None], np.float16, {"bf16": 1}, [b"bf16"], MagicMock(), 16)),
        *(("head_dims", x, ArgumentError) for x in ("64", ["64"], 64.0, [64.0], None, [None], True, [], (), 0, -8,
                                                    {64: 1}, MagicMock(), np.array([64.0]))),
        *(("head_dims", x, UnsupportedError) for x in (63, [64, 257], 512)),
        *(("head_dim_v", x, ArgumentError) for x in ("64", [64], 64.0, True, 0, -8)),
        *(("head_dim_v", x, UnsupportedError) for x in (63, 264)),
        *(("causal", x, ArgumentError) for x in ("True", ["False"], None, [None], 2, [2], [], 0.0, {True: 1})),
        *(("window", x, ArgumentError) for x in ((256, 0), "yes", None, 2, [])),
        *(("backward", x, ArgumentError) for x in ("no", None, 2, [])),
        *(("deterministic", x, ArgumentError) for x in ("no", None, 2, [True])),
        *(("softcap", x, ArgumentError) for x in (50.0, 50, "no", None, [True])),
        *(("cache_dtype", x, ArgumentError) for x in ("e4m3", "bf16", 8, b"int8")),
        *(("packed", x, ArgumentError) for x in (3, "no", None, [True])),
        *(("devices", x, ArgumentError) for x in (-1, [-1], 2, [0, 99], "0", ["0"], "cuda:0", 0.0, True, [], (), {0: 1},
                                                  [None])),
    ],
    ids=_label,
)  # fmt: skip
def test_warmup_refuses(name: str, given: Any, kind: type[Exception], prepared: list[Any]) -> None:
    with pytest.raises(kind, match=rf"^{name}: expected "):
        cupyflash.warmup(**{name: given})
    assert not prepared


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_warmup_with_a_softcap(head_dim: int, deterministic: bool, prepared: list[Any]) -> None:
    """All kernels that calls with any softcap take, and none of calls without."""
    cupyflash.warmup(
        dtypes="bf16", head_dims=head_dim, window=True, deterministic=deterministic, softcap=True, devices=0
    )
    found, calls = {v for _, v in prepared}, set()
    masks: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (300, 2)}]
    for mask, heads_k in itertools.product(masks, (2, 4)):
        shapes = [(2, 1000, 4, head_dim), *[(2, 900, heads_k, head_dim)] * 2]
        problem = make_problem(shapes, ["bf16"] * 3, softcap=30.0, deterministic=deterministic, **mask)
        calls |= set(variants_of_calls(problem, Device.of(0)))
    assert found == calls
    prepared.clear()
    cupyflash.warmup(dtypes="bf16", head_dims=head_dim, window=True, deterministic=deterministic, devices=0)
    assert len(prepared) == len(found)
    assert not found & {v for _, v in prepared}


@pytest.mark.parametrize("head_dim", [64, 256])
def test_warmup_of_packed_sequences(head_dim: int, prepared: list[Any]) -> None:
    """All kernels that `attention_varlen` takes, however many sequences there are, and none of `attention`."""
    cupyflash.warmup(dtypes="bf16", head_dims=head_dim, packed=True, devices=0)
    found, calls = {v for _, v in prepared}, set()
    for batch, heads_k in ((1, 2), (7, 4)):
        for causal in (False, True):
            shapes = [(1000, 4, head_dim), *[(900, heads_k, head_dim)] * 2]
            problem = make_problem(shapes, ["bf16"] * 3, causal=causal, sequences=batch)
            calls |= set(variants_of_calls(problem, Device.of(0)))
    assert found == calls
    prepared.clear()
    cupyflash.warmup(dtypes="bf16", head_dims=head_dim, devices=0)
    assert len(prepared) == len(found)
    assert not found & {v for _, v in prepared}


@pytest.mark.parametrize("given", [{"block_mask": True}, {"bias": True}], ids=str)
def test_warmup_of_packed_sequences_with_masks(given: dict[str, Any], prepared: list[Any]) -> None:
    """Whatever the arrays have room for, learned and not."""
    cupyflash.warmup(dtypes="bf16", head_dims=64, causal=True, packed=True, devices=0, **given)
    padding, whole = (True, False, False, True), (True, False, True, True)
    masks = [Bias("bool", own) for own in (padding, whole)] + [Bias("bf16", beside=own) for own in (padding, whole)]
    features: list[dict[str, Any]] = [{"block_mask": 3}]
    if "bias" in given:
        features = [{"bias": bias} for bias in (Bias("fp32"), *masks)]
    asked = itertools.product(features, (False, True), (False, True))
    for feature, learned, fit in asked:
        problem = make_problem(
            [(1000, 4, 64)] * 3, ["bf16"] * 3, causal=True, sequences=7, max_seqlens=(300, 310), **feature
        )
        calls = variants_of_calls(problem, Device.of(0), paired_bias=CHUNKS, dbias=learned, tiles_fit=fit)
        assert set(calls) <= {v for _, v in prepared}


def test_warmup_of_another_head_dim_of_v(prepared: list[Any]) -> None:
    """MLA's: dense, packed, over a cache."""
    of_mla = {"dtypes": "bf16", "head_dims": 192, "head_dim_v": np.int64(128), "devices": 0}
    for packed, given in ((False, {}), (True, {"sequences": 3})):
        prepared.clear()
        cupyflash.warmup(**of_mla, packed=packed)
        lead, calls = (() if packed else (2,)), set()
        for heads_k, causal in itertools.product((2, 4), (False, True)):
            shapes = [(*lead, 900, 4, 192), (*lead, 900, heads_k, 192), (*lead, 900, heads_k, 128)]
            problem = make_problem(shapes, ["bf16"] * 3, causal=causal, **given)
            calls |= set(variants_of_calls(problem, Device.of(0)))
        assert calls == {v for _, v in prepared}
    prepared.clear()
    cupyflash.warmup(**of_mla, with_cache=True)
    step = over_cache("bf16", 192, 64, seqlen_new=1, head_dim_v=128)
    assert set(variants_over_cache(step, Device.of(0), aligned=True, tma=True)) <= {v for _, v in prepared}


@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8_e4m3fn"])
def test_warmup_over_a_cache(cache_dtype: str | None, prepared: list[Any]) -> None:
    """The kernels that a step of generation takes, whatever the scales' shape."""
    cupyflash.warmup(dtypes="bf16", head_dims=128, with_cache=True, cache_dtype=cache_dtype, devices=0)
    stored = {None: "", "float8_e4m3fn": "e4m3"}.get(cache_dtype, "int8")
    wanted = {
        variant
        for page_size in (None, 16)
        for batch in (1, 64)
        for dims in ((1, 2) if stored else (0,))
        for variant in variants_over_cache(
            over_cache("bf16", 128, batch, page_size=page_size, seqlen_new=1, stored=stored, scale_dims=dims),
            Device.of(0), aligned=True, tma=True,
        )
    }  # fmt: skip
    assert wanted <= {v for _, v in prepared}
    for kind in ("int8", "e4m3"):
        assert all((kind in v.symbol) == (kind == stored) for v in wanted)


def test_warmup_over_a_cache_with_a_block_mask(prepared: list[Any]) -> None:
    """Whoever has a mask of its own, and whatever its size."""
    cupyflash.warmup(dtypes="bf16", head_dims=128, with_cache=True, block_mask=True, devices=0)
    call = over_cache("bf16", 128, 64, page_size=16, seqlen_new=1, block_mask=4, mask_tiles=100)
    wanted = set(variants_over_cache(call, Device.of(0), aligned=True, tma=True))
    assert wanted <= {v for _, v in prepared}
    assert any("tile_mask" in v.symbol for v in wanted)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ({"softcap": True, "sink": True}, {"softcap": 30.0, "sink": True}),
        ({"window": True, "alibi": True}, {"window": (100, 0), "alibi": 1}),
        ({"kv_range": True, "bias": True}, {"kv_range": True, "bias": Bias("fp32", beside=WHOLE)}),
        ({"mask_mod": "k % 2 == 0"}, {"mods": bind(None, "k % 2 == 0", None)[0]}),
        ({"packed": True}, {"packed": True, "seqlen_q": 64, "seqlen_new": 64}),
    ],
    ids=str,
)
def test_warmup_over_a_cache_with_options(given: dict[str, Any], known: dict[str, Any], prepared: list[Any]) -> None:
    cupyflash.warmup(dtypes="bf16", head_dims=128, with_cache=True, devices=0, **given)
    call = over_cache("bf16", 128, 64, page_size=16, **{"seqlen_new": 1} | known)
    assert set(variants_over_cache(call, Device.of(0), aligned=True, tma=True)) <= {v for _, v in prepared}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache_dtype": "int8"}, "cache_dtype: expected None without with_cache=True"),
        ({"with_cache": True, "dropout": True}, "dropout: expected False together with with_cache"),
        ({"with_cache": True, "deterministic": True}, "deterministic: expected False together with with_cache"),
    ],
    ids=str,
)
def test_warmup_refuses_what_a_cache_does_not_have(given: dict[str, Any], message: str, prepared: list[Any]) -> None:
    with pytest.raises(ArgumentError, match=message):
        cupyflash.warmup(dtypes="bf16", head_dims=128, devices=0, **given)
    assert not prepared


def test_warmup_with_mods(prepared: list[Any]) -> None:
    """Those of calls with these mods, of arrays of any length, fixed and learned, and no others."""
    mods: dict[str, Any] = {"score_mod": "score + table(h, k)", "mask_mod": lambda b, h, q, k: q >= k}
    cupyflash.warmup(
        dtypes="bf16", head_dims=64, causal=False, devices=0, **mods, mod_arrays={"table": np.zeros((3, 5), np.float32)}
    )
    text, _ = bind(**mods, mod_arrays={"table": np.zeros((7, 1), np.float32)})
    fixed, learned = set(), set()
    for heads_k in (2, 4):
        shapes = [(2, 1000, 4, 64), *[(2, 1000, heads_k, 64)] * 2]
        problem = make_problem(shapes, ["bf16"] * 3, mods=text, mod_shapes=((7, 1),))
        fixed |= set(variants_of_calls(problem, Device.of(0)))
        learned |= set(variants_of_calls(problem, Device.of(0), dmods=(0,)))
    assert {v for _, v in prepared} == fixed | learned
    assert len(learned - fixed) == 3
    prepared.clear()
    given = {"mod_arrays": {"table": np.zeros((3, 5), np.float32)}, "deterministic": True}
    cupyflash.warmup(dtypes="bf16", head_dims=64, causal=False, devices=0, **mods, **given)
    assert not any("dmods" in v.symbol for _, v in prepared)


def test_warmup_checks_arguments_before_it_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count", lambda: 0)
    with pytest.raises(ArgumentError, match=r"^head_dims: "):
        cupyflash.warmup(head_dims="64")
    for devices in (None, 0, [0, 1]):
        with pytest.raises(DeviceError, match="devices: expected a usable GPU"):
            cupyflash.warmup(devices=devices)
