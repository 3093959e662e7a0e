"""combine: partial results put together, in every library, against attention to all keys at once; its derivatives."""

from __future__ import annotations

import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import ArgumentError, attention, attention_varlen, attention_with_cache, combine
from cupyflash.check.case import NUMPY_DTYPE

CUTS = (0, 3, 3, 40, 67)  # one part has no key


def pieces(rng: np.random.Generator, dtype: Any = np.float64) -> tuple[list[Any], list[Any], tuple[Any, Any]]:
    """Parts of a causal call: queries that see no key of a part among them."""
    q, k, v = rng.standard_normal((3, 2, 67, 4, 16)).astype(dtype)
    parts = []
    for start, stop in itertools.pairwise(CUTS):  # the mask of each counts from its own last key
        parts.append(attention(q, k[:, start:stop], v[:, start:stop], window=(None, 67 - stop), return_lse=True))
    outs, lses = map(list, zip(*parts, strict=True))
    return outs, lses, attention(q, k, v, causal=True, return_lse=True)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 2e-3)])
def test_parts_of_a_causal_call(dtype: Any, rtol: float, rng: np.random.Generator) -> None:
    outs, lses, (out, lse) = pieces(rng, dtype)
    assert any(np.isneginf(x).any() for x in lses)
    for given in ((outs, lses), (np.stack(outs), np.stack(lses)), (tuple(outs), np.stack(lses))):
        found = combine(*given)
        assert (found[0].dtype, found[1].dtype) == (out.dtype, lse.dtype)
        np.testing.assert_allclose(found[0].astype(np.float64), out.astype(np.float64), rtol=rtol, atol=rtol)
        np.testing.assert_allclose(found[1], lse, rtol=max(rtol, 1e-6) if dtype != np.float64 else rtol)


def test_what_sees_nothing_counts_for_nothing(rng: np.random.Generator) -> None:
    outs, lses = rng.standard_normal((3, 1, 5, 2, 8)), np.zeros((3, 1, 2, 5))
    outs[1], lses[1] = np.nan, -np.inf
    lses[:, 0, 1, 2], outs[:, 0, 2, 1] = -np.inf, np.inf
    out, lse = combine(outs, lses)
    assert np.isneginf(lse[0, 1, 2])
    assert not out[0, 2, 1].any()
    np.testing.assert_allclose(out[0, 0], (outs[0, 0, 0] + outs[2, 0, 0]) / 2)
    np.testing.assert_allclose(lse[0, 0], np.log(2))


def test_huge_and_tiny(rng: np.random.Generator) -> None:
    """No exponential of an lse overflows; a part alone is itself."""
    outs = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)
    for a, b in ((1e30, 1e30), (-1e30, -1e30), (500.0, -500.0), (88.0, 89.0)):
        out, lse = combine(outs, np.array([a, b], np.float32).reshape(2, 1, 1, 1))
        share = 1 / (1 + np.exp(np.clip(b - a, -700, 700)))
        np.testing.assert_allclose(out, share * outs[0] + (1 - share) * outs[1], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(lse, np.logaddexp(a, b), rtol=1e-6)
    alone = combine(outs[:1], np.full((1, 1, 1, 1), 3, np.float32))
    np.testing.assert_array_equal(alone[0], outs[0])
    np.testing.assert_array_equal(alone[1], 3)


def test_nan_stays(rng: np.random.Generator) -> None:
    outs, lses = rng.standard_normal((2, 1, 1, 1, 8)), np.array([0.0, np.nan]).reshape(2, 1, 1, 1)
    assert np.isnan(combine(outs, lses)[0]).all()


def test_packed_and_cached(rng: np.random.Generator) -> None:
    """A prefix that all share is attended to once, by all queries packed."""
    q = rng.standard_normal((3, 4, 16))
    prefix = rng.standard_normal((2, 20, 2, 16))
    caches = rng.standard_normal((2, 3, 30, 2, 16))
    lengths = np.array([0, 11, 30], np.int32)
    a = attention_varlen(q, *prefix, np.array([0, 3], np.int32), np.array([0, 20], np.int32), return_lse=True)
    b = attention_with_cache(q, *caches, cache_seqlens=lengths, cu_seqlens_q=np.arange(4, dtype=np.int32),
                             return_lse=True)  # fmt: skip
    out, lse = combine((a[0], b[0]), (a[1], b[1]))
    for i, n in enumerate(lengths):
        k, v = (np.concatenate((prefix[x], caches[x, i, :n]))[None] for x in range(2))
        exact = attention(q[None, i : i + 1], k, v, return_lse=True)
        np.testing.assert_allclose(out[i], exact[0][0, 0], rtol=1e-12)
        np.testing.assert_allclose(lse[:, i], exact[1][0, :, 0], rtol=1e-12)


@pytest.mark.needs("torch")
def test_torch(rng: np.random.Generator) -> None:
    import torch

    outs, lses, (out, lse) = pieces(rng)
    x = [torch.from_numpy(np.stack(y)) for y in (outs, lses)]
    found = combine(*x)
    np.testing.assert_allclose(found[0].numpy(), out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found[1].numpy(), lse, rtol=1e-12)
    half = combine([torch.from_numpy(y).bfloat16() for y in outs], [torch.from_numpy(y).float() for y in lses])
    assert (half[0].dtype, half[1].dtype) == (torch.bfloat16, torch.float32)
    few = [torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 1, 2, 2, 3), (3, 1, 2, 2))]
    few[1][1] = -torch.inf
    few[1][:, 0, 1, 1] = -torch.inf
    few = [y.requires_grad_() for y in few]
    gradients = torch.autograd.grad([y.sum() for y in _finite(*combine(*few))], few)
    assert all(torch.isfinite(y).all() for y in gradients)
    finite = [torch.randn(3, 1, 2, 2, 3, dtype=torch.float64), torch.randn(3, 1, 2, 2, dtype=torch.float64)]
    finite = [y.requires_grad_() for y in finite]
    assert torch.autograd.gradcheck(combine, finite)
    assert torch.autograd.gradgradcheck(combine, finite)


def _finite(out: Any, lse: Any) -> tuple[Any, Any]:
    return out, lse[lse > -np.inf]


@pytest.mark.needs("torch")
def test_gradients_of_parts_are_those_of_the_whole(rng: np.random.Generator) -> None:
    """Through out and lse of each part, of which one row sees nothing."""
    import torch

    q, k, v = (torch.from_numpy(x).requires_grad_() for x in rng.standard_normal((3, 1, 9, 2, 8)))
    parts = [attention(q, k[:, a:b], v[:, a:b], window=(None, 9 - b), return_lse=True) for a, b in ((0, 4), (4, 9))]
    out, lse = combine(*zip(*parts, strict=True))
    weight = torch.from_numpy(rng.standard_normal(out.shape))
    parted = torch.autograd.grad((out * weight).sum() + lse.sum(), (q, k, v))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    whole = torch.autograd.grad((out * weight).sum() + lse.sum(), (q, k, v))
    for a, b in zip(parted, whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.needs("torch")
def test_inside_torch_compile(rng: np.random.Generator) -> None:
    import torch

    outs, lses = torch.from_numpy(rng.standard_normal((3, 1, 2, 2, 3))), torch.zeros(3, 1, 2, 2, dtype=torch.float64)
    found = torch.compile(combine, backend="eager", fullgraph=True)(outs, lses)
    torch.testing.assert_close(found, combine(outs, lses))


@pytest.mark.needs("jax")
def test_jax(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp
    from jax.test_util import check_grads

    outs, lses, (out, lse) = pieces(rng, np.float32)
    x = jnp.stack([jnp.asarray(y) for y in outs]), jnp.stack([jnp.asarray(y) for y in lses])
    found = jax.jit(combine)(*x)
    np.testing.assert_allclose(np.asarray(found[0]), out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(found[1]), lse, rtol=1e-5)
    assert combine(list(x[0].astype(jnp.bfloat16)), list(x[1]))[0].dtype == jnp.bfloat16
    gradients = jax.grad(lambda o, w: combine(o, w)[0].sum(), (0, 1))(*x)
    assert all(bool(jnp.isfinite(y).all()) for y in gradients)
    few = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 1, 2, 2, 3), (2, 1, 2, 2))]
    check_grads(combine, few, 1, rtol=0.05, atol=0.05)


@pytest.mark.needs("jax")
def test_jax_that_promotes_nothing(rng: np.random.Generator) -> None:
    """Programs that let JAX convert no dtype and add no dimension by itself."""
    import jax
    import jax.numpy as jnp

    outs, lses, (out, lse) = pieces(rng, np.float32)
    parts = [jnp.asarray(x) for x in outs], [jnp.asarray(x) for x in lses]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = combine(*parts)
        mixed = combine([parts[0][0].astype(jnp.bfloat16), *parts[0][1:]], parts[1])[0]
        gradient = jax.grad(lambda x: combine(x, parts[1])[0].sum())(parts[0])
    np.testing.assert_allclose(np.asarray(found[0]), out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(found[1]), lse, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(mixed), out, rtol=1e-2, atol=1e-2)
    assert [x.shape for x in gradient] == [x.shape for x in outs]


def test_bf16_of_numpy(rng: np.random.Generator) -> None:
    outs, lses, (out, _) = pieces(rng, np.float32)
    found, _ = combine([x.astype(ml_dtypes.bfloat16) for x in outs], lses)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), out, rtol=0.02, atol=0.02)


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("kinds", [("fp16", "bf16"), ("bf16", "fp32"), ("fp32", "fp16")])
def test_parts_of_different_dtypes(kinds: tuple[str, ...], library: str, rng: np.random.Generator) -> None:
    """Sums that are kept in fp32, say, and another part in 16 bits: the result is in fp32."""
    import jax.numpy as jnp
    import torch

    def given(x: np.ndarray) -> Any:
        if library == "torch":
            is_bf16 = x.dtype == ml_dtypes.bfloat16
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if is_bf16 else torch.from_numpy(x)
        return jnp.asarray(x) if library == "jax" else x

    outs, lses, _ = pieces(rng, np.float32)
    rounded = [x.astype(NUMPY_DTYPE[kind]) for x, kind in zip(outs[:2], kinds, strict=True)]
    expected = combine([x.astype(np.float32) for x in rounded], lses[:2])
    found = combine([given(x) for x in rounded], [given(x) for x in lses[:2]])
    assert str(found[0].dtype).endswith("float32")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-5)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_part_of_fp64_beside_one_of_fp32(library: str, rng: np.random.Generator) -> None:
    """Each with the lse that its call returned: the result is in fp64."""
    import torch

    outs, lses, _ = pieces(rng)
    parts = [(outs[0], lses[0]), (outs[3].astype(np.float32), lses[3].astype(np.float32))]
    expected = combine(*zip(*[[x.astype(np.float64) for x in part] for part in parts], strict=True))
    given = parts if library == "numpy" else [[torch.from_numpy(x) for x in part] for part in parts]
    for a, b in zip(combine(*zip(*given, strict=True)), expected, strict=True):
        assert str(a.dtype).endswith("float64")
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12)


def test_an_lse_of_inf_says_nothing(rng: np.random.Generator) -> None:
    """A query that has seen a score of inf gives NaN, without a warning of NumPy's."""
    outs, lses, _ = pieces(rng, np.float32)
    lses[0][0, 1, 2] = np.inf
    out, lse = combine(outs, lses)
    assert np.isnan(out[0, 2, 1]).all()
    assert np.isnan(lse[0, 1, 2])
    assert np.isfinite(out[0, :2]).all()


ZEROS = np.zeros((2, 1, 3, 4, 8)), np.zeros((2, 1, 4, 3))
WRONG: tuple[tuple[Any, Any, str], ...] = (
    ([], ZEROS[1], "outs: expected at least one array, got none"),
    (None, ZEROS[1], "outs: expected an array of CuPy, NumPy, PyTorch or JAX"),
    (ZEROS[0][0, 0], ZEROS[1], "outs: expected one or more parts (batch, seqlen_q, heads_q, head_dim) or"),
    (ZEROS[0][:0], ZEROS[1][:0], "outs: expected one or more parts"),
    (ZEROS[0], ZEROS[1].swapaxes(2, 3), "lses: expected shape (2, 1, 4, 3), that of outs with heads before rows"),
    (ZEROS[0], ZEROS[1][:1], "lses: expected shape (2, 1, 4, 3)"),
    (
        [ZEROS[0][0], ZEROS[0][0, :, :2]],
        ZEROS[1],
        "outs, lses: expected parts of one shape each, got [(1, 2, 4, 8), (1",
    ),
    (ZEROS[0].astype(int), ZEROS[1], "outs: expected a floating-point dtype"),
    ([ZEROS[0][0], ZEROS[0][1].astype(int)], ZEROS[1], "outs[1]: expected a floating-point dtype (fp16, bf16, fp32, "),
    (
        [ZEROS[0][0], ZEROS[0][1].astype(np.float32)],
        ZEROS[1].astype(np.float32),
        "lses: expected fp64, beside outs of fp32, fp64, got fp32",
    ),
    (
        [ZEROS[0][0], ZEROS[0][1].astype(np.float32)],
        list(ZEROS[1].astype(np.float32)),
        "lses[0]: expected fp64, beside outs of fp32, fp64, got fp32",
    ),
    (ZEROS[0], ZEROS[1].astype(int), "lses: expected fp64, beside outs of fp64, got int64"),
    (ZEROS[0], ZEROS[1].astype(np.float32), "lses: expected fp64, beside outs of fp64, got fp32"),
    (ZEROS[0].astype(np.float32), ZEROS[1], "lses: expected fp32, beside outs of fp32, got fp64"),
    (ZEROS[0].astype(np.float16), ZEROS[1].astype(np.float16), "lses: expected fp32, beside outs of fp16, got fp16"),
    (list(ZEROS[0]), [ZEROS[1][0], ZEROS[1][1].astype(int)], "lses[1]: expected fp64, beside outs of fp64, got int64"),
)


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_lse_is_of_fp32_in_every_library(library: str) -> None:
    import jax.numpy as jnp
    import torch

    of = torch.from_numpy if library == "torch" else jnp.asarray
    outs, lses = (x.astype(np.float32) for x in ZEROS)
    for kind, name in ((np.int32, "int32"), (np.float16, "fp16")):
        with pytest.raises(ArgumentError, match=f"lses: expected fp32, beside outs of fp32, got {name}"):
            combine(of(outs), of(lses.astype(kind)))


@pytest.mark.parametrize(("outs", "lses", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(outs: Any, lses: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        combine(outs, lses)


@pytest.mark.needs("torch")
def test_parts_on_several_devices_are_named() -> None:
    import torch

    outs, lses = torch.zeros(2, 1, 3, 2, 8), torch.zeros(2, 1, 2, 3)
    with pytest.raises(ArgumentError, match=r"lses.*: expected the device of outs.*, cpu, got meta"):
        combine(list(outs), [lses[0], lses[1].to("meta")])
