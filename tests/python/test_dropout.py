"""Dropout through the public API: which elements are dropped; seeds, statistics, gradients, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.dropout import STEPS, kept, key_of, limit_of, philox, words_of
from cupyflash.gpu.device import Device
from cupyflash.plan.families import plan_call
from cupyflash.problem import Problem
from tests import pretended_gpu

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def written_out(seed: int, sequence: int, head: int, query: int, key: int) -> int:
    """The number of one element, in Python's integers: Philox-4x32 with 7 rounds and our counter."""
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    c = [key // 16, query // 16 * 32 + 4 * (query % 8) + key % 8 // 2, head, sequence]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    word = c[2 * (key // 8 % 2) + query // 8 % 2]
    return (word >> 16 if key % 2 else word) & 0x7FFF


# Of Random123's known answers: counter, key, and what 7 and 10 rounds make of them.
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
KNOWN = (
    ((0,) * 4, (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ((0,) * 4, (0, 0), 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (*PI, 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (*PI, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


@pytest.mark.parametrize(("counter", "key", "rounds", "words"), KNOWN)
def test_philox_has_its_known_answers(counter: Any, key: Any, rounds: int, words: str) -> None:
    assert " ".join(f"{int(x):08x}" for x in philox(counter, key, rounds)) == words


def test_the_mask_is_what_it_says(rng: np.random.Generator) -> None:
    """Element by element, of rows and keys that begin anywhere."""
    seed, limit = int(rng.integers(2**63)), 20000
    found = kept(words_of(seed), limit, np.array([3, 0]), np.array([1, 5]), slice(5, 50), slice(19, 77))
    for n, (b, h) in enumerate(((3, 1), (0, 5))):
        for i in range(5, 50):
            for j in range(19, 77):
                assert found[n, i - 5, j - 19] == (written_out(seed, b, h, i, j) >= limit)


def read(q: int, k: int, *, heads: int = 1, batch: int = 1, **options: Any) -> np.ndarray:
    """What is kept, read out of attention: scores of 0, and v that is the identity, 64 keys at a time."""
    Q, K = np.zeros((batch, q, heads, 64)), np.zeros((batch, k, heads, 64))
    found = np.zeros((batch, heads, q, k))
    for first in range(0, k, 64):
        V = np.zeros((batch, k, heads, 64))
        for j in range(first, min(first + 64, k)):
            V[:, j, :, j - first] = 1
        out = cupyflash.attention(Q, K, V, **options)
        found[..., first : first + 64] = out.transpose(0, 2, 1, 3)[..., : min(64, k - first)]
    return found


def test_attention_drops_these_elements() -> None:
    p, seed = 0.3, 2**40 + 7
    found = read(70, 150, heads=2, batch=2, dropout_p=p, dropout_seed=seed)
    limit = limit_of(p)
    for b in range(2):
        for h in range(2):
            Z = kept(words_of(seed), limit, np.array([b]), np.array([h]), slice(0, 70), slice(0, 150))[0]
            np.testing.assert_allclose(found[b, h], Z * STEPS / (STEPS - limit) / 150, rtol=1e-12)


def test_statistics() -> None:
    """The mean within five standard deviations; heads, rows, keys, sequences and seeds independent of each other."""
    n, p = 512, 0.25
    heads = np.arange(4)
    Z = kept(words_of(11), limit_of(p), np.repeat([0, 1], 4), np.tile(heads, 2), slice(0, n), slice(0, n))
    other = kept(words_of(12), limit_of(p), np.zeros(1, int), np.zeros(1, int), slice(0, n), slice(0, n))[0]
    sigma = np.sqrt(p * (1 - p))
    assert abs(Z.mean() - (1 - p)) < 5 * sigma / np.sqrt(Z.size)
    assert np.abs(Z.mean(axis=2) - (1 - p)).max() < 5.5 * sigma / np.sqrt(n)  # of each row
    assert np.abs(Z.mean(axis=1) - (1 - p)).max() < 5.5 * sigma / np.sqrt(n)  # of each key

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return abs(float(((a - (1 - p)) * (b - (1 - p))).mean())) / sigma**2 * np.sqrt(a.size)

    for i in range(8):
        assert correlation(Z[i], other) < 5 or i == 0
        for j in range(i):
            assert correlation(Z[i], Z[j]) < 5
        for step in (1, 2, 8, 16):
            assert correlation(Z[i, step:], Z[i, :-step]) < 5
            assert correlation(Z[i, :, step:], Z[i, :, :-step]) < 5


def test_the_expectation_of_out_is_out_without(rng: np.random.Generator) -> None:
    q, k, v = rng.standard_normal((3, 1, 24, 2, 16))
    plain, plain_lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    outs = []
    for seed in range(400):
        out, lse = cupyflash.attention(q, k, v, causal=True, dropout_p=0.2, dropout_seed=seed, return_lse=True)
        assert lse.tobytes() == plain_lse.tobytes()
        outs.append(out)
    error = np.abs(np.mean(outs, axis=0) - plain)
    assert (error < 5.5 * np.std(outs, axis=0) / 20 + 1e-9).all()


def test_no_dropout_is_no_dropout(rng: np.random.Generator) -> None:
    q, k, v = rng.standard_normal((3, 1, 24, 2, 16))
    plain = cupyflash.attention(q, k, v)
    assert cupyflash.attention(q, k, v, dropout_p=0).tobytes() == plain.tobytes()
    assert cupyflash.attention(q, k, v, dropout_p=0.0, dropout_seed=5).tobytes() == plain.tobytes()
    assert cupyflash.attention(q, k, v, dropout_p=1e-9, dropout_seed=5).tobytes() == plain.tobytes()
    assert np.isfinite(cupyflash.attention(q, k, v, dropout_p=1 - 1e-12, dropout_seed=5)).all()


def test_gradients_by_finite_differences(rng: np.random.Generator) -> None:
    q, k, v, dout = rng.standard_normal((4, 1, 19, 2, 8))
    dlse = rng.standard_normal((1, 2, 19))
    options = {"causal": True, "softcap": 2.0, "dropout_p": 0.3, "dropout_seed": 99}
    slopes, sink = rng.uniform(0, 0.3, 2), rng.uniform(-1, 1, 2)

    def loss(**changed: Any) -> float:
        x = {"q": q, "k": k, "v": v, "alibi_slopes": slopes, "sink": sink, **changed}
        out, lse = cupyflash.attention(**x, **options, return_lse=True)
        return float((out * dout).sum() + (lse * dlse).sum())

    given = {"alibi_slopes": slopes, "sink": sink}
    out, lse = cupyflash.attention(q, k, v, **given, **options, return_lse=True)
    more = {**given, "dlse": dlse, "gradients_of": ("alibi_slopes", "sink")}
    found = cupyflash.attention_backward(dout, q, k, v, out, lse, **more, **options)
    of = {"q": found.dq, "k": found.dk, "v": found.dv, "alibi_slopes": found.dalibi_slopes, "sink": found.dsink}
    for name, x in {"q": q, "k": k, "v": v, **given}.items():
        for _ in range(6):
            i = tuple(rng.integers(x.shape))
            up, down = x.copy(), x.copy()
            up[i] += 1e-5
            down[i] -= 1e-5
            expected = (loss(**{name: up}) - loss(**{name: down})) / 2e-5
            assert of[name][i] == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_packed_sequences_drop_as_in_a_batch(rng: np.random.Generator) -> None:
    """By the number of the sequence, and queries and keys within it."""
    q, k, v = rng.standard_normal((3, 3, 20, 2, 16))
    options = {"causal": True, "dropout_p": 0.4, "dropout_seed": 3}
    dense = cupyflash.attention(q, k, v, **options)
    cu = np.array([0, 20, 40, 60], np.int32)
    packed = cupyflash.attention_varlen(*(x.reshape(60, 2, 16) for x in (q, k, v)), cu, **options)
    np.testing.assert_allclose(packed.reshape(dense.shape), dense, rtol=1e-12)
    ranges = np.array([[3, 20], [0, 20], [5, 15]], np.int32)  # and where keys lie, not where a range of them begins
    ranged = cupyflash.attention(q, k, v, kv_range=ranges, **options)
    np.testing.assert_allclose(ranged[1], dense[1], rtol=1e-12)
    hidden = read(20, 20, batch=1, dropout_p=0.4, dropout_seed=3)[0, 0] > 0
    seen = read(20, 20, batch=1, dropout_p=0.4, dropout_seed=3, kv_range=ranges[:1])[0, 0] > 0
    np.testing.assert_array_equal(seen[:, 3:], hidden[:, 3:])


def test_forms_of_a_seed() -> None:
    def mask(seed: Any) -> bytes:
        return read(9, 33, dropout_p=0.5, dropout_seed=seed).tobytes()

    one = mask(2**63 + 5)
    for same in (np.array([2**63 + 5], np.uint64), np.array([5 - 2**63]), np.uint64(2**63 + 5), 2**63 + 5 - 2**64):
        assert mask(same) == one
    assert mask(np.array(5 - 2**63)) == one
    assert mask(np.array([5, -(2**31)], np.int32)) == one
    assert mask(np.array([5 - 2**63, 0])) == one
    offsets = {mask(np.array([5 - 2**63, i])) for i in range(20)}
    assert len(offsets) == 20
    assert len({mask(i) for i in range(20)}) == 20
    key = key_of(np.array([[5, 0], [1, 0]], np.int32))
    assert key[0] | key[1] << 32 == 5 + 0x9E3779B97F4A7C15


def test_a_seed_that_is_not_given_is_drawn() -> None:
    np.random.seed(1)  # noqa: NPY002 (what users do)
    first, second = (read(9, 33, dropout_p=0.5) for _ in range(2))
    np.random.seed(1)  # noqa: NPY002
    assert (first != second).any()
    assert (first == read(9, 33, dropout_p=0.5)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 1.0}, "dropout_p: expected a number from 0 on and below 1, got 1.0"),
        ({"dropout_p": -0.1}, "dropout_p: expected a number from 0 on and below 1, got -0.1"),
        ({"dropout_p": "x"}, "dropout_p: expected a number"),
        ({"dropout_p": None}, "dropout_p: expected a number from 0 on and below 1, got None"),
        (
            {"dropout_p": 0.5, "dropout_seed": np.ma.array([1, 2], mask=True)},
            "dropout_seed: expected a plain array, and a numpy.ma.MaskedArray has rules of its own",
        ),
        ({"dropout_p": float("nan")}, "dropout_p: expected a number from 0 on and below 1, got nan"),
        ({"dropout_p": 0.5, "dropout_seed": 1.5}, "dropout_seed: expected an integer, got 1.5"),
        ({"dropout_p": 0.5, "dropout_seed": True}, "dropout_seed: expected an integer, got True"),
        ({"dropout_p": 0.5, "dropout_seed": np.zeros(3, np.int64)}, "dropout_seed: expected an integer, or an int64"),
        ({"dropout_p": 0.5, "dropout_seed": np.zeros(1)}, "dropout_seed: expected an integer, or an int64 array"),
        ({"dropout_p": 0.5, "dropout_seed": np.zeros(1, np.int32)}, "dropout_seed: expected an integer, or an int64"),
    ],
)
def test_what_is_wrong_is_refused(options: dict[str, Any], message: str) -> None:
    q = np.zeros((1, 8, 2, 8))
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention(q, q, q, **options)
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention_backward(q, q, q, q, q, np.zeros((1, 2, 8)), **{"dropout_seed": 1, **options})


def test_a_backward_needs_the_seed() -> None:
    q = np.zeros((1, 8, 2, 8))
    with pytest.raises(ArgumentError, match="dropout_seed: expected the seed of the forward"):
        cupyflash.attention_backward(q, q, q, q, q, np.zeros((1, 2, 8)), dropout_p=0.5)


# ---- torch ----


@pytest.mark.needs("torch")
def test_torch(rng: np.random.Generator) -> None:
    """Seeds from torch's generator; autograd drops what the forward dropped."""
    import torch

    x = [torch.tensor(rng.standard_normal((2, 21, 2, 16)), requires_grad=True) for _ in range(3)]
    torch.manual_seed(7)
    out, lse = cupyflash.attention(*x, causal=True, dropout_p=0.3, return_lse=True)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), x)
    torch.manual_seed(7)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,))
    same = cupyflash.attention(*x, causal=True, dropout_p=0.3, dropout_seed=seed, return_lse=True)
    assert out.equal(same[0])
    want = cupyflash.attention_backward(
        2 * out.detach(), *(t.detach() for t in x), out.detach(), lse.detach(), dlse=torch.ones_like(lse), causal=True,
        dropout_p=0.3, dropout_seed=seed,
    )  # fmt: skip
    for got, exact in zip(grads, want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    numpy = cupyflash.attention(*(t.detach().numpy() for t in x), causal=True, dropout_p=0.3, dropout_seed=int(seed))
    np.testing.assert_array_equal(out.detach().numpy(), numpy)
    assert not out.equal(cupyflash.attention(*x, causal=True, dropout_p=0.3))
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(1), torch.zeros(1, dtype=torch.int64, device="meta")):
        with pytest.raises(ArgumentError, match="dropout_seed: expected"):
            cupyflash.attention(*x, dropout_p=0.3, dropout_seed=wrong)


@pytest.mark.needs("torch")
def test_torch_checkpoints_drop_again_what_they_dropped(rng: np.random.Generator) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    x = [torch.tensor(rng.standard_normal((1, 21, 2, 16)), requires_grad=True) for _ in range(3)]

    def attend(*x: Any) -> Any:
        return cupyflash.attention(*x, dropout_p=0.3).square().sum()

    torch.manual_seed(3)
    want = torch.autograd.grad(attend(*x), x)
    torch.manual_seed(3)
    found = torch.autograd.grad(checkpoint(attend, *x, use_reentrant=False), x)
    assert all(a.equal(b) for a, b in zip(found, want, strict=True))


@pytest.mark.needs("torch")
def test_torch_compile(rng: np.random.Generator) -> None:
    """Whole, forward and backward, with a seed that is given and one that is drawn."""
    import torch

    x = [torch.tensor(rng.standard_normal((1, 21, 2, 16)), requires_grad=True) for _ in range(3)]
    seed = torch.tensor([5])

    def attend(*x: Any, seed: Any = None) -> Any:
        return cupyflash.attention(*x, dropout_p=0.3, dropout_seed=seed)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got, want = compiled(*x, seed=seed), attend(*x, seed=seed)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
    first, second = compiled(*x), compiled(*x)
    assert not first.equal(second)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*x, seed=torch.tensor([6])), attend(*x, seed=6))


@pytest.mark.needs("torch>=2.5")
def test_torch_vmap(rng: np.random.Generator) -> None:
    """Each index is the call that it would be by itself, whether it has a seed of its own or shares one."""
    import torch

    x = list(torch.tensor(rng.standard_normal((3, 3, 2, 21, 2, 16))))

    def attend(q: Any, k: Any, v: Any, seed: Any) -> Any:
        return cupyflash.attention(q, k, v, dropout_p=0.3, dropout_seed=seed)

    def gradient(*given: Any) -> Any:
        return torch.func.grad(lambda *x: attend(*x).square().sum())(*given)

    large, words = torch.tensor([[-1], [2**31], [2**62 + 3]]), torch.arange(6, dtype=torch.int32).reshape(3, 2)
    for seeds, dim in ((torch.arange(3)[:, None], 0), (large, 0), (words, 0), (torch.tensor([5]), None)):
        for f in (attend, gradient):
            found = torch.vmap(f, (0, 0, 0, dim))(*x, seeds)
            want = [f(*(t[i] for t in x), seeds if dim is None else seeds[i]) for i in range(3)]
            torch.testing.assert_close(found, torch.stack(want))
    none = torch.vmap(gradient, (0, 0, 0, None))(*(t[:0] for t in x), torch.tensor([5]))
    assert none.shape == (0, *x[0].shape[1:])
    q = x[0][:1].expand(2, -1, -1, -1, -1)
    for randomness, same in (("same", True), ("different", False)):
        drawn = torch.vmap(lambda q: cupyflash.attention(q, q, q, dropout_p=0.3), randomness=randomness)(q)
        assert drawn[0].equal(drawn[1]) is same


# ---- JAX ----


@pytest.mark.needs("jax")
def test_jax(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    x = [jnp.asarray(rng.standard_normal((2, 21, 2, 16)), jnp.float32) for _ in range(3)]
    key = jax.random.key(5)

    def attend(q: Any, k: Any, v: Any, seed: Any) -> Any:
        return cupyflash.attention(q, k, v, causal=True, dropout_p=0.3, dropout_seed=seed)

    found = jax.jit(attend)(*x, key)
    words = np.asarray(jax.random.key_data(key)).view(np.int32)
    numpy = cupyflash.attention(*map(np.asarray, x), causal=True, dropout_p=0.3, dropout_seed=words)
    np.testing.assert_allclose(found, numpy, rtol=1e-6)
    np.testing.assert_array_equal(attend(*x, jax.random.key_data(key)), found)
    np.testing.assert_array_equal(attend(*x, 9), attend(*x, np.int64(9)))
    assert (attend(*x, 9) != found).any()
    grads = jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)))(*x, key)
    out, lse = cupyflash.attention(*map(np.asarray, x), causal=True, dropout_p=0.3, dropout_seed=words, return_lse=True)
    want = cupyflash.attention_backward(
        2 * out, *map(np.asarray, x), out, lse, causal=True, dropout_p=0.3, dropout_seed=words
    )
    for got, exact in zip(grads, want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)
    keys = jax.random.split(key, 2)
    mapped = jax.vmap(lambda q, k, v, s: attend(q[None], k[None], v[None], s)[0])(*x, keys)
    for i in range(2):
        np.testing.assert_allclose(mapped[i], attend(*(t[i : i + 1] for t in x), keys[i])[0], rtol=1e-6)
    with pytest.raises(ArgumentError, match=r"dropout_seed: expected a key of jax.random or an integer"):
        cupyflash.attention(*x, dropout_p=0.3)


# ---- Kernels ----


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plan(arch: str, head_dim: int) -> None:
    """Every kernel that forms P has a form of its own; p and the seed decide none, and nothing is stored."""
    device = Device.synthetic(arch)
    with_dropout = Problem("bf16", 2, 300, 500, 8, 2, head_dim, 0.5, dropout_p=0.1, dropout=1)
    other = Problem("bf16", 2, 300, 500, 8, 2, head_dim, 0.5, dropout_p=0.7, dropout=2)
    for backward in (False, True):
        plan = plan_call(with_dropout, device, backward=backward)
        assert all("dropout" in launch.variant.symbol for launch in plan.launches)
        assert plan == plan_call(other, device, backward=backward)
        plain = plan_call(Problem("bf16", 2, 300, 500, 8, 2, head_dim, 0.5), device, backward=backward)
        assert set(plan.workspace) == set(plain.workspace)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_launch_what_is_planned(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    q, k = np.zeros((2, 40, 4, 64), np.float16), np.zeros((2, 50, 2, 64), np.float16)
    lse = np.zeros((2, 4, 40), np.float32)
    for seed in (3, np.array([3, 4])):
        for p in (0.1, 0.2):
            gpu.launched.clear()
            cupyflash.attention(q, k, k, dropout_p=p, dropout_seed=seed)
            cupyflash.attention_backward(q, q, k, k, q, lse, dropout_p=p, dropout_seed=seed)
            assert ["dropout" in x.symbol for x in gpu.launched] == [True] * 4
    gpu.launched.clear()
    cupyflash.attention(q, k, k, dropout_p=0.0, dropout_seed=3)
    assert ["dropout" in x.symbol for x in gpu.launched] == [False]
