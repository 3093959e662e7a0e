"""The public functions on the CPU: libraries, layouts, gradients, and every error a caller can meet."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, DeviceError, UnsupportedError
from cupyflash.arrays.adapters import TORCH
from cupyflash.check import cases
from cupyflash.check.accuracy import Oracle
from cupyflash.gpu.device import Device
from cupyflash.plan.families import plan_call
from cupyflash.problem import Problem
from tests.producer import Producer

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def qkv(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal((3, 2, 33, 4, 16)).astype(np.float32))


@pytest.mark.parametrize("name", ["gqa", "bhsd", "fused-qkv", "dlse", "empty-batch", "empty-seqlen-k"])
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_numpy(name: str, dtype: str) -> None:
    case = cases.case(name)
    inputs = case.inputs(dtype)
    oracle = Oracle(case.problem(dtype), *inputs)
    q, k, v, dout = (case.in_layout(x) for x in inputs[:4])
    copies = [x.copy() for x in (q, k, v, dout)]
    out, lse = cupyflash.attention(q, k, v, **case.options(), return_lse=True)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=inputs.dlse, **case.options())
    assert isinstance(grads, cupyflash.Gradients)
    verdicts = oracle.judge_forward(case.in_layout(out), lse) + oracle.judge_backward(*map(case.in_layout, grads))
    assert all(v.passed for v in verdicts), "\n".join(map(str, verdicts))
    assert out.dtype == q.dtype
    assert out.flags.c_contiguous
    for x, copy in zip((q, k, v, dout), copies, strict=True):
        np.testing.assert_array_equal(x, copy)  # inputs are never written


@pytest.mark.needs("torch")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch(dtype: str, softcap: float | None) -> None:
    import torch

    case = cases.Case("torch", "full", 33, 33, 16, 2, 4, 4, causal=True, softcap=softcap)
    kind = getattr(torch, dtype)
    name = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}[dtype]
    inputs = case.inputs(name)
    q, k, v, dout = (TORCH.from_numpy(x.swapaxes(1, 2)).requires_grad_() for x in inputs[:4])
    out, lse = cupyflash.attention(q, k, v, causal=True, softcap=softcap, layout="bhsd", return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), dout.detach(), retain_graph=True)
    assert {x.dtype for x in (out, *grads)} == {kind}
    out_np, lse_np, *grads_np = (TORCH.to_numpy(x.detach()) for x in (out, lse, *grads))
    oracle = Oracle(case.problem(name), *inputs)
    verdicts = oracle.judge_forward(out_np.swapaxes(1, 2), lse_np)
    verdicts += oracle.judge_backward(*(x.swapaxes(1, 2) for x in grads_np))
    assert all(v.passed for v in verdicts), "\n".join(map(str, verdicts))
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert torch.autograd.grad(lse.sum(), q, retain_graph=True)[0].shape == q.shape
    with pytest.raises(UnsupportedError, match="second derivatives are not supported"):
        torch.autograd.grad(out, q, dout, create_graph=True)[0].sum().backward()


@pytest.mark.needs("torch")
def test_torch_gradcheck() -> None:
    import torch

    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 5, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    capped = {"softcap": 0.8, "scale": -0.4, "window": (3, 2)}
    for options in ({"causal": True}, {"window": (2, 1), "scale": -0.3}, {}, {"softcap": 1.1}, capped):
        function = lambda *x, options=options: cupyflash.attention(*x, **options, return_lse=True)  # noqa: E731
        assert torch.autograd.gradcheck(function, (q, k, v))


@pytest.mark.needs("torch")
def test_torch_records_nothing_without_need(qkv: Any) -> None:
    import torch

    q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv)
    with torch.no_grad():
        assert cupyflash.attention(q, k, v).grad_fn is None
    assert cupyflash.attention(q.detach(), k.detach(), v.detach()).grad_fn is None
    assert cupyflash.attention(q.detach(), k, v.detach()).grad_fn is not None


@pytest.mark.needs("jax")
def test_jax(qkv: Any) -> None:
    import jax
    import jax.numpy as jnp

    q, k, v = (jax.device_put(jnp.asarray(x, jnp.bfloat16), jax.devices("cpu")[0]) for x in qkv)
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    grads = cupyflash.attention_backward(out, q, k, v, out, lse, causal=True)
    assert all(isinstance(x, jax.Array) for x in (out, lse, *grads))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    a, b, c = (np.asarray(x) for x in (q, k, v))
    want, want_lse = cupyflash.attention(a, b, c, causal=True, return_lse=True)
    want_grads = cupyflash.attention_backward(want, a, b, c, want, want_lse, causal=True)
    for x, same in zip((out, lse, *grads), (want, want_lse, *want_grads), strict=True):
        np.testing.assert_array_equal(np.asarray(x), same)
    np.testing.assert_array_equal(jax.jit(cupyflash.attention)(q, k, v), cupyflash.attention(q, k, v))


def everything(q: Any, k: Any, v: Any, **options: Any) -> list[bytes]:
    """Each result, bit for bit."""
    out, lse = cupyflash.attention(q, k, v, **options, return_lse=True)
    return [x.tobytes() for x in (out, lse, *cupyflash.attention_backward(q, q, k, v, out, lse, **options))]


def test_no_softcap_is_none(qkv: Any) -> None:
    plain, capped = everything(*qkv, causal=True), everything(*qkv, causal=True, softcap=3.0)
    assert everything(*qkv, causal=True, softcap=None) == plain
    assert all(a != b for a, b in zip(plain, capped, strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_cap_that_no_score_comes_near(dtype: str) -> None:
    """c tanh(s / c) is s - s^3 / (3 c^2): scores of 0.5 lose 4e-8."""
    case = cases.Case("far", "full", 65, 131, 32, heads_q=4, heads_k=2, causal=True, scale=0.02)
    inputs = case.inputs(dtype)
    q, k, v, dout = inputs[:4]
    options = case.options() | {"softcap": 1000}
    out, lse = cupyflash.attention(q, k, v, **options, return_lse=True)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    oracle = Oracle(case.problem(dtype), *inputs)
    verdicts = oracle.judge_forward(out, lse) + oracle.judge_backward(*grads)
    assert all(v.passed for v in verdicts), "\n".join(map(str, verdicts))


def test_other_dlpack_producers_get_numpy(qkv: Any) -> None:
    out = cupyflash.attention(*map(Producer, qkv))
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(out, cupyflash.attention(*qkv))


def arrays(dtype: Any = np.float32, **shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.ones(shapes.get(name, (2, 9, 4, 16)), dtype) for name in "qkv"]


WRONG: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    (arrays(q=(2, 9, 64)), {}, ArgumentError, r"q: expected 4 dimensions \(batch, seqlen, heads, head_dim\), got"),
    (arrays(q=(2, 9, 6, 16)), {}, ArgumentError, "k: expected heads_k to divide heads_q = 6, got heads_k = 4"),
    (arrays(k=(1, 9, 4, 16)), {}, ArgumentError, "k: expected the batch size of q, 2, got 1"),
    (arrays(k=(2, 9, 4, 24)), {}, ArgumentError, "k: expected the head_dim of q, 16, got 24"),
    (arrays(v=(2, 9, 4, 20)), {}, UnsupportedError, "v: expected a head_dim that is a multiple of 8 and at most 256"),
    (arrays(v=(2, 8, 4, 16)), {}, ArgumentError,
     r"v: expected the shape of k but for head_dim, \(2, 9, 4, 16\), got \(2, 8, 4, 16\)"),
    (arrays(**dict.fromkeys("qkv", (1, 2, 1, 20))), {}, UnsupportedError, "multiple of 8 and at most 256, got 20"),
    (arrays(**dict.fromkeys("qkv", (1, 2, 1, 264))), {}, UnsupportedError, "multiple of 8 and at most 256, got 264"),
    (arrays(**dict.fromkeys("qkv", (1, 2, 1, 0))), {}, ArgumentError, "head_dim of at least 8, got 0"),
    (arrays(np.int32), {}, ArgumentError, "q: expected a floating-point dtype .*, got int32"),
    (arrays(object), {}, ArgumentError, "q: expected a floating-point dtype .*, got object"),
    (arrays(complex), {}, ArgumentError, "got complex128"),
    ([*arrays()[:2], arrays(np.float64)[2]], {}, ArgumentError, "v: expected the dtype of q, fp32, got fp64; cast"),
    ([*arrays()[:2], [1, 2]], {}, ArgumentError, "v: expected an array of CuPy, NumPy, PyTorch or JAX.*got builtins"),
    ([None, None, None], {}, ArgumentError, "q: expected an array"),
    (arrays(), {"layout": "sbhd"}, ArgumentError, "layout: expected \"bshd\" or \"bhsd\", got 'sbhd'"),
    (arrays(), {"window": (-1, -1)}, ArgumentError, r"left \+ right >= 0, got \(-1, -1\).*write None, not -1"),
    (arrays(), {"window": 5}, ArgumentError, "window: expected a pair"),
    (arrays(), {"window": (1.5, 2)}, ArgumentError, "window: expected left to be an integer or None, got 1.5"),
    (arrays(), {"window": [3, True]}, ArgumentError, "window: expected right to be an integer or None, got True"),
    (arrays(), {"scale": float("nan")}, ArgumentError, "scale: expected a finite number, got nan"),
    (arrays(), {"scale": "small"}, ArgumentError, "scale: expected a number or None, got 'small'"),
    ([x[..., ::2] for x in arrays(q=(1, 2, 1, 32), k=(1, 2, 1, 32), v=(1, 2, 1, 32))], {}, ArgumentError,
     "q: expected a stride of 1 along head_dim, got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "options", "kind", "message"), WRONG, ids=[w[3][:40] for w in WRONG])
def test_bad_input_is_named(inputs: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        cupyflash.attention(*inputs, **options)
    assert isinstance(caught.value, cupyflash.CupyflashError)
    assert isinstance(caught.value, ValueError if kind is ArgumentError else NotImplementedError)


def test_bad_backward_input_is_named(qkv: Any) -> None:
    q, k, v = qkv
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    wrong = {
        "dout: expected shape (2, 33, 4, 16) and dtype fp32 of q, got (2, 32, 4, 16)": (q[:, 1:], out, lse, None),
        "out: expected shape (2, 33, 4, 16) and dtype fp32 of q": (q, out.astype(np.float64), lse, None),
        "lse: expected shape (batch, heads_q, seqlen_q) = (2, 4, 33)": (q, out, lse[..., :5], None),
        "dlse: expected shape (batch, heads_q, seqlen_q) = (2, 4, 33), dtype fp32": (q, out, lse, lse.astype("f8")),
        "dout: expected shape (2, 33, 4, 16) and dtype fp32 of q, got (33, 4, 16) and fp32": (q[0], out, lse, None),
        "out: expected shape (2, 33, 4, 16) and dtype fp32 of q, got (2,) and fp32": (q, out[:, 0, 0, 0], lse, None),
        "lse: expected shape (batch, heads_q, seqlen_q) = (2, 4, 33), dtype fp32, on the CPU; got (33,)": (
            q,
            out,
            lse[0, 0],
            None,
        ),
        "dlse: expected shape (batch, heads_q, seqlen_q) = (2, 4, 33), dtype fp32, on the CPU; got (4, 33)": (
            q,
            out,
            lse,
            lse[0],
        ),
        "lse: expected an array of": (q, out, None, None),
    }
    for message, (dout, o, rows, dlse) in wrong.items():
        with pytest.raises(ArgumentError, match=re.escape(message)):
            cupyflash.attention_backward(dout, q, k, v, o, rows, dlse=dlse)


@pytest.mark.needs("torch")
def test_libraries_are_not_mixed(qkv: Any) -> None:
    import torch

    q, k, v = qkv
    with pytest.raises(ArgumentError, match="k: expected an array of numpy like q, got one of torch"):
        cupyflash.attention(q, torch.from_numpy(k), v)
    with pytest.raises(ArgumentError, match=r"q: .*got device meta"):
        cupyflash.attention(*(torch.empty(1, 2, 1, 16, device="meta") for _ in range(3)))


def test_the_backend_variable_is_checked(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "gpu")
    with pytest.raises(ArgumentError, match="CUPYFLASH_BACKEND: expected one of auto, cuda, cpu, got 'gpu'"):
        cupyflash.attention(*qkv)


def test_a_gpu_that_is_not_there(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyflash.gpu.device.count", lambda: 0)
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
    with pytest.raises(DeviceError, match="CUPYFLASH_BACKEND=cuda"):
        cupyflash.attention(*qkv)
    with pytest.raises(DeviceError, match="devices: expected a usable GPU"):
        cupyflash.warmup()
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    assert cupyflash.attention(*qkv).shape == qkv[0].shape


def test_old_gpus_and_odd_dtypes_are_refused_before_cuda() -> None:
    volta = Device("Tesla V100", 0, (7, 0), 80, 98304, 98304, 6 << 20)
    with pytest.raises(UnsupportedError, match=r"Tesla V100 has compute capability 7\.0; the GPU kernels need 7\.5"):
        plan_call(Problem("fp16", 1, 9, 9, 1, 1, 64, 1.0), volta)
    with pytest.raises(UnsupportedError, match="q: fp64 has no GPU kernel yet, expected bf16, fp16 or fp32; cast q"):
        plan_call(Problem("fp64", 1, 9, 9, 1, 1, 64, 1.0), Device.synthetic("sm_90"), backward=True)
    with pytest.raises(UnsupportedError, match="split the batch"):
        plan_call(Problem("fp16", 2**20, 2**20, 9, 1, 1, 64, 1.0), Device.synthetic("sm_90"))


def test_modules_need_no_import_of_their_own() -> None:
    """In a process that has imported nothing else."""
    code = "import cupyflash as c; c.masks.local(8, left=1); c.mods.where; c.compat; c.masks.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'cupyflash.masks' has no attribute 'nothing'"
