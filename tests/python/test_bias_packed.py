"""A bias and a mask of packed sequences: each sequence has its own positions, what is beyond it is not read, and its
gradient is 0 there; in every library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, attention, attention_backward, attention_varlen, attention_varlen_backward
from cupyflash.bias import own_of
from cupyflash.gpu.device import Device
from cupyflash.plan.families import plan_call
from cupyflash.problem import Bias, make_problem
from tests import pretended_gpu

B, H, HK, D = 4, 4, 2, 16
CU_Q, CU_K = (np.array(x, np.int32) for x in ((0, 21, 22, 22, 40), (0, 13, 47, 52, 60)))
USED = np.array([13, 30, 0, 7], np.int32)
QUERIES, KEYS = 23, 33  # of a bias: the longest sequences have 21, and 30 that count
SHAPES = (
    (B, H, QUERIES, KEYS), (1, H, QUERIES, KEYS), (H, QUERIES, KEYS), (QUERIES, KEYS), (B, 1, 1, KEYS), (KEYS,),
    (B, H, QUERIES, 1), (H, 1, 1), (1,), (),
)  # fmt: skip
MASKS = ((B, 1, 1, KEYS), (1, H, QUERIES, KEYS))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, Any]:
    q, dout = rng.standard_normal((2, 41, H, D))
    k, v = rng.standard_normal((2, 63, HK, D))
    return {"q": q, "k": k, "v": v, "dout": dout, "dlse": rng.standard_normal((H, 41))}


LENGTHS = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "seqused_k": USED}


def alone(b: int) -> tuple[slice, slice]:
    """The rows of a sequence, and its keys that count."""
    return slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b] + USED[b])


def part(x: np.ndarray, b: int) -> np.ndarray:
    """What a bias has of one sequence, as broadcast as it was."""
    whole, (rows, keys) = x.reshape((1,) * (4 - x.ndim) + x.shape), alone(b)
    lengths = slice(b, b + 1), slice(None), slice(rows.stop - rows.start), slice(keys.stop - keys.start)
    return whole[tuple([slice(None) if n == 1 else s for n, s in zip(whole.shape, lengths, strict=True)])]


def unread(x: np.ndarray) -> np.ndarray:
    """Which elements of a bias no sequence has."""
    found = np.ones(x.shape, bool)
    for b in range(B):
        part(found, b)[...] = False
    return found


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 4), "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_sequence_is_attention_of_its_own(
    shape: tuple[int, ...], options: dict[str, Any], arrays: dict[str, Any], rng: np.random.Generator
) -> None:
    """With NaN where no sequence is, and a mask beside it."""
    bias, mask = np.asarray(rng.standard_normal(shape)), rng.random(MASKS[len(shape) % 2]) < 0.8
    bias[unread(bias)] = np.nan
    q, k, v, dout, dlse = arrays.values()
    more = {"bias": bias, "mask": mask, **options}
    out, lse = attention_varlen(q, k, v, **LENGTHS, **more, return_lse=True)
    found = attention_varlen_backward(dout, q, k, v, out, lse, **LENGTHS, **more, dlse=dlse, gradients_of="bias")
    dbias = np.zeros(shape)
    for b in range(B):
        rows, keys = alone(b)
        x, own = (
            (q[None, rows], k[None, keys], v[None, keys]),
            {n: part(more[n], b) for n in ("bias", "mask")} | options,
        )
        out_b, lse_b = attention(*x, **own, return_lse=True)
        np.testing.assert_array_equal(out[rows], out_b[0])
        np.testing.assert_array_equal(lse[:, rows], lse_b[0])
        of = attention_backward(
            dout[None, rows], *x, out_b, lse_b, dlse=dlse[None, :, rows], gradients_of="bias", **own
        )
        np.testing.assert_array_equal(found.dq[rows], of.dq[0])
        np.testing.assert_array_equal(found.dk[keys], of.dk[0])
        target = part(dbias, b)
        target += of.dbias
    assert found.dbias.shape == shape
    np.testing.assert_allclose(found.dbias, dbias, rtol=1e-12, atol=1e-12)
    assert not found.dbias[unread(dbias)].any()


WRONG = (
    ({"bias": (1, H, 20, KEYS)}, r"^bias: .* at least 21 queries, those of sequence 0, got 20 along dimension -2;"),
    ({"bias": (KEYS - 4,)}, r"^bias: .* at least 30 keys, those of sequence 1, got 29 along dimension -1; make room"),
    ({"mask": (QUERIES, 2)}, r"^mask: expected room for at least 13 keys, those of sequence 0, got 2 along"),
    ({"bias": (QUERIES, KEYS), "mask": (22, KEYS)},
     r"^mask: .* \(batch, heads_q, max_seqlen_q, max_seqlen_k\) = \(4, 4, 23, 33\), .*got \(22, 33\)"),
    ({"bias": (QUERIES, KEYS - 4), "mask": (QUERIES, KEYS - 4)}, r"^bias and mask: expected room for at least 30 keys"),
    ({"bias": (B - 1, 1, 1, 1)}, r"^bias: .* = \(4, 4, any, any\), .*got \(3, 1, 1, 1\)"),
    ({"bias": (1, B, H, QUERIES, KEYS)}, r"^bias: expected shape one that broadcasts to"),
)  # fmt: skip


@pytest.mark.parametrize(("shapes", "message"), WRONG, ids=lambda x: str(x)[:60])
def test_what_is_wrong_is_refused(shapes: dict[str, tuple[int, ...]], message: str, arrays: dict[str, Any]) -> None:
    added = {name: np.ones(shape, bool if name == "mask" else np.float64) for name, shape in shapes.items()}
    with pytest.raises(ArgumentError, match=message):
        attention_varlen(arrays["q"], arrays["k"], arrays["v"], **LENGTHS, **added)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_of_a_spec_have_their_own_room(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, grids and params of biases of different lengths, one call after the other."""
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    q, cu, lse = np.zeros((300, H, 64), np.float16), np.array([0, 100, 300], np.int32), np.zeros((H, 300), np.float32)
    for shape, room, is_paired in (
        ((1, H, 200, 204), (200, 204), True), ((H, 201, 301), (201, 301), False), ((2, 1, 1, 250), (2**29, 250), True),
        ((200, 1), (200, 2**29), False), ((1, H, 200, 200), (200, 200), True),
    ):  # fmt: skip
        gpu.launched.clear()
        bias = np.zeros(shape, np.float16)
        attention_varlen(q, q, q, cu, bias=bias)
        attention_varlen_backward(q, q, q, q, q, lse, cu, bias=bias, gradients_of="bias")
        kinds = {variant.symbol: variant.params for variant in gpu.loaded}
        for launch in gpu.launched:
            params = np.frombuffer(launch.params, kinds[launch.symbol])[0]
            plain = params["plain"] if "plain" in params.dtype.names else params
            assert (plain["max_seqlen_q"], plain["max_seqlen_k"]) == room
        problem = make_problem(
            [(300, H, 64)] * 3, ["fp16"] * 3, sequences=2, bias=Bias("fp16", own_of(shape)), max_seqlens=room
        )
        plans = [
            plan_call(problem, Device.of(0), paired_bias=is_paired, backward=backward, dbias=backward)
            for backward in (False, True)
        ]
        want = [(n.variant.symbol, n.grid) for plan in plans for n in plan.launches]
        assert [(n.symbol, n.grid) for n in gpu.launched] == want


@pytest.mark.needs("torch")
def test_torch(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """Learned by autograd, compiled, under vmap."""
    import torch

    q, k, v, dout, _ = (torch.tensor(x) for x in arrays.values())
    lengths = {name: torch.tensor(x) for name, x in LENGTHS.items()}
    mask = torch.tensor(rng.random(MASKS[0]) < 0.8)

    def attend(bias: Any) -> Any:
        return attention_varlen(q, k, v, **lengths, bias=bias, mask=mask, causal=True)

    for shape in ((1, H, QUERIES, KEYS), (B, 1, 1, KEYS)):
        bias = torch.tensor(rng.standard_normal(shape), requires_grad=True)
        out = attend(bias)
        (found,) = torch.autograd.grad(out, bias, dout)
        more = {"bias": bias.detach().numpy(), "mask": mask.numpy(), "causal": True}
        x = arrays["q"], arrays["k"], arrays["v"]
        want, lse = attention_varlen(*x, **LENGTHS, **more, return_lse=True)
        of = attention_varlen_backward(arrays["dout"], *x, want, lse, **LENGTHS, **more, gradients_of="bias")
        np.testing.assert_array_equal(out.detach(), want)
        np.testing.assert_array_equal(found, of.dbias)  # type: ignore[attr-defined]
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(bias)
        torch.testing.assert_close(compiled, out)
        torch.testing.assert_close(torch.autograd.grad(compiled, bias, dout)[0], found)
        two = torch.stack([bias.detach(), -bias.detach()])
        torch.testing.assert_close(torch.vmap(attend)(two), torch.stack([attend(one) for one in two]))
    with pytest.raises(ArgumentError, match=r"^bias and mask: expected room for at least 21 queries"):
        attend(torch.zeros(20, KEYS, dtype=torch.float64))


@pytest.mark.needs("torch")
def test_one_compiled_program_takes_any_room(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    import torch

    q, k, v = (torch.tensor(arrays[name]) for name in "qkv")
    lengths, compiled = {name: torch.tensor(x) for name, x in LENGTHS.items()}, []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    attend = torch.compile(
        lambda bias: attention_varlen(q, k, v, **lengths, bias=bias), fullgraph=True, backend=count, dynamic=True
    )
    for more in range(3):
        bias = torch.tensor(rng.standard_normal((H, QUERIES + more, KEYS + 2 * more)))
        torch.testing.assert_close(attend(bias), attention_varlen(q, k, v, **lengths, bias=bias))
    assert len(compiled) == 1


@pytest.mark.needs("jax")
def test_jax(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """Inside jit, its gradient too, and under vmap."""
    import jax
    import jax.numpy as jnp

    x = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    lengths = {name: jnp.asarray(a) for name, a in LENGTHS.items()}
    bias = jnp.asarray(rng.standard_normal((1, H, QUERIES, KEYS)), jnp.float32)
    mask = jnp.asarray(rng.random(MASKS[0]) < 0.8)

    def value(bias: Any) -> Any:
        return (attention_varlen(x["q"], x["k"], x["v"], **lengths, bias=bias, mask=mask) * x["dout"]).sum()

    plain = {name: np.asarray(a) for name, a in x.items()}
    three, more = (plain["q"], plain["k"], plain["v"]), {"bias": np.asarray(bias), "mask": np.asarray(mask)}
    out, lse = attention_varlen(*three, **LENGTHS, **more, return_lse=True)
    want = attention_varlen_backward(plain["dout"], *three, out, lse, **LENGTHS, **more, gradients_of="bias")
    found = jax.jit(jax.grad(value))(bias)
    np.testing.assert_allclose(found, want.dbias, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
    both = jax.vmap(value)(jnp.stack([bias, -bias]))
    np.testing.assert_allclose(both, [value(bias), value(-bias)], rtol=1e-4, atol=1e-4)


def test_options_are_those_of_the_dense_call() -> None:
    import inspect

    for packed, dense in ((attention_varlen, attention), (attention_varlen_backward, attention_backward)):
        names = set(inspect.signature(dense).parameters)
        assert names <= set(inspect.signature(packed).parameters)
