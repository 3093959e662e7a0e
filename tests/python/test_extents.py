"""Spec and extents: a call with new numbers loads nothing, learns nothing, and has the params it should have."""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError
from cupyflash.arrays.adapters import NUMPY
from cupyflash.gpu.device import Device
from cupyflash.launch import filled as filled_params
from cupyflash.launch import passes, template
from cupyflash.launch import prepared as launch
from cupyflash.launch.kept import Kept
from cupyflash.operands import BACKWARD, FORWARD, Pass
from cupyflash.plan import families as plan
from cupyflash.plan.extents import Extents
from cupyflash.plan.spec import Spec
from cupyflash.problem import Bias, Problem, make_problem
from tests import pretended_gpu
from tests.pretended_gpu import Gpu, facts, found_in, random_array

pytestmark = pytest.mark.needs("cupy")
Arrays = tuple[np.ndarray, ...]
NAMES = ("q", "k", "v", "out", "dout")


def draw(
    rng: np.random.Generator, head_dim: int = 64, layout: str = "bshd", group: int = 0, head_dim_v: int = 0
) -> Arrays:
    """q, k, v, out and dout of lengths that no other call has; `group`: query heads of a head of k, unless any."""
    batch, seqlen_q, seqlen_k, heads_k = (int(n) for n in rng.integers((1, 1, 1, 1), (4, 400, 400, 4)))
    heads_q = heads_k * (group or int(rng.integers(1, 4)))
    q, k = (batch, seqlen_q, heads_q), (batch, seqlen_k, heads_k)
    of_v = head_dim_v or head_dim
    rows = (q, head_dim), (k, head_dim), (k, of_v), (q, of_v), (q, of_v)
    return tuple(random_array(rng, lengths, width, layout) for lengths, width in rows)


def both(x: Arrays, layout: str = "bshd", **options: Any) -> None:
    """A forward and a backward."""
    q, k, v, out, dout = x
    batch, heads, seqlen = q.shape[0], q.shape[2 if layout == "bshd" else 1], q.shape[1 if layout == "bshd" else 2]
    cupyflash.attention(q, k, v, layout=layout, **options)
    lse = np.zeros((batch, heads, seqlen), np.float32)
    cupyflash.attention_backward(dout, q, k, v, out, lse, layout=layout, **options)


def test_new_numbers_load_nothing_and_learn_nothing(gpu: Gpu, rng: np.random.Generator) -> None:
    both(draw(rng, group=1), window=(7, 0), scale=0.5)
    loaded, encoded, launched = len(gpu.loaded), gpu.encoded, len(gpu.launched)
    assert loaded == 4
    for i in range(50):
        both(draw(rng, group=1), window=(i, 2 * i), scale=0.1 + i)
    assert (len(gpu.loaded), gpu.encoded) == (loaded, encoded)
    assert len(gpu.launched) == 51 * launched
    both(draw(rng, head_dim=128, group=1), window=(7, 0), scale=0.5)
    assert len(gpu.loaded) == loaded + 4
    assert gpu.encoded > encoded


def planned(which: Pass, x: Arrays, options: dict[str, Any]) -> list[tuple[str, int, dict[str, bytes]]]:
    """(symbol, grid, facts) of the launches that the plan of these arrays by itself has."""
    own_v = x[0].shape[-1] != x[2].shape[-1]
    given = passes.given_of(which, NAMES[: 3 if which is FORWARD else 5], (), own_v)
    signatures = [NUMPY.describe(name, NUMPY.signature(a)) for name, a in zip(given.names, x, strict=False)]
    problem = make_problem([a.shape for a in x[:3]], ["fp16"] * 3, **options)
    known: dict[str, Any] = {"backward": which is BACKWARD, "family": os.environ.get("CUPYFLASH_FAMILY")}
    chosen = plan.plan_call(problem, Device.of(0), **known)
    filled = filled_params.fill(given, chosen, problem, signatures, options["layout"])
    assert filled is not None
    found = []
    for n in (one for one in chosen.launches if one.grid):
        is_whole = n.variant.params == filled.params.dtype
        found.append((n.variant.symbol, n.grid, facts(filled.params if is_whole else filled.params["plain"])))
    return found


@pytest.mark.parametrize("place", [pretended_gpu.plain, pretended_gpu.with_a_mark, pretended_gpu.crossed])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (256, 256), (192, 128), (64, 136)])
def test_params_are_those_of_a_plan_by_itself(
    head_dim: int, head_dim_v: int, layout: str, family: str, place: pretended_gpu.Place, gpu: Gpu,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Lengths, heads, strides and options alternate, and come again; whatever the driver's maps are like."""
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    gpu.place = place
    masks: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (30, 5)}, {"window": (None, 90), "scale": 0.7}]
    calls = [(draw(rng, head_dim, layout, 0, head_dim_v), masks[i % 4] | {"layout": layout}) for i in range(12)]
    for x, options in [*calls, *calls[::-1]]:
        gpu.launched.clear()
        both(x, **options)
        want = planned(FORWARD, x, options) + planned(BACKWARD, x, options)
        assert found_in(gpu.launched, gpu) == want


def test_a_large_array_after_a_small_one(gpu: Gpu, rng: np.random.Generator) -> None:
    """What the driver's map of a small array says more is not handed on to the maps of others."""
    gpu.place = pretended_gpu.with_a_mark
    for seqlen in (3, 300):
        x = tuple(random_array(rng, (2, seqlen, 4), 256, "bshd") for _ in range(5))
        gpu.launched.clear()
        both(x)
        options = {"layout": "bshd"}
        assert found_in(gpu.launched, gpu) == planned(FORWARD, x, options) + planned(BACKWARD, x, options)


def test_maps_that_are_not_understood_cost_one_question_each(gpu: Gpu, rng: np.random.Generator) -> None:
    gpu.place = pretended_gpu.crossed
    both(draw(rng))
    encoded = gpu.encoded
    both(draw(rng))
    assert gpu.encoded == encoded + 4 + 7


def test_between_small_and_large_alone_arrays_cost_questions(gpu: Gpu) -> None:
    """Where small arrays have a mark: it is understood, but not from how many bytes on there is none."""
    gpu.place = pretended_gpu.with_a_mark
    cupyflash.attention(*[np.zeros((1, 5000, 2, 64), np.float16)] * 3)
    rows_of_256_bytes = {770: 0, 360: 0, 500: 4, 771: 0, 300: 0, 470: 0, 490: 4, 550: 0}
    for seqlen, questions in rows_of_256_bytes.items():
        encoded = gpu.encoded
        cupyflash.attention(*[np.zeros((1, seqlen, 2, 64), np.float16)] * 3)
        assert gpu.encoded == encoded + questions, seqlen


def bit_by_batch(longs: Any, words: Any, lengths: list[int], strides: list[int]) -> None:
    """A mark that depends on more than how large an array is."""
    pretended_gpu.with_a_mark(longs, words, lengths, strides)
    words[3] |= (lengths[3] > 1) << 5 if words[3] else 0


def late(longs: Any, words: Any, lengths: list[int], strides: list[int]) -> None:
    """A mark that larger arrays have, too."""
    pretended_gpu.plain(longs, words, lengths, strides)
    if sum((n - 1) * step for n, step in zip(lengths[1:], strides, strict=True)) < 1 << 19:
        words[3] |= 1 << 21


@pytest.mark.parametrize(("place", "free"), [(bit_by_batch, (1 << 18,)), (late, (1 << 14, 1 << 20))])
def test_marks_that_are_understood_in_part(place: Any, free: tuple[int, ...], gpu: Gpu) -> None:
    """The driver is asked wherever a map is not known to be what it would be."""
    gpu.place = place
    cupyflash.attention(*[np.zeros((1, 9000, 2, 64), np.float16)] * 3)
    for n_bytes in (1 << 14, 1 << 17, 1 << 18, 1 << 20):
        encoded = gpu.encoded
        x = np.zeros((1, n_bytes // 256 + 7, 2, 64), np.float16)
        gpu.launched.clear()
        cupyflash.attention(x, x, x)
        assert (gpu.encoded == encoded) == (n_bytes in free or n_bytes == 1 << 20)
        assert found_in(gpu.launched, gpu) == planned(FORWARD, (x, x, x), {"layout": "bshd"})


def test_a_map_that_the_driver_refuses(gpu: Gpu) -> None:
    """That call goes to the other family, and those after it do not."""
    gpu.place, gpu.refuses = pretended_gpu.crossed, lambda lengths: lengths[1] == 77
    for seqlen in (70, 77, 80, 77):
        cupyflash.attention(*[np.zeros((1, seqlen, 2, 64), np.float16)] * 3)
    assert [n.symbol[:8] for n in gpu.launched] == ["fwd_sm90", "fwd_sm80", "fwd_sm90", "fwd_sm80"]


def test_the_family_is_part_of_the_key(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x = [np.zeros((1, 70, 2, 64), np.float16)] * 3
    for wish in ("", "sm80", "sm90", "sm80", ""):
        monkeypatch.setenv("CUPYFLASH_FAMILY", wish)
        cupyflash.attention(*x)
    monkeypatch.delenv("CUPYFLASH_FAMILY")
    cupyflash.attention(*x)
    assert [n.symbol[4:8] for n in gpu.launched] == ["sm90", "sm80", "sm90", "sm80", "sm90", "sm90"]
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm100")
    with pytest.raises(ArgumentError, match=r"^CUPYFLASH_FAMILY: expected one of"):
        cupyflash.attention(*x)


def test_what_else_decides_the_kernels(gpu: Gpu, rng: np.random.Generator) -> None:
    """Each of these calls has a kernel of its own, also once all the others are ready."""
    q, k, v, *_ = (np.zeros((2, 70, 2, 64), np.float16) for _ in range(5))
    shifted = np.zeros(q.size + 1, np.float16)[1:].reshape(q.shape)
    broadcast = np.broadcast_to(k[:1], k.shape)
    calls: list[tuple[Arrays, dict[str, Any]]] = [
        ((q, k, v), {}), ((q, k, v), {"causal": True}), ((q, k, v), {"window": (3, 3)}), ((q, k, v), {"scale": -1.0}),
        ((q, k, shifted), {}), ((q, broadcast, v), {}), (tuple(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)), {}),
    ]  # fmt: skip
    for x, options in calls * 2:
        cupyflash.attention(*x, **options)
    symbols = [n.symbol for n in gpu.launched]
    assert len(set(symbols)) == len(calls)
    assert symbols[: len(calls)] == symbols[len(calls) :]
    cupyflash.attention(q[:, :0], k, v)
    assert len(gpu.launched) == 2 * len(calls)  # no queries, no blocks


def test_refused_in_the_same_words_where_the_kernels_are_ready(gpu: Gpu) -> None:
    """What is new about a call is checked, however much of it is known."""
    q, k = np.zeros((2, 70, 4, 64), np.float16), np.zeros((2, 50, 2, 64), np.float16)
    wrong: list[Arrays] = [
        (q[0], k, k), (q, k[0], k[0]), (q, k, k[:, 1:]), (q, k[:1], k[:1]), (q[..., :32], k, k), (q, k, k[..., :36]),
        (q, k[:, :, :0], k[:, :, :0]), (q[:, :, :3], k, k), (q, k.astype(np.float32), k), (q[..., ::2], k[..., ::2], k),
        (q[..., ::2], *[k[..., ::2]] * 2), (q, k, k.astype(np.float32)), (q[..., :60], *[k[..., :60]] * 2),
        (q.astype(np.int32), *[k.astype(np.int32)] * 2),
    ]  # fmt: skip
    for x in wrong:
        messages = []
        for is_ready in (False, True):
            launch.forget()
            if is_ready:
                cupyflash.attention(q, k, k)
                cupyflash.attention(q[..., :32], k[..., :32], k[..., :32])
            with pytest.raises((ArgumentError, UnsupportedError)) as raised:
                cupyflash.attention(*x)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")
def test_tensors_of_new_lengths_are_looked_at(gpu: Gpu) -> None:
    """That they lie in memory as a whole, and that nobody traces them."""
    import torch

    def call(x: Any) -> Any:
        return cupyflash.attention(x, x, x)

    call(torch.zeros(1, 70, 2, 64, dtype=torch.float16))
    whole, rows = torch.zeros(1, 80, 2, 64, dtype=torch.float16), torch.zeros(1, 90, 3, 64, dtype=torch.float16)
    for x in (whole, rows[:, :, :2]):
        x.untyped_storage().resize_(x.nbytes // 2)
        with pytest.raises(ArgumentError, match=r"^q: a tensor of shape .* needs \d+ bytes of memory and has \d+"):
            call(x)
    with pytest.raises(UnsupportedError, match=r"^q: torch.jit.trace"):
        torch.jit.trace(call, torch.zeros(1, 100, 2, 64, dtype=torch.float16))
    assert len(gpu.launched) == 1


def test_numbers_are_not_in_the_spec() -> None:
    like = make_problem([(2, 300, 4, 64)] * 3, ["bf16"] * 3, window=(3, 4), scale=0.5)
    for numbers in (
        {"batch": 7},
        {"seqlen_q": 9, "seqlen_k": 1},
        {"heads_q": 8},
        {"window": (None, 7)},
        {"scale": 2.0},
    ):
        assert Spec.of(replace(like, **numbers)) == Spec.of(like)  # type: ignore[arg-type]
    for more in ({"seqlen_k": 0}, {"window": (None, 0)}, {"window": (None, None)}, {"scale": 0.0}):
        assert Spec.of(replace(like, **more)) != Spec.of(like)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted({f.name for f in fields(Problem)} - {*template.NUMBERS, "window", "bias"}))
def test_what_calls_do_not_write_is_in_the_spec(name: str) -> None:
    """By value: params that are kept hold it."""
    like = Problem("bf16", 2, 300, 300, 4, 4, 64, 0.5)
    others: Any = {"dtype": "fp16", "head_dim": 72, "head_dim_v": 72, "softcap": 30.0, "mods": "score_mod (score + q)"}
    other = others.get(name) or not getattr(like, name)
    assert getattr(Spec.of(replace(like, **{name: other})), name) == other


def test_of_a_bias_the_spec_has_what_decides_kernels() -> None:
    """Its strides are written; where it is broadcast decides the tiles of its gradient."""
    like = Problem("bf16", 2, 300, 300, 4, 4, 64, 0.5)
    known: dict[str, Any] = {"backward": True, "dbias": True}
    whole, keys, wide = Bias("bf16"), Bias("bf16", (False, False, False, True)), Bias("fp32")
    specs = [Spec.of(replace(like, bias=bias), **known) for bias in (None, whole, keys, wide)]
    assert len(set(specs)) == 4
    assert Spec.of(replace(like, bias=whole)) == Spec.of(replace(like, bias=keys))
    assert Spec.of(replace(like, bias=whole), paired_bias=True) != Spec.of(replace(like, bias=whole))
    assert Spec.of(like, **known, paired_bias=True) == Spec.of(like, backward=True)


# ---- what is kept ----


class Value:
    recent = False


def test_the_oldest_goes_and_nothing_else() -> None:
    kept: Kept[Value] = Kept(3)
    for key in range(10):
        kept.keep(key, Value())
        assert list(kept) == list(range(max(0, key - 2), key + 1))


def test_what_is_found_is_spared_once() -> None:
    kept: Kept[Value] = Kept(3)
    for key in "abc":
        kept.keep(key, Value())
    assert kept.find("a") is kept.values()[0]
    kept.keep("d", Value())
    assert list(kept) == ["c", "a", "d"]
    for key in "efg":
        assert kept.find("missing") is None
        kept.keep(key, Value())
    assert list(kept) == ["e", "f", "g"]
    for key in "efg":
        kept.find(key)
    kept.keep("h", Value())
    assert list(kept) == ["f", "g", "h"]


def test_keys_that_cannot_be_hashed_are_not_kept() -> None:
    kept: Kept[Value] = Kept(3)
    value = Value()
    assert kept.keep([1], value) is value
    assert kept.find([1]) is None
    assert len(kept) == 0


def test_calls_kept_stay_few(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "calls", Kept(5))
    often = np.zeros((1, 400, 1, 64), np.float16)
    cupyflash.attention(often, often, often)
    (first,) = launch.calls.values()
    for seqlen in range(1, 60):
        cupyflash.attention(*[often[:, :seqlen]] * 3)
        cupyflash.attention(often, often, often)
        assert len(launch.calls) <= 5
        assert first in launch.calls.values()
    assert len(launch.specs) == 1


@pytest.mark.parametrize(
    ("options", "sm_count", "limit"),
    [
        ({}, 132, 1024),
        ({"deterministic": True}, 132, 1024),
        ({}, 16, -1),  # blocks that wait for each other might not all run
        ({"window": (None, 0)}, 16, 4096),
        ({"window": (None, 0), "deterministic": True}, 16, 4096),
        ({"window": (2047, 2048)}, 132, 1 << 20),  # of which no query sees more than 4096
        ({"window": (5, 7), "packed": True}, 132, 1 << 20),
        ({"window": (2048, 2048)}, 132, 4096),
        ({"window": (5, None)}, 132, 4096),
        ({"packed": True}, 16, -1),
    ],
    ids=str,
)
def test_up_to_how_many_keys_dq_is_not_cleared(options: dict[str, Any], sm_count: int, limit: int) -> None:
    gpu = replace(Device.synthetic("sm_90"), sm_count=sm_count)
    for seqlen in (1, 1024, 1025, 2048, 2049, 4096, 4097, 1 << 20):
        problem = Problem("bf16", 1, seqlen, seqlen, 2, 2, 64, scale=1.0, **{"window": (None, None)} | options)
        numbers = plan.kernels_of(Spec.of(problem, backward=True), gpu).numbers(Extents.of(problem))
        assert bool(numbers.first_stores) == (seqlen <= limit)
        assert ("dq_turn" in numbers.workspace) == (bool(numbers.first_stores) or problem.deterministic)
        if limit == 1024 and not (problem.deterministic and seqlen > limit):
            assert (numbers.section, numbers.last_section) == (1, 1)  # the blocks of a head begin one after the other


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("window", [(None, None), (None, 0)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_few_key_blocks_of_a_head_add_in_turn_at_the_same_time(
    family: str, window: tuple[int | None, int | None], packed: bool
) -> None:
    """In deterministic order at most 16, unless they begin apart, which the first ones of sequences of few keys do, or
    the order is by nature, or there are no more heads."""
    device = Device.synthetic("sm_90")

    def sections(seqlen: int, head_dim: int = 128, heads: int = 64, group: int = 1, **options: Any) -> tuple[int, int]:
        """The fewest heads of one, as schedule.cuh makes them, and how many key blocks of each then run at once."""
        given: dict[str, Any] = {"scale": 1.0, "window": window, "packed": packed, "deterministic": True} | options
        problem = Problem("bf16", 1, seqlen, seqlen, group * heads, heads, head_dim, **given)
        kernels = plan.kernels_of(Spec.of(problem, backward=True, family=family), device)
        numbers = kernels.numbers(Extents.of(problem))
        before_last = (heads - numbers.last_section) % numbers.section or numbers.section
        fewest = min(before_last, numbers.last_section) if heads > numbers.last_section else numbers.last_section
        return fewest, device.sm_count * kernels.variants[1].tile.blocks_per_sm // fewest

    for seqlen in (2048, 8192, 1 << 17):
        apart = family == "sm90" and packed and window == (None, None)  # of 8 heads at the most
        for heads in (64, 16) if apart else (64, 61, 16):
            assert sections(seqlen, heads=heads)[1] <= 16
        assert sections(seqlen, heads=3)[0] == 3
        assert sections(seqlen, deterministic=False)[0] <= sections(seqlen)[0]
    assert packed or sections(1 << 17, deterministic=False)[1] > 16
    if family == "sm90":
        for group in (1, 4):
            ordered, fast = (sections(8192, 256, group=group, deterministic=on) for on in (True, False))
            assert ordered == fast
        assert packed or window != (None, None) or sections(1024)[0] == 1


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"softcap": 3.0}], ids=str)
def test_packed_sequences_of_few_keys_are_not_cleared(options: dict[str, Any]) -> None:
    """Whatever their average; of up to 8 heads at a time, whose up to 8 key blocks then wait for each other."""
    for batch, seqlen in ((1, 1 << 20), (64, 4096)):
        problem = Problem("bf16", batch, seqlen, seqlen, 32, 32, 64, scale=1.0, packed=True, **options)
        kernels = plan.kernels_of(Spec.of(problem, backward=True), Device.synthetic("sm_90"))
        numbers = kernels.numbers(Extents.of(problem))
        assert numbers.first_stores == 1025
        assert {"dq_turn", "lengths_contradict"} <= set(numbers.workspace)
        assert max(numbers.section, numbers.last_section) <= 8


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_numbers_by_lengths(family: str, packed: bool, rng: np.random.Generator) -> None:
    """One function of lengths says what the plan says of each call: of a forward tiles and sections as they are
    defined, of a backward what it says of the extents as a whole."""
    device = Device.synthetic("sm_90")
    for backward in (False, True):
        spec = Spec("bf16", 64, backward=backward, packed=packed, family=family, causal=True, tma=True, grouped=True)
        kernels = plan.kernels_of(spec, device)
        for _ in range(20):
            batch, heads_k, group = (int(n) for n in rng.integers((1, 1, 2), (9, 40, 5)))
            first = Extents(batch, 64, 64, heads_k * group, heads_k, 0, 0)
            of_lengths = kernels.by_lengths(first)
            for m, n in rng.integers(1, (2000, 400_000), (10, 2)).tolist():
                found = of_lengths(m, n)
                assert found == kernels.numbers(first._replace(seqlen_q=m, seqlen_k=n))
                if not backward:
                    check_forward(kernels, first, found, m, n)


@pytest.mark.parametrize("backward", [False, True])
def test_too_many_tiles_of_new_lengths(backward: bool) -> None:
    kernels = plan.kernels_of(Spec("bf16", 64, tma=True, backward=backward), Device.synthetic("sm_90"))
    of_lengths = kernels.by_lengths(Extents(1 << 20, 64, 64, 64, 64, 0, 0))
    assert of_lengths(64, 64)[0][0] == 1 << 26
    with pytest.raises(UnsupportedError, match=r"^q: expected at most 2147483647 tiles of work, got \d+"):
        of_lengths(1 << 14, 64)


def check_forward(kernels: Any, extents: Extents, found: Any, m: int, n: int) -> None:
    """Tiles of queries, and so many heads of k together as K and V of `mixed_bytes` are."""
    batch, _, _, heads_q, heads_k, *_ = extents
    rows, packed = kernels.variants[0].block_m, kernels.spec.packed
    of_head = m // rows + batch + 1 if packed else math.ceil(m / rows)
    tiles, workspace, section, last, *others = found
    assert (tiles, workspace, others) == ((of_head * heads_q * (1 if packed else batch),), {}, [False, 1, 1])
    group, heads = heads_q // heads_k, heads_k * (1 if packed else batch)
    keys, of_one = (n // batch, of_head // batch) if packed else (n, of_head)
    key_bytes = 2 * 2 * kernels.spec.head_dim
    assert section == group * max(1, min(heads, kernels.mixed_bytes // max(1, keys * key_bytes)))
    tail = 2 * kernels.device.sm_count if kernels.spec.uneven else 0
    assert last == group * min(heads, max(section // group, math.ceil(tail / max(1, of_one * group))))
