"""JAX on the GPU: inside jit, on XLA's streams and memory, against plain attention in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash

pytestmark = [pytest.mark.gpu, pytest.mark.needs("jax")]


@pytest.fixture
def three() -> list[Any]:
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 301, 8, 64), (2, 333, 2, 64), (2, 333, 2, 64)
    return [jax.random.normal(key, shape, dtype="bfloat16") for key, shape in zip(keys, shapes, strict=True)]


def ours(q: Any, k: Any, v: Any) -> Any:
    return cupyflash.attention(q, k, v, causal=True)


def causal(s: Any) -> Any:
    import jax.numpy as jnp

    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2]), s, -jnp.inf)


def plain(q: Any, k: Any, v: Any, of_scores: Callable[[Any], Any] = causal) -> Any:
    """In fp32; `of_scores`: what becomes of scores (batch, heads, queries, keys)."""
    import jax
    import jax.numpy as jnp

    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = jnp.einsum("bshd,bthd->bhst", q, k, precision="highest") * q.shape[-1] ** -0.5
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(of_scores(s)), v, precision="highest")


def test_another_family_is_another_trace(three: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need another workspace."""
    want = plain(*three), gradients(plain)(*three)
    for name in ("sm80", "sm90", "sm80"):
        monkeypatch.setenv("CUPYFLASH_FAMILY", name)
        near((ours(*three), gradients(ours)(*three)), want)


def gradients(f: Any, of: Any = (0, 1, 2)) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.grad(lambda *x: (f(*x).astype(jnp.float32) ** 2).sum(), of)


def near(got: Any, want: Any) -> None:
    """Within two roundings of bf16, relative to the largest value."""
    import jax

    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() <= 2**-7 * np.abs(y).max()


def test_jit_and_gradients(three: list[Any]) -> None:
    import jax

    near(ours(*three), plain(*three))
    near(jax.jit(ours)(*three), plain(*three))
    near(jax.jit(gradients(ours))(*three), gradients(plain)(*three))


def test_many_layers_in_one_program(three: list[Any]) -> None:
    """Enough custom calls for XLA to make command buffers of them, which it replays with other inputs.

    Compared with the same calls outside jit: XLA may round a sum that it fuses less often.
    """
    import jax

    q, k, v = three

    def layers(q: Any, k: Any, v: Any) -> Any:
        for _ in range(8):
            q = ours(q, k, v) + q
        return q

    compiled = jax.jit(layers)
    for i in range(4):
        near(compiled(q + i, k, v), layers(q + i, k, v))


def test_scan_vmap_and_packed(three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    q, k, v = three
    mapped = jax.jit(jax.vmap(ours))(*[jnp.stack([x, 2 * x]) for x in three])
    near(mapped[0], plain(q, k, v))
    found = jax.jit(lambda q: jax.lax.scan(lambda x, _: (ours(x, k, v), None), q, None, length=3)[0])(q)
    near(found, plain(plain(plain(q, k, v), k, v), k, v))
    edges = jnp.asarray([0, 100, 100, 301], jnp.int32)
    packed = jax.jit(lambda q, k, v, e: cupyflash.attention_varlen(q, k, v, e, causal=True))
    got = packed(q[0], k[0, :301], v[0, :301], edges)
    near(got[:100], plain(q[:1, :100], k[:1, :100], v[:1, :100])[0])
    near(got[100:], plain(q[:1, 100:], k[:1, 100:301], v[:1, 100:301])[0])


def test_nothing_is_prepared_where_it_runs(three: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    from cupyflash.launch import find

    compiled = jax.jit(lambda *x: cupyflash.attention(*x, scale=0.21)).lower(*three).compile()

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("prepared while XLA runs")

    monkeypatch.setattr(find, "prepare", fails)
    jax.block_until_ready(compiled(*three))


def test_arrays_of_the_cpu_stay_there(three: list[Any]) -> None:
    import jax

    cpu = jax.devices("cpu")[0]
    out = jax.jit(ours)(*[jax.device_put(x, cpu) for x in three])
    assert out.devices() == {cpu}
    near(out, plain(*three))


def test_mods(three: list[Any]) -> None:
    """Arrays that are traced, of which each step of a scan has another; calls that vmap joins, and that it does not."""
    import jax
    import jax.numpy as jnp

    q, k, v = three
    tables = jax.random.normal(jax.random.key(1), (2, q.shape[2], 30))
    kind = jax.random.randint(jax.random.key(2), (q.shape[0], k.shape[1]), 0, 3, jnp.int32)

    def modified(q: Any, k: Any, v: Any, table: Any) -> Any:
        def score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return jnp.tanh(score / 3) * 3 + (b + 1) * table[h, jnp.abs(i - j)]

        def shown(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (kind[b, i] == kind[b, j]) | (j == 0)

        return cupyflash.attention(q, k, v, score_mod=score, mask_mod=shown)

    def written_out(q: Any, k: Any, v: Any, table: Any) -> Any:
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
        b = jnp.arange(q.shape[0])[:, None, None, None]
        same = kind[:, : q.shape[1], None] == kind[:, None]

        def of_scores(s: Any) -> Any:
            s = jnp.tanh(s / 3) * 3 + (b + 1) * table[:, jnp.clip(abs(i - j), 0, 29)]
            return jnp.where((same | (j == 0))[:, None], s, -jnp.inf)

        return plain(q, k, v, of_scores)

    near(modified(q, k, v, tables[0]), written_out(q, k, v, tables[0]))
    of = 0, 1, 2, 3  # the table is learned, too
    near(jax.jit(gradients(modified, of))(q, k, v, tables[0]), gradients(written_out, of)(q, k, v, tables[0]))
    mapped = jax.jit(jax.vmap(gradients(modified, 3), (None, None, None, 0)))(q, k, v, tables)
    near(mapped[1], gradients(written_out, 3)(q, k, v, tables[1]))
    steps = jax.jit(lambda q, tables: jax.lax.scan(lambda x, table: (modified(x, k, v, table), None), q, tables)[0])
    near(steps(q, tables), written_out(written_out(q, k, v, tables[0]).astype(q.dtype), k, v, tables[1]))
    many = jnp.stack([q, 2 * q])
    near(jax.vmap(modified, (0, None, None, 0))(many, k, v, tables)[1], written_out(2 * q, k, v, tables[1]))

    def windowed(q: Any) -> Any:
        return cupyflash.attention(q, k, v, mask_mod="abs(q - k) < 50")

    near(jax.jit(jax.vmap(windowed))(many), jnp.stack([windowed(q), windowed(2 * q)]))


@pytest.mark.parametrize("own", [(1, 1), (2, 8)], ids=str)
def test_block_masks(own: tuple[int, int], three: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    from cupyflash import masks

    q, k, v = three
    lengths = q.shape[1], k.shape[1]
    mask = masks.from_dense(np.random.default_rng(0).random((*own, *lengths)) < 0.3)
    mask |= masks.local(*lengths, left=40, right=3)

    def masked(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v, block_mask=mask)

    def written_out(q: Any, k: Any, v: Any) -> Any:
        return plain(q, k, v, lambda s: jnp.where(mask.sees(*map(slice, (0, 0), lengths)), s, -jnp.inf))

    near(masked(q, k, v), written_out(q, k, v))
    near(jax.jit(masked)(q, k, v), written_out(q, k, v))
    near(jax.jit(gradients(masked))(q, k, v), gradients(written_out)(q, k, v))
    mapped = jax.jit(jax.vmap(masked))(*[jnp.stack([x, -x]) for x in three])
    near(mapped, jnp.stack([masked(q, k, v), masked(-q, -k, -v)]))
    compiled = jax.jit(lambda *x: masked(*x) + masked(x[0] + 1, *x[1:]))  # a program is replayed with other inputs
    for i in range(3):
        near(compiled(q + i, k, v), masked(q + i, k, v) + masked(q + i + 1, k, v))


# ---- Many queries over a cache ----

LENGTHS = 700, 3000


def many(how: str, rng: np.random.Generator) -> dict[str, Any]:
    """Arrays of fp32 whose numbers bf16 has, and options: 200 queries of each sequence, or 1 and 399 of them packed."""
    import ml_dtypes

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)

    packed, paged, room = "packed" in how, "pages" in how, 5248
    batch = 1 if "in parts" in how else 2
    pool = (batch * room // 16 + 3, 16) if paged else (batch, 8192 if "in parts" in how else room)
    heads = 32 if "in parts" in how else 16
    x: dict[str, Any] = {"q": draw(*((400,) if packed else (batch, 200)), heads, 64)}
    x |= {f"{name}_cache": draw(*pool, 4, 64) for name in "kv"}
    x["cache_seqlens"] = np.array(LENGTHS[:batch], np.int32)
    if "int8" in how:
        x |= {f"{name}_cache": rng.integers(-127, 128, (*pool, 4, 64)).astype(np.int8) for name in "kv"}
        x |= {f"{name}_scale": (rng.random((pool[0], 4)) / 50).astype(np.float32) for name in "kv"}
    if paged:
        x["block_table"] = rng.permutation(pool[0])[: batch * room // 16].reshape(batch, -1).astype(np.int32)
    else:
        for b in range(batch):
            x["k_cache"][b, LENGTHS[b] :], x["v_cache"][b, LENGTHS[b] :] = np.nan, np.nan
    if packed:
        x["cu_seqlens_q"] = np.array([0, 1, 400], np.int32)
    if how not in ("read", "pages", "int8, pages"):
        x |= {name: draw(*x["q"].shape[:-2], 4, 64) for name in "kv"}
    if "rotary" in how:
        turns = rng.uniform(-3, 3, (2000, 16))
        x |= {"rotary_cos": np.cos(turns).astype(np.float32), "rotary_sin": np.sin(turns).astype(np.float32)}
    if "features" in how:
        x |= {"sink": rng.standard_normal(heads).astype(np.float32), "window": (500, 2), "softcap": 5.0}
        x["kv_range"] = np.array([[5, 600], [0, 5000]], np.int32)
    if "blocks" in how:
        x["block_mask"] = cupyflash.masks.global_local(8192, window=300, global_tokens=20)
    return x | {"causal": how != "read"}


@pytest.mark.parametrize(
    "how",
    [
        "read",
        "append",
        "rotary",
        "features",
        "in parts",
        "in parts, blocks",
        "blocks, pages",
        "pages",
        "append, pages",
        "int8, pages",
        "packed",
        "packed pages, rotary",
    ],
)
def test_many_queries_over_a_cache(how: str, family: str, three: list[Any], rng: np.random.Generator) -> None:
    """By the forward, against float64; eager, inside jit, and where the caches are donated."""
    import jax
    import jax.numpy as jnp

    x = many(how, rng)
    options = {name: y for name, y in x.items() if not isinstance(y, np.ndarray)}
    exact = ("k_scale", "v_scale")
    wide = {name: y.astype(np.float64) if y.dtype == np.float32 and name not in exact else y
            for name, y in x.items() if name not in options}  # fmt: skip
    of_16_bits = ("q", "k", "v", "k_cache", "v_cache")
    given = {name: jnp.asarray(y, jnp.bfloat16 if name in of_16_bits and y.dtype == np.float32 else y.dtype)
             for name, y in x.items() if name not in options}  # fmt: skip

    def call(**x: Any) -> Any:
        return cupyflash.attention_with_cache(**x, **options, return_lse=True)

    assert "target_name=cupyflash" in str(jax.make_jaxpr(lambda x: call(**x))(given)).replace("cupyflash_cache", "")
    append = ("k_cache", "v_cache") if "k" in x else ()
    expected = cupyflash.attention_with_cache(**wide, **options, return_lse=True)
    expected = (*expected, *(wide[name] for name in append))
    calls = [call, jax.jit(call), jax.jit(call, donate_argnames=append)]
    found = [f(**given) for f in calls]
    for results in found:
        assert len(results) == len(expected)
        for a, b in zip(results, expected, strict=True):
            is_number = np.isfinite(b)
            assert np.array_equal(np.isfinite(np.asarray(a, np.float32)), is_number)
            near(np.where(is_number, np.asarray(a, np.float32), 0), np.where(is_number, b, 0))
        for a, b in zip(results, found[0], strict=True):
            assert np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_a_prompt_in_chunks(three: list[Any]) -> None:
    """A scan of calls that append and take the forward, in place: each as a causal call on all has it. The program is
    replayed with other inputs."""
    import jax
    import jax.numpy as jnp

    chunks, size = 8, 256
    q = jax.random.normal(jax.random.key(0), (1, chunks * size, 32, 64), "bfloat16")
    k, v = (jax.random.normal(jax.random.key(i), (1, chunks * size, 8, 64), "bfloat16") for i in (1, 2))

    def step(state: Any, new: Any) -> Any:
        *caches, length = state
        out, *caches = cupyflash.attention_with_cache(
            new[0], *caches, cache_seqlens=length, k=new[1], v=new[2], causal=True
        )
        return (*caches, length + size), out

    @jax.jit
    def prompt(*rows: Any) -> Any:
        empty = jnp.zeros((1, 8192, 8, 64), jnp.bfloat16)
        cut = [jnp.moveaxis(x.reshape(1, chunks, size, *x.shape[2:]), 1, 0) for x in rows]
        _, outs = jax.lax.scan(step, (empty, empty, jnp.zeros(1, jnp.int32)), cut)
        return jnp.moveaxis(outs, 0, 1).reshape(rows[0].shape)

    for i in range(3):
        near(prompt(q + i, k, v), ours(q + i, k, v))
