"""JAX: mods and block masks, against the same call on NumPy arrays, and gradients against plain attention by JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_jax import SHAPES, agree, at_once, run_on_four_devices, squared

import cupyflash
from cupyflash import ArgumentError, BlockMask, masks
from cupyflash.mods import bind
from tests import pretended_gpu

pytestmark = pytest.mark.needs("jax")

BATCH, SQ, HEADS, _ = SHAPES[0]
SK = SHAPES[1][1]
BY_PLACE = "tanh(score) + (b + 1) * table[h, max(0, q - k)]"  # what it computes depends on all four


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")


@pytest.fixture
def three(rng: np.random.Generator) -> list[Any]:
    """q, k and v: grouped heads, more keys than queries."""
    import jax.numpy as jnp

    return [jnp.asarray(rng.standard_normal(shape, dtype=np.float32)) for shape in SHAPES]


@pytest.fixture
def table(rng: np.random.Generator) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(rng.standard_normal((HEADS, 20), dtype=np.float32))


def by_place(q: Any, k: Any, v: Any, table: Any) -> Any:
    return cupyflash.attention(q, k, v, score_mod=BY_PLACE, mod_arrays={"table": table})


def plain(q: Any, k: Any, v: Any, score: Callable[..., Any], sees: Any = True) -> tuple[Any, Any]:
    """out and lse where scores are changed by a function of them and of b, h, q and k."""
    import jax
    import jax.numpy as jnp

    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    b, h = jnp.arange(s.shape[0])[:, None, None, None], jnp.arange(s.shape[1])[:, None, None]
    s = jnp.where(sees, score(s, b, h, jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])), -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(s), v), jax.nn.logsumexp(s, -1)


@at_once
def plain_by_place(q: Any, k: Any, v: Any, table: Any) -> Any:
    import jax.numpy as jnp

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return jnp.tanh(s) + (b + 1) * table[h, jnp.clip(i - j, 0, 19)]

    return plain(q, k, v, score)[0]


def numpy_of(f: Callable[..., Any], *arrays: Any) -> Any:
    return f(*map(np.asarray, arrays))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of q in all calls of the CPU path from now on."""
    from cupyflash.jax import call

    seen: list[Any] = []
    run = call.run.forward
    monkeypatch.setattr(
        call.run, "forward", lambda lib, arrays, *more: (seen.append(arrays["q"].shape), run(lib, arrays, *more))[1]
    )
    return seen


# ---- Mods ----


def test_a_mod_is_that_of_numpy_arrays_inside_jit_and_outside(three: list[Any], table: Any) -> None:
    import jax

    want = numpy_of(by_place, *three, table)
    np.testing.assert_array_equal(by_place(*three, table), want)
    np.testing.assert_array_equal(jax.jit(by_place)(*three, table), want)


def test_gradients_of_a_mod(three: list[Any], table: Any) -> None:
    """Those of the arrays that it reads, too, by themselves and beside the others."""
    import jax

    want = jax.grad(squared(plain_by_place), (0, 1, 2, 3))(*three, table)
    agree(jax.grad(squared(by_place), (0, 1, 2, 3))(*three, table), want)
    agree(jax.jit(jax.grad(squared(jax.checkpoint(by_place)), (0, 1, 2)))(*three, table), want[:3])
    agree(jax.jit(jax.grad(squared(jax.checkpoint(by_place)), (0, 1, 2, 3)))(*three, table), want)
    agree(jax.grad(squared(by_place), 3)(*three, table), want[3])


def test_gradients_of_lse_of_a_mod(three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    weights = jnp.linspace(-1, 1, BATCH * HEADS * SQ).reshape(BATCH, HEADS, SQ)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = cupyflash.attention(q, k, v, score_mod="score * score - q", mask_mod="k <= q", return_lse=True)
        return (out**2).sum() + (weights * lse).sum()

    def want(q: Any, k: Any, v: Any) -> Any:
        sees = np.arange(SK) <= np.arange(SQ)[:, None]
        out, lse = plain(q, k, v, lambda s, b, h, i, j: s * s - i, sees)
        return (out**2).sum() + (weights * lse).sum()

    agree(jax.grad(loss, (0, 1, 2))(*three), jax.grad(want, (0, 1, 2))(*three))


def test_a_backward_of_ones_own(three: list[Any], table: Any) -> None:
    import jax

    mask = masks.local(SQ, SK, left=9, right=9)

    @jax.jit
    def both(q: Any, k: Any, v: Any, table: Any) -> Any:
        options = {"score_mod": BY_PLACE, "mod_arrays": {"table": table}, "block_mask": mask}
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        found = cupyflash.attention_backward(2 * out, q, k, v, out, lse, gradients_of="table", **options)
        return *found, found.dmod_arrays["table"]

    def ours(q: Any, k: Any, v: Any, table: Any) -> Any:
        return cupyflash.attention(q, k, v, score_mod=BY_PLACE, mod_arrays={"table": table}, block_mask=mask)

    agree(both(*three, table), jax.grad(squared(ours), (0, 1, 2, 3))(*three, table))


@pytest.mark.parametrize("wide", ["", "kind", "shift", "kind shift"])
def test_arrays_of_all_dtypes(wide: str, three: list[Any], rng: np.random.Generator) -> None:
    """Those of 64 bits exist where x64 is on, or was when they were made."""
    import jax
    import jax.numpy as jnp

    from cupyflash.jax.op import with_x64

    arrays = {
        "weight": rng.random((BATCH, HEADS, SQ, 2)).astype(ml_dtypes.bfloat16),
        "shift": rng.standard_normal(SK).astype(np.float64 if "shift" in wide else np.float16),
        "shown": rng.random((HEADS, SK)) < 0.7,
        "kind": rng.integers(0, 3, (3, SQ)).astype(np.int64 if "kind" in wide else np.int32),
    }
    if "kind" in wide:
        arrays["kind"] *= 2**40  # an index far beyond, whose lower half is 0
    options: dict[str, Any] = {
        "score_mod": "score * weight(b, h, q, k % 2) + shift[k]",
        "mask_mod": "shown(h, k) && kind(b, q) != 1 && kind(b, k) == 0",
    }
    want = cupyflash.attention(*map(np.asarray, three), **options, mod_arrays=arrays)
    with with_x64() if wide else contextlib.nullcontext():
        given = {name: jnp.asarray(x) for name, x in arrays.items()}
    assert {name: x.dtype for name, x in given.items()} == {name: x.dtype for name, x in arrays.items()}

    def ours(q: Any, k: Any, v: Any, learned: Any = None) -> Any:
        return cupyflash.attention(q, k, v, **options, mod_arrays=given | (learned or {}))

    np.testing.assert_array_equal(ours(*three), want)
    with with_x64() if wide else contextlib.nullcontext():
        np.testing.assert_array_equal(jax.jit(ours)(*three), want)
        learned = {name: given[name] for name in ("weight", "shift")}
        grads = jax.grad(squared(ours), (0, 1, 2, 3))(*three, learned)
        out, lse = ours(*three), cupyflash.attention(*three, **options, mod_arrays=given, return_lse=True)[1]
    five = (np.asarray(x) for x in (2 * out, *three, out, lse))
    own = cupyflash.attention_backward(*five, **options, mod_arrays=arrays, gradients_of=tuple(learned))
    for got, expected in zip(grads, own, strict=False):
        np.testing.assert_array_equal(got, expected)
    for name, x in grads[3].items():
        assert x.dtype == arrays[name].dtype
        np.testing.assert_array_equal(x, own.dmod_arrays[name])


def test_functions_of_jax_take_symbols(three: list[Any], table: Any) -> None:
    """Those that the mod names, by whatever name; arrays are found in its closure."""
    import jax
    import jax.numpy as jnp
    from jax.numpy import tanh

    half = jnp.float32(0.5)  # of no dimensions: a number

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = jnp.abs(q - k) < 9
        far = jax.nn.sigmoid(half * score) + jnp.where(q > k, 1, jnp.log2(4.0))
        return jnp.where(near, tanh(score / 2) * 2 + table[h, jnp.maximum(q - k, 0)].astype(jnp.float32), far)

    said = "abs(q - k) < 9 ? tanh(score / 2) * 2 + table[h, max(q - k, 0)] : sigmoid(0.5f * score) + (q > k ? 1 : 2.f)"
    assert bind(mod, None, None)[0] == bind(said, None, {"table": table})[0]
    chosen, _ = bind(lambda score, b, h, q, k: jax.lax.select(q > k, score, jax.lax.exp(score)), None, None)
    assert chosen == bind("q > k ? score : exp(score)", None, None)[0]

    def ours(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v, score_mod=mod, mask_mod=lambda b, h, q, k: jnp.logical_not(k == 3))

    def want(q: Any, k: Any, v: Any) -> Any:
        return plain(q, k, v, mod, np.arange(SK) != 3)[0]

    agree(jax.jit(ours)(*three), want(*three))
    agree(jax.grad(squared(ours), (0, 1, 2))(*three), jax.grad(squared(want), (0, 1, 2))(*three))


def test_what_a_closure_holds_may_be_traced(three: list[Any], rng: np.random.Generator) -> None:
    """Of each step of a scan another array: an argument of one program."""
    import jax
    import jax.numpy as jnp

    tables = jnp.asarray(rng.standard_normal((3, HEADS, 20), dtype=np.float32))
    q, k, v = three

    def layers(q: Any, tables: Any) -> Any:
        def step(x: Any, table: Any) -> Any:
            def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
                return jnp.tanh(score) + (b + 1) * table[h, jnp.maximum(0, q - k)]

            return jax.checkpoint(lambda x: cupyflash.attention(x, k, v, score_mod=mod))(x), None

        return jax.lax.scan(step, q, tables)[0]

    def want(q: Any, tables: Any) -> Any:
        for table in tables:
            q = plain_by_place(q, k, v, table)
        return q

    agree(jax.jit(layers)(q, tables), want(q, tables))
    agree(jax.jit(jax.grad(squared(layers), (0, 1)))(q, tables), jax.grad(squared(want), (0, 1))(q, tables))


@pytest.mark.parametrize("axes", [(0, None, None, None), (None, 0, 0, None), (None, None, None, 0), (0, 0, 0, 0)])
def test_vmap_leaves_places_what_they_are(axes: tuple[int | None, ...], three: list[Any], table: Any) -> None:
    """b and h count within each of the mapped calls."""
    import jax
    import jax.numpy as jnp

    given = [x if a is None else jnp.stack([x, 2 * x, -x]) for x, a in zip((*three, table), axes, strict=True)]
    agree(jax.vmap(by_place, axes)(*given), jax.vmap(plain_by_place, axes)(*given))
    got = jax.jit(jax.vmap(jax.grad(squared(by_place), (0, 3)), axes))(*given)
    agree(got, jax.vmap(jax.grad(squared(plain_by_place), (0, 3)), axes)(*given))


def test_a_gradient_of_an_array_that_mapped_calls_share(three: list[Any], table: Any) -> None:
    """Of each of them where vmap is around grad, and their sum where grad is around vmap."""
    import jax
    import jax.numpy as jnp

    def ours(q: Any, table: Any) -> Any:
        found = cupyflash.attention(q, *three[1:], score_mod="score + table[h, k]", mod_arrays={"table": table})
        return (found**2).sum()

    many = jnp.stack([three[0], 2 * three[0], -three[0]])
    want = jnp.stack([jax.grad(ours, 1)(q, table) for q in many])
    agree(jax.jit(jax.vmap(jax.grad(ours, 1), (0, None)))(many, table), want)
    summed = jax.grad(lambda table: jax.vmap(ours, (0, None))(many, table).sum())(table)
    agree(summed, want.sum(0))


def test_vmap_joins_the_batch_where_nobody_asks_for_b(three: list[Any], table: Any, calls: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    def call(text: str) -> Callable[..., Any]:
        return lambda q, k, v, table: cupyflash.attention(q, k, v, score_mod=text, mod_arrays={"table": table})

    many = [jnp.stack([x, 2 * x, -x]) for x in three]
    for text, shape in (("score + table[h, k]", (3 * BATCH, *SHAPES[0][1:])), ("score + b * table[h, k]", SHAPES[0])):
        calls.clear()
        got = jax.block_until_ready(jax.vmap(call(text), (0, 0, 0, None))(*many, table))
        assert set(calls) == {shape}
        agree(got, jnp.stack([call(text)(*[x[i] for x in many], table) for i in range(3)]))
    nested = jax.vmap(jax.vmap(by_place, (0, None, None, None)), (0, None, None, None))
    twice = jnp.stack([many[0], many[0] + 1])
    want = jnp.stack([jnp.stack([by_place(q, *three[1:], table) for q in one]) for one in twice])
    agree(nested(twice, *three[1:], table), want)


def test_packed_sequences(three: list[Any], table: Any) -> None:
    import jax
    import jax.numpy as jnp

    q, k, v = (x.reshape(-1, *x.shape[2:])[:60] for x in three)

    def packed(q: Any, k: Any, v: Any, edges: Any, table: Any) -> Any:
        return cupyflash.attention_varlen(q, k, v, edges, score_mod=BY_PLACE, mod_arrays={"table": table})

    edges = jnp.asarray([0, 17, 17, 52], jnp.int32)
    np.testing.assert_array_equal(jax.jit(packed)(q, k, v, edges, table), numpy_of(packed, q, k, v, edges, table))
    grads = jax.grad(squared(packed), (0, 1, 2, 4))(q, k, v, edges, table)

    def each(q: Any, k: Any, v: Any, table: Any) -> Any:
        parts = [(0, slice(0, 17)), (2, slice(17, 52))]
        found = [
            plain(q[None, at], k[None, at], v[None, at], lambda s, b, h, i, j, n=n: jnp.tanh(s)
                  + (n + 1) * table[h, jnp.clip(i - j, 0, 19)])[0][0]
            for n, at in parts
        ]  # fmt: skip
        return jnp.concatenate(found)

    agree(grads, at_once(jax.grad(squared(each), (0, 1, 2, 3)))(q, k, v, table))
    both = jax.vmap(packed, (None, None, None, 0, None))(q, k, v, jnp.stack([edges, edges // 2]), table)
    np.testing.assert_array_equal(both[1], packed(q, k, v, edges // 2, table))


# ---- Refused by name ----


def test_arrays_that_are_not_learned_have_no_gradient(three: list[Any], table: Any) -> None:
    """What stop_gradient holds back, what a mask alone reads, and integers: 0, or nothing."""
    import jax
    import jax.numpy as jnp

    def stopped(q: Any, k: Any, v: Any, table: Any) -> Any:
        return by_place(q, k, v, jax.lax.stop_gradient(table))

    dq, dtable = jax.grad(squared(stopped), (0, 3))(*three, table)
    agree(dq, jax.grad(squared(plain_by_place))(*three, table))
    assert not dtable.any()

    def masked(q: Any, limit: Any, kind: Any) -> Any:
        given = {"limit": limit, "kind": kind}
        return cupyflash.attention(q, *three[1:], mask_mod="k == 0 || limit[h] < kind[k]", mod_arrays=given)

    limit, kind = jnp.zeros(HEADS), jnp.arange(SK) % 3
    dlimit, dkind = jax.grad(squared(masked), (1, 2), allow_int=True)(three[0], limit, kind)
    assert dlimit.shape == (HEADS,)
    assert not dlimit.any()
    assert dkind.dtype == jax.dtypes.float0


def other(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.exp(x)


def test_what_is_wrong_with_a_mod_is_said(three: list[Any], table: Any) -> None:
    import jax
    import jax.numpy as jnp

    def call(mod: Any, **more: Any) -> Any:
        return cupyflash.attention(*three, score_mod=mod, **more)

    for mod, message in (
        (lambda score, b, h, q, k: other(score), "expected operators, cupyflash.mods.where, and functions of jax.nu"),
        (lambda score, b, h, q, k: jnp.arctan(score), "score_mod: arctan: expected one of the functions"),
        (lambda score, b, h, q, k: jax.lax.erf(score), "score_mod: erf: expected one of the functions"),
        (lambda score, b, h, q, k: score.astype(jnp.int32), "expected a dtype of floats for a float, got .*int32"),
        (lambda score, b, h, q, k: score + table[0], "table: expected an index for each of its 2 dimensions, got 1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(mod)
    with pytest.raises(ArgumentError, match=r"expected a number that is known now, .*; give x\[None\] in mod_arrays"):
        jax.jit(lambda a: call(lambda score, b, h, q, k: a * score))(2.0)
    with pytest.raises(ArgumentError, match="expected an array of jax like q, got one of numpy"):
        call("score + x[k]", mod_arrays={"x": np.ones(3)})
    with pytest.raises(ArgumentError, match=r"x: expected one of the dtypes .*, got int16"):
        call("score + x[k]", mod_arrays={"x": jnp.ones(3, jnp.int16)})


# ---- Block masks ----


def own_masks(batch: int, heads: int) -> BlockMask:
    """One for each sequence and head, or one for all; the first queries of the last head see nothing."""
    seen = np.random.default_rng(3).random((batch, heads, SQ, SK)) < 0.4
    seen[-1, -1, :4] = False
    return masks.from_dense(seen)


@pytest.mark.parametrize("own", [(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)], ids=str)
def test_a_block_mask(own: tuple[int, int], three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    mask = own_masks(*own)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v, block_mask=mask)

    def by_dots(q: Any, k: Any, v: Any) -> Any:
        sees = mask.sees(slice(0, SQ), slice(0, SK))
        some = jnp.swapaxes(jnp.asarray(sees.any(-1, keepdims=True)), 1, 2)
        return jnp.where(
            some, plain(q, k, v, lambda s, *_: s, jnp.where(sees.any(-1, keepdims=True), sees, True))[0], 0
        )

    want = numpy_of(ours, *three)
    for got in (jax.jit(ours)(*three), ours(*three)):
        np.testing.assert_array_equal(got, want)
    agree(want, by_dots(*three))
    grads = jax.grad(squared(by_dots), (0, 1, 2))(*three)
    agree(jax.grad(squared(ours), (0, 1, 2))(*three), grads)
    agree(jax.jit(jax.grad(squared(jax.checkpoint(ours)), (0, 1, 2)))(*three), grads)
    for axes in ((0, None, None), (0, 0, 0)):
        given = [x if a is None else jnp.stack([x, 2 * x, -x]) for x, a in zip(three, axes, strict=True)]
        agree(jax.vmap(ours, axes)(*given), jax.vmap(by_dots, axes)(*given))
        got = jax.jit(jax.vmap(jax.grad(squared(ours), (0, 1, 2)), axes))(*given)
        agree(got, jax.vmap(jax.grad(squared(by_dots), (0, 1, 2)), axes)(*given))
    steps = jax.jit(lambda q: jax.lax.scan(lambda x, _: (ours(x, *three[1:]), None), q, None, length=2)[0])
    agree(steps(three[0]), ours(ours(*three), *three[1:]))


def test_vmap_joins_the_batch_beside_a_block_mask(three: list[Any], calls: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    many = [jnp.stack([x, 2 * x, -x]) for x in three]
    for own in ((1, HEADS), (BATCH, 1)):
        mask = own_masks(*own)
        jax.block_until_ready(jax.vmap(lambda q, k, v, mask=mask: cupyflash.attention(q, k, v, block_mask=mask))(*many))
    assert set(calls) == {(3 * BATCH, *SHAPES[0][1:])}


def test_a_block_mask_is_put_on_a_device_once(three: list[Any]) -> None:
    """Where a program is traced, too: a constant that no trace holds back."""
    import jax

    mask = own_masks(1, 1)
    jax.make_jaxpr(lambda *x: cupyflash.attention(*x, block_mask=mask))(*three)
    kept = dict(mask.kept)
    assert not any(isinstance(x, jax.core.Tracer) for x in kept.values())
    cupyflash.attention(*three, block_mask=mask)
    jax.vmap(lambda q: cupyflash.attention(q, *three[1:], block_mask=mask))(three[0][None])
    assert {name: id(x) for name, x in mask.kept.items()} == {name: id(x) for name, x in kept.items()}
    assert len(kept.keys() - {"padded"}) == 2


def test_a_block_mask_of_other_lengths_is_refused(three: list[Any]) -> None:
    import jax

    for mask, message in (
        (masks.local(SQ, left=3), f"expected one of {SQ} queries and {SK} keys"),
        (own_masks(BATCH + 1, 1), f"expected batch of 1 or {BATCH}, as q has, got {BATCH + 1}"),
    ):
        with pytest.raises(ArgumentError, match=f"block_mask: {message}"):
            jax.jit(lambda *x, mask=mask: cupyflash.attention(*x, block_mask=mask))(*three)


def test_an_exported_call_has_the_block_mask_in_it(three: list[Any]) -> None:
    import jax.export

    def ours(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v, block_mask=mask, score_mod="0.5f * score - abs(q - k)")

    mask = own_masks(BATCH, HEADS)
    checks = [jax.export.DisabledSafetyCheck.custom_call("cupyflash")]
    found = jax.export.export(jax.jit(ours), disabled_checks=checks)(*three)
    agree(found.call(*three), ours(*three))


def test_all_together(three: list[Any], table: Any) -> None:
    """With dropout, a sink, slopes, a bias, a mask, ranges of keys, a window and a softcap."""
    import jax
    import jax.numpy as jnp

    sink, slopes = jnp.asarray([0.5, 1, -1, 2.0]), jnp.asarray([0.1, 0.2, 0.3, 0.4])
    ranges = jnp.asarray([[3, 40], [0, 45]], jnp.int32)
    bias, mask = jnp.sin(jnp.arange(SQ * SK, dtype=jnp.float32)).reshape(SQ, SK), jnp.arange(SK) % 11 != 5

    def ours(
        q: Any, k: Any, v: Any, table: Any, sink: Any, slopes: Any, bias: Any, mask: Any, ranges: Any,
        layout: str = "bshd",
    ) -> Any:  # fmt: skip
        if layout == "bhsd":
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        found = cupyflash.attention(
            q, k, v, score_mod=BY_PLACE, mask_mod="k % 7 != h", mod_arrays={"table": table}, sink=sink, softcap=3.0,
            alibi_slopes=slopes, bias=bias, mask=mask, kv_range=ranges, block_mask=own_masks(BATCH, HEADS),
            dropout_p=0.2, dropout_seed=5, window=(30, 12), layout=layout,
        )  # fmt: skip
        return found.swapaxes(1, 2) if layout == "bhsd" else found

    brought = table, sink, slopes, bias, mask, ranges
    want = numpy_of(ours, *three, *brought)
    np.testing.assert_array_equal(jax.jit(ours)(*three, *brought), want)
    np.testing.assert_array_equal(ours(*three, *brought, layout="bhsd"), want)
    many = jnp.stack([three[0], -three[0]])
    got = jax.vmap(lambda q: ours(q, *three[1:], *brought))(many)
    agree(got, jnp.stack([ours(q, *three[1:], *brought) for q in many]))


# ---- Sharded ----

SHARDED = """
import sys
sys.path.insert(0, {tests!r})
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from python.test_jax import agree, gradients, mesh_is_set, squared
from tests.two_devices import shard_map
import cupyflash
from cupyflash import masks
from cupyflash.jax import call
keys = jax.random.split(jax.random.key(0), 4)
three = [jax.random.normal(key, (4, n, heads, 16)) for key, n, heads in zip(keys, (37, 45, 45), (4, 2, 2))]
table, rng = jax.random.normal(keys[3], (4, 20)), np.random.default_rng(0)
seen = []
run = call.run.forward
call.run.forward = lambda library, arrays, *more: (seen.append(arrays["q"].shape), run(library, arrays, *more))[1]
def mod(text):
    return lambda q, k, v, table: cupyflash.attention(q, k, v, score_mod=text, mod_arrays=dict(table=table))
def masked(batch, heads):
    mask = masks.from_dense(rng.random((batch, heads, 37, 45)) < 0.5)
    return lambda q, k, v, table: cupyflash.attention(q, k, v, block_mask=mask)
CALLS = [
    (mod("score + b * table[h, k]"), P(), (4, 37, 4, 16)),
    (mod("score + table[h, k]"), P("data"), (2, 37, 4, 16)),
    (mod("score + b * table[0, k]"), P(None, None, "model"), (4, 37, 2, 16)),
    (mod("score + table[q, k]"), P("data", None, "model"), (2, 37, 2, 16)),
    (masked(1, 1), P("data", None, "model"), (2, 37, 2, 16)),
    (masked(4, 1), P("data", None, "model"), (2, 37, 2, 16)),
    (masked(1, 4), P("data", None, "model"), (2, 37, 2, 16)),
    (masked(4, 4), P("data", None, "model"), (2, 37, 2, 16)),
]
def padded(spec):
    return (*spec, None, None, None)[:3]
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    spec = P("data", None, "model")
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x in three]
    given.append(jax.device_put(table, NamedSharding(mesh, P())))
    for f, of_parts, shape in CALLS:
        want, grads = jax.block_until_ready((f(*three, table), gradients(f)(*three, table)))
        with mesh_is_set(mesh):  # in which results along explicit axes lie as q, k and v do
            found = jax.jit(f)(*given), jax.jit(gradients(f))(*given)
            agree(found, (want, grads))
            if kind is AxisType.Explicit:
                assert {{padded(x.sharding.spec) for x in jax.tree.leaves(found)}} == {{padded(spec)}}
        for g, expected in ((f, want), (jax.jit(f), want), (jax.jit(gradients(f)), grads)):
            jax.effects_barrier()
            seen.clear()
            found = jax.block_until_ready(g(*given))
            agree(found, expected)
            assert set(seen) == {{shape}}, (shape, seen)
            specs = {{padded(x.sharding.spec) for x in jax.tree.leaves(found)}}
            assert specs == {{padded(of_parts)}}, (of_parts, specs)
    # Inside shard_map a call knows its own part alone: b and h count from 0 in each, and so does a mask.
    for f in (CALLS[0][0], masked(2, 2)):
        def in_parts(*arrays):
            def part(b, h):  # a half of the sequences and of the heads
                halves = [jnp.split(jnp.split(x, 2)[b], 2, axis=2)[h] for x in arrays]
                return f(*halves, table)
            return jnp.concatenate([jnp.concatenate([part(b, h) for h in (0, 1)], 2) for b in (0, 1)])
        for check in (False, True):
            parts = shard_map(f, check, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec)
            agree(jax.jit(parts)(*given), in_parts(*three))
            agree(jax.jit(gradients(parts))(*given), gradients(in_parts)(*three))
    # Each device makes its part of what all learn, and these are summed up.
    def learned(text):
        def f(q, k, v, table, sink, slopes):
            return cupyflash.attention(
                q, k, v, score_mod=text, mod_arrays=dict(table=table), sink=sink, alibi_slopes=slopes
            )
        return jax.grad(squared(f), (0, 1, 2, 3, 4, 5))
    heads = jnp.asarray([0.5, -1, 2, 0]), jnp.asarray([0.1, 0.2, 0.3, 0.4])
    own = [jax.device_put(x, NamedSharding(mesh, P())) for x in heads]
    for text, shape in (
        ("score + table[h, q]", (2, 37, 4, 16)), ("score * table[0, k]", (2, 37, 2, 16)),
        ("score + table[b, k]", (4, 37, 2, 16)), ("score + table[b, h]", (4, 37, 4, 16)),
    ):
        want = jax.block_until_ready(learned(text)(*three, table, *heads))
        seen.clear()
        agree(jax.block_until_ready(jax.jit(learned(text))(*given, *own)), want)
        assert set(seen) == {{shape}}, (shape, seen)
print("DONE")
"""


def test_a_call_is_divided_where_nobody_asks_for_the_place() -> None:
    run_on_four_devices(SHARDED)


# ---- On a GPU ----


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_runs_on_a_gpu_was_prepared_when_it_was_traced(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With XLA's memory for all that is made, the lists of a block mask included."""
    import jax

    from cupyflash.jax import call, ffi
    from cupyflash.jax.buffers import CODES, Buffer
    from cupyflash.launch import find
    from cupyflash.options import Options
    from tests.xla_frame import XlaFrame

    gpu = pretended_gpu.pretend(monkeypatch, arch)
    monkeypatch.setattr("cupyflash.gpu.device.count", lambda: 1)
    q, lse = (jax.ShapeDtypeStruct(shape, kind) for shape, kind in (((2, 200, 4, 64), "float16"), ((2, 4, 200), "f4")))
    text, arrays = bind("score + table[h, k]", "kind[b, q] == 1", {"table": np.ones((4, 9), np.float32),
                                                                   "kind": np.ones((2, 200), bool)})  # fmt: skip
    mask = masks.local(200, left=30) & masks.from_dense(np.random.default_rng(0).random((4, 200, 200)) < 0.5)
    brought = {"block_tiles": mask.tiles, "block_bits": mask.bits, **arrays}
    for which, given, lists in (
        ("forward", {"q": q, "k": q, "v": q, **brought}, ("key_lists",)),
        (
            "backward",
            {"q": q, "k": q, "v": q, "out": q, "dout": q, "lse": lse, **brought},
            ("key_lists", "query_lists"),
        ),
    ):
        wanted = ("lse",) if which == "forward" else ("dmod_array_1",)
        static = call.Static.of(which, tuple(given), Options(mods=text), wanted)
        results = call.results_of(static, list(given.values()))
        workspace = call._workspace(static, list(given.values()), len(results))
        assert sum(x.dtype == np.int32 and len(x.shape) == 4 for x in workspace) == len(lists)
        assert any("return (score + table(h, k));" in v.source() for v in gpu.loaded if getattr(v, "mods", ""))
        made = [Buffer(4096 * (1 + i), tuple(x.shape), call.CODE_OF[np.dtype(x.dtype)], 0)
                for i, x in enumerate([*given.values(), *results, *workspace])]  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(find, "prepare", None)
            loaded, launched = len(gpu.loaded), len(gpu.launched)
            frame = XlaFrame(static.text([*given.values()]), made[: len(given)], made[len(given) :])
            frame.run(ffi._handler(call._run, lambda: 0))
        assert frame.errors == []
        assert len(gpu.loaded) == loaded
        assert len(gpu.launched) > launched
    assert CODES["bool"] == made[list(given).index("mod_array_0")].dtype


def test_all_gradients_come_out_of_a_program(three: list[Any], table: Any) -> None:
    """Gradients are a tree of JAX with all that was asked for."""
    import jax
    import jax.numpy as jnp

    q, k, v = three
    sink = jnp.ones(HEADS, jnp.float32)
    out, lse = cupyflash.attention(q, k, v, sink=sink, score_mod=BY_PLACE, mod_arrays={"table": table}, return_lse=True)

    def backward(q: Any) -> cupyflash.Gradients:
        given = {"sink": sink, "score_mod": BY_PLACE, "mod_arrays": {"table": table}}
        return cupyflash.attention_backward(out, q, k, v, out, lse, **given, gradients_of=["sink", "table"])

    want, got = backward(q), jax.tree.map(lambda x: 2 * x, jax.jit(backward)(q))
    assert isinstance(got, cupyflash.Gradients)
    agree(got.dsink, 2 * want.dsink)
    agree(got.dmod_arrays["table"], 2 * want.dmod_arrays["table"])
    for x, y in zip(got, want, strict=True):
        agree(x, 2 * y)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(want)]
    assert paths == [".dq", ".dk", ".dv", ".dsink", ".dmod_arrays['table']"]
    alone = cupyflash.attention_backward(out, q, k, v, out, lse, sink=sink)
    assert jax.tree.structure(alone) == jax.tree.structure(cupyflash.Gradients(1, 2, 3))
