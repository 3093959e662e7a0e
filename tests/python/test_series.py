"""Series: what a call of new lengths launches is what it launches where each call is prepared by itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.launch import prepared as launch
from cupyflash.launch import series
from cupyflash.plan import extents
from tests import pretended_gpu
from tests.pretended_gpu import Gpu, found_in, launched_by

pytestmark = pytest.mark.needs("cupy")
Lengths = tuple[int, int]
# In order: the first of each series, then others; of one row, of few (whose maps have a mark), of many.
FEW = [(70, 300), (71, 300), (70, 13)]
LENGTHS = [*FEW, (1, 40), (1, 3000), (3000, 2), (5000, 4096), (129, 1), (2, 1), (1, 1), (1, 1)]


def zeros(seqlen: int, heads: int, batch: int, head_dim: int, form: str) -> Any:
    """An array whose heads and rows lie as the form says, in the layout that its name begins with."""
    if form == "bshd":
        return np.zeros((batch, seqlen, heads, head_dim), np.float16)
    if form == "bshd rows of a buffer":
        return np.zeros((batch, 6000, heads, head_dim), np.float16)[:, :seqlen]
    x = np.zeros((batch, heads, seqlen, head_dim), np.float16)
    if form == "bshd of whole heads":
        return x.swapaxes(1, 2)
    return x if form == "bhsd" else zeros(seqlen, heads, batch, head_dim, "bshd").swapaxes(1, 2)


FORMS = ["bshd", "bshd rows of a buffer", "bshd of whole heads", "bhsd", "bhsd of whole rows"]


def dense(lengths: Lengths, form: str, batch: int = 1, heads: Lengths = (4, 2), **options: Any) -> None:
    """A forward, and a backward."""
    (m, n), (heads_q, heads_k) = lengths, heads
    q, out, dout = (zeros(m, heads_q, batch, 64, form) for _ in range(3))
    k, v = (zeros(n, heads_k, batch, 64, form) for _ in range(2))
    options["layout"] = form[:4]
    cupyflash.attention(q, k, v, **options)
    cupyflash.attention_backward(dout, q, k, v, out, np.zeros((batch, heads_q, m), np.float32), **options)


def packed(lengths: Lengths, **options: Any) -> None:
    (m, n), cu = lengths, np.zeros(4, np.int32)
    q, k, v = (np.zeros((total, heads, 64), np.float16) for total, heads in ((m, 4), (n, 2), (n, 2)))
    cu_seqlens = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    cupyflash.attention_varlen(q, k, v, **cu_seqlens, **options)
    lse = np.zeros((4, m), np.float32)
    cupyflash.attention_varlen_backward(q, q, k, v, q, lse, **cu_seqlens, **options)


def compare(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, calls: list[Callable[[], None]]) -> int:
    """How many of these calls were made from a series; all launch what they launch by themselves."""
    found: list[bool] = []

    def watch(*given: Any) -> Any:
        call = again(*given)
        found.append(call is not None)
        return call

    again = series.again
    with monkeypatch.context() as patch:
        patch.setattr(series, "again", watch)
        got = [launched_by(gpu, call) for call in calls]
    launch.forget()
    monkeypatch.setattr(series, "again", lambda *_: None)
    assert [launched_by(gpu, call) for call in calls] == got
    return sum(found)


@pytest.mark.parametrize("place", [pretended_gpu.plain, pretended_gpu.with_a_mark, pretended_gpu.crossed])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [1, 3])
def test_dense(
    batch: int, form: str, family: str, place: pretended_gpu.Place, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    gpu.place = place
    calls = [lambda x=x: dense(x, form, batch, causal=x[0] > 70) for x in LENGTHS]
    count = compare(gpu, monkeypatch, calls)
    assert count == 0 if (place, family) == (pretended_gpu.crossed, "sm90") else count >= 4


@pytest.mark.parametrize("place", [pretended_gpu.plain, pretended_gpu.with_a_mark])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_packed(family: str, place: pretended_gpu.Place, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    gpu.place = place
    assert compare(gpu, monkeypatch, [lambda x=x: packed(x, causal=True) for x in LENGTHS]) >= 8


def test_with_what_features_bring(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not depend on lengths is part of a series; a bias, a mask and tiles of a block mask have none."""
    slopes, sink, ranges = np.zeros(4, np.float32), np.zeros(4, np.float32), np.zeros((1, 2), np.int32)
    calls = []
    for m, n in FEW:
        arrays: list[dict[str, Any]] = [{"alibi_slopes": slopes}, {"alibi_slopes": slopes[None]}, {"sink": sink}]
        arrays += [{"kv_range": ranges}, {"bias": np.zeros((m, n), np.float16)}, {"mask": np.zeros((m, n), bool)}]
        calls += [lambda m=m, n=n, x=x: dense((m, n), "bshd", **x) for x in arrays]
    assert compare(gpu, monkeypatch, calls) == 2 * 2 * 4


def test_a_sweep(gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms, heads, batches and masks alternate; lengths come again."""
    calls, shares = [], set[int]()
    divide = extents.divide
    monkeypatch.setattr(extents, "divide", lambda *x: (found := divide(*x), shares.add(found[0]))[0])
    for _ in range(60):
        lengths = tuple(int(n) for n in rng.choice([1, 2, 64, 65, 511, 2049], 2))
        form, batch, heads = str(rng.choice(FORMS)), int(rng.integers(1, 3)), [(2, 1), (3, 3), (8, 1)][rng.integers(3)]
        window = [None, (5, 0)][rng.integers(2)]
        calls.append(lambda a=(lengths, form, batch, heads), w=window: dense(*a, window=w))
    assert compare(gpu, monkeypatch, calls) > 10
    assert shares > {1, 2}  # of a group's heads, which lengths decide


def test_steps_that_a_series_does_not_say(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that are repeated, that lie at odd places, or too far apart for a word of 32 bits."""
    q, k = np.zeros((2, 70, 2, 64), np.float16), np.zeros((2, 50, 2, 64), np.float16)
    odd = np.lib.stride_tricks.as_strided(np.zeros(20000, np.float16), k.shape, (2 * 6403, 256, 128, 2))
    far = np.lib.stride_tricks.as_strided(k[:1], k.shape, (1 << 34, 256, 128, 2))
    others = [k, np.broadcast_to(k[:1], k.shape), odd, far, k]
    calls = [lambda x=x: cupyflash.attention(q, x, x) for x in [*others, *[x[:, :40] for x in others]]]
    compare(gpu, monkeypatch, calls)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("axis", [0, 2])
def test_a_series_begins_with_steps_longer_than_a_word(
    axis: int, family: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first call nothing of them is left in the others."""
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    k = np.zeros((2, 50, 2, 64), np.float16)
    steps = (1 << 34, 128, 6400, 2) if axis == 0 else (12800, 128, 1 << 34, 2)
    far = np.lib.stride_tricks.as_strided(k, k.shape, steps)
    near = np.zeros((2, 2, 50, 64), np.float16).swapaxes(1, 2)
    calls = [lambda x=x: cupyflash.attention(k[:, : x.shape[1]], x, x) for x in (far, near[:, :40], near[:, :30])]
    assert compare(gpu, monkeypatch, calls) == 2


def test_a_series_begins_with_sequences_in_reverse(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of out, which no kernel of the backward reads by TMA."""

    def backward(m: int, step: int) -> None:
        q, lse = np.zeros((2, m, 2, 64), np.float16), np.zeros((2, 2, m), np.float32)
        cupyflash.attention_backward(q, q, q, q, q[::step], lse)

    calls = [lambda x=x: backward(*x) for x in ((70, -1), (71, 1), (72, -1), (73, 1))]
    assert compare(gpu, monkeypatch, calls) == 2


@pytest.mark.needs("torch")
def test_tensors(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def call(m: int, n: int) -> None:
        q, k = torch.zeros(2, m, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 4, n, 64, dtype=torch.bfloat16)
        out, lse = cupyflash.attention(q, k.transpose(1, 2), k.transpose(1, 2), return_lse=True)
        cupyflash.attention_backward(q, q, k.transpose(1, 2), k.transpose(1, 2), out, lse)

    assert compare(gpu, monkeypatch, [lambda x=x: call(*x) for x in LENGTHS]) >= 6


def test_refused_in_the_same_words(gpu: Gpu) -> None:
    """Lengths that contradict each other, in a series that is there."""
    q, k = np.zeros((2, 70, 4, 64), np.float16), np.zeros((2, 50, 2, 64), np.float16)
    lse = np.zeros((2, 4, 70), np.float32)

    def backward(out: Any, lse: Any) -> None:
        cupyflash.attention_backward(q[:, 1:], q[:, 1:], k, k, out, lse)

    wrong: list[Callable[[], Any]] = [
        lambda: cupyflash.attention(q[:, 1:], k, k[:, 1:]), lambda: cupyflash.attention(q[:, 1:], k[:, 1:], k),
        lambda: backward(q, lse[:, :, 1:]), lambda: backward(q[:, 1:], lse), lambda: cupyflash.attention(q[0], k, k),
    ]  # fmt: skip
    for call in wrong:
        messages = []
        for is_ready in (False, True):
            launch.forget()
            if is_ready:
                dense((70, 50), "bshd", 2)
            with pytest.raises(ArgumentError) as raised:
                call()
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


def test_lengths_that_come_once_are_not_kept(gpu: Gpu) -> None:
    """They do not drive out those that come again."""
    for m in range(10, 30):
        cupyflash.attention(*[np.zeros((1, m, 2, 64), np.float16)] * 3)
    assert len(launch.calls) == 1
    for _ in range(3):
        cupyflash.attention(*[np.zeros((1, 20, 2, 64), np.float16)] * 3)
    assert len(launch.calls) == 2
    assert len(launch.series) == 1


def test_what_came_lately_is_remembered(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for more lengths, and for launches on more grids, the older half of them goes."""
    monkeypatch.setattr(series, "_MAX_SEEN", 4)
    monkeypatch.setattr(launch, "_MAX_LAUNCHES", 4)
    for n in (100, 200, 300, 400, 500, 600):
        dense((n, n), "bshd")
    assert all(2 <= len(prepared._launches) <= 4 for prepared in launch.specs.values())
    count = len(launch.calls)
    dense((400, 400), "bshd")
    assert len(launch.calls) == count + 2
    dense((200, 200), "bshd")
    assert len(launch.calls) == count + 2


def test_threads_share_a_series(gpu: Gpu) -> None:
    """Each launches what its own lengths say."""
    lengths = range(10, 200)
    cupyflash.attention(*[np.zeros((1, 5, 2, 64), np.float16)] * 3)
    gpu.launched.clear()

    def call(m: int) -> None:
        cupyflash.attention(*[np.zeros((1, m, 2, 64), np.float16)] * 3)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, lengths))
    problems = [facts["problem"] for _, _, facts in found_in(gpu.launched, gpu)]
    assert sorted(int.from_bytes(x[4:8], "little") for x in problems) == list(lengths)
    assert all(x[4:8] == x[8:12] for x in problems)
    assert len(launch.calls) == len(launch.series) == 1
