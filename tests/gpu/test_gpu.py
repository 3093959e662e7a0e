"""The kernels on a GPU, through the public API, against the float64 reference."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import cupyflash
from cupyflash.check import cases
from cupyflash.check.accuracy import Oracle
from tests.fuzz import run as fuzz
from tests.fuzz.spec import Spec
from tests.gpu_arrays import captured, on_gpu, to_numpy

pytestmark = pytest.mark.gpu

DTYPES = ("fp16", "bf16", "fp32")


def poison(library: str, megabytes: int = 64) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    if library == "cupy":
        import cupy

        cupy.full(megabytes << 18, np.nan, np.float32)
    else:
        import torch

        torch.full((megabytes << 18,), float("nan"), device="cuda")


@functools.lru_cache(maxsize=4)
def judged(name: str, dtype: str) -> tuple[cases.Case, cases.Inputs, Oracle]:
    """A case, its inputs, and its exact and plain results."""
    case = cases.case(name)
    inputs = case.inputs(dtype)
    return case, inputs, Oracle(case.problem(dtype), *inputs)


def check(case: cases.Case, oracle: Oracle, inputs: cases.Inputs, library: str) -> None:
    """Run forward and backward of a case and judge them."""
    q, k, v, dout = (on_gpu(case.in_layout(x), library) for x in inputs[:4])
    dlse = None if inputs.dlse is None else on_gpu(inputs.dlse, library)
    options, forward, backward = case.options(), cupyflash.attention, cupyflash.attention_backward
    if case.packed:
        forward, backward = cupyflash.attention_varlen, cupyflash.attention_varlen_backward
    options |= inputs.given(lambda x: on_gpu(x, library))
    poison(library)
    out, lse = forward(q, k, v, **options, return_lse=True)
    verdicts = oracle.judge_forward(case.in_layout(to_numpy(out)), to_numpy(lse))
    if case.backward:
        poison(library)
        grads = backward(dout, q, k, v, out, lse, dlse=dlse, gradients_of=inputs.learned, **options)
        learned = [to_numpy(x) for x in inputs.learned_in(grads).values()]
        verdicts += oracle.judge_backward(*(case.in_layout(to_numpy(g)) for g in grads), *learned)
    failed = [str(verdict) for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [c.name for c in cases.CASES])
def test_case(name: str, dtype: str) -> None:
    case, inputs, oracle = judged(name, dtype)
    check(case, oracle, inputs, "cupy")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", [c.name for c in cases.select("quick")])
def test_case_torch(name: str) -> None:
    case, inputs, oracle = judged(name, "bf16")
    check(case, oracle, inputs, "torch")


@pytest.fixture
def qkv(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    q, k, v = rng.standard_normal((3, 2, 333, 4, 64)).astype(np.float16)
    return on_gpu(q, "cupy"), on_gpu(k, "cupy"), on_gpu(v, "cupy")


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    """By the bound of first order: where rows see two or three keys, the 2x rule fails by chance."""
    group, heads_k = data.draw(st.sampled_from([(1, 3), (2, 2), (5, 1)]), "group, heads_k")
    bound = st.one_of(st.none(), st.integers(-40, 120).filter(lambda b: b != -1))  # -1 warns
    left, right = data.draw(st.tuples(bound, bound).filter(lambda w: None in w or sum(w) >= 0), "window")
    spec = Spec(
        dtype=data.draw(st.sampled_from(DTYPES), "dtype"),
        d=data.draw(st.sampled_from([8, 64, 96, 128, 160, 256]), "head_dim"),
        batch=data.draw(st.integers(1, 2), "batch"),
        sq=data.draw(st.integers(1, 300), "seqlen_q"),
        sk=data.draw(st.integers(1, 300), "seqlen_k"),
        heads=heads_k,
        group=group,
        causal=data.draw(st.booleans(), "causal"),
        left=left,
        right=right,
        dlse=data.draw(st.booleans(), "dlse"),
        deterministic=data.draw(st.booleans(), "deterministic"),
        seed=data.draw(st.integers(0, 10**6), "seed"),
        family=os.environ.get("CUPYFLASH_FAMILY", ""),
    )
    wrong = fuzz.check(spec, "gpu")
    assert not wrong, f"{spec}: {wrong}"


def test_forward_and_deterministic_backward_repeat_bitwise(qkv: tuple[Any, Any, Any]) -> None:
    q, k, v = qkv
    first = None
    for _ in range(5):
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        grads = cupyflash.attention_backward(v, q, k, v, out, lse, causal=True, deterministic=True)
        bits = [to_numpy(x).tobytes() for x in (out, lse, *grads)]
        first = first or bits
        assert bits == first


def test_results_are_queued_on_the_current_stream(qkv: tuple[Any, Any, Any]) -> None:
    """A chain behind slow work: whoever runs on another stream reads NaN, here or in the step before."""
    import cupy

    def chain(q: Any, k: Any, v: Any) -> Any:
        for _ in range(20):
            v = cupyflash.attention(q, k, v, causal=True)
        return v

    expected = to_numpy(chain(*qkv))
    assert np.isfinite(expected).all()
    slow, inputs = cupy.ones(1 << 28, np.float32), [cupy.full_like(x, np.nan) for x in qkv]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        chain(*inputs)  # allocates what the next chain takes, and leaves NaN there
        stream.synchronize()
        for _ in range(100):  # 2 GiB of traffic each
            slow *= 1
        for x, value in zip(inputs, qkv, strict=True):
            x[...] = value
        out = chain(*inputs)
    assert not stream.done
    stream.synchronize()
    np.testing.assert_array_equal(to_numpy(out), expected)


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")  # the leaves are used on two streams
def test_a_cuda_graph_captures_forward_and_backward() -> None:
    import torch

    q, k, v = (torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))

    def step() -> tuple[Any, ...]:
        out = cupyflash.attention(q, k, v, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    graph, replayed = captured(step)
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for got, expected in zip(replayed, step(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_cold_kernel_in_a_capture_is_refused_by_name() -> None:
    import torch

    q = torch.randn(1, 64, 2, 152, device="cuda", dtype=torch.bfloat16)  # a head_dim that nothing else here uses
    with (
        pytest.raises(cupyflash.UnsupportedError, match=r"fwd_sm\d+_bf16_d152.*warmup"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        cupyflash.attention(q, q, q)
    assert cupyflash.attention(q, q, q).isfinite().all()


def test_threads_share_kernels_and_keep_their_arguments_apart(qkv: tuple[Any, Any, Any]) -> None:
    import cupy

    q, k, v = qkv
    scales = [0.01 * (i + 1) for i in range(8)]
    expected = [to_numpy(cupyflash.attention(q, k, v, scale=s)) for s in scales]
    wrong: list[int] = []

    def work(i: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                out = cupyflash.attention(q, k, v, scale=scales[i])
            stream.synchronize()
        if to_numpy(out).tobytes() != expected[i].tobytes():
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.needs("torch")
def test_more_than_2_31_elements() -> None:
    import torch

    batch, seqlen, heads, d = 2, 65536 + 77, 130, 128  # 2.2e9 elements in q; one key head, so that it is quick
    q = torch.randn(batch, seqlen, heads, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, 100, 1, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    dq = cupyflash.attention_backward(out, q, k, v, out, lse).dq
    rows = slice(seqlen - 5, seqlen)
    judge_rows(1, rows, out, lse, dq, q, k, v)
    judge_rows(0, slice(0, 5), out, lse, dq, q, k, v)


def judge_rows(batch: int, rows: slice, out: Any, lse: Any, dq: Any, q: Any, k: Any, v: Any) -> None:
    """Some queries of one batch, without a mask; dout is out. Their dk and dv are not those of all queries."""
    queries, dout, found, lse, dq = (
        to_numpy(x.contiguous())
        for x in (q[batch, None, rows], out[batch, None, rows], out[batch, None, rows], lse[batch, None, :, rows],
                  dq[batch, None, rows])
    )  # fmt: skip
    keys, values = (to_numpy(x[batch, None]) for x in (k, v))
    case = cases.Case("rows", "full", rows.stop - rows.start, k.shape[1], q.shape[3], 1, q.shape[2], k.shape[2])
    oracle = Oracle(case.problem("bf16"), queries, keys, values, dout)
    verdicts = oracle.judge_forward(found, lse) + oracle.judge_backward(dq, *oracle.plain_backward[1:])
    failed = [str(verdict) for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.needs("torch")
def test_memory_grows_linearly() -> None:
    import torch

    heads, d = 8, 64
    extra = []
    lengths = [1 << i for i in range(10, 19)]
    for seqlen in lengths:
        q, k, v, dout = (torch.randn(1, seqlen, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = cupyflash.attention(q, k, v, window=(128, 0), return_lse=True)
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, window=(128, 0))
        torch.cuda.synchronize()
        extra.append(torch.cuda.max_memory_allocated() - before)
        del out, lse, grads
    budget = [n * heads * (4 * d * 2 + 4 + 4 + d * 4) for n in lengths]  # out dq dk dv, lse, delta, fp32 dQ
    assert all(e <= 1.1 * b for e, b in zip(extra, budget, strict=True)), list(zip(extra, budget, strict=True))
    fit = np.polyfit(lengths, extra, 1)
    residual = np.var(np.polyval(fit, lengths) - extra) / np.var(extra)
    assert 1 - residual > 0.999


@pytest.mark.needs("torch")
def test_autograd_agrees_with_the_function(rng: np.random.Generator) -> None:
    import torch

    q, k, v, dout = (torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.float16) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = cupyflash.attention(*leaves, causal=True, deterministic=True, return_lse=True)
    grads = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    plain = cupyflash.attention_backward(
        dout, q, k, v, out, lse, dlse=torch.ones_like(lse), causal=True, deterministic=True
    )
    for a, b in zip(grads, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.autograd.grad(cupyflash.attention(*leaves).sum(), leaves)  # an expanded gradient


@pytest.mark.needs("jax")
def test_jax_arrays_on_the_gpu() -> None:
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    case, inputs, oracle = judged("gqa", "bf16")
    q, k, v, dout = (jnp.asarray(x) for x in inputs[:4])
    out, lse = cupyflash.attention(q, k, v, **case.options(), return_lse=True)
    assert isinstance(out, jax.Array)
    assert (out.dtype, out.devices()) == (jnp.bfloat16, q.devices())
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **case.options())
    assert all(isinstance(g, jax.Array) for g in grads)
    verdicts = oracle.judge_forward(np.asarray(out), np.asarray(lse)) + oracle.judge_backward(*map(np.asarray, grads))
    assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))


@pytest.mark.usefixtures("numpy_on_gpu")
def test_numpy_arrays_travel_to_the_gpu_and_back() -> None:
    case, inputs, oracle = judged("causal-d64", "fp16")
    q, k, v, dout = inputs[:4]
    out, lse = cupyflash.attention(q, k, v, **case.options(), return_lse=True)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **case.options())
    assert {type(x) for x in (out, lse, *grads)} == {np.ndarray}
    verdicts = oracle.judge_forward(out, lse) + oracle.judge_backward(*grads)
    assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))


def test_fp64_on_the_gpu_is_refused(qkv: tuple[Any, Any, Any]) -> None:
    with pytest.raises(cupyflash.UnsupportedError, match="q: fp64 has no GPU kernel"):
        cupyflash.attention(*(x.astype(np.float64) for x in qkv))


@pytest.mark.needs("torch")
def test_several_gpus() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    torch.cuda.set_device(0)
    q, k, v = (torch.randn(1, 200, 4, 64, device="cuda:1", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    out = cupyflash.attention(q, k, v, deterministic=True)  # the device is the arrays' own, not the current one
    out.backward(torch.ones_like(out))
    assert out.device == q.grad.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    x, y, z = (t.detach().to("cuda:0").requires_grad_() for t in (q, k, v))
    same = cupyflash.attention(x, y, z, deterministic=True)
    same.backward(torch.ones_like(same))
    torch.testing.assert_close(out.cpu(), same.cpu(), rtol=0, atol=0)
    for a, b in ((q, x), (k, y), (v, z)):
        torch.testing.assert_close(a.grad.cpu(), b.grad.cpu(), rtol=0, atol=0)
    with pytest.raises(cupyflash.ArgumentError, match="k: expected the device of q, GPU 1, got GPU 0"):
        cupyflash.attention(q, y, v)
