"""Two calls that differ in one respect: the second launches what it would were it the first, or raises the same error.

The tests of comparisons (test_last) begin with ordinary calls; these are the pairs that would be taken for each other
by a comparison that forgets something.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, CupyflashError
from cupyflash.arrays.adapters import TORCH
from cupyflash.launch import prepared as launch
from cupyflash.launch import run
from cupyflash.launch.kept import Kept
from cupyflash.launch.made import launched
from tests import pretended_gpu
from tests.pretended_gpu import Gpu, found_in

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("cupy")
HALF = torch.float16
One = Callable[[], Any]


def zeros(*shape: int, dtype: Any = HALF) -> Any:
    return torch.zeros(shape or (2, 4, 4, 64), dtype=dtype)


def dense(**given: Any) -> One:
    """Attention of as many queries as keys as heads, but for what is given."""
    arrays = {name: given.pop(name, None) for name in "qkv"}
    arrays = {name: zeros() if x is None else x for name, x in arrays.items()}
    return partial(cupyflash.attention, **arrays, **given)


def packed(**given: Any) -> One:
    arrays = {name: given.pop(name, None) for name in "qkv"}
    arrays = {name: zeros(9, 4, 64) if x is None else x for name, x in arrays.items()}
    return partial(cupyflash.attention_varlen, **arrays, **{"cu_seqlens_q": ends(0, 5, 9), **given})


def ends(*of: int, dtype: Any = torch.int32) -> Any:
    return torch.tensor(of, dtype=dtype)


def apart(*strides: int) -> Any:
    """(2, 4, 4, 64) with these strides."""
    return torch.zeros(1 << 16, dtype=HALF).as_strided((2, 4, 4, 64), strides)


def without_memory(x: Any) -> Any:
    x.untyped_storage().resize_(0)
    return x


def bias(*shape: int, dtype: Any = HALF) -> Any:
    return torch.zeros(shape, dtype=dtype)


# Calls whose arrays differ, of one kind.
ARRAYS: dict[str, tuple[Callable[[], One], Callable[[], One]]] = {
    "rows and heads change places": (dense, lambda: dense(k=zeros().transpose(1, 2))),
    "the stride of one head": (
        lambda: dense(**{name: zeros(2, 9, 1, 64) for name in "qkv"}),
        lambda: dense(q=zeros(2, 9, 64, 1).transpose(2, 3), k=zeros(2, 9, 1, 64), v=zeros(2, 9, 1, 64)),
    ),
    "one head for all": (dense, lambda: dense(k=zeros(2, 4, 1, 64).expand(2, 4, 4, 64))),
    "one sequence for all": (dense, lambda: dense(v=zeros(1, 4, 4, 64).expand(2, 4, 4, 64))),
    "sequences at odd strides": (dense, lambda: dense(q=apart(1025, 256, 64, 1))),
    "sequences overlap": (dense, lambda: dense(k=apart(256, 256, 64, 1))),
    "elements apart": (dense, lambda: dense(v=apart(2048, 512, 128, 2))),
    "dtype of k": (dense, lambda: dense(k=zeros(dtype=torch.bfloat16))),
    "integers": (dense, lambda: dense(**{name: zeros(dtype=torch.int16) for name in "qkv"})),
    "head_dim of k": (dense, lambda: dense(k=zeros(2, 4, 4, 72))),
    "three dimensions": (dense, lambda: dense(q=zeros(8, 4, 64))),
    "no batch": (dense, lambda: dense(**{name: zeros(0, 4, 4, 64) for name in "qkv"})),
    "no keys": (dense, lambda: dense(k=zeros(2, 0, 4, 64), v=zeros(2, 0, 4, 64))),
    "heads that do not divide": (dense, lambda: dense(k=zeros(2, 4, 3, 64), v=zeros(2, 4, 3, 64))),
    "fewer values than keys": (dense, lambda: dense(v=zeros(2, 3, 4, 64))),
    "memory given back": (dense, lambda: dense(v=without_memory(zeros()))),
    "slopes of sequences": (
        lambda: dense(alibi_slopes=torch.zeros(4)),
        lambda: dense(alibi_slopes=torch.zeros(2, 4)),
    ),
    "slopes in fp64": (
        lambda: dense(alibi_slopes=torch.zeros(4)),
        lambda: dense(alibi_slopes=torch.zeros(4).double()),
    ),
    "too many sinks": (lambda: dense(sink=torch.zeros(4)), lambda: dense(sink=torch.zeros(5))),
    "a bias for all": (lambda: dense(bias=bias(2, 4, 4, 4)), lambda: dense(bias=bias(1, 1, 4, 4))),
    "a bias of keys": (lambda: dense(bias=bias(2, 4, 4, 4)), lambda: dense(bias=bias(2, 4, 1, 4))),
    "a bias by columns": (lambda: dense(bias=bias(4, 4)), lambda: dense(bias=bias(4, 4).t())),
    "a bias in fp32": (lambda: dense(bias=bias(4, 4)), lambda: dense(bias=bias(4, 4, dtype=torch.float32))),
    "a mask in rows apart": (
        lambda: dense(mask=bias(4, 4, dtype=torch.bool)),
        lambda: dense(mask=bias(4, 8, dtype=torch.bool)[:, :4]),
    ),
    "ranges of one sequence": (
        lambda: dense(kv_range=ends(0, 1, 0, 1).view(2, 2)),
        lambda: dense(kv_range=ends(0, 1).view(1, 2)),
    ),
    "ends in int64": (packed, lambda: packed(cu_seqlens_q=ends(0, 5, 9, dtype=torch.int64))),
    "more sequences": (packed, lambda: packed(cu_seqlens_q=ends(0, 3, 5, 9))),
    "other ends of keys": (
        lambda: packed(cu_seqlens_k=ends(0, 4, 9)),
        lambda: packed(cu_seqlens_k=ends(0, 3, 4, 9)),
    ),
    "lengths of one sequence": (lambda: packed(seqused_k=ends(1, 2)), lambda: packed(seqused_k=ends(1))),
    "an array of a mod": (
        lambda: dense(score_mod="score + x(h)", mod_arrays={"x": torch.zeros(4)}),
        lambda: dense(score_mod="score + x(h)", mod_arrays={"x": torch.zeros(5)}),
    ),
}

# Calls that differ otherwise, or by more.
KINDS: dict[str, tuple[Callable[[], One], Callable[[], One]]] = {
    "layout": (dense, lambda: dense(layout="bhsd")),
    "no scale": (dense, lambda: dense(scale=0.0)),
    "scale below 0": (lambda: dense(scale=0.5), lambda: dense(scale=-0.5)),
    "scale that is no number": (lambda: dense(scale=0.5), lambda: dense(scale=float("nan"))),
    "a window open to the left": (lambda: dense(window=(0, 0)), lambda: dense(window=(None, 0))),
    "a window": (lambda: dense(window=(1, 0)), lambda: dense(window=(0, 1))),
    "dropout": (lambda: dense(dropout_p=0.1, dropout_seed=1), lambda: dense(dropout_p=0.2, dropout_seed=1)),
    "dropout of all": (lambda: dense(dropout_p=0.1, dropout_seed=1), lambda: dense(dropout_p=1.5, dropout_seed=1)),
    "seeds that are no integers": (
        lambda: dense(dropout_p=0.1, dropout_seed=torch.zeros(2, dtype=torch.int64)),
        lambda: dense(dropout_p=0.1, dropout_seed=torch.zeros(2)),
    ),
    "a mod": (lambda: dense(score_mod="score + 1"), lambda: dense(score_mod="score + 2")),
    "a mod of masks": (lambda: dense(mask_mod="q >= k"), lambda: dense(mask_mod="q > k")),
    "the name of an array": (
        lambda: dense(alibi_slopes=torch.zeros(4)),
        lambda: dense(sink=torch.zeros(4)),
    ),
    "bias or mask": (
        lambda: dense(mask=bias(4, 4, dtype=torch.bool)),
        lambda: dense(bias=bias(4, 4, dtype=torch.bool)),
    ),
    "ends or lengths": (lambda: packed(cu_seqlens_k=ends(0, 4, 9)), lambda: packed(seqused_k=ends(0, 4))),
}
PAIRS = ARRAYS | KINDS


def outcome(gpu: Gpu, call: One) -> Any:
    """What a call launches, and what its results look like; or its error."""
    gpu.launched.clear()
    try:
        out = call()
    except CupyflashError as e:
        return type(e), str(e)
    return out.shape, out.dtype, [there(gpu, *one) for one in gpu.launched], found_in(gpu.launched, gpu)


def there(gpu: Gpu, symbol: str, grid: int, data: bytes) -> list[str]:
    """The arrays that a launch has addresses of."""
    params = np.frombuffer(data, next(x.params for x in gpu.loaded if x.symbol == symbol))[0]
    plain = params["plain"] if "plain" in params.dtype.names else params
    return [name for name in plain.dtype.names if plain.dtype[name] == np.uint64 and plain[name]]


def alone(gpu: Gpu, call: One) -> Any:
    """That of a call that is the first."""
    launch.forget()
    return outcome(gpu, call)


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_second_call_gets_its_own(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    first, second = PAIRS[name]
    want, other = alone(gpu, second()), alone(gpu, first())
    assert want != other
    for _ in range(3):
        assert outcome(gpu, first()) == other
    assert [outcome(gpu, second()) for _ in range(3)] == [want] * 3
    assert outcome(gpu, first()) == other


@pytest.mark.parametrize("name", ARRAYS)
def test_a_comparison_that_forgets_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    gpu = pretended_gpu.pretend(monkeypatch)
    first, second = ARRAYS[name]
    want = alone(gpu, second())
    monkeypatch.setattr(TORCH, "comparison", lambda *_: lambda *_: True)

    def again(kind: Any, tensors: Any, *_: Any) -> Any:  # which looks at no address either
        for one in launch.calls.last.get(kind, ()):
            if one.is_alike is not None:
                return one.call, launched(TORCH, one.call, tensors, [x.data_ptr() or 16 for x in tensors], 0)
        return None

    monkeypatch.setattr(run, "again", again)
    launch.forget()
    for _ in range(3):
        outcome(gpu, first())
    assert outcome(gpu, second()) != want


# ---- Lengths that are new ----


def rows(*lengths: int, form: str = "bshd", **given: Any) -> One:
    """Of so many rows of q, k and v, the last as often as it takes."""
    m, n, n_of_v = (*lengths, lengths[-1], lengths[-1])[:3]
    made = {}
    for name, count in zip("qkv", (m, n, n_of_v), strict=True):
        whole = zeros(2, 4, count, 64).transpose(1, 2) if form == "whole heads" else zeros(2, count, 4, 64)
        made[name] = whole.transpose(1, 2) if form == "bhsd" else whole[0] if form == "packed" else whole
    if form == "packed":
        return packed(**made, **given)
    return dense(**made, layout="bhsd" if form == "bhsd" else "bshd", **given)


FORMS = ["bshd", "bhsd", "whole heads", "packed"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "known", [[(1, 9), (1, 10), (1, 11), (1, 12)], [(9, 1), (10, 1), (11, 1), (12, 1)], [(1, 1)] * 4]
)
def test_one_row_is_another_series(known: list[tuple[int, int]], form: str, gpu: Gpu) -> None:
    """Whose maps say nothing of the stride of rows: after the steps of a decoder, say, comes a prompt."""
    new = [(5, 13), (5, 1), (1, 13), (70, 300), (6, 6), (1, 14)]
    want = [alone(gpu, rows(*lengths, form=form)) for lengths in new]
    launch.forget()
    for lengths in known:
        outcome(gpu, rows(*lengths, form=form))
    assert [outcome(gpu, rows(*lengths, form=form)) for lengths in new] == want


def odd_address() -> Any:
    return torch.zeros(2 * 80 * 4 * 64 + 1, dtype=HALF)[1:].view(2, 80, 4, 64)


def in_buffer(step: int, row: int = 256, head: int = 64) -> Any:
    """(2, 80, 4, 64) with sequences so far apart."""
    return torch.zeros(1 << 17, dtype=HALF).as_strided((2, 80, 4, 64), (step, row, head, 1))


# New lengths, and one respect more in which arrays are not those of the series.
BEYOND: dict[str, Callable[[], One]] = {
    "one row": lambda: rows(1, 80),
    "one key": lambda: rows(80, 1),
    "no key": lambda: rows(80, 0),
    "fewer values": lambda: rows(80, 80, 79),
    "odd address": lambda: of_80(q=odd_address()),
    "sequences at odd strides": lambda: of_80(q=in_buffer(80 * 256 + 4)),
    "one sequence for all": lambda: of_80(k=in_buffer(0)),
    "sequences apart": lambda: of_80(k=in_buffer(100 * 256)),
    "heads before rows": lambda: of_80(v=in_buffer(80 * 256, 64, 80 * 64)),
    "rows apart": lambda: of_80(v=in_buffer(80 * 512, 512)),
    "one head for all": lambda: of_80(k=in_buffer(80 * 256, 256, 0)),
    "bf16": lambda: of_80(k=zeros(2, 80, 4, 64, dtype=torch.bfloat16)),
    "half of the memory": lambda: of_80(k=half_of_memory()),
    "more heads": lambda: of_80(q=zeros(2, 80, 8, 64)),
    "another batch": lambda: of_80(q=zeros(3, 80, 4, 64)),
    "slopes": lambda: of_80(alibi_slopes=torch.zeros(4)),
    "causal": lambda: of_80(causal=True),
}


def of_80(**given: Any) -> One:
    return dense(**{**{name: zeros(2, 80, 4, 64) for name in "qkv"}, **given})


def half_of_memory() -> Any:
    x = zeros(2, 80, 4, 64)
    x.untyped_storage().resize_(x.nbytes // 2)
    return x


def of_one(step: int) -> One:
    """Of one sequence, whose stride says nothing."""
    x = torch.zeros(80 * 256, dtype=HALF)
    return dense(q=x.as_strided((1, 80, 4, 64), (step, 256, 64, 1)), k=zeros(1, 90, 4, 64), v=zeros(1, 90, 4, 64))


@pytest.mark.parametrize("step", [0, 3, 80 * 256, 1 << 40])
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_the_stride_of_one_sequence_says_nothing(step: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    want = alone(gpu, of_one(80 * 256))
    assert alone(gpu, of_one(step)) == want
    launch.forget()
    for n in (60, 61, 62, 63):
        outcome(gpu, dense(**{name: zeros(1, n, 4, 64) for name in "qkv"}))
    asked = len(launch.calls)
    monkeypatch.setattr(run, "find", None)  # nobody looks for it
    assert outcome(gpu, of_one(step)) == want
    assert len(launch.calls) == asked


def test_memory_that_ends_in_a_series(gpu: Gpu) -> None:
    """A tensor may begin anywhere in its memory, whose last element is the last that it needs."""
    for n in (60, 61, 62, 63):
        outcome(gpu, rows(n, n))
    size = 80 * 4 * 64
    for step, needed in ((size, 2 * size), (2 * size, 3 * size)):
        for missing in (0, 1):
            v = torch.zeros(8 + needed, dtype=HALF).as_strided((2, 80, 4, 64), (step, 256, 64, 1), 8)
            v.untyped_storage().resize_(2 * (8 + needed - missing))
            found = outcome(gpu, dense(q=zeros(2, 70 + missing, 4, 64), k=zeros(2, 80, 4, 64), v=v))
            assert (found[0] is ArgumentError) == bool(missing)
            assert len(gpu.launched) == 1 - missing


def test_heads_that_lie_around_rows_and_inside(gpu: Gpu) -> None:
    """At the same strides of rows: a series of the one says all of the other, too, but not where heads are one."""

    def call(n: int, head: int) -> Any:
        x = torch.zeros(1 << 19, dtype=HALF)
        q, k, v = (x.as_strided((2, n, 4, 64), (1 << 18, 256, head, 1), i << 10) for i in range(3))
        return outcome(gpu, dense(q=q, k=k, v=v))

    heads = [64, 0, 200 * 256, 68]
    launch.forget()
    want = []
    for i, head in enumerate(heads):
        launch.forget()
        want.append(call(80 + i, head))
    launch.forget()
    for n in (60, 61, 62, 63):
        call(n, n * 256)
    assert [call(80 + i, head) for i, head in enumerate(heads)] == want


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_a_series_takes_no_more_than_lengths(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    want, plain = alone(gpu, BEYOND[name]()), alone(gpu, of_80())
    assert want != plain
    launch.forget()
    for m in (60, 61, 62, 63):
        outcome(gpu, rows(m, m + 10))
    assert [outcome(gpu, BEYOND[name]()) for _ in range(3)] == [want] * 3
    assert outcome(gpu, of_80()) == plain


@pytest.mark.parametrize("place", [pretended_gpu.plain, pretended_gpu.crossed])
def test_new_lengths_of_interleaved_keys(place: pretended_gpu.Place, gpu: Gpu) -> None:
    """Whose maps the driver makes; a bias whose rows are no whole chunks has another kernel."""

    def biased(m: int, n: int, form: str) -> One:
        return rows(m, n, form=form, bias=bias(1, 4, m, n))

    gpu.place = place
    new = [(5, 16), (70, 304), (6, 8), (1, 16), (6, 14), (6, 1)]
    for form in ("bshd", "bhsd", "whole heads"):
        want = [alone(gpu, biased(m, n, form)) for m, n in new]
        symbols = [symbol for _, _, _, ((symbol, *_),) in want]
        assert [("interleaves_keys" in symbol) for symbol in symbols] == [True, True, True, False, False, False]
        launch.forget()
        for m in (2, 3, 4):
            outcome(gpu, biased(m, 8 * m, form))
        assert [outcome(gpu, biased(m, n, form)) for m, n in new] == want


# ---- JAX's custom calls, of one text ----

BUFFERS: dict[str, dict[str, Any]] = {
    "the same": {},
    "rows": {"rows": (9, 70)},
    "keys": {"rows": (64, 65)},
    "rows and heads change places": {"rows": (4, 4), "heads": (64, 64)},
    "heads of k": {"heads": (4, 2)},
    "dtype": {"dtype": "bfloat16"},
    "head_dim": {"head_dim": 128},
    "batch": {"batch": 2},
    "family": {"family": "sm80"},
    "addresses": {"offset": 8},
    "an unknown family": {"family": "sm70"},
}


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", BUFFERS)
def test_a_call_of_xlas_gets_its_own(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.jax import call, ffi

    monkeypatch.setattr("cupyflash.gpu.device.count", lambda: 1)
    handler = ffi._handler(call._run, lambda: 0)

    def run(family: str = "sm90", **given: Any) -> Any:
        monkeypatch.setenv("CUPYFLASH_FAMILY", "sm90")  # of which the text tells
        frame = frame_of(**given)
        monkeypatch.setenv("CUPYFLASH_FAMILY", family)
        gpu.launched.clear()
        frame.run(handler)
        return frame.errors, found_in(gpu.launched, gpu)

    second = BUFFERS[name]
    want, plain = run(**second), run()
    assert (want != plain) == (name != "the same")
    launch.forget()
    for _ in range(3):
        assert run() == plain
    assert [run(**second) for _ in range(3)] == [want] * 3
    assert run() == plain


def frame_of(
    rows: tuple[int, int] = (64, 70), heads: tuple[int, int] = (4, 4), batch: int = 1, head_dim: int = 64,
    dtype: str = "float16", offset: int = 0,
) -> Any:  # fmt: skip
    """XLA's frame of a causal forward."""
    import jax

    from cupyflash.jax import call
    from cupyflash.jax.buffers import Buffer
    from cupyflash.options import Options
    from tests.xla_frame import XlaFrame

    q, k = (jax.ShapeDtypeStruct((batch, n, h, head_dim), dtype) for n, h in zip(rows, heads, strict=True))
    static = call.Static.of("forward", ("q", "k", "v"), Options(causal=True), ("lse",))
    results = call.results_of(static, [q, k, k])
    found = [
        Buffer(4096 * 1024 * (1 + i) + offset, tuple(x.shape), call.CODE_OF[np.dtype(x.dtype)], 0)
        for i, x in enumerate([q, k, k, *results])
    ]
    return XlaFrame(static.text([q, k, k]), found[:3], found[3:])


# ---- What decides a call beside its arguments ----


def neg_of(x: Any) -> Any:
    return torch._neg_view(x)


class Named(torch.Tensor):
    """A subclass without rules of its own."""


CONTEXTS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "a plain tensor": (lambda x: x, contextlib.nullcontext),
    "one that requires grad": (lambda x: x.requires_grad_(), contextlib.nullcontext),
    "a parameter": (torch.nn.Parameter, contextlib.nullcontext),
    "without grad": (lambda x: x.requires_grad_(), torch.no_grad),
    "inference": (lambda x: x, torch.inference_mode),
    "a tensor of inference": (lambda x: zeros(), torch.inference_mode),
    "a negative view": (neg_of, contextlib.nullcontext),
    "a subclass": (lambda x: x.as_subclass(Named), contextlib.nullcontext),
    "autocast": (lambda x: x, lambda: torch.autocast("cpu", torch.bfloat16)),
    "a mode": (lambda x: x, lambda: torch.device("cpu")),
    "forward mode": (lambda x: torch.autograd.forward_ad.make_dual(x, x), torch.autograd.forward_ad.dual_level),
    "a mode that sees operators": (lambda x: x, lambda: torch.utils.flop_counter.FlopCounterMode(display=False)),
}
WAYS: dict[str, Callable[..., Any]] = {
    "attention": cupyflash.attention,
    "with lse": partial(cupyflash.attention, return_lse=True),
    "the operator": lambda *x: torch.ops.cupyflash.forward(*x),
}


def in_context(gpu: Gpu, name: str, way: str, seqlen: int = 4) -> Any:
    change, context = CONTEXTS[name]
    q, k, v = (zeros(2, seqlen, 4, 64) for _ in "qkv")
    q.fill_(1.0)
    with context():
        q = change(q)
        gpu.launched.clear()
        try:
            found = WAYS[way](q, k, v)
        except CupyflashError as e:
            return type(e), str(e)
    results = found if isinstance(found, tuple) else (found,)
    facts = [(type(x), x.shape, x.stride(), x.dtype, x.requires_grad, x.is_inference()) for x in results]
    return facts, found_in(gpu.launched, gpu)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_calls_of_all_contexts_in_all_orders(way: str, gpu: Gpu, rng: Any) -> None:
    """Of lengths that come again, and of new ones."""
    import cupyflash.torch.ops  # noqa: F401

    want, kinds = {}, [(name, seqlen) for name in CONTEXTS for seqlen in (4, 5, 6, 7, 8)]
    for kind in kinds:
        launch.forget()
        want[kind] = in_context(gpu, kind[0], way, kind[1])
    order = [*kinds, *[(name, 4) for name in CONTEXTS for _ in range(6)]]
    for _ in range(3):
        launch.forget()
        for i in rng.permutation(len(order)):
            name, seqlen = order[i]
            for again in range(1 if seqlen > 4 else 1 + i % 3):
                assert in_context(gpu, name, way, seqlen) == want[name, seqlen], (name, seqlen, again)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_context_after_plain_calls(way: str, name: str, gpu: Gpu) -> None:
    """Known by a comparison, of a call and of a series."""
    want = {}
    for seqlen in (4, 30):
        launch.forget()
        want[seqlen] = in_context(gpu, name, way, seqlen)
    for known in ([4] * 4, [20, 21, 22, 23]):
        launch.forget()
        for seqlen in known:
            in_context(gpu, "a plain tensor", way, seqlen)
        for seqlen in (4, 30):
            assert in_context(gpu, name, way, seqlen) == want[seqlen]


@pytest.mark.parametrize("value", ["sm80", "sm70"])
def test_a_family_that_is_asked_for_between_calls(value: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (of_80, packed):
        plain = alone(gpu, call())
        with monkeypatch.context() as patch:
            patch.setenv("CUPYFLASH_FAMILY", value)
            want = alone(gpu, call())
        launch.forget()
        assert want != plain
        assert [outcome(gpu, call()) for _ in range(4)] == [plain] * 4
        with monkeypatch.context() as patch:
            patch.setenv("CUPYFLASH_FAMILY", value)
            assert [outcome(gpu, call()) for _ in range(4)] == [want] * 4
        assert outcome(gpu, call()) == plain


def test_calls_that_went_for_others(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recalled may no longer be kept elsewhere."""
    monkeypatch.setattr(launch, "calls", Kept(2))
    monkeypatch.setattr(launch, "specs", Kept(1))
    monkeypatch.setattr(launch, "series", Kept(1))
    calls = [lambda n=n, scale=scale: rows(n, n, scale=scale) for n in (8, 9, 9, 9, 30, 31, 32) for scale in (1.0, 0.5)]
    want = [outcome(gpu, call()) for call in calls]
    assert [outcome(gpu, call()) for _ in range(3) for call in calls] == 3 * want


def test_threads_get_their_own(gpu: Gpu) -> None:
    """Of the calls of several threads, each launches what it would alone."""
    lengths = [(m, n) for m in (1, 5, 64) for n in (1, 7, 65)]
    want = {both: alone(gpu, rows(*both))[-1][0] for both in lengths}
    launch.forget()
    gpu.launched.clear()
    asked: dict[int, tuple[int, int]] = {}
    kept: list[Any] = []  # so that addresses stay different

    def work(first: int) -> None:
        for i in range(60):
            m, n = lengths[(first + i // 3) % len(lengths)]
            q = zeros(2, m, 4, 64)
            kept.append(q)
            asked[q.data_ptr()] = m, n
            cupyflash.attention(q, zeros(2, n, 4, 64), zeros(2, n, 4, 64))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert len(gpu.launched) == 4 * 60
    for one in gpu.launched:
        params = np.frombuffer(one.params, next(x.params for x in gpu.loaded if x.symbol == one.symbol))[0]
        address = int((params["plain"] if "plain" in params.dtype.names else params)["q"])
        assert found_in([one], gpu) == [want[asked[address]]]


def test_no_tensor_is_kept_alive(gpu: Gpu) -> None:
    seen: list[Any] = []
    for n in (60, 61, 62, 63, 63, 63, 63):
        q, k, v, of_each = zeros(2, n, 4, 64), zeros(2, n, 4, 64), zeros(2, n, 4, 64), ends(0, n)
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        cupyflash.attention_backward(out, q, k, v, out, lse)
        cupyflash.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=of_each)
        seen += map(weakref.ref, (q, k, v, of_each, out, lse))
        cupyflash.attention(q.requires_grad_(), k, v).sum().backward()
    del q, k, v, of_each, out, lse
    gc.collect()
    assert [x() for x in seen] == [None] * len(seen)
