"""JAX: the operation under its transforms, against plain attention by JAX itself; sharded; and JAX's own signatures."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError

pytestmark = pytest.mark.needs("jax")

SHAPES = (2, 37, 4, 16), (2, 45, 2, 16), (2, 45, 2, 16)


@pytest.fixture
def three(rng: np.random.Generator) -> list[Any]:
    """q, k and v: grouped heads, more keys than queries."""
    import jax.numpy as jnp

    return [jnp.asarray(rng.standard_normal(shape, dtype=np.float32)) for shape in SHAPES]


def ours(q: Any, k: Any, v: Any) -> Any:
    return cupyflash.attention(q, k, v, causal=True)


def scores(q: Any, k: Any) -> Any:
    """Of a causal mask aligned at the bottom right."""
    import jax.numpy as jnp

    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    s = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2]), s, -jnp.inf)


def at_once(f: Callable[..., Any]) -> Callable[..., Any]:
    """What `f` computes, compiled as a whole: step by step JAX compiles each operation for each shape."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import jax

        return jax.jit(f)

    return lambda *x: compiled()(*x)


@at_once
def plain(q: Any, k: Any, v: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores(q, k)), jnp.repeat(v, q.shape[2] // v.shape[2], 2))


def squared(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *x: (f(*x) ** 2).sum()


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return jax.grad(squared(f), (0, 1, 2))


def agree(got: Any, want: Any) -> None:
    import jax

    jax.block_until_ready(got)  # on all its devices: a comparison of copies waits for one of them
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * float(abs(np.asarray(y)).max()))


# ---- Transforms ----


def test_it_runs_inside_jit(three: list[Any]) -> None:
    import jax

    agree(jax.jit(ours)(*three), plain(*three))
    agree(ours(*three), plain(*three))


def test_it_is_differentiable(three: list[Any]) -> None:
    import jax

    agree(gradients(ours)(*three), gradients(plain)(*three))
    agree(jax.jit(gradients(ours))(*three), gradients(plain)(*three))


def test_lse_is_differentiable(three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    weights = jnp.linspace(-1, 1, 2 * 4 * 37).reshape(2, 4, 37)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        return (out**2).sum() + (weights * lse).sum()

    def want(q: Any, k: Any, v: Any) -> Any:
        return (plain(q, k, v) ** 2).sum() + (weights * jax.nn.logsumexp(scores(q, k), -1)).sum()

    agree(jax.grad(loss, (0, 1, 2))(*three), jax.grad(want, (0, 1, 2))(*three))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 1, 0)])
def test_vmap(axes: tuple[int | None, ...], three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    given = [x if a is None else jnp.stack([x, 2 * x, x + 1], a) for x, a in zip(three, axes, strict=True)]
    agree(jax.vmap(ours, axes)(*given), jax.vmap(plain, axes)(*given))
    agree(jax.jit(jax.vmap(gradients(ours), axes))(*given), jax.vmap(gradients(plain), axes)(*given))


def test_vmap_of_nothing(three: list[Any]) -> None:
    """An axis of length 0, as jax.nn has it; the gradient of what is not mapped is 0."""
    import jax
    import jax.numpy as jnp

    q, k, v = three
    none = jnp.zeros((0, *q.shape), q.dtype)
    assert jax.vmap(ours, (0, None, None))(none, k, v).shape == none.shape
    found = jax.vmap(gradients(ours), (0, None, None))(none, k, v)
    assert [x.shape for x in found] == [(0, *x.shape) for x in three]


def test_vmap_of_vmap(three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    given = [jnp.stack([jnp.stack([x, x / 2]), jnp.stack([x + 1, -x])]) for x in three]
    agree(jax.vmap(jax.vmap(ours))(*given), jax.vmap(jax.vmap(plain))(*given))


def test_scan_and_checkpoint(three: list[Any]) -> None:
    import jax

    def layers(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any) -> Any:
            step = jax.checkpoint(lambda x: f(x, k, v))
            return jax.lax.scan(lambda x, _: (step(x), None), q, None, length=3)[0]

        return run

    agree(jax.jit(gradients(layers(ours)))(*three), gradients(layers(plain))(*three))


def test_packed_sequences_inside_jit(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    q, k, v = (jnp.asarray(rng.standard_normal((50, 2, 16), dtype=np.float32)) for _ in range(3))
    edges = [[0, 17, 17, 40], [0, 5, 29, 50]]

    def packed(q: Any, k: Any, v: Any, cu_seqlens: Any) -> Any:
        return cupyflash.attention_varlen(q, k, v, cu_seqlens, causal=True)

    def each(q: Any, k: Any, v: Any, cu_seqlens: list[int]) -> Any:
        parts = [slice(*two) for two in itertools.pairwise(cu_seqlens) if two[0] < two[1]]
        found = [plain(q[None, at], k[None, at], v[None, at])[0] for at in parts]
        return jnp.concatenate([*found, jnp.zeros((50 - cu_seqlens[-1], 2, 16))])

    compiled = jax.jit(jax.grad(squared(packed), (0, 1, 2)))
    for lengths in edges:  # the second with what was compiled for the first
        one_by_one = at_once(gradients(functools.partial(each, cu_seqlens=lengths)))
        agree(compiled(q, k, v, jnp.asarray(lengths, jnp.int32)), one_by_one(q, k, v))
    assert compiled._cache_size() == 1
    mapped = jax.vmap(packed, (None, None, None, 0))(q, k, v, jnp.asarray(edges, jnp.int32))
    agree(mapped, jnp.stack([each(q, k, v, lengths) for lengths in edges]))


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi_slopes_and_their_gradient(shape: tuple[int, ...], three: list[Any], rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    slopes = jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32)

    @at_once
    def biased(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        i, j = jnp.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], jnp.arange(k.shape[1])
        s = scores(q, k) - jnp.broadcast_to(slopes, (2, 4))[:, :, None, None] * abs(i - j)
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(s), jnp.repeat(v, 2, 2))

    def with_slopes(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return cupyflash.attention(q, k, v, causal=True, alibi_slopes=slopes)

    agree(jax.jit(with_slopes)(*three, slopes), biased(*three, slopes))
    agree(jax.grad(squared(with_slopes), (0, 3))(*three, slopes), jax.grad(squared(biased), (0, 3))(*three, slopes))
    given = [jnp.stack([x, x / 2]) for x in (*three, slopes)]
    agree(jax.vmap(with_slopes)(*given), jax.vmap(biased)(*given))
    axes = (0, None, None, None)
    agree(
        jax.vmap(jax.grad(squared(with_slopes), 3), axes)(given[0], *three[1:], slopes),
        jax.vmap(jax.grad(squared(biased), 3), axes)(given[0], *three[1:], slopes),
    )


def test_sinks_and_their_gradient(three: list[Any], rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    sink = jnp.asarray(rng.uniform(-2, 3, 4), jnp.float32)

    @at_once
    def one_key_more(q: Any, k: Any, v: Any, sink: Any) -> Any:
        s = scores(q, k)
        s = jnp.concatenate([s, jnp.broadcast_to(sink[:, None, None], (*s.shape[:3], 1))], -1)
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(s)[..., :-1], jnp.repeat(v, 2, 2))

    def with_sink(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return cupyflash.attention(q, k, v, causal=True, sink=sink)

    agree(jax.jit(with_sink)(*three, sink), one_key_more(*three, sink))
    want = jax.grad(squared(one_key_more), (0, 1, 2, 3))(*three, sink)
    agree(jax.grad(squared(with_sink), (0, 1, 2, 3))(*three, sink), want)
    given = [jnp.stack([x, x / 2]) for x in (*three, sink)]
    agree(jax.vmap(with_sink)(*given), jax.vmap(one_key_more)(*given))
    axes = (0, None, None, None)
    agree(
        jax.vmap(jax.grad(squared(with_sink), 3), axes)(given[0], *three[1:], sink),
        jax.vmap(jax.grad(squared(one_key_more), 3), axes)(given[0], *three[1:], sink),
    )


def test_gradients_that_were_not_asked_for_before(three: list[Any]) -> None:
    """JAX keeps what it traced: for q alone, and for q and the sink, of one program under several transforms."""
    import jax
    import jax.numpy as jnp

    sink, attend = jnp.asarray([0.5, -1, 2, 0]), jax.jit(lambda *x: cupyflash.attention(*x[:3], sink=x[3]))

    def loss(q: Any, sink: Any) -> Any:
        return (attend(q, *three[1:], sink) ** 2).sum()

    def scanned(q: Any, sink: Any) -> Any:
        return jax.lax.scan(lambda total, _: (total + loss(q, sink), None), 0.0, None, length=1)[0]

    want = jax.grad(loss, (0, 1))(three[0], sink)
    for f in (loss, jax.checkpoint(loss), scanned, loss, jax.checkpoint(loss)):
        agree(jax.grad(f)(three[0], sink), want[0])
        agree(jax.grad(f, (0, 1))(three[0], sink), want)


def test_a_backward_of_ones_own(three: list[Any]) -> None:
    import jax

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        return tuple(cupyflash.attention_backward(2 * out, q, k, v, out, lse, causal=True))

    agree(both(*three), gradients(plain)(*three))


def test_dtypes(three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    for dtype in (jnp.float16, jnp.bfloat16):
        out = jax.jit(ours)(*[x.astype(dtype) for x in three])
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(np.float32), plain(*three), rtol=0.05, atol=0.05)


def test_a_call_that_is_exported_runs_without_being_traced_again(three: list[Any]) -> None:
    import jax.export

    checks = [jax.export.DisabledSafetyCheck.custom_call("cupyflash")]
    agree(jax.export.export(jax.jit(ours), disabled_checks=checks)(*three).call(*three), plain(*three))
    registered = (
        "import cupyflash.jax, cupyflash.jax.ffi as ffi; kept = []; ffi.register = lambda *x: kept.append(x[0])"
    )
    script = f"{registered}; cupyflash.jax.register(); print(*sorted(set(kept)))"  # for programs of other processes
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found == ["cupyflash", "cupyflash_cache", "cupyflash_into"]
    (batch,) = jax.export.symbolic_shape("batch")
    symbolic = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in three]
    with pytest.raises(UnsupportedError, match=r"q: expected a shape of numbers, got \(batch, 37, 4, 16\)"):
        jax.export.export(jax.jit(ours), disabled_checks=checks)(*symbolic)


# ---- Refused by name ----


def test_another_family_is_another_trace(three: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need another workspace, which XLA allocates as the trace says."""
    from cupyflash.jax import call

    monkeypatch.setattr(call, "_parse", lambda text: found.append(text) or call.Static.parse(text))
    texts = []
    for family in ("sm80", "sm90", "sm80"):
        monkeypatch.setenv("CUPYFLASH_FAMILY", family)
        found: list[bytes] = []
        ours(*three).block_until_ready()
        texts += found
    assert len(texts) == 3
    assert texts[0] == texts[2] != texts[1]
    assert [call.Static.parse(x).family for x in texts] == ["sm80", "sm90", "sm80"]


def test_a_call_whose_text_has_no_shapes_is_an_older_versions(three: list[Any]) -> None:
    from cupyflash.jax import call
    from cupyflash.options import Options

    static = call.Static.of("forward", ("q", "k", "v"), Options(window=(3, None)))
    text = static.text(three).encode()
    assert call.Static.parse(text) == static
    with pytest.raises(RuntimeError, match="older version of cupyflash: export it again"):
        call.Static.parse(text.partition(b"\n")[0])


def test_a_call_of_another_trace_says_so() -> None:
    from cupyflash.jax.buffers import Buffers

    with pytest.raises(RuntimeError, match="CUPYFLASH_FAMILY"):
        Buffers([]).empty((1,), "fp32", None)


def test_what_is_wrong_is_said_when_it_is_traced(three: list[Any]) -> None:
    import jax

    q, k, v = three
    with pytest.raises(ArgumentError, match=r"^k: expected the head_dim of q, 16, got 8"):
        jax.jit(ours)(q, k[..., :8], v)
    with pytest.raises(ArgumentError, match=r"^v: expected "):
        jax.eval_shape(ours, q, k, v[:1])
    with pytest.raises(ArgumentError, match=r"^q: expected a floating-point dtype .*, got int32"):
        jax.jit(ours)(q.astype(np.int32), k, v)


def test_second_derivatives_are_refused(three: list[Any]) -> None:
    import jax

    with pytest.raises(UnsupportedError, match="second derivatives"):
        jax.grad(lambda q: jax.grad(squared(ours))(q, *three[1:]).sum())(three[0])


def test_an_error_where_the_call_runs_is_raised_by_jax(three: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    from cupyflash.launch import run

    compiled = jax.jit(lambda *x: cupyflash.attention(*x, scale=0.25)).lower(*three).compile()

    def fails(*_: Any) -> None:
        raise RuntimeError("so it goes")

    monkeypatch.setattr(run, "forward", fails)
    with pytest.raises(Exception, match="RuntimeError: so it goes"):
        jax.block_until_ready(compiled(*three))


UNFINISHED = """
import jax
import cupyflash
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1024, 8, 64), dtype="bfloat16")
loss = jax.jit(lambda q, k, v: (cupyflash.attention(q, k, v, causal=True) ** 2).sum())
{kept}jax.grad(loss, (0, 1, 2))(q, k, v)
print("DONE")
"""


@pytest.mark.parametrize("kept", ["grads = ", ""], ids=["kept", "dropped"])
def test_a_program_that_ends_before_its_results_are_there(kept: str) -> None:
    """XLA's threads call into the interpreter until then; one that is gone would keep them waiting for ever."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED.format(kept=kept)], env=environment, capture_output=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, b"DONE"), done.stderr[-3000:]


# ---- Sharded ----

SHARDED = """
import sys
sys.path.insert(0, {tests!r})
import contextlib
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from python.test_jax import agree, gradients, mesh_is_set, ours, plain, squared
from tests.two_devices import shard_map
import cupyflash
from cupyflash.jax import call
keys = jax.random.split(jax.random.key(0), 3)
three = [jax.random.normal(key, (4, n, heads, 16)) for key, n, heads in zip(keys, (37, 45, 45), (4, 2, 2))]
want, grads = plain(*three), gradients(plain)(*three)
def with_sink(q, k, v, sink):
    return cupyflash.attention(q, k, v, sink=sink)
def repeated(q, k, v, sink):
    return with_sink(q, jnp.concatenate([k, k]), jnp.concatenate([v, v]), sink)
few = three[0], three[1][:2], three[2][:2], jnp.asarray([0.5, -1, 2, 0])
shared_grads = jax.block_until_ready(jax.grad(squared(repeated), (0, 1, 2, 3))(*few))  # before they are counted
seen = []
run = call.run.forward
call.run.forward = lambda library, arrays, *more: (seen.append(arrays["q"].shape), run(library, arrays, *more))[1]
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    spec = P("data", None, "model")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in three]
    for context in (contextlib.nullcontext(), mesh_is_set(mesh)):
        with context:
            for f, expected in ((ours, want), (jax.jit(ours), want), (jax.jit(gradients(ours)), grads)):
                seen.clear()
                found = f(*placed)
                agree(found, expected)
                specs = [tuple(x.sharding.spec)[:3] for x in jax.tree.leaves(found)]
                assert set(specs) == {{tuple(spec)}}, specs
                assert set(seen) == {{(2, 37, 2, 16)}} and len(seen) == 4, seen
    for check in (False, True):
        parts = shard_map(ours, check, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        agree(jax.jit(gradients(parts))(*placed), grads)
        # What devices share has the sum of their gradients.
        specs = P("data"), P(), P(), P()
        parts = shard_map(with_sink, check, mesh=mesh, in_specs=specs, out_specs=specs[0])
        given = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(few, specs)]
        agree(jax.jit(jax.grad(squared(parts), (0, 1, 2, 3)))(*given), shared_grads)
    # One key head a device is the most: four devices along the heads are two too many, and are not an error.
    line = jax.make_mesh((4,), ("model",), axis_types=(kind,))
    if kind is AxisType.Auto:
        q = jax.device_put(three[0], NamedSharding(line, P(None, None, "model")))
        k, v = (jax.device_put(x, NamedSharding(line, P())) for x in three[1:])
        agree(jax.jit(ours)(q, k, v), want)
print("DONE")
"""


# Fewer key heads than devices along the heads: k and v are whole on each device, which takes the key head of its query
# heads, and the gradient of a key head is the sum of the devices'. Where that does not come out even, it is no error.
FEW_KEY_HEADS = """
import sys
sys.path.insert(0, {tests!r})
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from python.test_jax import agree, mesh_is_set, squared
import cupyflash
from cupyflash.jax import call
def f(q, k, v, sink):
    return cupyflash.attention(q, k, v, sink=sink, causal=True, layout=layout)
seen = []
run = call.run.forward
call.run.forward = lambda library, arrays, *more: (seen.append(arrays["q"].shape), run(library, arrays, *more))[1]
keys = jax.random.split(jax.random.key(0), 3)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(kind,))
    for heads_q, heads_k, layout in ((4, 1, "bshd"), (4, 1, "bhsd"), (4, 2, "bshd"), (8, 2, "bhsd"), (12, 3, "bshd")):
        sink = jax.random.normal(keys[0], (heads_q,))
        shapes = (2, 21, heads_q, 16), (2, 29, heads_k, 16), (2, 29, heads_k, 16)
        three = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]
        three = three if layout == "bshd" else [x.swapaxes(1, 2) for x in three]
        grads = jax.value_and_grad(squared(f), (0, 1, 2, 3))
        want = jax.block_until_ready(grads(*three, sink))
        by_heads = P(None, None, "model") if layout == "bshd" else P(None, "model")
        places = [NamedSharding(mesh, spec) for spec in (by_heads, P(), P(), P("model"))]
        given = [jax.device_put(x, place) for x, place in zip((*three, sink), places)]
        with mesh_is_set(mesh):
            compiled = jax.jit(grads).lower(*given).compile()
            seen.clear()
            agree(compiled(*given), want)
        if heads_k < 3:
            own = heads_q // 4
            assert "all-gather" not in compiled.as_text()
            assert set(seen) == {{(2, 21, own, 16) if layout == "bshd" else (2, own, 21, 16)}}, seen
# Inside a program query heads, too, may lie along more devices than they divide into.
mesh, layout = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,)), "bshd"
by_heads = NamedSharding(mesh, P(None, None, "model"))
for heads_q, heads_k in ((2, 2), (2, 1), (6, 2), (6, 1)):
    given = [jax.random.normal(key, (2, 21, n, 16)) for key, n in zip(keys, (heads_q, heads_k, heads_k))]
    given.append(jax.random.normal(keys[0], (heads_q,)))
    uneven = lambda q, *more: squared(f)(jax.lax.with_sharding_constraint(q, by_heads), *more)
    agree(*(jax.jit(jax.value_and_grad(g, (0, 1, 2, 3)))(*given) for g in (uneven, squared(f))))
print("DONE")
"""


# Inside set_mesh types say how arrays lie along explicit axes, and JAX checks those of gradients.
EXPLICIT = """
import sys
sys.path.insert(0, {tests!r})
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from python.test_jax import agree, gradients, ours, plain, squared
import cupyflash
from cupyflash.jax import dot_product_attention
keys = jax.random.split(jax.random.key(0), 3)
three = [jax.random.normal(key, (4, n, heads, 16)) for key, n, heads in zip(keys, (37, 45, 45), (4, 2, 2))]
with_lse = lambda q, k, v: cupyflash.attention(q, k, v, causal=True, return_lse=True)
swapped = lambda *x: cupyflash.attention(*(x.swapaxes(1, 2) for x in x), layout="bhsd", return_lse=True)
lengths, some = jnp.asarray([3, 4, 5, 45]), jnp.arange(45) % 3 > 0
with_more = lambda q, k, v: cupyflash.attention(
    q, k, v, kv_range=jnp.stack([0 * lengths, lengths], -1).astype("int32"), mask=some, dropout_p=0.2, dropout_seed=3)
def theirs(q, k, v):
    return dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths, query_seq_lengths=lengths)
def packed(q, k, v):
    ends = jnp.asarray([0, 5, 37])
    return cupyflash.attention_varlen(q[0], k[0, :37], v[0, :37], ends, ends, return_lse=True)
def learned(q, k, v, sink, bias):
    return cupyflash.attention(q, k, v, sink=sink, bias=bias)
def layers(f):
    one = jax.checkpoint(lambda q, kv: (q + f(q, *kv), None))
    return lambda q, k, v: jax.lax.scan(one, q, (jnp.stack([k, 2 * k]), jnp.stack([v, v])))[0]
shared = jnp.asarray([0.5, -1, 2, 0]), jax.random.normal(keys[0], (4, 37, 45))
many = [jnp.stack([x, -x, 2 * x, x]) for x in three]
want = dict(
    fwd=plain(*three), bwd=gradients(plain)(*three), lse=with_lse(*three), swapped=swapped(*three),
    theirs=gradients(theirs)(*three), packed=packed(*three), more=gradients(with_more)(*three),
    learned=jax.grad(squared(learned), (0, 3, 4))(*three, *shared), layers=gradients(layers(plain))(*three),
    many=jax.vmap(plain)(*many), grads_of_many=jax.vmap(gradients(plain))(*many),
    back=cupyflash.attention_backward(three[0], *three, *with_lse(*three), causal=True),
)
want = jax.block_until_ready(want)
E, A = AxisType.Explicit, AxisType.Auto
for types in ((E, E), (A, E), (E, A)):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=types)
    own = [name if kind is E else None for name, kind in zip(mesh.axis_names, types)]
    data, model = own
    def lies(x, *spec):
        found = tuple(jax.typeof(x).sharding.spec)
        assert found + (None,) * (len(spec) - len(found)) == spec, (found, spec)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in three]
        compiled = jax.jit(ours).lower(*placed).compile().as_text()
        assert "all-gather" not in compiled
        agree(jax.jit(ours)(*placed), want["fwd"])
        found = jax.jit(gradients(ours))(*placed)
        agree(found, want["bwd"])
        agree(gradients(ours)(*placed), want["bwd"])
        for x in found:
            lies(x, data, None, model, None)
        out, lse = jax.jit(with_lse)(*placed)
        agree((out, lse), want["lse"])
        lies(lse, data, model, None)
        if A in types:
            continue
        out, lse = jax.jit(swapped)(*placed)
        agree((out, lse), want["swapped"])
        lies(out, data, model, None, None)
        lies(lse, data, model, None)
        agree(jax.jit(gradients(theirs))(*placed), want["theirs"])
        agree(jax.jit(gradients(with_more))(*placed), want["more"])
        agree(jax.jit(jax.grad(squared(learned), (0, 3, 4)))(*placed, *shared), want["learned"])
        for f in (gradients(layers(ours)), jax.jit(gradients(layers(ours)))):
            agree(f(*placed), want["layers"])
        found = jax.jit(lambda *x: cupyflash.attention_backward(x[0], *x, *with_lse(*x), causal=True))(*placed)
        agree(found, want["back"])
        for spec in (P(None, "data", None, "model"), P("data", None, None, "model"), P()):
            given = [jax.device_put(x, NamedSharding(mesh, spec)) for x in many]
            agree(jax.jit(jax.vmap(ours))(*given), want["many"])
            agree(jax.jit(jax.vmap(gradients(ours)))(*given), want["grads_of_many"])
        for spec in (P(None, None, None, "model"), P()):  # what is not divided, or lies on one device
            given = [jax.device_put(x, NamedSharding(mesh, spec)) for x in three]
            agree(jax.jit(gradients(ours))(*given), want["bwd"])
        agree(jax.jit(gradients(ours))(*three), want["bwd"])
        flat = [jax.device_put(x, NamedSharding(mesh, P(None, None, "model"))) for x in three]
        agree(jax.jit(packed)(*flat), want["packed"])
print("DONE")
"""


def mesh_is_set(mesh: Any) -> Any:
    """A context in which a mesh is JAX's; none where JAX has no such thing, before 0.7.1."""
    import jax

    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else contextlib.nullcontext()


def run_on_devices(count: int, *command: str) -> None:
    """Run a program to its last line, in a process of its own where the CPU is so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "DONE", done.stderr[-3000:]


def run_on_four_devices(code: str) -> None:
    """`{tests}`: the folder of the tests."""
    run_on_devices(4, "-c", code.format(tests=str(Path(__file__).resolve().parents[1])))


def test_each_device_computes_its_part() -> None:
    run_on_four_devices(SHARDED)


def test_fewer_key_heads_than_devices() -> None:
    run_on_four_devices(FEW_KEY_HEADS)


@pytest.mark.needs("jax>=0.8")  # versions are compared by two numbers, and set_mesh came with 0.7.1
def test_axes_that_types_tell() -> None:
    run_on_four_devices(EXPLICIT)


def test_two_devices_are_as_exact_as_one() -> None:
    run_on_devices(2, "-m", "tests.two_devices")


# ---- JAX's own signatures ----


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 7, (3, 9)])
@pytest.mark.parametrize("lengths", [(33, 33), (21, 40), (40, 21)])
def test_dot_product_attention(
    is_causal: bool, window: Any, lengths: tuple[int, int], rng: np.random.Generator
) -> None:
    import jax
    import jax.numpy as jnp

    from cupyflash.jax import dot_product_attention

    seqlen_q, seqlen_k = lengths
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, n, heads, 16), dtype=np.float32))
        for n, heads in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2))
    )
    options = {"is_causal": is_causal, "local_window_size": window, "scale": 0.3}
    got = dot_product_attention(q, k, v, **options)
    sees = np.ones((seqlen_q, seqlen_k), bool)
    rows, columns = np.ogrid[:seqlen_q, :seqlen_k]
    if is_causal:
        sees &= columns <= rows
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        sees &= (columns >= rows - left) & (columns <= rows + right)
    # The mask changes nothing, but for JAX 0.6, which forgets a window that comes alone.
    want = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(sees)[None, None], **options)
    some = sees.any(1)  # JAX gives the mean of v to a query that sees no key
    np.testing.assert_allclose(got[:, some], want[:, some], rtol=2e-5, atol=2e-5)
    assert not np.asarray(got)[:, ~some].any()


def test_dot_product_attention_has_the_arguments_of_jax(three: list[Any]) -> None:
    import jax

    from cupyflash.jax import dot_product_attention

    def parameters(f: Any) -> list[tuple[Any, ...]]:
        return [(x.name, x.kind, x.default) for x in inspect.signature(f).parameters.values()]

    # JAX 0.6 has no return_residual.
    theirs = parameters(jax.nn.dot_product_attention)
    assert [x for x in parameters(dot_product_attention) if x[0] != "return_residual"] == [
        x for x in theirs if x[0] != "return_residual"
    ]
    for implementation in (None, "xla", "cudnn"):
        agree(dot_product_attention(*three, implementation=implementation), dot_product_attention(*three))
    with pytest.raises(ArgumentError, match='implementation: expected None, "xla" or "cudnn", got "triton"'):
        dot_product_attention(*three, implementation="triton")


def test_dot_product_attention_names_its_own_arguments(three: list[Any]) -> None:
    from cupyflash.jax import dot_product_attention

    query, key, value = three
    with pytest.raises(ArgumentError, match=r"^key: expected the head_dim of query, 16, got 8"):
        dot_product_attention(query, key[..., :8], value)


def test_dot_product_attention_without_a_batch(three: list[Any]) -> None:
    """Each of the three may lack it, as in jax.nn."""
    import jax

    from cupyflash.jax import dot_product_attention

    query, key, value = (x[:1] for x in three)
    for some in ((query[0], key, value), (query, key[0], value[0]), (query[0], key[0], value[0])):
        got, want = dot_product_attention(*some), jax.nn.dot_product_attention(*some)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_dot_product_attention_takes_arrays_of_numpy(rng: np.random.Generator) -> None:
    """As jax.nn's does: masks and lengths are often made by NumPy."""
    import jax

    from cupyflash.jax import dot_product_attention as ours

    q, k, v = (rng.standard_normal((2, 20, 2, 16), dtype=np.float32) for _ in range(3))
    given = {"bias": rng.standard_normal((1, 2, 20, 20)), "mask": np.tri(20, dtype=bool)[None, None]}
    lengths = {"query_seq_lengths": np.array([20, 20]), "key_value_seq_lengths": np.array([20, 13])}
    for f in (lambda f: lambda q: f(q, k, v), lambda f: lambda q: f(q, k, v, **given, **lengths)):
        for x in (q, jax.numpy.asarray(q)):
            want = jax.nn.dot_product_attention
            agree(f(ours)(x), f(want)(x))
            agree(jax.jit(f(ours))(x), f(want)(x))


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
@pytest.mark.parametrize("lengths", [np.array([9]), np.array([9, 9, 9]), np.array([9.5, 9.5])])
def test_lengths_are_an_integer_a_sequence(name: str, lengths: Any, rng: np.random.Generator) -> None:
    from cupyflash.jax import dot_product_attention

    q, k, v = (rng.standard_normal((2, 20, 2, 16), dtype=np.float32) for _ in range(3))
    with pytest.raises(ArgumentError, match=rf"{name}: expected integers of shape \(2,\), got"):
        dot_product_attention(q, k, v, **{name: lengths})


@pytest.mark.parametrize("kind", ["int8", "uint8", "uint32"])
def test_lengths_of_few_bits_do_not_wrap(kind: str, rng: np.random.Generator) -> None:
    import jax.numpy as jnp

    from cupyflash.jax import dot_product_attention

    q, k, v = (rng.standard_normal((2, 300, 1, 8), dtype=np.float32) for _ in range(3))
    lengths = jnp.array([100, 70])
    found, want = (dot_product_attention(q, k, v, key_value_seq_lengths=x) for x in (lengths.astype(kind), lengths))
    assert np.array_equal(found, want)


def test_lengths_of_queries_where_ranks_are_not_promoted(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    from cupyflash.jax import dot_product_attention

    q = rng.standard_normal((2, 9, 1, 8), dtype=np.float32)
    with jax.numpy_rank_promotion("raise"):
        found = dot_product_attention(q, q, q, query_seq_lengths=jnp.array([4, 9]))
    assert not found[0, 4:].any()
    assert found[0, :4].any()


def test_a_constant_beside_what_is_traced_has_a_way_out() -> None:
    import jax

    q = np.ones((1, 4, 1, 8), np.float32)
    with pytest.raises(ArgumentError, match=r"^k: .*; give jax\.numpy\.asarray\(q\)"):
        jax.jit(lambda k: cupyflash.attention(q, k, k))(q)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": "False"}, "is_causal: expected True or False"),
        ({"return_residual": [1]}, "return_residual: expected True or False"),
        ({"bias": np.ones((8, 8), np.complex64)}, "bias: expected real numbers, got complex64"),
        ({"query": np.ones(8, np.float32)}, "query: expected 4 dimensions"),
        ({"key": np.ones((8, 8), np.float32)}, "key: expected 4 dimensions"),
        ({"local_window_size": -1}, "local_window_size: expected left"),
        (
            {"local_window_size": (-2, 5), "is_causal": True},
            r"local_window_size: .* got \(-2, 5\), which hides every key",
        ),
    ],
)
def test_dot_product_attention_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    from cupyflash.jax import dot_product_attention

    given = dict.fromkeys(("query", "key", "value"), np.ones((1, 8, 1, 8), np.float32))
    with pytest.raises(ArgumentError, match=message):
        dot_product_attention(**given | change)


def test_dot_product_attention_without_a_batch_and_with_lse(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    from cupyflash.jax import dot_product_attention

    q, k, v = (jnp.asarray(rng.standard_normal((20, 2, 16), dtype=np.float32)) for _ in range(3))
    out, lse = dot_product_attention(q, k, v, return_residual=True)
    agree(out, jax.nn.dot_product_attention(q, k, v))
    agree(lse, jax.nn.logsumexp(jnp.einsum("shd,thd->sht", q, k) / 4, -1))


def test_dot_product_attention_with_biases_masks_and_lengths(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    from cupyflash.jax import dot_product_attention as ours

    q, k, v = (jnp.asarray(rng.standard_normal((2, 20, 2, 16), dtype=np.float32)) for _ in range(3))
    mask = jnp.asarray(rng.random((2, 1, 20, 20)) < 0.7).at[..., 0].set(True)
    agree(ours(q, k, v, mask=mask), jax.nn.dot_product_attention(q, k, v, mask=mask))
    bias = jnp.asarray(rng.standard_normal((1, 2, 20, 20), dtype=np.float32))
    agree(ours(q, k, v, bias, mask), jax.nn.dot_product_attention(q, k, v, bias, mask))
    of_keys, of_queries = jnp.array([20, 13]), jnp.array([7, 20])
    for given in (
        {"key_value_seq_lengths": of_keys}, {"key_value_seq_lengths": of_keys + 3, "mask": mask},
        {"key_value_seq_lengths": of_keys, "query_seq_lengths": of_queries, "is_causal": True},
    ):  # fmt: skip

        def both(f: Any, given: Any = given) -> Any:
            return jax.jit(lambda *x: (f(*x, **given), jax.grad(squared(lambda *x: f(*x, **given)), (0, 1, 2))(*x)))

        agree(both(ours)(q, k, v), both(jax.nn.dot_product_attention)(q, k, v))
    out, lse = ours(q, k, v, query_seq_lengths=of_queries, return_residual=True)
    whole, of_whole = ours(q, k, v, return_residual=True)
    agree(out, whole.at[0, 7:].set(0))
    np.testing.assert_array_equal(lse, of_whole.at[0, 7:].set(-jnp.inf))


def test_flax_attention(three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    from cupyflash.jax import flax_attention

    q, k, v = three
    k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
    got = flax_attention(*[x[None] for x in (q, k, v)], dropout_rate=0.1, deterministic=True, precision=None)
    agree(got[0], jax.nn.dot_product_attention(q, k, v))
    key = jax.random.key(3)
    got = flax_attention(*[x[None] for x in (q, k, v)], dropout_rate=0.1, dropout_rng=key)
    agree(got[0], cupyflash.attention(q, k, v, dropout_p=0.1, dropout_seed=key))
    bias, mask = jax.random.normal(key, (q.shape[2], q.shape[1], k.shape[1])), jnp.arange(k.shape[1]) % 3 > 0
    for given in ({"bias": bias}, {"mask": mask}):
        got = flax_attention(q, k, v, **given, dropout_rate=0.1, dropout_rng=key)
        agree(got, cupyflash.attention(q, k, v, **given, dropout_p=0.1, dropout_seed=key))


def test_an_integer_of_jax_is_a_seed(three: list[Any]) -> None:
    """The same as Python's, also where a program counts it on; an array of one is still no seed of 64 bits."""
    import jax
    import jax.numpy as jnp

    def dropped(seed: Any) -> Any:
        return cupyflash.attention(*three, dropout_p=0.3, dropout_seed=seed)

    for seed in (jnp.int32(3), jnp.int32(-3), jnp.uint32(2**32 - 3), np.int32(-3)):
        want = dropped(int(seed))
        for got in (dropped(seed), jax.jit(dropped)(seed)):
            np.testing.assert_array_equal(got, want)
    assert (dropped(jnp.int32(-3)) != dropped(jnp.uint32(2**32 - 3))).any()
    for wrong in (jnp.zeros(1, jnp.int32), jnp.float32(3), jnp.int8(3)):
        with pytest.raises(ArgumentError, match="dropout_seed: expected an integer, or an int64 array"):
            dropped(wrong)


# ---- XLA's interface ----


def test_lengths_on_a_gpu_are_copied_before_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPYFLASH_DEBUG looks at them; their address is not one of the host."""
    from cupyflash.jax.buffers import CODES, Buffer, Buffers

    def read(address: int, to: Any, stream: int) -> None:
        assert (address, stream) == (64, 7)
        to[...] = 0, 5, 9

    monkeypatch.setattr("cupyflash.gpu.device.read", read)
    found = Buffers(stream=7).to_numpy(Buffer(64, (3,), CODES["int32"], 0))
    np.testing.assert_array_equal(found, np.array([0, 5, 9], np.int32))


def test_the_structs_are_those_of_the_header_that_jaxlib_brings() -> None:
    import jaxlib

    from cupyflash.jax import structs

    header = Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h"
    if not header.is_file():
        pytest.fail(f"jaxlib brings no {header}")
    text = header.read_text()

    def fields(name: str) -> list[str]:
        body = re.search(rf"(?:typedef )?struct {name} \{{(.*?)\n\}}", text, re.DOTALL)
        assert body, name
        lines = re.sub(r"//.*", "", body[1])
        named = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)|(\w+);", lines)
        return [a or b for a, b in named]

    same = {
        "XLA_FFI_CallFrame": structs.CallFrame, "XLA_FFI_Args": structs.Buffers, "XLA_FFI_Rets": structs.Buffers,
        "XLA_FFI_Buffer": structs.XlaBuffer, "XLA_FFI_Attrs": structs.Attributes, "XLA_FFI_ByteSpan": structs.Span,
        "XLA_FFI_Extension_Base": structs.Extension, "XLA_FFI_Metadata_Extension": structs.MetadataExtension,
        "XLA_FFI_Api_Version": structs.Version, "XLA_FFI_Stream_Get_Args": structs.StreamArgs,
        "XLA_FFI_Error_Create_Args": structs.ErrorArgs,
    }  # fmt: skip
    for name, kind in same.items():
        assert len(fields(name)) == len(kind._fields_), (name, fields(name))
    found = fields("XLA_FFI_Api")
    assert found.index("Stream_Get") == [name for name, _ in structs.Api._fields_].index("Stream_Get")
    assert found.index("Error_Create") == [name for name, _ in structs.Api._fields_].index("Error_Create")
    assert fields("XLA_FFI_Metadata")[:3] == ["struct_size", "api_version", "traits"]
    codes = dict(re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", text))
    from cupyflash.jax.buffers import CODES

    names = {"bool": "PRED", "int32": "S32", "fp16": "F16", "fp32": "F32", "fp64": "F64", "bf16": "BF16"} | {
        "int8": "S8", "int64": "S64", "uint8": "U8", "float8_e4m3fn": "F8E4M3FN",
    }  # fmt: skip
    assert {name: int(codes[names[name]]) for name in CODES} == CODES
    assert ctypes.sizeof(structs.Span) == 16


def test_a_struct_is_read_as_ctypes_reads_it() -> None:
    from cupyflash.jax import structs

    def leaves(x: Any) -> list[Any]:
        if not isinstance(x, ctypes.Structure):
            return [x if isinstance(x, int) else 0 if x is None else ctypes.cast(x, ctypes.c_void_p).value or 0]
        return [leaf for name, *_ in x._fields_ for leaf in leaves(getattr(x, name))]

    for kind in (structs.CallFrame, structs.XlaBuffer, structs.Span):
        memory = ctypes.create_string_buffer(bytes(range(1, 1 + ctypes.sizeof(kind))), ctypes.sizeof(kind))
        address = ctypes.addressof(memory)
        assert list(structs.reader(kind)(address)) == leaves(kind.from_address(address))
