"""Packed sequences on a GPU, through the public API; the cases of the table are in test_gpu.py.

CUPYFLASH_FAMILY is set for each family in turn; sm90 is left out where the GPU has none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError, attention_varlen, attention_varlen_backward
from cupyflash.check import cases
from cupyflash.check.accuracy import Oracle
from cupyflash.compile import jit
from cupyflash.launch import prepared
from tests.gpu_arrays import nothing_waits, on_gpu, to_numpy
from tests.packed_lengths import TOTAL_K, TOTAL_Q, WRONG

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]
LENGTHS = (131, 0, 1, 257, 64)


def cumulative(lengths: Sequence[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], np.int32)


def tensors(total: int, d: int = 64, heads: int = 4) -> list[Any]:
    """q, k, v and dout in bf16."""
    import torch

    return [torch.randn(total, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def places(lengths: Sequence[int]) -> Any:
    import torch

    return torch.from_numpy(cumulative(lengths)).cuda()


def both(q: Any, k: Any, v: Any, dout: Any, *places: Any, **options: Any) -> list[Any]:
    """out, lse, dq, dk and dv."""
    out, lse = attention_varlen(q, k, v, *places, **options, return_lse=True)
    return [out, lse, *attention_varlen_backward(dout, q, k, v, out, lse, *places, **options)]


def same(found: Sequence[Any], want: Sequence[Any]) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, want, strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b), err_msg=name)


def judge(oracle: Oracle, results: Sequence[Any]) -> None:
    out, lse, *grads = (x if isinstance(x, np.ndarray) else to_numpy(x) for x in results)
    verdicts = oracle.judge_forward(out, lse) + oracle.judge_backward(*grads)
    assert all(v.passed for v in verdicts), "\n".join(str(v) for v in verdicts if not v.passed)


@pytest.fixture(params=["packed-unequal-d128", "packed-used", "packed-forty-short"])
def judged(request: pytest.FixtureRequest) -> tuple[cases.Case, cases.Inputs, Oracle]:
    case = cases.case(request.param)
    inputs = case.inputs("bf16")
    return case, inputs, Oracle(case.problem("bf16"), *inputs)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", [c.name for c in cases.PACKED_CASES])
def test_case(name: str, dtype: str) -> None:
    case = cases.case(name)
    inputs = case.inputs(dtype)
    assert inputs.features.sequences is not None
    given = inputs.given(lambda x: on_gpu(x, "torch")) | case.options()
    q, k, v, dout = (on_gpu(case.in_layout(x), "torch") for x in inputs[:4])
    dlse = None if inputs.dlse is None else on_gpu(inputs.dlse, "torch")
    if os.environ["CUPYFLASH_FAMILY"] == "sm90" and (case.memory == "misaligned" or "empty" in case.tags):
        with pytest.raises(UnsupportedError, match="CUPYFLASH_FAMILY=sm90"):
            attention_varlen(q, k, v, **given)
        return
    out, lse = attention_varlen(q, k, v, **given, return_lse=True)
    grads = attention_varlen_backward(dout, q, k, v, out, lse, dlse=dlse, gradients_of=inputs.learned, **given)
    found = [case.in_layout(to_numpy(x)) for x in (out, *grads)]
    learned = list(inputs.learned_in(grads).values())
    judge(Oracle(case.problem(dtype), *inputs), [found[0], lse, *found[1:], *learned])


@pytest.mark.needs("torch")
def test_autograd(judged: tuple[cases.Case, cases.Inputs, Oracle]) -> None:
    import torch

    case, inputs, oracle = judged
    assert inputs.features.sequences is not None
    given = {name: on_gpu(x, "torch") for name, x in inputs.features.sequences.named().items()} | case.options()
    q, k, v, dout = (on_gpu(x, "torch") for x in inputs[:4])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention_varlen(*leaves, **given, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout)
    judge(oracle, [out.detach(), lse.detach(), *grads])


@pytest.mark.usefixtures("numpy_on_gpu")
@pytest.mark.parametrize("library", ["numpy", "cupy", "jax"])
def test_other_libraries(library: str, judged: tuple[cases.Case, cases.Inputs, Oracle]) -> None:
    """NumPy arrays are copied to the GPU and back."""
    case, inputs, oracle = judged
    assert inputs.features.sequences is not None
    module = pytest.importorskip(library)
    if library == "jax" and module.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    to = {"numpy": lambda x: x, "cupy": lambda x: on_gpu(x, "cupy"), "jax": lambda x: module.numpy.asarray(x)}[library]
    given = {name: to(x) for name, x in inputs.features.sequences.named().items()} | case.options()
    found = both(*(to(x) for x in inputs[:4]), **given)
    kind = {"numpy": "ndarray", "cupy": "ndarray", "jax": "ArrayImpl"}[library]
    assert {type(x).__name__ for x in found} == {kind}
    judge(oracle, [np.asarray(x) if library == "jax" else x for x in found])


@pytest.mark.needs("torch")
@pytest.mark.parametrize("d", [64, 128, 256])
def test_equal_lengths_are_a_batch(d: int) -> None:
    """The same numbers as a dense call, which tiles each sequence alike, up to the order of sums in dq."""
    import torch

    batch, n = 5, 203
    arrays = tensors(batch * n, d)
    found = both(*arrays, places([n] * batch), causal=True, deterministic=True)
    dense = [x.view(batch, n, *x.shape[1:]) for x in arrays]
    q, k, v, dout = dense
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
    torch.testing.assert_close(found[1], lse.transpose(0, 1).reshape(4, -1), rtol=1e-5, atol=1e-5)
    for a, b in zip((found[0], *found[2:]), (out, *grads), strict=True):
        torch.testing.assert_close(a, b.reshape(a.shape), rtol=2e-2, atol=2e-2)


@pytest.mark.needs("torch")
def test_a_deterministic_backward_repeats_bitwise() -> None:
    arrays, cu = tensors(sum(LENGTHS)), places(LENGTHS)
    first = both(*arrays, cu, causal=True, deterministic=True)
    for _ in range(4):
        same(both(*arrays, cu, causal=True, deterministic=True), first)


@pytest.mark.needs("torch")
def test_two_thousand_short_sequences(rng: np.random.Generator) -> None:
    lengths = tuple(int(n) for n in rng.integers(0, 40, 2000))
    case = cases.Case("short", "full", sum(lengths), sum(lengths), 64, 2000, lengths_q=lengths, causal=True)
    inputs = case.inputs("bf16")
    q, k, v, dout = (on_gpu(x, "torch") for x in inputs[:4])
    judge(Oracle(case.problem("bf16"), *inputs), both(q, k, v, dout, places(lengths), causal=True))


@pytest.mark.needs("torch")
def test_new_lengths_load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the same total in other parts, nor another total and batch."""
    both(*tensors(sum(LENGTHS)), places(LENGTHS), causal=True)
    monkeypatch.setattr(jit, "compile_kernel", lambda *_, **__: pytest.fail("a kernel was compiled"))
    for lengths in (LENGTHS[::-1], (7, 800), (1,) * 70, (453,)):
        arrays, cu = tensors(sum(lengths)), places(lengths)
        found = both(*arrays, cu, causal=True)
        assert all(bool(x.isfinite().all()) for x in found)


@pytest.mark.needs("torch")
def test_a_warm_call_waits_for_nothing() -> None:
    import torch

    arrays, cu = tensors(sum(LENGTHS)), places(LENGTHS)
    used = torch.tensor([100, 0, 1, 200, 3], device="cuda", dtype=torch.int32)
    want = both(*arrays, cu, cu, seqused_k=used, causal=True, deterministic=True)
    with nothing_waits():
        found = both(*arrays, cu, cu, seqused_k=used, causal=True, deterministic=True)
    same(found, want)


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUPYFLASH_DEBUG=1, with kernels of its own that do not stay."""
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    prepared.calls.clear()
    yield
    prepared.calls.clear()


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("decreasing", r"cu_seqlens_q\[2\] = 20"),
        ("first-not-zero", r"cu_seqlens_q\[0\] = 66"),
        ("beyond", r"cu_seqlens_q\[3\] = 900"),
        ("keys-run-out", r"cu_seqlens_k\[3\] = 300"),
        ("used-beyond", r"seqused_k\[0\] = 91"),
    ],
)
@pytest.mark.usefixtures("debug")
def test_debug_names_the_wrong_entry(wrong: str, message: str) -> None:
    given = arguments(wrong)
    with pytest.raises(ArgumentError, match=message):
        attention_varlen(*spread(TOTAL_Q, TOTAL_K), **given)


def arguments(wrong: str) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    return {
        name: on_gpu(np.array(x, np.int32), "torch")
        for name, x in zip(names, WRONG[wrong], strict=True)
        if x is not None
    }


def spread(total_q: int, total_k: int, d: int = 64) -> list[Any]:
    import torch

    return [torch.randn(n, 2, d, device="cuda", dtype=torch.bfloat16) for n in (total_q, total_k, total_k)]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("wrong", WRONG)
def test_lengths_that_contradict(wrong: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, inputs stay as they are, and so does what lies around all arrays, results included."""
    import torch

    from cupyflash.arrays.adapters import TORCH

    made: list[tuple[Any, Any]] = []

    def walled(shape: Sequence[int], dtype: Any) -> Any:
        """An array in the middle of a buffer that holds a pattern."""
        bytes_of = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
        wall = 1 << 16
        buffer = torch.full((bytes_of + 2 * wall,), 0x5A, device="cuda", dtype=torch.uint8)
        inside = buffer[wall : wall + bytes_of]
        made.append((buffer, inside))
        return inside.view(dtype).view(tuple(shape))

    def empty_like(self: Any, x: Any) -> Any:
        return walled(x.shape, x.dtype)

    def make(self: Any, likes: Sequence[str], made: Sequence[Any], arrays: Any) -> list[Any]:
        found = [walled(arrays[name].shape, arrays[name].dtype) for name in likes]
        return found + [walled(shape, self._dtypes[dtype]) for shape, dtype in made]

    def make_like(self: Any, forms: Any, pointers: list[int]) -> list[Any]:
        _, arguments, _ = forms
        found = [walled(shape, dtype) for shape, _, dtype in arguments]
        pointers += [x.data_ptr() for x in found]
        return found

    monkeypatch.setattr(type(TORCH), "empty_like", empty_like)
    monkeypatch.setattr(type(TORCH), "make", make)
    monkeypatch.setattr(type(TORCH), "make_like", make_like)
    monkeypatch.setattr(type(TORCH), "making", lambda self, x: None)
    inputs = []
    for x in (*spread(TOTAL_Q, TOTAL_K, d), spread(TOTAL_Q, 1, d)[0]):
        inputs.append(walled(x.shape, x.dtype))
        inputs[-1].copy_(x)
    before, given = [x.clone() for x in inputs], arguments(wrong)
    q, k, v, dout = inputs
    out, lse = attention_varlen(q, k, v, **given, causal=True, return_lse=True)
    attention_varlen_backward(dout, q, k, v, out, lse, **given, causal=True)
    torch.cuda.synchronize()
    assert len(made) > 4
    for buffer, inside in made:
        edge = (buffer.numel() - inside.numel()) // 2
        assert bool((buffer[:edge] == 0x5A).all() & (buffer[-edge:] == 0x5A).all())
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
