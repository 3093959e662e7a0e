"""Calls that are known by a comparison with the last one: they launch what is launched where nothing is known yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError, masks
from cupyflash.arrays import torch_private
from cupyflash.arrays.adapters import TORCH
from cupyflash.launch import last, run
from cupyflash.launch import prepared as launch
from cupyflash.options import Options
from tests import pretended_gpu
from tests.pretended_gpu import Gpu, found_in, launched_by

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("cupy")
HALF = torch.float16


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of the calls that are not recalled, the names of their arrays."""
    found: list[Any] = []
    find = run.find
    monkeypatch.setattr(
        run, "find", lambda which, library, arrays, *x: found.append([*arrays]) or find(which, library, arrays, *x)
    )
    return found


def zeros(*shape: int, dtype: Any = HALF) -> Any:
    return torch.zeros(shape or (2, 64, 4, 64), dtype=dtype)


def three(*shape: int, dtype: Any = HALF) -> dict[str, Any]:
    return {name: zeros(*shape, dtype=dtype) for name in "qkv"}


def both(arrays: dict[str, Any], **options: Any) -> None:
    """A forward and a backward."""
    q, k, v = (arrays[name] for name in "qkv")
    more = {name: x for name, x in arrays.items() if name not in "qkv"}
    cupyflash.attention(q, k, v, **more, **options)
    rows = q.shape[1] if options.get("layout", "bshd") == "bshd" else q.shape[2]
    lse = torch.zeros(q.shape[0], q.shape[1] * q.shape[2] // rows, rows)
    out, dout = torch.empty_like(q), torch.empty_like(q)
    cupyflash.attention_backward(dout, q, k, v, out, lse, **more, **options)


# ---- Calls that come again ----


def test_the_third_of_equal_calls_is_recalled(gpu: Gpu, looked_for: list[Any]) -> None:
    arrays = three()
    first = launched_by(gpu, lambda: both(arrays))
    both(three())
    looked_for.clear()
    for _ in range(3):
        assert launched_by(gpu, lambda: both(three())) == first
    assert len(looked_for) == 2  # by the comparisons that the first of them has made
    launch.forget()
    both(arrays)
    assert len(looked_for) == 4


def test_results_lie_where_the_arrays_do_also_where_another_gpu_is_current(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        cupyflash.attention(*three().values())
    (call,) = launch.calls.values()
    make, arguments, device = call.forms
    call.forms = make, arguments, device + 1
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda n: entered.append(n) or contextlib.nullcontext())
    gpu.launched.clear()
    out = cupyflash.attention(*three().values())
    assert entered == [device + 1]
    (launched,) = gpu.launched
    assert out.data_ptr().to_bytes(8, "little") in launched.params


def odd() -> Any:
    """At an address that is no multiple of 16."""
    return torch.zeros(2 * 64 * 4 * 64 + 1, dtype=HALF)[1:].view(2, 64, 4, 64)


# What comes after calls of `three()`: each differs from them in one respect.
CHANGES: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "dtype": lambda: (three(dtype=torch.bfloat16), {}),
    "batch": lambda: (three(3, 64, 4, 64), {}),
    "seqlen": lambda: (three(2, 65, 4, 64), {}),
    "heads": lambda: (three(2, 64, 5, 64), {}),
    "head_dim": lambda: (three(2, 64, 4, 128), {}),
    "fewer heads of k": lambda: (three() | {"k": zeros(2, 64, 2, 64), "v": zeros(2, 64, 2, 64)}, {}),
    "more keys": lambda: (three() | {"k": zeros(2, 70, 4, 64), "v": zeros(2, 70, 4, 64)}, {}),
    "strides of q": lambda: (three() | {"q": zeros(2, 4, 64, 64).transpose(1, 2)}, {}),
    "strides of v": lambda: (three() | {"v": zeros(2, 4, 64, 64).transpose(1, 2)}, {}),
    "rows further apart": lambda: (three() | {"k": zeros(2, 64, 4, 72)[..., :64]}, {}),
    "address of q": lambda: (three() | {"q": odd()}, {}),
    "address of v": lambda: (three() | {"v": odd()}, {}),
    "slopes": lambda: (three() | {"alibi_slopes": torch.zeros(4)}, {}),
    "sink": lambda: (three() | {"sink": torch.zeros(4)}, {}),
    "causal": lambda: (three(), {"causal": True}),
    "scale": lambda: (three(), {"scale": 0.3}),
    "window": lambda: (three(), {"window": (3, 4)}),
    "layout": lambda: (three(), {"layout": "bhsd"}),
    "deterministic": lambda: (three(), {"deterministic": True}),
    "softcap": lambda: (three(), {"softcap": 30.0}),
    "score_mod": lambda: (three(), {"score_mod": "score + 1"}),
}


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_not_recalled(change: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    arrays, options = CHANGES[change]()
    for _ in range(4):
        plain = launched_by(gpu, lambda: both(three()))
    got = [launched_by(gpu, lambda: both(arrays, **options)) for _ in range(4)]
    assert launched_by(gpu, lambda: both(three())) == plain
    launch.forget()
    want = launched_by(gpu, lambda: both(arrays, **options))
    assert want != plain
    assert got == [want] * 4


def test_the_family_and_what_is_wanted_are_part_of_a_kind(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x = three()
    for wish in ("sm90", "sm80", "sm90"):
        monkeypatch.setenv("CUPYFLASH_FAMILY", wish)
        for want_lse in (False, True):
            for _ in range(4):
                found = cupyflash.attention(*x.values(), return_lse=want_lse)
                assert isinstance(found, tuple) == want_lse
                assert gpu.launched[-1].symbol[4:8] == wish


def test_lengths_are_read_where_they_are_debugged(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ends = zeros(9, 4, 64), torch.tensor([0, 7, 9], dtype=torch.int32)
    for _ in range(4):
        cupyflash.attention_varlen(x, x, x, cu_seqlens_q=ends)
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    ends[1] = 10
    with pytest.raises(ArgumentError, match="cu_seqlens_q"):
        cupyflash.attention_varlen(x, x, x, cu_seqlens_q=ends)


def test_memory_that_is_gone(gpu: Gpu) -> None:
    x = zeros()
    for _ in range(4):
        cupyflash.attention(x, x, x)
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"^q: a tensor of shape .* needs \d+ bytes of memory and has 0"):
        cupyflash.attention(x, x, x)


def test_a_comparison_says_no_where_a_signature_differs() -> None:
    """And keeps no tensor alive."""
    import weakref

    x = zeros()
    is_alike = TORCH.comparison([x])
    assert is_alike is not None
    assert is_alike(x)
    assert is_alike(torch.ones_like(x))
    others = [
        x.bfloat16(),
        x.int(),
        x.to("meta"),
        x[:1],
        x.transpose(0, 1),
        x.flatten(),
        x.requires_grad_(False).to_sparse(),
    ]
    others += [torch._neg_view(x), torch.nn.Parameter(x), x.numpy(), None]
    for other in others:
        assert not is_alike(other)
    with torch.inference_mode():
        assert not is_alike(x)
    assert TORCH.comparison([x, x]) is None
    seen = weakref.ref(x)
    del x, others
    assert seen() is None


def test_results_are_new_where_those_before_were_given(gpu: Gpu, looked_for: list[Any]) -> None:
    given = zeros(), torch.zeros(2, 4, 64)
    for _ in range(3):
        assert run.forward(TORCH, three(), Options(), into=given)[0] is given[0]
    looked_for.clear()
    out, lse = run.forward(TORCH, three(), Options())
    assert not looked_for
    assert (out.shape, lse.shape) == (given[0].shape, given[1].shape)
    assert out is not given[0]


def test_calls_that_take_turns_are_not_compared(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = three(), three(2, 70, 4, 64)
    made: list[int] = []
    comparison = TORCH.comparison
    monkeypatch.setattr(TORCH, "comparison", lambda *given: made.append(1) or comparison(*given))
    for i in range(6):
        cupyflash.attention(*x.values())
        cupyflash.attention(*y.values())
        if i == 2:  # both are kept
            made.clear()
    assert not made
    for _ in range(6):
        cupyflash.attention(*y.values())
    assert len(made) == 1


def test_kinds_stay_few(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last, "_MOST", 5)
    x = three()
    for i in range(20):
        for m in (64, 63, 62, 61):
            cupyflash.attention(x["q"][:, :m], x["k"], x["v"], scale=1.0 + i)
        assert len(launch.calls.last) <= 5
    kinds = [*launch.calls.last]
    last.keep(launch.calls.last, "new", None)
    assert kinds[-1] in launch.calls.last


def test_a_torch_that_compares_nothing(gpu: Gpu, looked_for: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_of_programs", lambda name: None)
    want = launched_by(gpu, lambda: both(three()))
    for m in (64, 63, 62, 61, 64, 64):
        both({name: x[:, :m] for name, x in three().items()})
    assert launched_by(gpu, lambda: both(three())) == want
    assert len(looked_for) == 2 * 8


# ---- Lengths that are new ----


FORMS: dict[str, Callable[[int, int, int], Any]] = {
    "bshd": lambda batch, n, heads: zeros(batch, n, heads, 64),
    "bshd rows of a buffer": lambda batch, n, heads: zeros(batch, 300, heads, 64)[:, :n],
    "bshd of whole heads": lambda batch, n, heads: zeros(batch, heads, n, 64).transpose(1, 2),
    "bhsd": lambda batch, n, heads: zeros(batch, heads, n, 64),
    "bhsd of whole rows": lambda batch, n, heads: zeros(batch, n, heads, 64).transpose(1, 2),
}
LENGTHS = [(70, 300), (71, 300), (72, 13), (9, 9), (1, 40), (40, 1), (290, 2), (3, 299), (1, 1), (44, 45)]


@pytest.mark.parametrize("place", [pretended_gpu.plain, pretended_gpu.with_a_mark])
@pytest.mark.parametrize("form", [*FORMS, "packed", "mixed"])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_new_lengths(
    family: str, form: str, place: Any, gpu: Gpu, looked_for: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a series that is there. Those of one row are another one, and those that came before are kept."""
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    gpu.place = place
    ends, other = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 1, 5], dtype=torch.int32)

    def call(m: int, n: int, more: bool = False) -> None:
        slopes = {"alibi_slopes": torch.zeros(4)} if more else {}
        if form == "packed":
            q, k, v = zeros(m, 4, 64), zeros(n, 2, 64), zeros(n, 2, 64)
            cu_seqlens = {"cu_seqlens_q": ends, "cu_seqlens_k": other}
            check(q, cupyflash.attention_varlen(q, k, v, return_lse=more, **cu_seqlens, **slopes), (4, m))
            return
        makes = ["bshd", "bshd of whole heads", "bshd"] if form == "mixed" else [form] * 3
        q, k, v = (FORMS[name](2, *x) for name, x in zip(makes, ((m, 4), (n, 2), (n, 2)), strict=True))
        layout = "bshd" if form == "mixed" else form[:4]
        check(q, cupyflash.attention(q, k, v, layout=layout, return_lse=more, **slopes), (2, 4, m))

    def check(q: Any, results: Any, rows: tuple[int, ...]) -> None:
        """That they are new, contiguous, and like q and of these rows."""
        out, *lse = results if isinstance(results, tuple) else (results,)
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
        assert [(x.shape, x.dtype) for x in lse] == [(rows, torch.float32)] * len(lse)
        assert all(x.is_contiguous() and x.storage_offset() == 0 for x in (out, *lse))

    calls = [lambda x=x, more=more: call(*x, more) for more in (False, True) for x in (*LENGTHS, *LENGTHS[:3])]
    got = [launched_by(gpu, one) for one in calls]
    recalled = len(calls) - len(looked_for)
    assert recalled >= 2 * 3 or place is pretended_gpu.with_a_mark
    launch.forget()
    monkeypatch.setattr(launch.series, "find", lambda key: None)
    monkeypatch.setattr(run, "again", lambda *_: None)
    assert [launched_by(gpu, one) for one in calls] == got


# Options whose launches share a workspace, of queries of one length.
SHARING: dict[str, Callable[[int], dict[str, Any]]] = {
    "mask_mod": lambda n: {"mask_mod": "k <= q + b"},
    "mask": lambda n: {"mask": torch.ones(2, 1, 1, 50, dtype=torch.bool)},
    "mask of one": lambda n: {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
    "block_mask": lambda n: {"block_mask": masks.local(n, 50, left=3)},
    "mask_mod and lse": lambda n: {"mask_mod": "k <= q + b", "return_lse": True},
}


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("name", SHARING)
def test_new_lengths_of_calls_with_a_workspace(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies behind the results, and is none of them."""
    gpu = pretended_gpu.pretend(monkeypatch, arch)

    def call(n: int) -> list[Any]:
        q, k, v = zeros(2, n, 4, 64), zeros(2, 50, 4, 64), zeros(2, 50, 4, 64)
        gpu.launched.clear()
        results = cupyflash.attention(q, k, v, **SHARING[name](n))
        kinds = {variant.symbol: variant.params for variant in gpu.loaded}
        for symbol, _, data in gpu.launched:
            params = np.frombuffer(data, kinds[symbol])[0]
            params = params["plain"] if "plain" in params.dtype.names else params
            out, *lse = results if isinstance(results, tuple) else (results,)
            assert int(params["o"]) == out.data_ptr() != int(params["lse"])
            assert not lse or int(params["lse"]) == lse[0].data_ptr()
            assert int(params["block_tiles"]) != out.data_ptr()
        return found_in(gpu.launched, gpu)

    found = [call(n) for n in range(40, 48)]
    launch.forget()
    monkeypatch.setattr(run, "again", lambda *_: None)
    assert [call(n) for n in range(40, 48)] == found


def test_arrays_that_lie_otherwise_each(gpu: Gpu, looked_for: list[Any]) -> None:
    """In one series rows of k lie in whole heads, and in the next those of v: neither is taken for the other."""
    bshd, heads = FORMS["bshd"], FORMS["bshd of whole heads"]

    def call(m: int, forms: tuple[Any, ...]) -> list[Any]:
        return launched_by(gpu, lambda: cupyflash.attention(*(form(2, m, 4) for form in forms)))

    ways = (bshd, bshd, bshd), (bshd, heads, bshd), (bshd, bshd, heads), (heads, bshd, bshd)
    found = [[call(60 + m, forms) for m in range(8)] for forms in ways]
    assert len(looked_for) <= len(ways) * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "again", lambda *_: None)
        for forms, launched in zip(ways, found, strict=True):
            launch.forget()
            assert [call(60 + m, forms) for m in range(8)] == launched


def test_new_lengths_between_calls_that_come_again(gpu: Gpu, looked_for: list[Any]) -> None:
    """Both are recalled."""
    x = three(2, 60, 4, 64)
    want = launched_by(gpu, lambda: cupyflash.attention(*x.values()))
    for _ in range(3):
        cupyflash.attention(*x.values())
    for n in (70, 71, 72):
        cupyflash.attention(*three(2, n, 4, 64).values())
    looked_for.clear()
    for n in range(80, 90):
        found = launched_by(gpu, lambda n=n: cupyflash.attention(*three(2, n, 4, 64).values()))
        problem = found[0][2]["problem"]
        assert int.from_bytes(problem[4:8], "little") == n
        for _ in range(n % 3):
            assert launched_by(gpu, lambda: cupyflash.attention(*x.values())) == want
    assert not looked_for


def known(m: int = 60, n: int = 50) -> None:
    """Calls that let a series be compared."""
    for i in range(4):
        cupyflash.attention(zeros(2, m + i, 4, 64), *(zeros(2, n + i, 4, 64) for _ in "kv"))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")
def test_new_lengths_are_checked(gpu: Gpu, looked_for: list[Any]) -> None:
    known()
    looked_for.clear()
    cupyflash.attention(*three(2, 70, 4, 64).values())
    assert not looked_for
    launched = len(gpu.launched)
    with pytest.raises(ArgumentError, match=r"^v: expected"):
        cupyflash.attention(zeros(2, 71, 4, 64), zeros(2, 71, 4, 64), zeros(2, 72, 4, 64))
    q, k, v = three(2, 73, 4, 64).values()
    v.untyped_storage().resize_(v.nbytes // 2)
    with pytest.raises(ArgumentError, match=r"^v: a tensor of shape .* needs \d+ bytes of memory and has \d+"):
        cupyflash.attention(q, k, v)
    with pytest.raises(UnsupportedError, match=r"^q: torch.jit.trace"):
        torch.jit.trace(cupyflash.attention, tuple(three(2, 74, 4, 64).values()))
    assert len(gpu.launched) == launched
    cupyflash.attention(zeros(2, 0, 4, 64), zeros(2, 70, 4, 64), zeros(2, 70, 4, 64))
    assert len(gpu.launched) == launched


def test_lengths_that_come_again_are_kept(gpu: Gpu, looked_for: list[Any]) -> None:
    known()
    calls = len(launch.calls)
    for n in (70, 71, 72):
        cupyflash.attention(*three(2, n, 4, 64).values())
    assert len(launch.calls) == calls
    for n in (70, 71, 72) * 3:
        cupyflash.attention(*three(2, n, 4, 64).values())
    assert len(launch.calls) == calls + 3


@pytest.mark.parametrize("name", ["CUPYFLASH_FAMILY", "heads", "strides"])
def test_a_series_is_of_its_kind(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm90")
    known()
    heads = 8 if name == "heads" else 4
    if name == "CUPYFLASH_FAMILY":
        monkeypatch.setenv(name, "sm80")
    q, k, v = (zeros(2, 90, heads, 64) for _ in range(3))
    if name == "strides":
        k = zeros(2, 90, 2 * heads, 64)[:, :, ::2]
    found = launched_by(gpu, lambda: cupyflash.attention(q, k, v))
    launch.forget()
    assert found == launched_by(gpu, lambda: cupyflash.attention(q, k, v))
